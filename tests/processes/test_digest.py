"""The digest of an array: as computed in plain Python, under every sharding; each bit and each
place counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import functree as ft
from functree.processes.digest import digest as found
from functree.processes.digest import strides
from tests.lib.meshes import EXPLICIT, MESH

DTYPES = [
    "bool_", "int2", "uint2", "int4", "uint4", "int8", "uint16", "int32", "uint32", "int64", "float64", "complex64",
    "complex128", "bfloat16", "float16", "float32", "float4_e2m1fn", "float8_e4m3", "float8_e5m2", "float8_e8m0fnu",
]  # fmt: skip
WIDE = 2**32


def mixed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor % WIDE
    return x ^ x >> 16


def by_hand(words: list[list[int]]) -> int:
    """The digest of an array's elements in their order, each given by its 32-bit words."""
    total = 0
    for element, several in enumerate(words):
        for i, word in enumerate(several):
            total += mixed(word ^ mixed((element + (i + 1) * 0x9E3779B9) % WIDE))
    return total % WIDE


def words(array: np.ndarray) -> list[list[int]]:
    """The 32-bit words of each element, the lower one first."""
    wide = {1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, np.uint32)
    flat = np.frombuffer(array.tobytes(), wide).reshape(array.size, -1)
    return [[int(word) for word in element] for element in flat]


def values(dtype: str) -> np.ndarray:
    """An 8 by 4 array. A dtype of less than a byte has one element in each byte; its upper bits do
    not count."""
    numbers = np.arange(32).reshape(8, 4) % (2 if dtype in ("bool_", "int2") else 4)
    return numbers.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_each_dtype(dtype: str) -> None:
    array = values(dtype)
    with jax.enable_x64(array.dtype.itemsize >= 8 and dtype != "complex64"):
        expected = by_hand(words(array))
        assert found(array) == expected
        for mesh in (MESH, EXPLICIT):
            for spec in (ft.P(), ft.P("data", "model"), ft.P(("model", "data"))):
                assert (
                    found(jax.device_put(jnp.asarray(array), NamedSharding(mesh, spec))) == expected
                ), spec


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_of_random_keys(impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 8)
    assert found(keys) == found(jax.device_put(keys, NamedSharding(MESH, ft.P("data"))))
    assert found(keys) == found(jax.random.key_data(keys))


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT])
def test_under_a_mesh_of_other_devices(mesh: Mesh) -> None:
    array = jnp.arange(16.0).reshape(8, 2)
    expected = by_hand(words(np.asarray(array)))
    half = NamedSharding(ft.make_mesh(data=4, devices=jax.devices()[4:]), ft.P("data"))
    placed = [jax.device_put(array, where) for where in (jax.devices()[3], half)]
    assert found(array) == found(placed[0]) == expected
    with jax.set_mesh(mesh):
        assert [found(one) for one in placed] == [expected, expected]


def test_of_host_memory_and_of_nothing() -> None:
    array = jnp.arange(8.0)
    host = jax.device_put(array, NamedSharding(MESH, ft.P("data"), memory_kind="pinned_host"))
    assert found(host) == found(array) == found(np.arange(8, dtype=np.float32))
    assert found(jnp.zeros((0, 3))) == found(np.zeros((0, 3))) == 0
    assert found(np.float64(3)) == by_hand([[0, 0x40080000]])


def test_the_places_in_a_large_array_differ() -> None:
    """Positions have 32 bits, and a stride of a multiple of 2**32 would not be seen in them."""
    assert strides((3, 2**16, 2**16)) == (5, 2**16, 1)
    assert strides((2, 2**17, 2**17)) == (2**34 - 4 * (2**32 - 5), 2**17, 1)
