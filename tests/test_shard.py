"""`ft.shard`, beside what JAX does with literal specs."""

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
from meshes import MESH, mesh_of
from trees import MLP, mlp

import functree as ft

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


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


@pytest.mark.parametrize("other", [ft.make_mesh(data=8), mesh_of(explicit=True)], ids=["shape", "explicit"])
def test_shard_moves_to_another_mesh_what_lies_right_there(other: Mesh):
    """On the same devices, in the same parts: and yet the array's mesh is another one."""
    x = jax.device_put(jnp.ones(8), NamedSharding(other, P(other.axis_names)))
    placed = ft.shard(x, P(("data", "model")), MESH)
    assert placed.sharding == NamedSharding(MESH, P(("data", "model")))
    assert placed.sharding.mesh.axis_types == MESH.axis_types and placed.sharding.mesh.shape == MESH.shape


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
        (jnp.ones((4, 8)), "batch", r'"batch" names 1 dimensions, but the array has 2'),
        ({"x": jnp.ones((4, 8))}, "batch hidden", "names the dimensions of a bare array, but this is a dict"),
        (jnp.ones((4, 8)), "batch hiden", "no rule names `hiden`; did you mean the rule for `hidden`"),
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


# What fails in silence elsewhere


def test_silent_failure_07_names_stand_at_their_own_dimensions():
    class Batched(eqx.Module):
        w: Annotated[Array, ft.Axes(None, "embed", "hidden")]

    model = ft.shard(Batched(jnp.ones((4, 6, 8))), RULES, MESH)
    assert model.w.sharding.spec == P(None, None, "model")


def test_silent_failure_25_one_array_at_two_places_stays_one():
    class Tied(eqx.Module):
        embed: Float[Array, "vocab embed"]
        unembed: Float[Array, "vocab embed"]

    table = jnp.ones((16, 4))
    placed = ft.shard(Tied(table, table), ft.AxisRules({"vocab": "model", "embed": None}), MESH)
    assert placed.embed is placed.unembed
    assert placed.embed.sharding.spec == P("model", None)
