"""How an array is placed: on which mesh, whether as wanted, and in which words."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from functree.devices.placement import (
    is_placed,
    is_sharded_as,
    sharding_text,
    with_devices_of,
)
from tests.lib.meshes import EXPLICIT, MESH, lay

P = PartitionSpec
HERE = lay(jnp.ones((4, 8)), "data")
DEVICES = jax.devices()


@pytest.mark.parametrize(("sharding", "same"), [
    (NamedSharding(MESH, P("data")), True),
    (NamedSharding(MESH, P("data", None)), True),
    (NamedSharding(MESH, P("data"), memory_kind="device"), True),
    (NamedSharding(MESH, P("model")), False),
    (SingleDeviceSharding(DEVICES[0]), False),
], ids=str)  # fmt: skip
def test_sharded_as_wanted(sharding: Any, same: bool):
    assert is_sharded_as(HERE, sharding) is same


@pytest.mark.parametrize(("sharding", "text"), [
    (None, "unspecified"),
    (NamedSharding(MESH, P(None, "model")), "P(None, 'model') on (data=2, model=4)"),
    (NamedSharding(MESH, P("data"), memory_kind="pinned_host"), "P('data') on (data=2, model=4) in pinned_host"),
    (NamedSharding(MESH.abstract_mesh, P("data")), "P('data') on (data=2, model=4)"),
    (SingleDeviceSharding(DEVICES[1]), f"on {DEVICES[1]}"),
    (SingleDeviceSharding(DEVICES[1], memory_kind="pinned_host"), f"on {DEVICES[1]} in pinned_host"),
    (SimpleNamespace(device_set=set(DEVICES), memory_kind=None), "on 8 devices"),
], ids=range(7))  # fmt: skip
def test_in_words(sharding: Any, text: str):
    assert sharding_text(sharding) == text


# Another order of the same devices, and other names for them: JAX finds these shardings equivalent
# to those on the mesh.
NAMED = jax.sharding.Mesh(MESH.devices, ("batch", "model"), axis_types=MESH.axis_types)


@pytest.mark.parametrize(("array", "placed"), [
    (HERE, True),
    (lay(jnp.ones((4, 8)), ("data",), None), True),
    (jax.device_put(HERE, NamedSharding(NAMED, P("batch"))), False),
    (jax.device_put(HERE, NamedSharding(EXPLICIT, P("data"))), False),
    (jax.device_put(HERE, NamedSharding(MESH, P("data"), memory_kind="pinned_host")), False),
    (jax.device_put(jnp.ones((4, 8)), DEVICES[0]), False),
    (jnp.ones((4, 8)), False),
    (np.ones((4, 8)), False),
    (jax.ShapeDtypeStruct((4, 8), np.float32, sharding=HERE.sharding), False),
], ids=["as wanted", "the same spec", "other names", "other types", "host", "device",
        "uncommitted", "numpy", "abstract"])  # fmt: skip
def test_placed_already(array: Any, placed: bool):
    assert is_placed(array, NamedSharding(MESH, P("data"))) is placed


def test_an_abstract_mesh_with_the_devices_of_an_array():
    abstract = MESH.abstract_mesh
    larger = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=MESH.axis_types)
    other = jax.device_put(jnp.ones(2), NamedSharding(NAMED, P()))
    assert with_devices_of(abstract, [np.ones(2), jnp.ones(2), other, HERE]) is MESH
    assert with_devices_of(larger, [HERE, other]) is larger
    assert with_devices_of(EXPLICIT.abstract_mesh, [HERE]) == EXPLICIT.abstract_mesh
    assert with_devices_of(abstract, []) is abstract
