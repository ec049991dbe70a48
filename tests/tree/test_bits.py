"""The bits of arrays, and where they are computed with."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import functree as ft
from functree.tree.arrays import bits, is_key, on_device, unsigned, with_sharding

MESH = ft.make_mesh(data=8)
SHARDED = NamedSharding(MESH, PartitionSpec("data"))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("float32", "uint32"), ("bfloat16", "uint16"), ("int8", "uint8"), ("uint16", "uint16")],
)
def test_as_many_bits(dtype: str, wanted: str):
    assert unsigned(jnp.dtype(dtype)) == jnp.dtype(wanted)
    values = jnp.array([1, 0, 3], dtype)
    assert np.array_equal(bits(values), np.asarray(values).view(wanted))


def test_keys_are_told_from_other_dtypes():
    assert is_key(jax.random.key(0).dtype)
    assert not is_key(jax.random.PRNGKey(0).dtype)


def test_an_array_in_host_memory_is_taken_to_its_devices():
    array = jax.device_put(jnp.arange(8.0), SHARDED)
    assert on_device(array) is array
    host = jax.device_put(array, SHARDED.with_memory_kind("pinned_host"))
    moved = on_device(host)
    assert moved.sharding == array.sharding and np.array_equal(moved, array)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_result_is_where_its_sharding_says(kind: str):
    double: Callable[[jax.Array], jax.Array] = lambda x: 2 * x  # noqa: E731
    found = with_sharding(double, SHARDED.with_memory_kind(kind), jnp.arange(8.0))
    assert found.sharding.memory_kind == kind
    assert np.array_equal(found, 2 * np.arange(8.0))
