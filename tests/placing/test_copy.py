"""`ft.copy`: arrays of the same values and shardings, in memory of their own."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH

X = np.arange(32, dtype=np.float32).reshape(8, 4)
ARRAYS: dict[str, Any] = {
    "sharded": ft.shard(X, P("data"), MESH),
    "on Explicit axes": ft.shard(X, P("data", "model"), EXPLICIT),
    "replicated": ft.shard(X, P(), MESH),
    "uncommitted": jnp.asarray(X),
    "on one device": jax.device_put(X, jax.devices()[3]),
    "on the host": jax.device_put(X, NamedSharding(MESH, P("data"), memory_kind="pinned_host")),
    "NumPy's": X,
    "a number of NumPy": np.float32(3),
    "a key": jax.random.key(3),
    "sharded keys": ft.shard(jax.random.split(jax.random.key(3), 8), P("data"), MESH),
    "empty": jnp.ones((0, 4)),
}


def pointers(x: Any) -> set[Any]:
    if isinstance(x, np.ndarray | np.generic):
        return {id(x)}
    raw = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return {
        shard.data.unsafe_buffer_pointer() for shard in raw.addressable_shards if shard.data.size
    }


def bits(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


@pytest.mark.parametrize("kind", ARRAYS)
def test_the_same_values_where_they_lie(kind: str):
    x = ARRAYS[kind]
    y = ft.copy(x)
    assert type(y) is type(x) or isinstance(x, np.generic)
    assert np.array_equal(bits(x), bits(y)) and pointers(x).isdisjoint(pointers(y))
    if isinstance(x, jax.Array):
        assert y.sharding == x.sharding
        assert y.committed == x.committed
        assert jax.typeof(y) == jax.typeof(x)


def test_everything_else_stays():
    shared = jnp.ones(3)
    tree = {
        "a": shared,
        "b": [shared, "text", None, 3],
        "abstract": jax.ShapeDtypeStruct((2,), np.float32),
    }
    new = ft.copy(tree)
    assert new["a"] is new["b"][0] is not shared and new["b"][1:] == ["text", None, 3]
    assert new["abstract"] is tree["abstract"]
    assert jax.tree.structure(new) == jax.tree.structure(tree)
    layer = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    assert eqx.tree_equal(ft.copy(layer), layer)
    assert eqx.tree_equal(ft.copy(ft.pack(layer)).tree, layer)


def test_inside_a_trace():
    assert np.array_equal(jax.jit(ft.copy)(X), X)
    assert jax.grad(lambda x: ft.copy(x).sum())(jnp.ones(3)).tolist() == [1.0] * 3


def test_ties_stay_unless_they_are_untied():
    for x in (ARRAYS["sharded"], ARRAYS["NumPy's"], ARRAYS["a key"]):
        kept = ft.copy({"a": x, "b": [x]})
        assert kept["a"] is kept["b"][0] is not x
        untied = ft.copy({"a": x, "b": [x]}, untie=True)
        assert pointers(untied["a"]).isdisjoint(pointers(untied["b"][0]) | pointers(x))
        assert all(np.array_equal(bits(y), bits(x)) for y in (untied["a"], untied["b"][0]))


def test_what_is_deleted_is_named():
    x = jnp.ones(3)
    x.delete()
    with raises("copy: 1 argument is deleted", "b.0   f32[3]\n      is deleted"):
        ft.copy({"a": jnp.ones(2), "b": [x]})
