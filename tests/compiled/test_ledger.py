"""The ledger: what programs move, against closed forms written out here; memory; what cannot be
known, said."""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import functree as ft
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
        # Forward the output of a block's halves, backward the gradients of their inputs.
        partial = [*ATTENTION, *MLP]
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
    assert {
        str(path)[6:]: size for path, size in ledger.memory.arguments.items() if path[0] == "model"
    } == {str(row.path): row.bytes_per_device for row in plan.rows}


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
    allocated = stats.argument_size_in_bytes + stats.temp_size_in_bytes + ledger.memory.outputs
    assert ledger.memory.peak == allocated - plan.bytes_per_device


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


def test_gradients_that_are_single_numbers_are_told_apart_from_their_norm() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    both = ft.P(("data", "model"))  # a shard is one number
    layout = dict.fromkeys("abc", both)

    def loss(scales: Any, x: Any) -> jax.Array:
        for scale in scales.values():
            x = jnp.sin(x * scale[None])
        return x.mean()

    def step(scales: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss)(scales, x), opt_state)
        return optax.apply_updates(scales, updates), opt_state

    scales = dict.fromkeys(layout, jax.ShapeDtypeStruct((8,), "float32"))
    x, state = jax.ShapeDtypeStruct((16, 8), "float32"), jax.eval_shape(tx.init, scales)
    given = {"in_shardings": (layout, None, both), "out_shardings": (layout, None), "mesh": MESH}
    with jax.numpy_dtype_promotion("standard"):
        collectives = ft.ledger(step, scales, state, x, **given).collectives
    backward = {tuple(map(str, one.paths)) for one in collectives if one.phase == "backward"}
    assert backward == {("a",), ("b",), ("c",)}


def test_a_norm_that_scales_two_scalars_is_named_by_neither() -> None:
    """It is at the same place as both, element by element."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def loss(p: Any, x: Any) -> jax.Array:
        return jnp.sin(p["outside"] * jnp.sin(p["inside"] * (x @ p["w"]))).mean()

    def step(p: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss)(p, x), opt_state)
        return optax.apply_updates(p, updates), opt_state

    scalar = jax.ShapeDtypeStruct((), "float32")
    p = {"inside": scalar, "outside": scalar, "w": jax.ShapeDtypeStruct((64, 32), "float32")}
    layout = {"inside": ft.P(), "outside": ft.P(), "w": ft.P("model")}
    given = {"in_shardings": (layout, None, ft.P("data")), "out_shardings": (layout, None)}
    x = jax.ShapeDtypeStruct((16, 64), "float32")
    ledger = ft.ledger(step, p, jax.eval_shape(tx.init, p), x, mesh=MESH, **given)
    norms = [one for one in ledger.collectives if one.phase == "update"]
    assert [(one.mesh_axes, one.bytes, one.paths) for one in norms] == [(("model",), 4, ())]


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


def test_what_is_donated_is_memory_of_the_result() -> None:
    x = jax.ShapeDtypeStruct((64, 16), "float32")
    kept, donated = (
        ft.jit(lambda x: x + 1, donate=donate).lower(x).compile().ledger().memory
        for donate in ((), "x")
    )
    assert (kept.aliases, donated.aliases) == (0, 64 * 16 * 4)


def test_a_loop_of_unknown_length_is_said() -> None:
    def halved(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: (x @ w) / 2, x)

    columns = ft.P(None, "model")
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 64), (16, 64)]]
    given = {"in_shardings": (ft.P("model"), columns), "out_shardings": columns, "mesh": MESH}
    ledger = ft.ledger(halved, *shapes, **given)
    endless = [one for one in ledger.collectives if one.count is None]
    assert endless and all(one.total == one.bytes for one in endless)
    assert (
        "a loop's length depends on data, so each operation is counted once"
        in ledger.not_understood[0]
    )
    assert "not understood: the number of runs" in str(ledger)


def test_the_share_without_a_path_is_printed() -> None:
    ledger = gradient("TP", None)[0].ledger()
    lost = sum(one.total for one in ledger.collectives if not one.paths)
    assert 0.99 < ledger.attributed < 1 and lost == 3 * BATCH // 2 * SEQ * 4 + 4
    assert "0.2 % of these bytes could not be attributed to a parameter" in ledger.summary()
    assert "compiled for CPUs: on TPUs and GPUs, the compiler chooses" in str(ledger)


def lines_of_fsdp(min_size: int, gathered: bool = False) -> set[tuple[Any, ...]]:
    """What a step of a network of three layers moves under FSDP: 64 wide, 256 inside, with eight
    examples."""
    mesh, layout = ft.make_mesh(data=8), ft.FSDP("data", min_size=min_size)

    def loss(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
        if gathered:
            model = ft.constrain(model, ft.P())
        return jnp.mean((jax.vmap(model)(x) - x) ** 2)

    model = eqx.filter_eval_shape(eqx.nn.MLP, 64, 64, 256, 2, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((8, 64), "float32")
    gradients = ft.jit(ft.grad(loss), in_shardings=(layout, ft.P("data")), rules=layout, mesh=mesh)
    return {
        (one.kind, one.phase, one.bytes, ", ".join(map(str, one.paths)))
        for one in ft.ledger(gradients, model, x).collectives
    }


def test_what_a_line_means_under_fsdp_of_a_stock_model():
    moved = lines_of_fsdp(1024)
    # The result of the last layer, and its gradient: float32, and of all examples.
    assert ("all-reduce", "forward", 8 * 64 * 4, "layers.2.weight") in moved
    assert ("all-gather", "backward", 8 * 64 * 4, "layers.2.weight") in moved
    # The gradient of a whole bias, of which each device has a part.
    bias = ("all-gather", "backward", 256 * 4, "layers.1.bias")
    assert bias in moved and bias not in lines_of_fsdp(0)
    for kind, phase, _, path in lines_of_fsdp(1024, gathered=True):
        assert path == "" or (kind == "all-gather") == (phase == "forward")
