"""The ledger: what programs move, against closed forms written out here; memory; what cannot be
known, said."""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH
from tests.lib.training import (
    ATTENTION,
    BATCH,
    EMBED,
    LAYERS,
    LAYOUTS,
    MLP,
    NORMS,
    SEQ,
    VOCAB,
    gradient,
    training_step,
)

# Phases and paths are read from the lines and scopes of the source.
pytestmark = pytest.mark.usefixtures("compiles_anew")

Row = tuple[str, tuple[str, ...], int, int | None, str]
"""Kind, mesh axes, bytes, count, and the paths of one array that is moved."""

PARAMETERS = {  # of one layer, in numbers of elements
    **dict.fromkeys(NORMS, 64),
    "attn.query": 64 * 64, "attn.key": 64 * 32, "attn.value": 64 * 32, "attn.out": 64 * 64,
    **dict.fromkeys(MLP, 64 * 128),
}  # fmt: skip
TWO = {"up": (64, 128), "down": (128, 32)}
TOP = {"embed.weight": VOCAB * 64, "norm.scale": 64, "unembed.weight": VOCAB * 64}


def rows(ledger: ft.Ledger) -> Counter[Row]:
    """What a ledger says that can be computed by hand."""
    found: Counter[Row] = Counter()
    for one in ledger.collectives:
        assert one.mesh_axes is not None
        found[one.kind, one.mesh_axes, one.bytes, one.count, ", ".join(map(str, one.paths))] += 1
    return found


def each_layer(
    name: str, remat: bool, unrolled: bool
) -> list[tuple[str, tuple[str, ...], int, str]]:
    """What one layer moves under a layout, and the backward pass for it."""
    activation = BATCH // 2 * SEQ * EMBED * 4  # the residual stream of one device
    axes = ("data", "model") if name == "FSDP" else ("data",)
    shards = 1 if name == "FSDP" else 4  # of a matrix, over `model`
    size = {leaf: 4 * n // (1 if leaf in NORMS else shards) for leaf, n in PARAMETERS.items()}
    moved = [("all-reduce", axes, size[leaf], leaf) for leaf in PARAMETERS]  # the gradients
    if name != "FSDP":
        partial = [
            "attn.out",
            "mlp.down",
            "attn.query",
            "attn.key",
            "attn.value",
            "mlp.gate",
            "mlp.up",
        ]
        partial += ["attn.out"] if remat else []  # whose output the backward pass needs again
        moved += [("all-reduce", ("model",), activation, leaf) for leaf in partial]
    if name != "TP":
        gathered = list(PARAMETERS)
        if remat:
            gathered += list(PARAMETERS)
        elif (
            not unrolled
        ):  # a scan keeps no gathered weight; without recomputation it needs no scale again
            gathered += [*ATTENTION, *MLP]
        moved += [("all-gather", axes, size[leaf], leaf) for leaf in gathered]
    return moved


def once(name: str) -> list[tuple[str, tuple[str, ...], int, str]]:
    """What the embedding, the last norm, the logits and the loss move."""
    axes = ("data", "model") if name == "FSDP" else ("data",)
    shards = 1 if name == "FSDP" else 4
    size = {leaf: 4 * n // (1 if leaf == "norm.scale" else shards) for leaf, n in TOP.items()}
    moved = [("all-reduce", axes, size[leaf], leaf) for leaf in TOP] + [("all-reduce", axes, 4, "")]
    if name != "FSDP":
        of_all = (
            BATCH // 2 * SEQ * 4
        )  # the largest logit, the sum of the exponentials, the logit of the label
        moved += 3 * [("all-reduce", ("model",), of_all, "")]
        moved += [
            ("all-reduce", ("model",), of_all * EMBED, leaf)
            for leaf in ("embed.weight", "unembed.weight")
        ]
    if name != "TP":
        moved += [("all-gather", axes, size[leaf], leaf) for leaf in TOP]
    return moved


def expected(name: str, remat: bool, unrolled: bool) -> Counter[Row]:
    """What a training step moves."""
    found = Counter((kind, axes, size, 1, path) for kind, axes, size, path in once(name))
    for kind, axes, size, path in each_layer(name, remat, unrolled):
        if unrolled:
            found.update((kind, axes, size, 1, f"blocks.{i}.{path}") for i in range(LAYERS))
        else:
            found[kind, axes, size, LAYERS, f"blocks.layer.{path}"] += 1
    return found


@pytest.mark.parametrize("unrolled", [False, True], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_collective_of_a_training_step(name: str, remat: str | None, unrolled: bool) -> None:
    compiled, plan = gradient(name, remat, unrolled)
    ledger = compiled.ledger()
    assert rows(ledger) == expected(name, remat is not None, unrolled)
    assert (
        ledger.backend == "cpu"
        and ledger.sizes == {"data": 2, "model": 4}
        and not ledger.not_understood
    )
    model = sum(size for path, size in ledger.memory.arguments.items() if path[0] == "model")
    assert model == plan.bytes_per_device
    assert {
        str(path)[6:]: size for path, size in ledger.memory.arguments.items() if path[0] == "model"
    } == {str(row.path): row.bytes_per_device for row in plan.rows}


@pytest.mark.parametrize("name", LAYOUTS)
def test_scanned_and_unrolled_move_the_same(name: str) -> None:
    for remat in [None, "full"] if name == "TP" else ["full"]:
        scanned, unrolled = (gradient(name, remat, one)[0].ledger() for one in (False, True))
        assert scanned.totals() == unrolled.totals() and scanned.totals()


def test_a_step_with_its_optimizer() -> None:
    compiled, plan = training_step("FSDP+TP")
    ledger = compiled.ledger()
    # Gradients belong to the parameters, and not to the moments that are made of them too.
    assert rows(ledger) == Counter(
        {
            (*row[:4], f"model.{row[4]}" if row[4] else ""): n
            for row, n in expected("FSDP+TP", False, False).items()
        }
    )
    assert {one.arguments for one in ledger.collectives if one.paths} == {("ts",)}
    state = {
        str(path)[3:]: size for path, size in ledger.memory.arguments.items() if path[0] == "ts"
    }
    assert state == {str(row.path): row.bytes_per_device for row in plan.rows}
    assert ledger.memory.aliases == plan.bytes_per_device
    stats = compiled.memory_analysis()
    assert sum(ledger.memory.arguments.values()) == stats.argument_size_in_bytes
    assert ledger.memory.temporaries == stats.temp_size_in_bytes
    assert (
        ledger.memory.peak
        == stats.argument_size_in_bytes
        + stats.temp_size_in_bytes
        + ledger.memory.outputs
        - (plan.bytes_per_device)
    )


X = jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), "float32")
MLP_MOVES: dict[str, list[tuple[str, tuple[str, ...], int, int, str]]] = {
    "TP": [
        ("all-reduce", ("model",), BATCH // 2 * SEQ * EMBED * 4, 1, "down"),
        *(("all-reduce", ("data",), 64 * 128 * 4 // 4, 1, leaf) for leaf in ("gate", "up", "down")),
        ("all-reduce", ("data",), 4, 1, ""),
    ],
    "FSDP": [
        *(
            ("all-gather", ("data", "model"), 64 * 128 * 4, 1, leaf)
            for leaf in ("gate", "up", "down")
        ),
        *(
            ("all-reduce", ("data", "model"), 64 * 128 * 4, 1, leaf)
            for leaf in ("gate", "up", "down")
        ),
        ("all-reduce", ("data", "model"), 4, 1, ""),
    ],
    "FSDP+TP": [
        *(("all-gather", ("data",), 64 * 128 * 4 // 4, 1, leaf) for leaf in ("gate", "up", "down")),
        ("all-reduce", ("model",), BATCH // 2 * SEQ * EMBED * 4, 1, "down"),
        *(("all-reduce", ("data",), 64 * 128 * 4 // 4, 1, leaf) for leaf in ("gate", "up", "down")),
        ("all-reduce", ("data",), 4, 1, ""),
    ],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_collective_of_an_mlp(name: str) -> None:
    layout = LAYOUTS[name]
    batch = ft.P(("data", "model") if name == "FSDP" else "data")
    fun = ft.jit(
        lambda model, x: ft.value_and_grad(lambda model: (model(x) ** 2).mean())(model),
        in_shardings=(layout, batch), out_shardings=(None, layout), mesh=MESH, rules=layout,
    )  # fmt: skip
    model = ft.abstract(lambda key: ft.nn.MLP(EMBED, 128, key=key))(jax.random.key(0))
    ledger = fun.lower(model, X).compile().ledger()
    assert rows(ledger) == Counter(MLP_MOVES[name])
    phases = {
        (one.kind, one.mesh_axes == ("model",), one.bytes == 4): one.phase
        for one in ledger.collectives
    }
    assert phases.pop(("all-reduce", False, True)) == "forward"  # the loss
    assert phases.pop(("all-reduce", False, False)) == "backward"  # the gradients
    assert set(phases.values()) == {"forward"}


def test_phases_and_lines_of_a_step() -> None:
    ledger = training_step.__wrapped__("TP", "full")[0].ledger()
    found = Counter(
        (one.phase, one.bytes > 4) for one in ledger.collectives if one.mesh_axes == ("model",)
    )
    # The embedding, `out` and `down` forward, and three in the loss; `out` again; q, k, v, gate,
    # up, unembed.
    assert found == {("forward", True): 6, ("recompute", True): 1, ("backward", True): 6}
    assert {
        one.phase for one in ledger.collectives if one.mesh_axes == ("data",) and one.bytes > 4
    } == {"backward"}
    lines = {
        str(one.path).rpartition(".layer.")[2]: one.source
        for one in ledger.collectives
        if one.phase == "forward"
    }
    assert "nn/mlp.py:" in (lines["mlp.down"] or "") and "nn/attention/layer.py:" in (
        lines["attn.out"] or ""
    )
    assert "training.py:" in (lines["None"] or "")  # the loss, which a test file computes


SPLIT = {"w": ft.P("model"), "b": ft.P()}


def test_the_update_has_a_phase_of_its_own() -> None:
    import optax

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    @ft.jit(in_shardings=(SPLIT, None, ft.P("data")), out_shardings=(SPLIT, None), mesh=MESH)
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: ((x @ p["w"] + p["b"][None]) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = {
        "w": jax.ShapeDtypeStruct((64, 32), "float32"),
        "b": jax.ShapeDtypeStruct((32,), "float32"),
    }
    ledger = step.lower(
        params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((16, 64), "float32")
    )
    moved = {
        (one.phase, one.bytes): list(map(str, one.paths))
        for one in ledger.compile().ledger().collectives
    }
    # The norm of all gradients is one number, which belongs to no parameter if there are several.
    assert moved == {
        ("forward", 16 // 2 * 32 * 4): [
            "w",
            "",
        ],  # the product of two arguments, of which `x` is an array itself
        ("backward", 64 * 32 * 4 // 4): ["w"],
        ("backward", 32 * 4): ["b"],
        ("update", 4): [],
    }


def test_gradients_that_are_single_numbers_are_told_apart_from_their_norm() -> None:
    import optax

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    layout = {name: ft.P(("data", "model")) for name in "abc"}  # a shard is one number

    @ft.jit(
        in_shardings=(layout, None, ft.P(("data", "model"))),
        out_shardings=(layout, None),
        mesh=MESH,
    )
    def step(scales: Any, opt_state: Any, x: Any) -> Any:
        def loss(scales: Any) -> jax.Array:
            y = x
            for scale in scales.values():
                y = jnp.sin(y * scale[None])
            return y.mean()

        updates, opt_state = tx.update(jax.grad(loss)(scales), opt_state)
        return optax.apply_updates(scales, updates), opt_state

    scales = {name: jax.ShapeDtypeStruct((8,), "float32") for name in layout}
    with jax.numpy_dtype_promotion("standard"):
        ledger = step.lower(
            scales, jax.eval_shape(tx.init, scales), jax.ShapeDtypeStruct((16, 8), "float32")
        )
    collectives = ledger.compile().ledger().collectives
    backward = {tuple(map(str, one.paths)) for one in collectives if one.phase == "backward"}
    assert backward == {("a",), ("b",), ("c",)}


def test_equal_shapes_are_told_apart() -> None:
    x, w = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    layouts = {"left": ft.P("model", None), "right": ft.P(None, "data")}

    @ft.jit(in_shardings=(layouts, ft.P()), out_shardings=ft.P(), mesh=MESH)
    def project(weights: Any, x: Any) -> Any:
        return (x @ weights["left"]) @ weights["right"]

    ledger = project.lower({"left": w, "right": w}, x).compile().ledger()
    assert {(one.mesh_axes, str(one.path)) for one in ledger.collectives} == {
        (("model",), "left"),
        (("data",), "right"),
    }


def test_the_gradient_of_an_activation_is_not_of_what_it_was_compared_with() -> None:
    """`relu` lets a gradient pass by a comparison with what another parameter has made."""

    def loss(p: Any, x: Any) -> Any:
        hidden = jax.nn.relu(ft.constrain(x @ p["up"], ft.P(None, "data")))
        return (ft.constrain(hidden @ p["down"], ft.P("data")) ** 2).mean()

    p = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in TWO.items()}
    x = jax.ShapeDtypeStruct((16, 64), "float32")
    layouts = (ft.P("data"), ft.P("data"))
    ledger = ft.ledger(jax.grad(loss), p, x, in_shardings=layouts, mesh=ft.make_mesh(data=8))
    moved = [one for one in ledger.collectives if one.phase == "backward" and one.moves]
    activations = [one for one in moved if one.moves == "activation"]
    assert activations and {tuple(map(str, one.paths)) for one in activations} == {("down",)}


def test_an_unused_argument_is_not_counted() -> None:
    shape = jax.ShapeDtypeStruct((64, 64), "float32")

    @ft.jit(in_shardings=ft.P("model"), out_shardings=ft.P(), mesh=MESH)
    def take(first: Any, unused: Any, last: Any) -> Any:
        return first @ last

    ledger = take.lower(shape, shape, shape).compile().ledger()
    assert {str(path): size for path, size in ledger.memory.arguments.items()} == {
        "first": 4096,
        "last": 4096,
    }
    assert {name for one in ledger.collectives for name in one.arguments} == {"first", "last"}
    assert ledger.memory.arguments["last"] == 4096
    with pytest.raises(KeyError, match="no argument at `lost`; did you mean `last`"):
        ledger.memory.arguments["lost"]


def test_what_is_donated_is_memory_of_the_result() -> None:
    x = jax.ShapeDtypeStruct((64, 16), "float32")
    kept, donated = (
        ft.jit(lambda x: x + 1, donate=donate).lower(x).compile().ledger().memory
        for donate in ((), "x")
    )
    assert (kept.aliases, donated.aliases) == (0, 64 * 16 * 4)


def test_a_permuted_mesh() -> None:
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(4, 2).T, ("data", "model"))
    for name in LAYOUTS:
        assert rows(gradient(name, None, False, mesh)[0].ledger()) == expected(name, False, False)


def test_nested_loops_multiply() -> None:
    @ft.jit(in_shardings=(ft.P("model"), ft.P(None, "model")), out_shardings=ft.P(), mesh=MESH)
    def f(w: Any, x: Any) -> Any:
        def inner(x: Any, _: Any) -> tuple[Any, None]:
            return ft.constrain(jnp.tanh(x @ w) @ w.T, ft.P(None, "model")), None

        def outer(x: Any, _: Any) -> tuple[Any, None]:
            return jax.lax.scan(inner, x, None, length=5)[0] + 1, None

        return jax.lax.scan(outer, x, None, length=3)[0]

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 32), (16, 64)]]
    ledger = f.lower(*shapes).compile().ledger()
    assert 15 in {one.count for one in ledger.collectives if str(one.arguments) == "('w',)"}


def test_a_loop_of_unknown_length_is_said() -> None:
    @ft.jit(
        in_shardings=(ft.P("model"), ft.P(None, "model")),
        out_shardings=ft.P(None, "model"),
        mesh=MESH,
    )
    def f(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(
            lambda x: jnp.abs(x).max() > 1,
            lambda x: ft.constrain((x @ w) / 2, ft.P(None, "model")),
            x,
        )

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 64), (16, 64)]]
    ledger = f.lower(*shapes).compile().ledger()
    endless = [one for one in ledger.collectives if one.count is None]
    assert endless and all(one.total == one.bytes for one in endless)
    assert "the length of a loop depends on data; they count once" in ledger.not_understood[0]
    assert "not understood: how often" in str(ledger)


def test_the_share_without_a_path_is_printed() -> None:
    ledger = gradient("TP", None)[0].ledger()
    lost = sum(one.total for one in ledger.collectives if not one.paths)
    assert 0.99 < ledger.attributed < 1 and lost == 3 * BATCH // 2 * SEQ * 4 + 4
    assert "0.2 % of these bytes serve no parameter that could be found" in ledger.summary()


def test_the_text() -> None:
    ledger = gradient.__wrapped__("TP", None, True)[0].ledger()
    text = str(ledger)
    assert "model.blocks.{0-2}.attn.out" in text and "attention/layer.py:" in text
    assert "all-reduce            model                                    1.4 MiB" in text
    assert (
        "memory of each device: arguments 142.8 KiB" in text
        and max(map(len, text.splitlines())) <= 120
    )
    assert "compiled for CPUs" in text
    assert repr(ledger) == f"<Ledger of {len(ledger.collectives)} collectives for cpu>"
    page = ledger.html()
    assert page.startswith("<!doctype html>") and "model.blocks.{0-2}.attn.out" in page


def test_functions_that_are_jitted_already_keep_their_layouts() -> None:
    with raises("is jitted already: give the layouts where it is jitted"):
        ft.ledger(jax.jit(lambda x: x), jnp.ones(3), in_shardings=ft.P())
    with raises("ledger cannot compile so", "a function"):
        ft.ledger(3)  # pyright: ignore[reportArgumentType]


def _lines_of_fsdp(min_size: int, batch: int, gathered: bool = False) -> set[Row]:
    """What a step of a network of three layers moves under FSDP: 64 wide, 256 inside."""
    mesh, layout = ft.make_mesh(data=8), ft.FSDP("data", min_size=min_size)

    def loss_fn(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
        if gathered:
            model = ft.constrain(model, ft.P())
        return jnp.mean((jax.vmap(model)(x) - x) ** 2)

    gradients = ft.jit(ft.grad(loss_fn), rules=layout)
    model = ft.init(lambda key: eqx.nn.MLP(64, 64, 256, 2, key=key), layout, mesh)(
        jax.random.key(0)
    )
    x = ft.shard(jnp.ones((batch, 64)), ft.P("data"), mesh)
    return {
        (one.kind, (one.phase or "",), one.bytes, one.count, ", ".join(map(str, one.paths)))
        for one in gradients.lower(model, x).compile().ledger().collectives
    }


def test_what_a_line_means_under_fsdp_of_a_stock_model():
    for batch in (8, 64):
        moved = _lines_of_fsdp(1024, batch)
        # The result of the last layer, and its gradient: float32, and of all examples.
        for kind, phase in (("all-reduce", "forward"), ("all-gather", "backward")):
            assert (kind, (phase,), batch * 64 * 4, 1, "layers.2.weight") in moved
        # The gradient of a whole bias, of which each device has a part.
        bias = ("all-gather", ("backward",), 256 * 4, 1, "layers.1.bias")
        assert bias in moved and bias not in _lines_of_fsdp(0, batch)
        for kind, (phase,), _, _, path in _lines_of_fsdp(1024, batch, gathered=True):
            assert path == "" or (kind == "all-gather") == (phase == "forward")
