"""`ft.constrain`, beside what JAX does with literal specs."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH, mesh_of
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
    def body(x: Array) -> Array:
        assert x.shape == (2, 8)  # local along `data`, global along `model`
        return ft.constrain(x, "batch hidden", RULES)

    with jax.set_mesh(MESH):
        partial = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        assert jax.jit(partial)(jnp.ones((4, 8))).sharding.spec == P("data", "model")


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
        pytest.raises(ft.ShardingError, match=r"no rules to lay out `batch hidden`.*axis_rules"),
    ):
        ft.constrain(jnp.ones((4, 8)), "batch hidden")


def test_constrain_on_host_moves_to_the_host():
    with jax.set_mesh(MESH):
        out = jax.jit(lambda x: ft.constrain(x * 2.0, ft.on_host(P("data"))))(jnp.ones((4, 8)))
    assert out.sharding.memory_kind == "pinned_host"


def test_one_function_under_two_rule_sets_has_two_layouts():
    @jax.jit
    def step(x: Array) -> Array:
        return ft.constrain(x * 2.0, "batch hidden")

    with jax.set_mesh(MESH):
        with ft.axis_rules(ft.AxisRules({"batch": "data", "hidden": None})):
            first = step(jnp.ones((4, 8)))
        with ft.axis_rules(ft.AxisRules({"batch": None, "hidden": "model"})):
            second = step(jnp.ones((4, 8)))
    assert first.sharding.is_equivalent_to(NamedSharding(MESH, P("data")), 2)
    assert second.sharding.is_equivalent_to(NamedSharding(MESH, P(None, "model")), 2)


# What fails in silence elsewhere


def test_silent_failure_02_a_constraint_that_does_not_divide_is_an_error():
    with jax.set_mesh(MESH), ft.axis_rules(RULES), pytest.raises(ft.ShardingError) as error:
        jax.jit(lambda x: ft.constrain(x, "batch hidden"))(jnp.ones((4, 6)))
    text = str(error.value)
    assert '"hidden" has size 6; rule hidden→model needs a multiple of model=4' in text
    assert error.value.problems[0].shape == (4, 6)
    # An activation has no path: the line says which it is.
    assert re.match(r"ft.constrain at test_constrain.py:\d+: 1 leaf cannot be laid out on", text)
    assert text.endswith(
        'Try: pad "hidden" to 8, or leave every "hidden" unsharded by `"hidden": None`'
    )


def test_the_line_is_told_of_a_layout_too():
    told = r"ft.constrain at test_constrain.py:\d+: 1 leaf cannot be laid out"
    with jax.set_mesh(MESH), pytest.raises(ft.ShardingError, match=told):
        ft.constrain(jnp.ones((3, 8)), P("data"))


def test_rows_that_the_mesh_does_not_divide():
    with jax.set_mesh(MESH), ft.axis_rules(RULES), pytest.raises(ft.ShardingError) as error:
        ft.constrain(jnp.ones((3, 8)), "batch hidden")
    told = 'pad "batch" to 4 with rows that do not count, drop what is left over, or leave every'
    assert told in str(error.value)


def test_a_name_without_a_rule_is_told_with_its_line():
    with jax.set_mesh(MESH), ft.axis_rules(ft.AxisRules({"batch": "data"})):
        with pytest.raises(ft.ShardingError, match=r"ft.constrain at test_constrain.py:\d+: "):
            ft.constrain(jnp.ones((4, 8)), "batch seq")


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


# Found by reading


def test_constrain_sees_the_names_that_a_layout_gives():
    rules = ft.AxisRules(
        {"hidden": "model", "embed": None},
        names={eqx.nn.Linear: ft.names(weight="hidden embed", bias="hidden")},
    )
    layer = eqx.nn.Linear(6, 8, key=jax.random.key(0))
    with jax.set_mesh(MESH):
        placed = jax.jit(lambda layer: ft.constrain(layer, rules))(layer)
    assert placed.weight.sharding.is_equivalent_to(NamedSharding(MESH, P("model", None)), 2)


def test_constrain_refuses_a_layout_for_another_mesh():
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with (
        jax.set_mesh(MESH),
        pytest.raises(ft.ShardingError, match=r"mesh \(data=4, model=2\).*use one mesh"),
    ):
        ft.constrain(jnp.ones((4, 8)), NamedSharding(other, P("data")))


def test_inside_shard_map_sizes_are_local():
    """Three of six rows are on each device along `data`, which does not divide three."""

    def body(x: Array) -> Array:
        return ft.constrain(x, "batch hidden", RULES)

    x = jnp.ones((6, 8))
    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    found = jax.jit(mapped)(x)
    assert found.shape == (6, 8) and found.sharding.is_equivalent_to(
        NamedSharding(MESH, P("data", "model")), 2
    )


def test_a_layout_brings_its_mesh():
    """Where there is no ambient mesh, and the array is on none."""
    planned = ft.plan(jnp.ones((4, 8)), P(None, "model"), MESH)
    for layout, spec in ((NamedSharding(MESH, P("data")), P("data")), (planned, P(None, "model"))):
        found = jax.jit(lambda x, layout=layout: ft.constrain(x * 2, layout))(jnp.ones((4, 8)))
        assert found.sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)


def test_a_layout_beside_the_rules_is_checked_too() -> None:
    """`FSDP` lays out no activation, but a mesh axis that the mesh lacks is a mistake wherever it stands."""
    rules = ft.AxisRules({"batch": "data", "embed": None})
    for layout in (rules | ft.FSDP("dta"), ft.StateSharding({...: rules | ft.FSDP("dta")})):
        with raises("the mesh (data=2, model=4) has no axis `dta`", error=ft.ShardingError):
            jax.jit(lambda x, rules=layout: ft.constrain(x, "batch embed", rules)).lower(
                ft.shard(jnp.ones((8, 8)), ft.P(), ft.make_mesh(data=2, model=4))
            )
