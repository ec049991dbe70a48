"""`ft.whole_matrices`: the values of the optimizer, one exchange in and one out, and what is
refused."""

from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises
from tests.lib.covering import selected_cells
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec


class Layer(eqx.Module):
    """A matrix, and what is none."""

    weight: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]

    @classmethod
    def create(cls, key: Array) -> "Layer":
        return cls(jax.random.normal(key, (8, 16)), jax.random.normal(key, (16,)))

    def __matrix_dimensions__(self) -> Any:
        return {"weight": (-2, -1)}


KEY = jax.random.key(0)
MODELS: dict[str, Any] = {
    "plain": lambda: Layer.create(KEY),
    "list of 3": lambda: [Layer.create(key) for key in jax.random.split(KEY, 3)],
    "nested": lambda: ft.stack(lambda key: ft.stack(Layer.create, 2, key, "inner"), 3, KEY),
} | {n: lambda n=n: ft.stack(Layer.create, n, KEY) for n in (1, 2, 3, 8)}

TENSOR = ft.AxisRules({"hidden": "model", ...: None})
LAYOUTS: dict[str, ft.Layout] = {
    "FSDP": ft.AxisRules({...: None}) | ft.FSDP(("data", "model"), min_size=0),
    "TP": TENSOR,
    "FSDP+TP": TENSOR | ft.FSDP("data", min_size=0),
    "data parallel": ft.AxisRules({...: None}),
}
SPECS = {"FSDP": P(None, None, ("data", "model")), "TP": P(None, None, "model")}
SPECS |= {"FSDP+TP": P(None, "data", "model"), "data parallel": P(None, None, None)}
MESHES: dict[str, Mesh] = {"Auto": MESH, "Explicit": EXPLICIT}


# The optimizers


def dimensions(parameters: Any) -> Any:
    return ft.nn.matrix_dimensions(parameters)(parameters)


def muon(**options: Any) -> optax.GradientTransformation:
    """Muon; with two iterations, since each of them takes its time to compile."""
    options = {"ns_steps": 2, "muon_weight_dimension_numbers": dimensions, **options}
    return optax.contrib.muon(0.1, **options)


class Statistics(eqx.Module):
    """The state of `preconditioned`."""

    left: Any
    right: Any


def preconditioned() -> optax.GradientTransformation:
    """A chain of a user's with statistics of matrices, in the manner of Shampoo."""

    def is_matrix(x: Any) -> bool:
        return x.ndim == 2

    def init(params: Any) -> Statistics:
        return Statistics(
            jax.tree.map(lambda x: jnp.zeros((x.shape[0],) * 2) if is_matrix(x) else None, params),
            jax.tree.map(lambda x: jnp.zeros((x.shape[1],) * 2) if is_matrix(x) else None, params),
        )

    def root(a: Any) -> Any:
        values, vectors = jnp.linalg.eigh(a + 0.1 * jnp.eye(a.shape[0]))
        return vectors * values[None] ** -0.25 @ vectors.T

    def update(updates: Any, state: Statistics, params: Any = None) -> Any:
        def left(g: Any, a: Any) -> Any:
            return None if a is None else 0.9 * a + g @ g.T

        def right(g: Any, a: Any) -> Any:
            return None if a is None else 0.9 * a + g.T @ g

        new = Statistics(
            jax.tree.map(left, updates, state.left), jax.tree.map(right, updates, state.right)
        )

        def scaled(g: Any, a: Any, b: Any) -> Any:
            return g if a is None else root(a) @ g @ root(b)

        return jax.tree.map(scaled, updates, new.left, new.right), new

    inner = optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
    return optax.chain(inner, optax.trace(0.9), optax.scale(-0.1))


# Those of the table, and others that are tried once.
OPTIMIZERS: dict[str, Any] = {
    "muon": muon,
    "decay": lambda: muon(weight_decay=0.1, mu_dtype=jnp.bfloat16),
    "adaptive": lambda: muon(adaptive=True),
    "aol": lambda: muon(preconditioning="aol", nesterov=False),
    "schatten": lambda: muon(preconditioning="schatten", consistent_rms=0.2),
    "preconditioned": preconditioned,
}
OTHERS: dict[str, Any] = {
    "without dimensions": lambda: optax.contrib.muon(0.1, ns_steps=2),
    "in a scan": lambda: muon(ns_coeffs=((3.4, -4.7, 2.0),) * 2),
    "trust": lambda: optax.chain(muon(), optax.scale_by_trust_ratio()),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), muon()),
    "injected": lambda: optax.inject_hyperparams(
        lambda rate: optax.chain(muon(), optax.scale(rate))
    )(rate=0.5),
    "partition": lambda: optax.partition(
        {"a": muon(), "b": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: "a" if x.ndim == 2 else "b", params),
    ),
    "by layers already": lambda: ft.layerwise(muon()),
    "whole already": lambda: ft.whole_matrices(muon()),
}


def updated(tx: Any, model: Any, state: Any) -> Any:
    """An update by a gradient that is different for each layer, and the new state."""
    gradients = jax.tree.map(lambda x: jnp.sin(3 * x) + 0.1 * x, model)
    return tx.update(gradients, state, model)


def run_in(state: Any) -> Any:
    """A state as after some steps."""

    def filled(x: Any) -> Any:
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x + jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) / 10

    return jax.tree.map(filled, state)


# optax promotes, and adds a number to an array of keys' data.
@pytest.fixture(autouse=True)
def _as_optax_needs_it() -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def expected(tx: Any, model: Any) -> Any:
    """What the optimizer computes for the layers one by one, on one device."""
    tx = ft.layerwise(tx)
    return jax.jit(lambda model, state: updated(tx, model, state))(model, run_in(tx.init(model)))


def close(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            text = jax.tree_util.keystr(path)
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=text)


def on_mesh(tx: Any, model: Any, layout: ft.Layout, mesh: Mesh) -> tuple[Any, Any, Any]:
    """A jitted update, and what it is called with: sharded model and state."""
    placed = ft.shard(model, layout, mesh)
    shardings = ft.plan_optimizer(tx, model, layout, mesh, otherwise=ft.P()).shardings
    state = jax.device_put(run_in(tx.init(model)), shardings)
    update = ft.jit(lambda model, state: updated(tx, model, state), rules=layout, mesh=mesh)
    return update, placed, state


def moved(update: Any, model: Any, state: Any) -> list[tuple[Any, ...]]:
    """What the program of an update moves: kind, mesh axes and bytes."""
    ledger = update.lower(model, state).compile().ledger()
    return [(one.kind, one.mesh_axes, one.bytes) for one in ledger.collectives]


# Values

CELLS = list(product(OPTIMIZERS, LAYOUTS, MESHES, ("plain", 1, 2, 3, 8)))


@pytest.mark.parametrize(("optimizer", "layout", "mesh", "layers"), selected_cells(CELLS))
def test_values(optimizer: str, layout: str, mesh: str, layers: Any) -> None:
    tx, model = OPTIMIZERS[optimizer](), MODELS[layers]()
    update, placed, state = on_mesh(ft.whole_matrices(tx), model, LAYOUTS[layout], MESHES[mesh])
    updates, after = update(placed, state)
    close((updates, after), expected(tx, model))
    for one, parameter in zip(jax.tree.leaves(updates), jax.tree.leaves(placed), strict=True):
        assert one.sharding.is_equivalent_to(parameter.sharding, one.ndim)


@pytest.mark.parametrize("optimizer", OTHERS)
def test_values_of_others(optimizer: str) -> None:
    tx, model = OTHERS[optimizer](), MODELS[3]()
    update, placed, state = on_mesh(ft.whole_matrices(tx), model, LAYOUTS["FSDP+TP"], MESH)
    close(update(placed, state), expected(tx, model))


@pytest.mark.parametrize(("layers", "mesh"), [("list of 3", "Auto"), ("nested", "Explicit")])
def test_values_of_other_trees(layers: str, mesh: str) -> None:
    tx, model = muon(), MODELS[layers]()
    update, placed, state = on_mesh(ft.whole_matrices(tx), model, LAYOUTS["FSDP+TP"], MESHES[mesh])
    close(update(placed, state), expected(tx, model))


@pytest.mark.parametrize("optimizer", ["adaptive", "preconditioned"])
def test_values_without_a_mesh(optimizer: str) -> None:
    tx, model = OPTIMIZERS[optimizer](), MODELS[2]()
    whole = ft.whole_matrices(tx)
    state = run_in(whole.init(model))
    found = jax.jit(lambda model, state: updated(whole, model, state))(model, state)
    close(found, expected(tx, model))


def test_a_mesh_with_axes_of_both_types() -> None:
    types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    tx, model = muon(), MODELS[3]()
    update, placed, state = on_mesh(ft.whole_matrices(tx), model, LAYOUTS["FSDP+TP"], mesh)
    close(update(placed, state), expected(tx, model))


def test_what_an_optimizer_does_besides_is_done() -> None:
    seen: list[Any] = []

    def look(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda x: seen.append(x.shape), updates.layer.bias)
        return updates, state

    stateless = optax.GradientTransformation(lambda params: optax.EmptyState(), look)
    tx = ft.whole_matrices(optax.chain(stateless, muon()))
    update, placed, state = on_mesh(tx, MODELS[3](), TENSOR, MESH)
    jax.block_until_ready(update(placed, state))
    jax.effects_barrier()
    assert seen == [(16,)] * 3  # once for each layer


def test_outside_of_jit() -> None:
    tx, model = muon(ns_steps=1), MODELS["plain"]()
    _, placed, state = on_mesh(tx, model, TENSOR, MESH)
    with ft.axis_rules(TENSOR):
        close(updated(ft.whole_matrices(tx), placed, state), expected(tx, model))


def test_parameters_that_nothing_needs_may_be_missing() -> None:
    tx, model = preconditioned(), MODELS[3]()
    whole, by_layers = ft.whole_matrices(tx), ft.layerwise(tx)
    _, placed, state = on_mesh(whole, model, LAYOUTS["FSDP"], MESH)
    update = ft.jit(lambda g, s: whole.update(g, s), rules=LAYOUTS["FSDP"])
    wanted = jax.jit(lambda g, s: by_layers.update(g, s))(model, run_in(by_layers.init(model)))
    close(update(placed, state), wanted)


# What is moved

IN_AND_OUT = ("data", "model")


@pytest.mark.parametrize(
    ("layout", "layers", "expected"),
    [
        # One exchange in and one out. The layers of one device are 512 bytes each, whole.
        ("FSDP+TP", 8, [("all-to-all", IN_AND_OUT, 512)] * 2),
        ("FSDP", 8, [("all-to-all", IN_AND_OUT, 512)] * 2),
        ("TP", 8, [("all-to-all", ("model",), 1024)] * 2),
        ("data parallel", 8, []),
        # Layers that do not fill the devices.
        ("FSDP+TP", 3, [("all-to-all", IN_AND_OUT, 512)] * 2),
        # A single matrix is gathered, and nothing goes out.
        ("FSDP+TP", 1, [("all-gather", IN_AND_OUT, 512)]),
        ("TP", "plain", [("all-gather", ("model",), 512)]),
        # Three matrices that are alike are exchanged together.
        ("FSDP+TP", "list of 3", [("all-to-all", IN_AND_OUT, 512)] * 2),
        ("FSDP+TP", "nested", [("all-to-all", IN_AND_OUT, 512)] * 2),
    ],
)
def test_one_exchange_in_and_one_out(layout: str, layers: Any, expected: Any) -> None:
    update = on_mesh(ft.whole_matrices(muon()), MODELS[layers](), LAYOUTS[layout], MESH)
    assert moved(*update) == expected


@pytest.mark.parametrize(
    ("layout", "over", "expected"),
    [
        ("TP", "data", [("all-gather", ("model",), 2048), ("all-gather", ("data",), 1024)]),
        ("TP", ("data", "model"), [
            ("all-to-all", ("model",), 512),
            ("all-to-all", ("model",), 512),
            ("all-gather", ("data",), 1024),
        ]),
        ("FSDP+TP", "model", [
            ("all-to-all", ("model",), 512),
            ("all-gather", ("data",), 1024),
            ("all-to-all", ("model",), 512),
        ]),
        ("FSDP+TP", ["model", "data"], [("all-to-all", IN_AND_OUT, 512)] * 2),
        ("data parallel", "data", [("all-gather", ("data",), 4096)]),
    ],
)  # fmt: skip
def test_over(layout: str, over: Any, expected: Any) -> None:
    tx, model = muon(), MODELS[8]()
    update = on_mesh(ft.whole_matrices(tx, over=over), model, LAYOUTS[layout], MESH)
    assert moved(*update) == expected


@pytest.mark.parametrize("over", ["data", ("model", "data")])
def test_values_over(over: Any) -> None:
    tx, model = muon(), MODELS[3]()
    update, placed, state = on_mesh(ft.whole_matrices(tx, over), model, TENSOR, EXPLICIT)
    close(update(placed, state), expected(tx, model))


@pytest.mark.parametrize("mesh", MESHES)
def test_layers_that_are_sharded_stay_where_they_are(mesh: str) -> None:
    tx, model = muon(), MODELS[8]()
    layout = ft.AxisRules({"layers": "data", "hidden": "model", ...: None})
    update, placed, state = on_mesh(ft.whole_matrices(tx), model, layout, MESHES[mesh])
    close(update(placed, state), expected(tx, model))
    assert moved(update, placed, state) == [("all-to-all", ("model",), 512)] * 2


class Three(eqx.Module):
    """Three matrices of the reference."""

    first: Float[Array, "embed hidden"]
    second: Float[Array, "embed hidden"]
    third: Float[Array, "embed hidden"]

    def __matrix_dimensions__(self) -> Any:
        return dict.fromkeys(("first", "second", "third"), (-2, -1))


def twelve(key: Array) -> Any:
    return ft.stack(lambda key: Three(*jax.random.normal(key, (3, 256, 512))), 4, key)


def test_bytes_of_twelve_matrices() -> None:
    layout = ft.AxisRules({"embed": "data", "hidden": "model", "layers": None})
    model = ft.abstract(twelve)(KEY)
    tx = ft.whole_matrices(muon(ns_steps=1))
    update = ft.jit(
        lambda g, s, m: tx.update(g, s, m),
        in_shardings=(layout, ft.plan_optimizer(tx, model, layout, MESH), layout),
        rules=layout,
        mesh=MESH,
    )
    ledger = update.lower(model, jax.eval_shape(tx.init, model), model).compile().ledger()
    # Twelve layers on eight devices: two for each of them, of half a MiB.
    assert [(one.kind, one.bytes) for one in ledger.collectives] == [("all-to-all", 2**20)] * 2


def test_two_arrays_that_enter_are_one_exchange() -> None:
    update = on_mesh(ft.whole_matrices(OTHERS["trust"]()), MODELS[8](), LAYOUTS["FSDP"], MESH)
    exchanges = [one for one in moved(*update) if one[0] == "all-to-all"]
    assert exchanges == [("all-to-all", IN_AND_OUT, 1024), ("all-to-all", IN_AND_OUT, 512)]


def test_moments_are_sharded_as_their_parameters() -> None:
    layout = LAYOUTS["FSDP+TP"]
    ts = ft.TrainState.create(MODELS[3](), ft.whole_matrices(muon()), layout=layout, mesh=MESH)
    step = ft.jit(lambda ts: ft.apply_gradients(ts, ts.model), rules=layout, mesh=MESH)
    after = step(ts)
    mu = after.opt_state.inner_states["muon"].inner_state[0].mu
    for one in (mu.layer.weight, after.model.layer.weight):
        assert one.sharding.spec == P(None, "data", "model")
    assert mu.layer.bias == optax.MaskedNode()


def test_the_program_does_not_grow_with_depth() -> None:
    sizes = []
    for layers in (8, 16):
        model = ft.stack(Layer.create, layers, KEY)
        update, placed, state = on_mesh(ft.whole_matrices(muon()), model, LAYOUTS["FSDP+TP"], MESH)
        sizes.append(update.lower(placed, state).as_text().count("\n"))
    assert sizes[0] == sizes[1]


# Where the layout comes from


def test_layout_under_plain_jit() -> None:
    tx, model = muon(), MODELS[3]()
    whole = ft.whole_matrices(tx, layout=LAYOUTS["FSDP+TP"])
    _, placed, state = on_mesh(tx, model, LAYOUTS["FSDP+TP"], MESH)
    close(jax.jit(lambda m, s: updated(whole, m, s))(placed, state), expected(tx, model))


def test_a_layout_with_filters_for_what_is_not_trained() -> None:
    tx, model = muon(), MODELS[3]()
    layout = ft.StateSharding({"**.bias": P(), ...: LAYOUTS["FSDP+TP"]})
    weights = eqx.tree_at(lambda model: model.layer.bias, model, None)
    placed = ft.shard(weights, LAYOUTS["FSDP+TP"], MESH)
    whole = ft.whole_matrices(tx, layout=layout)
    update = jax.jit(lambda m, s: updated(whole, m, s))
    close(update(placed, run_in(whole.init(placed))), expected(tx, weights))


def test_no_layout_is_an_error() -> None:
    _, placed, state = on_mesh(muon(), MODELS[3](), TENSOR, MESH)
    with raises(
        "`ft.whole_matrices` cannot make the matrices of 1 parameter whole on mesh (data=2, ",
        'layer.weight   f32[3, 8, 16]   "layers embed hidden"',
        "its sharding is not known",
        "pass the layout of the model, `ft.whole_matrices(tx, layout=...)`",
        error=ft.ShardingError,
    ):
        jax.jit(lambda m, s: updated(ft.whole_matrices(muon()), m, s))(placed, state)


def test_a_layout_that_does_not_fit() -> None:
    _, placed, state = on_mesh(muon(), MODELS[3](), TENSOR, MESH)
    whole = ft.whole_matrices(muon(), layout=ft.AxisRules({"hidden": "model"}))
    with raises(
        "the layout for `ft.whole_matrices` does not fit on mesh (data=2, model=4)",
        "layer.weight",
        "no rule names `embed`",
        error=ft.ShardingError,
    ):
        jax.jit(lambda m, s: updated(whole, m, s))(placed, state)


def test_inside_of_shard_map_it_is_refused() -> None:
    _, placed, state = on_mesh(muon(), MODELS[3](), TENSOR, MESH)
    whole = ft.whole_matrices(muon(), layout=TENSOR)
    mapped = jax.shard_map(
        lambda m, s: updated(whole, m, s), mesh=MESH, in_specs=P(), out_specs=P()
    )
    with raises("whole inside of shard_map (data, model)", "layer.weight", "outside of shard_map"):
        jax.jit(mapped)(placed, state)


def test_one_device_needs_no_layout() -> None:
    tx, model = muon(), MODELS[2]()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    whole = ft.whole_matrices(tx)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda m, s: updated(whole, m, s))(model, run_in(whole.init(model)))
    close(found, expected(tx, model))


# What is refused


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"over": 3}, ("there is no such optimizer", "over=3", "a mesh axis, or several")),
        ({"over": ("data", 3)}, ("over=('data', 3)",)),
        ({"over": ("data", "data")}, ("over=('data', 'data')",)),
        ({"tx": lambda g: g}, ("is not an optimizer",)),
    ],
)
def test_arguments(arguments: Any, fragments: tuple[str, ...]) -> None:
    with raises(*fragments):
        ft.whole_matrices(**{"tx": muon(), **arguments})


def refused(tx: Any, layers: Any, *fragments: str) -> None:
    model = MODELS[layers]()
    placed = ft.shard(model, LAYOUTS["FSDP+TP"], MESH)
    update = ft.jit(lambda m: updated(tx, m, tx.init(m)), rules=LAYOUTS["FSDP+TP"])
    with raises(*fragments):
        update(placed)


def test_a_mesh_axis_that_there_is_not() -> None:
    refused(
        ft.whole_matrices(muon(), "modle"),
        3,
        "cannot spread layers",
        "over='modle'",
        "mesh (data=2, model=4) has no such axis; did you mean `model`?",
    )


@pytest.mark.parametrize("layers", [3, "plain"])
def test_what_looks_at_all_parameters_is_refused(layers: Any) -> None:
    inner = optax.chain(optax.clip_by_global_norm(1.0), muon())
    headline = "`ft.whole_matrices` "
    headline += "takes each layer" if layers == 3 else "computes the matrices of each parameter"
    refused(
        ft.whole_matrices(inner),
        layers,
        headline,
        "weight",
        "depends on `",
        "optax.chain(optax.clip_by_global_norm(1.0), ft.whole_matrices(optax.contrib.muon(1e-3)))",
    )


def test_a_condition_around_all_parameters_is_refused_inside() -> None:
    refused(
        ft.whole_matrices(optax.MultiSteps(muon(), 2)),  # pyright: ignore[reportArgumentType]
        3,
        "cannot be updated without others",
        "layer.weight",
        "is computed in one loop or condition with that of `layer.bias`",
        "`optax.MultiSteps(ft.whole_matrices(optax.contrib.muon(1e-3)), 4)`",
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_a_condition_around_all_parameters_is_outside(mesh: str) -> None:
    tx, model = muon(), MODELS[3]()
    whole: Any = optax.MultiSteps(ft.whole_matrices(tx), 1)
    update, placed, state = on_mesh(whole, model, LAYOUTS["FSDP+TP"], MESHES[mesh])
    found, _ = update(placed, state)
    by_layers: Any = optax.MultiSteps(ft.layerwise(tx), 1)
    state = run_in(by_layers.init(model))
    close(found, jax.jit(lambda m, s: updated(by_layers, m, s))(model, state)[0])


def test_inside_of_layerwise_it_is_refused() -> None:
    refused(
        ft.layerwise(ft.whole_matrices(muon())),
        3,
        "`ft.whole_matrices` inside of `ft.layerwise` would move each layer by itself",
        "layer.weight",
        "`ft.whole_matrices(ft.layerwise(tx))`",
    )
