"""`shard` and `constrain`, beside what JAX does with literal specs."""

from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def mesh_of(explicit: bool = False) -> Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


MESH = mesh_of()


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    name: str = "mlp"

    def __call__(self, x: Array) -> Array:
        return jax.nn.relu(x @ self.up) @ self.down


def mlp(embed: int = 6, hidden: int = 8) -> MLP:
    up, down = jax.random.normal(jax.random.key(0), (2, embed, hidden))
    return MLP(up, down.T)


# shard


@pytest.mark.parametrize("explicit", [False, True])
def test_shard_puts_arrays_where_jax_would(explicit: bool):
    mesh = mesh_of(explicit)
    placed = ft.shard(mlp(), RULES, mesh)
    assert placed.up.sharding == NamedSharding(mesh, P(None, "model"))
    assert placed.down.sharding == NamedSharding(mesh, P("model", None))
    assert placed.name == "mlp"
    assert np.array_equal(placed.up, mlp().up)


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "uint32", "bool", "complex64"]),
    spec=st.sampled_from([P(), P("data"), P(None, "model"), P(("data", "model")), P("model", "data")]),
    bits=st.binary(min_size=8 * 8, max_size=8 * 8),
)
def test_shard_changes_no_bit(dtype: str, spec: P, bits: bytes):
    raw = np.frombuffer(bits, np.uint8).reshape(8, 8)
    x = np.asarray(jnp.asarray(raw).astype(dtype))
    assert np.asarray(ft.shard(x, spec, MESH)).tobytes() == x.tobytes()


def test_shard_gives_back_the_same_object_when_nothing_is_to_be_done():
    once = ft.shard(mlp(), RULES, MESH)
    twice = ft.shard(once, RULES, MESH)
    assert once.up is twice.up and once.down is twice.down


def test_shard_commits_what_lies_right_by_chance():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.ones(4)
    placed = ft.shard(x, P("data"), mesh)
    assert placed.committed and placed.sharding == NamedSharding(mesh, P("data"))


def test_shard_moves_only_what_must_move():
    half = eqx.tree_at(lambda m: m.down, ft.shard(mlp(), RULES, MESH), jnp.ones((8, 6)))
    whole = ft.shard(half, RULES, MESH)
    assert whole.up is half.up and whole.down.sharding.spec == P("model", None)


def test_shard_takes_numpy_scalars_and_typed_keys():
    tree = {"n": np.float32(3), "key": jax.random.key(0), "x": np.ones((4, 8), np.float32), "static": "text"}
    placed = ft.shard(tree, P(), MESH)
    assert placed["n"].sharding == NamedSharding(MESH, P())
    assert jax.random.bits(placed["key"]) == jax.random.bits(jax.random.key(0))
    assert placed["static"] == "text"


def test_shard_names_a_bare_array():
    x = ft.shard(jnp.ones((4, 8)), RULES, MESH, axes="batch hidden")
    assert x.sharding.spec == P("data", "model")


@pytest.mark.parametrize(
    ("tree", "axes", "message"),
    [
        (jnp.ones((4, 8)), "batch", r'"batch" names 1 dimensions, and it has 2'),
        ({"x": jnp.ones((4, 8))}, "batch hidden", "names a bare array's dimensions, and this is a dict"),
        (jnp.ones((4, 8)), "batch hiden", "no rule names `hiden`; did you mean `hiden` in the rule `hidden`"),
        (jnp.ones((3, 8)), "batch hidden", '"batch" has size 3; rule batch→data needs a multiple of data=2'),
    ],
)
def test_shard_refuses_axes_that_do_not_fit(tree, axes: str, message: str):
    with pytest.raises(ft.ShardingError, match=message):
        ft.shard(tree, RULES, MESH, axes=axes)


def test_shard_says_constrain_in_a_trace():
    with pytest.raises(ft.ShardingError, match=r"(?s)up.*is traced.*inside a trace.*`ft.constrain`"):
        jax.jit(lambda up: ft.shard(MLP(up, up), RULES, MESH).up)(jnp.ones((6, 8)))


def test_shard_refuses_what_is_abstract():
    with pytest.raises(ft.ShardingError, match=r"(?s)is abstract.*`ft.abstract`"):
        ft.shard(jax.ShapeDtypeStruct((4, 8), "float32"), P(), MESH)


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 4}, MESH.abstract_mesh])
def test_shard_wants_devices(mesh):
    with pytest.raises(ft.ShardingError, match="which has no devices"):
        ft.shard(mlp(), RULES, mesh)


def test_shard_on_host():
    placed = ft.shard(mlp(), ft.on_host(RULES), MESH)
    assert placed.up.sharding.memory_kind == "pinned_host"
    assert ft.shard(placed, ft.on_host(RULES), MESH).up is placed.up
    assert ft.shard(placed, RULES, MESH).up.sharding.memory_kind == "device"


def test_a_failing_shard_moves_nothing():
    model = mlp(embed=6, hidden=7)
    with pytest.raises(ft.ShardingError, match=r"(?s)up .*down "):
        ft.shard(model, RULES, MESH)
    assert len(model.up.devices()) == 1


# constrain


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
        up, down = jax.jit(lambda up, down: _arrays(ft.constrain(MLP(up, down), RULES)))(mlp().up, mlp().down)
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
    with jax.set_mesh(MESH), pytest.raises(ft.ShardingError, match=r"no rules to place `batch hidden`.*axis_rules"):
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
    assert '"hidden" has size 6; rule hidden→model needs a multiple of model=4' in str(error.value)
    assert error.value.problems[0].shape == (4, 6)


def test_silent_failure_07_names_stand_at_their_own_dimensions():
    class Batched(eqx.Module):
        w: Annotated[Array, ft.Axes(None, "embed", "hidden")]

    model = ft.shard(Batched(jnp.ones((4, 6, 8))), RULES, MESH)
    assert model.w.sharding.spec == P(None, None, "model")


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_silent_failure_08_the_old_mesh_context_is_an_error():
    with MESH, ft.axis_rules(RULES), pytest.raises(ft.ShardingError, match=r"write `with jax.set_mesh\(mesh\):`"):
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


def test_silent_failure_25_one_array_at_two_places_stays_one():
    class Tied(eqx.Module):
        embed: Float[Array, "vocab embed"]
        unembed: Float[Array, "vocab embed"]

    table = jnp.ones((16, 4))
    placed = ft.shard(Tied(table, table), ft.AxisRules({"vocab": "model", "embed": None}), MESH)
    assert placed.embed is placed.unembed
    assert placed.embed.sharding.spec == P("model", None)


# Found by reading


def test_constrain_sees_the_names_that_a_layout_gives():
    rules = ft.AxisRules(
        {"hidden": "model", "embed": None}, names={eqx.nn.Linear: ft.names(weight="hidden embed", bias="hidden")}
    )
    layer = eqx.nn.Linear(6, 8, key=jax.random.key(0))
    with jax.set_mesh(MESH):
        placed = jax.jit(lambda layer: ft.constrain(layer, rules))(layer)
    assert placed.weight.sharding.is_equivalent_to(NamedSharding(MESH, P("model", None)), 2)


def test_constrain_refuses_a_layout_for_another_mesh():
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(MESH), pytest.raises(ft.ShardingError, match=r"mesh \(data=4, model=2\).*use one mesh"):
        ft.constrain(jnp.ones((4, 8)), NamedSharding(other, P("data")))
