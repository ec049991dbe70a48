"""`ft.constrain`, beside what JAX does with literal specs."""

import gc
import re
import weakref
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH, assert_lies, mesh_of
from tests.lib.trees import MLP, mlp

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


@pytest.mark.parametrize("explicit", [False, True])
def test_constrain_is_a_constraint_or_a_reshard(explicit: bool):
    mesh = mesh_of(explicit)

    def step(x: Array) -> Array:
        return ft.constrain(x * 2.0, "batch hidden")

    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        out = jax.jit(step)(jnp.ones((4, 8)))
        text = str(jax.make_jaxpr(step)(jnp.ones((4, 8))))
    assert out.sharding == NamedSharding(mesh, P("data", "model"))
    assert ("reshard" in text) == explicit and ("sharding_constraint" in text) != explicit


def test_constrain_takes_trees_and_leaves_statics():
    with jax.set_mesh(MESH):
        up, down = jax.jit(lambda up, down: _arrays(ft.constrain(MLP(up, down), RULES)))(
            mlp().up, mlp().down
        )
    assert (up.sharding.spec, down.sharding.spec) == (P(None, "model"), P("model"))


def _arrays(model: MLP) -> tuple[Array, Array]:
    assert model.name == "mlp"
    return model.up, model.down


def test_constrain_without_a_mesh_does_nothing():
    x = jnp.ones((3, 7))
    with ft.axis_rules(RULES):
        assert ft.constrain(x, "batch hidden") is x


def test_constrain_uses_the_mesh_of_the_arrays_type():
    x = ft.shard(jnp.ones((4, 8)), P(), MESH)
    text = str(jax.make_jaxpr(lambda x: ft.constrain(x, "batch hidden", RULES))(x))
    assert "sharding_constraint" in text and "'model'" in text


def test_constrain_leaves_out_what_is_manual():
    """Sizes are local along `data`: of six rows three are on a device, which two does not divide."""

    def body(x: Array) -> Array:
        assert x.shape == (3, 8)
        return ft.constrain(x, "batch hidden", RULES)

    how: Any = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}
    x = jnp.ones((6, 8))
    with jax.set_mesh(MESH):
        assert_lies(jax.jit(jax.shard_map(body, **how))(x), "data", "model")
    assert_lies(jax.jit(jax.shard_map(body, mesh=MESH, **how))(x), "data", "model")


def test_constrain_composes_with_vmap_grad_and_scan():
    def loss(x: Array) -> Array:
        def body(carry: Array, _: None) -> tuple[Array, None]:
            return ft.constrain(carry * 2.0, "batch hidden"), None

        return jax.lax.scan(body, x, None, length=3)[0].sum()

    with jax.set_mesh(MESH), ft.axis_rules(RULES):
        gradient = jax.jit(jax.grad(loss))(jnp.ones((4, 8)))
        rows = jax.jit(jax.vmap(lambda row: ft.constrain(row, "hidden")))(jnp.ones((4, 8)))
    assert np.array_equal(gradient, np.full((4, 8), 8.0))
    assert rows.shape == (4, 8)


def test_constrain_with_a_mesh_wants_rules():
    with (
        jax.set_mesh(MESH),
        pytest.raises(ft.ShardingError, match=r"no rules lay out `batch hidden`.*axis_rules"),
    ):
        ft.constrain(jnp.ones((4, 8)), "batch hidden")


def test_constrain_on_host_moves_to_the_host():
    with jax.set_mesh(MESH):
        out = jax.jit(lambda x: ft.constrain(x * 2.0, ft.on_host(P("data"))))(jnp.ones((4, 8)))
    assert out.sharding.memory_kind == "pinned_host"


# What fails in silence elsewhere


def test_silent_failure_02_a_constraint_that_does_not_divide_is_an_error():
    with jax.set_mesh(MESH), ft.axis_rules(RULES), pytest.raises(ft.ShardingError) as error:
        jax.jit(lambda x: ft.constrain(x, "batch hidden"))(jnp.ones((4, 6)))
    (problem,) = error.value.problems
    assert problem.why == '"hidden" has size 6; rule hidden→model needs a multiple of model=4'
    assert problem.remedy == (
        'pad "hidden" to 8, or leave every "hidden" unsharded with `"hidden": None`'
    )
    assert problem.shape == (4, 6)


# An activation has no path: the line says which it is. An array, its axes or layout, and what is told.
TOLD: dict[str, tuple[Any, Any, str]] = {
    "a size": (jnp.ones((4, 6)), "batch hidden", '"hidden" has size 6'),
    "rows": (jnp.ones((3, 8)), "batch hidden", 'pad "batch" to 4 with rows that you mask, drop the excess rows'),
    "a name without a rule": (jnp.ones((4, 8)), "batch seq", "no rule names `seq`"),
    "a layout": (jnp.ones((3, 8)), P("data"), "dimension 0 has size 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_the_line_is_told(case: str):
    x, layout, told = TOLD[case]
    with jax.set_mesh(MESH), ft.axis_rules(RULES), pytest.raises(ft.ShardingError) as error:
        ft.constrain(x, layout)
    text = str(error.value)
    assert re.match(r"ft.constrain at test_constrain.py:\d+: 1 leaf cannot be laid out on", text)
    assert told in text


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_silent_failure_08_the_old_mesh_context_is_an_error():
    with (
        MESH,
        ft.axis_rules(RULES),
        pytest.raises(ft.ShardingError, match=r"write `with jax.set_mesh\(mesh\):`"),
    ):
        jax.jit(lambda x: ft.constrain(x, "batch hidden"))(jnp.ones((4, 8)))


def test_silent_failure_23_a_program_traced_under_other_rules_is_not_reused():
    traces: list[str] = []

    @jax.jit
    def step(x: Array) -> Array:
        traces.append(str(ft.spec("batch hidden")))
        return x

    by_batch, by_hidden = {"batch": "data", "hidden": None}, {"batch": None, "hidden": "model"}
    for rules in (by_batch, by_hidden, by_batch):
        with ft.axis_rules(ft.AxisRules(rules)):
            step(jnp.ones((4, 8)))
    assert len(traces) == 2 and len(set(traces)) == 2


def test_constrain_refuses_a_layout_for_another_mesh():
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with (
        jax.set_mesh(MESH),
        pytest.raises(
            ft.ShardingError, match=r"mesh \(data=4, model=2\).*use the same mesh for both"
        ),
    ):
        ft.constrain(jnp.ones((4, 8)), NamedSharding(other, P("data")))


@pytest.mark.parametrize("ambient", [None, MESH.abstract_mesh], ids=["none", "abstract"])
def test_a_layout_brings_its_mesh(ambient: Any):
    """Where the array is on no mesh, and there is no ambient one, or one without devices."""
    planned = ft.plan(jnp.ones((4, 8)), P(None, "model"), MESH)
    for layout, spec in ((NamedSharding(MESH, P("data")), P("data")), (planned, P(None, "model"))):
        with nullcontext() if ambient is None else jax.sharding.use_abstract_mesh(ambient):
            found = jax.jit(lambda x, layout=layout: ft.constrain(x * 2, layout))(jnp.ones((4, 8)))
        assert_lies(found, *spec)


def test_a_layout_beside_the_rules_is_checked_too() -> None:
    """`FSDP` lays out no activation, but a mesh axis that the mesh lacks is a mistake wherever it stands."""
    rules = ft.AxisRules({"batch": "data", "embed": None})
    fsdp = ft.FSDP("dta")
    for layout in (rules | fsdp, fsdp | rules, ft.StateSharding({...: rules | fsdp})):
        with raises("the mesh (data=2, model=4) has no axis `dta`", error=ft.ShardingError):
            jax.jit(lambda x, rules=layout: ft.constrain(x, "batch embed", rules)).lower(
                ft.shard(jnp.ones((8, 8)), ft.P(), ft.make_mesh(data=2, model=4))
            )


# `axis_shards`

AXES = ft.AxisRules(
    {"experts": ("data", "model"), "hidden": "model", "layers": "data", "embed": None}
)
FALLBACKS = ft.AxisRules([("experts", "model"), ("hidden", "model"), ("hidden", None)])
SHARDED: dict[str, tuple[ft.Layout, tuple[Any, ...], tuple[tuple[str, ...], int]]] = {
    "one mesh axis": (AXES, ("hidden",), (("model",), 4)),
    "none": (AXES, ("embed",), ((), 1)),
    "taken by another dimension": (FALLBACKS, ("hidden", "experts hidden"), ((), 1)),
    "of several dimensions": (AXES, ("layers", "layers embed hidden"), (("data",), 2)),
    "axes": (AXES, ("hidden", ft.Axes("layers", "hidden")), (("model",), 4)),
    "a layout for parameters": (ft.FSDP("data"), ("embed",), ((), 1)),
}


@pytest.mark.parametrize("name", SHARDED)
def test_axis_shards(name: str) -> None:
    rules, given, expected = SHARDED[name]
    for mesh in (MESH, EXPLICIT):
        with jax.set_mesh(mesh), ft.axis_rules(rules):
            assert ft.axis_shards(*given) == ft.AxisShards(*expected)


def test_axis_shards_in_a_trace() -> None:
    """What a `shard_map` maps is left out."""
    found: list[ft.AxisShards] = []

    def body(x: jax.Array) -> jax.Array:
        found.append(ft.axis_shards("experts"))
        return x

    scalar = jax.ShapeDtypeStruct((), "float32")
    ft.jit(body, mesh=MESH, rules=AXES).lower(scalar)
    mapped = jax.shard_map(body, in_specs=P(), out_specs=P(), axis_names={"data"})
    with jax.set_mesh(MESH), ft.axis_rules(AXES):
        jax.jit(mapped).lower(scalar)
    assert found == [(("data", "model"), 8), (("model",), 4)]


def test_axis_shards_without_rules_or_mesh() -> None:
    with jax.set_mesh(MESH):
        assert ft.axis_shards("hidden") == ((), 1)
    with ft.axis_rules(AXES):
        assert ft.axis_shards("hidden") == ((), 1)


def test_axis_shards_of_what_is_no_axis() -> None:
    with jax.set_mesh(MESH), ft.axis_rules(AXES):
        with raises('axis_shards("hidden", "embed vocab"): the axes do not contain `hidden`'):
            ft.axis_shards("hidden", "embed vocab")
        with raises('"vocab" cannot be laid out', "no rule"):
            ft.axis_shards("vocab")
        with raises("invalid axes 3"):
            ft.axis_shards(3)  # pyright: ignore[reportArgumentType]


# The cache of specs

NAMED = ft.AxisRules({"batch": "data", "embed": None})


class Unhashable:
    def __call__(self, path: Any, leaf: Any) -> PartitionSpec:
        return P()

    def __eq__(self, other: object) -> bool:
        return self is other


def test_a_layout_that_cannot_be_hashed() -> None:
    for layout in (NAMED | Unhashable(), ft.StateSharding({"w": Unhashable(), ...: NAMED})):
        constrained = jax.jit(lambda x, layout=layout: ft.constrain(x, "batch embed", layout))
        with jax.set_mesh(MESH):
            assert_lies(constrained(jnp.ones((8, 4))), "data", None)


def test_no_array_of_a_layout_is_kept() -> None:
    def constrained() -> weakref.ref[Any]:
        weight = np.ones(3)
        layout = NAMED | (lambda path, leaf: P() if weight.ndim else P("data"))
        with jax.set_mesh(MESH):
            jax.jit(lambda x: ft.constrain(x, "batch embed", layout)).trace(jnp.ones((8, 4)))
        return weakref.ref(weight)

    kept = constrained()
    jax.clear_caches()
    gc.collect()
    assert kept() is None


def test_a_warning_comes_before_an_error() -> None:
    rules = ft.AxisRules({"batch": "data", "embed_dim": None, ...: None})
    for _ in range(2):
        with jax.set_mesh(MESH), pytest.warns(ft.FunctreeWarning, match="embed_dim"):
            with raises("(the root)   bf16[7, 4]", '"batch" has size 7'):
                ft.constrain(jnp.ones((7, 4), jnp.bfloat16), "batch embed", rules)
