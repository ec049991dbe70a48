"""The rule for the batch was forgotten under `...: None`: who says so, once, and where nothing is
said."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.devices.meshes import mesh_view
from functree.layout.rules import forgotten_axes
from tests.lib.checks import warns
from tests.lib.meshes import MESH, SIZES

P = ft.P
FSDP = ft.FSDP("data", min_size=0)
OPEN = ft.AxisRules({"hidden": "model", ...: None})
FORGOTTEN = OPEN | FSDP

CLOSED, BATCHED = ft.AxisRules({...: None}), ft.AxisRules({"batch": "data", ...: None})
BOTH = ft.FSDP(("data", "model"), min_size=0)

# A layout, and the mesh axes along which an activation `batch embed` is whole by mistake.
LAYOUTS: dict[str, tuple[ft.Layout, tuple[str, ...]]] = {
    "forgotten": (FORGOTTEN, ("data",)),
    "FSDP first": (FSDP | OPEN, ("data",)),
    "FSDP over two axes": (CLOSED | BOTH, ("data", "model")),
    "behind the last filter": (ft.StateSharding({...: FORGOTTEN}), ("data",)),
    "FSDP behind another filter": (ft.StateSharding({"embed.**": FSDP, ...: OPEN}), ("data",)),
    "on the host": (ft.on_host(FORGOTTEN), ("data",)),
    "a rule": (BATCHED | FSDP, ()),
    "FSDP alone": (FSDP, ()),
    "meant": (ft.AxisRules({"batch": None, ...: None}) | FSDP, ()),
    "a rule in another table": (OPEN | ft.AxisRules({"batch": "data"}) | FSDP, ()),
    "the axis shards something else": (ft.AxisRules({"seq": "data", ...: None}) | FSDP, ()),
    "no FSDP": (OPEN, ()),
    "an axis of size 1": (OPEN | ft.FSDP("one"), ()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_forgotten_axes(name: str):
    layout, wanted = LAYOUTS[name]
    mesh = mesh_view({**SIZES, "one": 1})
    assert forgotten_axes(layout, ft.Axes("batch", "embed"), mesh) == wanted
    assert forgotten_axes(layout, ft.Axes("seq", "embed"), mesh) == ()


def _twice() -> Any:
    """A function with two constraints: a new one, since JAX keeps the traces of one that it knows."""

    def twice(x: Array) -> Array:
        return ft.constrain(ft.constrain(x * 2, "batch seq embed") + 1, "batch seq hidden")

    return twice


def _named(x: Float[Array, "batch seq embed"]) -> Array:
    return x * 2


def _layers(x: Array) -> Array:
    return ft.nn.MLP(8, 16, key=jax.random.key(0))(x)


# The doors by which an array is constrained by its names.
DOORS: dict[str, Callable[[ft.Layout], Callable[[Any], Any]]] = {
    "constrain": lambda layout: ft.jit(_twice(), rules=layout),
    "constrain, ambient": lambda layout: _under(layout, _twice()),
    "constrain, rules=": lambda layout: jax.jit(
        lambda x: ft.constrain(x, "batch seq embed", layout)
    ),
    "typed": lambda layout: _under(layout, ft.typed(_named, constrain=True)),
    "nn": lambda layout: ft.jit(_layers, rules=layout),
    "behind filters": lambda layout: ft.jit(_twice(), rules=ft.StateSharding({...: layout})),
    "with remat": lambda layout: ft.jit(jax.checkpoint(_twice()), rules=layout),
}


def _under(layout: ft.Layout, fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(x: Array) -> Array:
        with jax.set_mesh(MESH), ft.axis_rules(layout):
            return jax.jit(fun)(x)

    return call


def _batch() -> Array:
    return ft.shard(jnp.ones((4, 4, 8)), P("data"), MESH)


@pytest.mark.parametrize("name", DOORS)
def test_each_door_says_it_once(name: str):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")  # shows equal texts once for each line
        DOORS[name](FORGOTTEN)(_batch())
    texts = [str(one.message) for one in told]
    wanted = (
        "constrain: `batch` has no rule except `...: None`, which replicates activations "
        "over the mesh axis `data`, over which `FSDP` shards the parameters. .* "
        "Add `'batch': 'data'` to the rules, or `'batch': None` if you intend replication"
    )
    assert len(texts) == 1 and re.fullmatch(wanted, texts[0]), texts
    assert told[0].category is ft.FunctreeWarning and told[0].filename == __file__
    # The remedies: neither warns.
    for entry in ("data", None):
        rules = ft.AxisRules({"batch": entry, "hidden": "model", ...: None})
        DOORS[name](rules | FSDP)(_batch())


def test_the_activation_is_whole_where_it_is_said_and_sharded_by_the_remedy():
    with warns("`batch` has no rule"):
        assert ft.jit(_twice(), rules=FORGOTTEN)(_batch()).sharding.spec == P(None, None, "model")
    layout = ft.AxisRules({"batch": "data", "hidden": "model", ...: None}) | FSDP
    assert ft.jit(_twice(), rules=layout)(_batch()).sharding.spec == P("data", None, "model")


def test_two_mesh_axes_are_named_as_they_are_written():
    layout = ft.AxisRules({...: None}) | ft.FSDP(("data", "model"))
    with warns("over the mesh axes `(data, model)`", "Add `'batch': ('data', 'model')`"):
        ft.jit(lambda x: ft.constrain(x, "batch seq embed"), rules=layout)(_batch())


def test_nothing_is_said_of_what_vmap_hides():
    layout = ft.AxisRules({...: None}) | FSDP
    one = jax.vmap(lambda x: ft.constrain(x * 2, "seq embed"))
    x = ft.shard(jnp.ones((4, 4, 8)), P("data"), MESH)
    # Nothing is wrong: the dimension without a name keeps its sharding.
    assert ft.jit(one, rules=layout)(x).sharding.spec[0] == "data"


def test_a_batch_that_is_placed_by_the_rules():
    fun = ft.jit(_named, rules=FORGOTTEN, mesh=MESH)
    with warns("_named: `batch` has no rule", "which replicates `x` f32[4, 4, 8] over", "'data'"):
        fun(jnp.ones((4, 4, 8)))
    layout = ft.AxisRules({"batch": "data", "hidden": "model", ...: None}) | FSDP
    ft.jit(_named, rules=layout, mesh=MESH)(jnp.ones((4, 4, 8)))
