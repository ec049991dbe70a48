"""`ft.muon` and `ft.on_whole_matrices`: the values of optax, one exchange in and one out, and what is
refused."""

from collections.abc import Callable
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
MESHES: dict[str, Mesh] = {"Auto": MESH, "Explicit": EXPLICIT}


# The optimizers


def dimensions(parameters: Any) -> Any:
    return ft.nn.matrix_dimensions(parameters)(parameters)


# Two iterations, since each of them takes its time to compile.
OPTIONS = {"ns_steps": 2, "muon_weight_dimension_numbers": dimensions}


def muon(**options: Any) -> Any:
    return ft.muon(0.1, **{**OPTIONS, **options})


def muon_of_optax(**options: Any) -> Any:
    """What it has to compute, for each layer."""
    return ft.layerwise(optax.contrib.muon(0.1, **{**OPTIONS, **options}))


def polar(matrix: Array) -> Array:
    u, _, v = jnp.linalg.svd(matrix, full_matrices=False)
    return u @ v


def is_matrix(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].name == "weight", params)


def with_polar(transform: Any) -> Any:
    """An optimizer of a user's with a function of matrices."""
    return optax.chain(optax.trace(0.9), optax.masked(transform, is_matrix), optax.scale(-0.1))


def polar_of_each() -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(polar, updates), state

    return with_polar(optax.GradientTransformation(lambda params: optax.EmptyState(), update))


# Those of the table, and others that are tried once: what is tested, and what it has to compute.
OF_MUON: dict[str, dict[str, Any]] = {
    "muon": {},
    "decay": {"weight_decay": 0.1, "mu_dtype": jnp.bfloat16},
    "adaptive": {"adaptive": True},
    "aol": {"preconditioning": "aol", "nesterov": False},
    "schatten": {"preconditioning": "schatten", "consistent_rms": 0.2},
    "spectral": {"preconditioning": "spectral", "eps": 1e-6, "beta": 0.8},
    "adam": {"adam_learning_rate": 0.3, "adam_b1": 0.8, "adam_weight_decay": 0.1},
    "in a scan": {"ns_coeffs": ((3.4, -4.7, 2.0),) * 2},
    "a preset": {"ns_coeffs": "dion", "ns_steps": 5},
    "a schedule": {"learning_rate": lambda step: 0.3 / (1 + step)},
    "a mask": {"weight_decay": 0.1, "weight_decay_mask": is_matrix},
}
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "polar": (
        lambda: with_polar(ft.on_whole_matrices(polar)), lambda: ft.layerwise(polar_of_each()),
    )
}  # fmt: skip
for name, options in OF_MUON.items():
    OPTIMIZERS[name] = (
        lambda own=options: ft.muon(**{"learning_rate": 0.1, **OPTIONS, **own}),
        lambda own=options: ft.layerwise(
            optax.contrib.muon(**{"learning_rate": 0.1, **OPTIONS, **own})
        ),
    )
TABLE = ("polar", "muon", "decay", "adaptive", "aol", "schatten")


def updated(tx: Any, model: Any, state: Any) -> Any:
    """An update by a gradient that is different for each layer, and the new state."""
    gradients = jax.tree.map(lambda x: jnp.sin(3 * x) + 0.1 * x, model)
    return tx.update(gradients, state, model)


def run_in(state: Any) -> Any:
    """A state as after some steps."""

    def filled(path: Any, x: Any) -> Any:
        if not {"mu", "trace"} & {getattr(key, "name", None) for key in path} or x.ndim < 2:
            return x
        return x + jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) / 10

    return jax.tree_util.tree_map_with_path(filled, state)


# optax promotes, and adds a number to an array of keys' data.
@pytest.fixture(autouse=True)
def _as_optax_needs_it() -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def expected(tx: Any, model: Any) -> Any:
    """The updates and the moments on one device."""
    return kept(jax.jit(lambda m, state: updated(tx, m, state))(model, run_in(tx.init(model))))


def kept(result: Any) -> Any:
    """The updates, and the leaves of the state that belong to parameters, in order."""
    updates, state = result
    return updates, [x for x in jax.tree.leaves(state) if x.ndim > 0 and x.shape[-1] != 3]


def close(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            narrow = one.dtype == jnp.bfloat16
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            text = jax.tree_util.keystr(path)
            precision = 1e-2 if narrow else 1e-3
            np.testing.assert_allclose(
                one, other, rtol=precision, atol=precision / 10, err_msg=text
            )


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

CELLS = list(product(TABLE, LAYOUTS, MESHES, ("plain", 1, 2, 3, 8)))


def check(tx: Any, wanted: Any, model: Any, layout: ft.Layout, mesh: Mesh) -> None:
    update, placed, state = on_mesh(tx, model, layout, mesh)
    updates, after = update(placed, state)
    close(kept((updates, after)), expected(wanted, model))
    for one, parameter in zip(jax.tree.leaves(updates), jax.tree.leaves(placed), strict=True):
        assert one.sharding.is_equivalent_to(parameter.sharding, one.ndim)


@pytest.mark.parametrize(("optimizer", "layout", "mesh", "layers"), selected_cells(CELLS))
def test_values(optimizer: str, layout: str, mesh: str, layers: Any) -> None:
    tx, wanted = OPTIMIZERS[optimizer]
    check(tx(), wanted(), MODELS[layers](), LAYOUTS[layout], MESHES[mesh])


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - set(TABLE)))
def test_values_of_others(optimizer: str) -> None:
    tx, wanted = OPTIMIZERS[optimizer]
    check(tx(), wanted(), MODELS[3](), LAYOUTS["FSDP+TP"], MESH)


@pytest.mark.parametrize(("layers", "mesh"), [("list of 3", "Auto"), ("nested", "Explicit")])
def test_values_of_other_trees(layers: str, mesh: str) -> None:
    check(muon(), muon_of_optax(), MODELS[layers](), LAYOUTS["FSDP+TP"], MESHES[mesh])


def test_a_mesh_with_axes_of_both_types() -> None:
    types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    check(muon(), muon_of_optax(), MODELS[3](), LAYOUTS["FSDP+TP"], mesh)


@pytest.mark.parametrize("over", [None, "data", ("model", "data")])
def test_mesh_axes_in_another_order_than_in_the_mesh(over: Any) -> None:
    layout = ft.AxisRules({"hidden": ("model", "data"), ...: None})
    check(muon(over=over), muon_of_optax(), MODELS[3](), layout, MESH)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_values_on_one_device_are_those_of_optax(optimizer: str) -> None:
    """To 1e-6 of the largest."""
    tx, wanted = (make() for make in OPTIMIZERS[optimizer])
    model = MODELS[2]()
    found = jax.jit(lambda m, s: updated(tx, m, s))(model, run_in(tx.init(model)))
    for one, other in zip(
        *map(jax.tree.leaves, (kept(found), expected(wanted, model))), strict=True
    ):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


def test_without_dimensions_the_matrices_are_those_of_a_layer() -> None:
    """A stack of vectors is none, nor are the heads of an attention."""
    model = {"stack": MODELS[3](), "plain": MODELS["plain"](), "heads": jnp.ones((2, 3, 4))}
    options = {"muon_weight_dimension_numbers": None}
    tx, wanted = muon(**options), muon_of_optax(**options)
    found = jax.jit(lambda m, s: updated(tx, m, s))(model, run_in(tx.init(model)))
    close(kept(found), expected(wanted, model))


def test_dimensions_of_more_than_two() -> None:
    model = {
        "heads": jax.random.normal(KEY, (4, 2, 3)),
        "experts": jax.random.normal(KEY, (2, 3, 4)),
    }
    numbers = optax.contrib.MuonDimensionNumbers
    options = {
        "muon_weight_dimension_numbers": {"heads": numbers(0, (1, 2)), "experts": numbers(-2, -1)}
    }
    tx, wanted = muon(**options), muon_of_optax(**options)
    found = jax.jit(lambda m, s: updated(tx, m, s))(model, run_in(tx.init(model)))
    close(kept(found), expected(wanted, model))


def test_matrices_of_one_shape_with_other_dimensions() -> None:
    """Each is scaled by its own; on a mesh such matrices are not computed together."""
    model = {name: jax.random.normal(jax.random.key(i), (8, 16)) for i, name in enumerate("abc")}
    numbers = optax.contrib.MuonDimensionNumbers
    of_each = {"a": numbers(-2, -1), "b": numbers(-1, -2), "c": numbers(-2, -1)}
    options = {"muon_weight_dimension_numbers": of_each}
    check(muon(**options), muon_of_optax(**options), model, P("data", "model"), MESH)


def test_matrices_of_two_dtypes_are_computed_apart() -> None:
    model = {"wide": jnp.ones((8, 16)), "narrow": jnp.ones((8, 16), jnp.bfloat16)}
    tx = ft.on_whole_matrices(lambda matrix: 2 * matrix)
    update, placed, state = on_mesh(tx, model, P("data", "model"), MESH)
    updates, _ = update(placed, state)
    assert {name: x.dtype for name, x in updates.items()} == {
        "wide": "float32",
        "narrow": "bfloat16",
    }


def test_outside_of_jit() -> None:
    tx, model = muon(ns_steps=1), MODELS["plain"]()
    _, placed, state = on_mesh(tx, model, TENSOR, MESH)
    with ft.axis_rules(TENSOR):
        close(kept(updated(tx, placed, state)), expected(muon_of_optax(ns_steps=1), model))


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
    update = on_mesh(muon(), MODELS[layers](), LAYOUTS[layout], MESH)
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
    update = on_mesh(muon(over=over), MODELS[8](), LAYOUTS[layout], MESH)
    assert moved(*update) == expected


@pytest.mark.parametrize("mesh", MESHES)
def test_layers_that_are_sharded_stay_where_they_are(mesh: str) -> None:
    model = MODELS[8]()
    layout = ft.AxisRules({"layers": "data", "hidden": "model", ...: None})
    update, placed, state = on_mesh(muon(), model, layout, MESHES[mesh])
    close(kept(update(placed, state)), expected(muon_of_optax(), model))
    assert moved(update, placed, state) == [("all-to-all", ("model",), 512)] * 2


def test_the_program_does_not_grow_with_depth() -> None:
    sizes = []
    for layers in (16, 32):
        model = ft.stack(Layer.create, layers, KEY)
        update, placed, state = on_mesh(muon(), model, LAYOUTS["FSDP+TP"], MESH)
        sizes.append(update.lower(placed, state).as_text().count("\n"))
    assert sizes[0] == sizes[1]


# Where the layout comes from


def test_a_layout_with_filters_for_what_is_not_trained() -> None:
    model = MODELS[3]()
    layout = ft.StateSharding({"**.bias": P(), ...: LAYOUTS["FSDP+TP"]})
    weights = eqx.tree_at(lambda model: model.layer.bias, model, None)
    placed = ft.shard(weights, LAYOUTS["FSDP+TP"], MESH)
    tx = muon(layout=layout)
    found = jax.jit(lambda m, s: updated(tx, m, s))(placed, run_in(tx.init(placed)))
    close(kept(found), expected(muon_of_optax(), weights))


def test_no_layout_is_an_error() -> None:
    _, placed, state = on_mesh(muon(), MODELS[3](), TENSOR, MESH)
    with raises(
        "`ft.muon` cannot gather the matrices of 1 parameter on mesh (data=2, ",
        'layer.weight   f32[3, 8, 16]   "layers embed hidden"',
        "its sharding is unknown",
        "pass the layout of the model, `ft.muon(..., layout=...)`",
        error=ft.ShardingError,
    ):
        jax.jit(lambda m, s: updated(muon(), m, s))(placed, state)


def test_a_layout_that_does_not_fit() -> None:
    _, placed, state = on_mesh(muon(), MODELS[3](), TENSOR, MESH)
    tx = muon(layout=ft.AxisRules({"hidden": "model"}))
    with raises(
        "`ft.muon`: the layout, from `layout=` or the ambient rules, does not fit the parameters on mesh (data=2, model=4)",
        "layer.weight",
        "no rule names `embed`",
        error=ft.ShardingError,
    ):
        jax.jit(lambda m, s: updated(tx, m, s))(placed, state)


def test_inside_of_shard_map_it_is_refused() -> None:
    _, placed, state = on_mesh(muon(), MODELS[3](), TENSOR, MESH)
    tx = muon(layout=TENSOR)
    mapped = jax.shard_map(lambda m, s: updated(tx, m, s), mesh=MESH, in_specs=P(), out_specs=P())
    with raises("inside shard_map (data, model)", "layer.weight", "outside of shard_map"):
        jax.jit(mapped)(placed, state)


def test_one_device_needs_no_layout() -> None:
    tx, model = muon(), MODELS[2]()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        found = jax.jit(lambda m, s: updated(tx, m, s))(model, run_in(tx.init(model)))
    close(kept(found), expected(muon_of_optax(), model))


# What is refused


ARGUMENTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "over": (lambda: muon(over=3), ("muon: invalid arguments", "over=3", "a name, or")),
    "an option": (
        lambda: muon(momentum=0.9),
        ("muon: got an unexpected keyword argument 'momentum'; see `optax.contrib.muon`",),
    ),
    "no function": (lambda: ft.on_whole_matrices(3), ("fn=3",)),  # pyright: ignore
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    make, fragments = ARGUMENTS[name]
    with raises(*fragments):
        make()


def counted_from_the_front(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), params)


def of_weights(fn: Any) -> Any:
    return optax.masked(ft.on_whole_matrices(fn), is_matrix)


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no such mesh axis": (
        lambda: muon(over="modle"),
        ("muon: invalid arguments", "mesh (data=2, model=4) has no such axis; did you mean `model`?"),
    ),
    "a mesh axis twice": (
        lambda: muon(over=("data", "data")), ("over='data'", "is named twice", "name the mesh axis once"),
    ),
    "no matrix": (
        lambda: ft.on_whole_matrices(polar),
        ("`ft.on_whole_matrices` cannot be applied", "layer.bias   f32[3, 16]",
         "is not a matrix: its shape is [16], not counting its stack",
         "Try: exclude the array with `optax.masked` or `optax.partition`"),
    ),
    "another shape": (
        lambda: of_weights(lambda x: x.T), ("layer.weight", "the function returns f32[16, 8] for it")
    ),
    "another dtype": (
        lambda: of_weights(lambda x: x.astype(jnp.bfloat16)), ("the function returns bf16[8, 16] for it",)
    ),
    "no array": (lambda: of_weights(lambda x: (x, x)), ("the function returns tuple for it",)),
    "dimensions counted from the front": (
        lambda: muon(muon_weight_dimension_numbers=counted_from_the_front),
        ("muon: matrices in stacks have invalid dimensions", "is in a stack, but its dimensions (1, 2) are not all",
         "count the dimensions from the end"),
    ),
    "inside of layerwise": (
        lambda: ft.layerwise(muon()),
        ("`ft.muon` cannot be applied", "is one layer of a stack", "remove `ft.layerwise`"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    make, fragments = REFUSED[case]
    tx, layout = make(), LAYOUTS["FSDP+TP"]
    update = ft.jit(lambda m: updated(tx, m, tx.init(m)), rules=layout)
    with raises(*fragments):
        update(ft.shard(MODELS[3](), layout, MESH))
