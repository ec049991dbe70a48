"""Where the results of functions of arrays lie."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from functree.tree.arrays import with_sharding
from tests.lib.meshes import MESH


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_result_is_where_its_sharding_says(kind: str):
    sharding = NamedSharding(MESH, PartitionSpec("data"), memory_kind=kind)
    found = with_sharding(jnp.negative, sharding, jnp.arange(8.0))
    assert found.sharding.memory_kind == kind and np.array_equal(found, -np.arange(8.0))
