"""Shards of matrices become whole matrices, and shards again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from functree.optimizers.exchange import Exchange

P = PartitionSpec
SIZES = {"a": 2, "b": 2, "c": 2, "one": 1}
MESH = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 4)
LAYER = (4, 8)


def exchange_of(stack: tuple[int, ...], spec: P, over: Any = None) -> Exchange:
    return Exchange.of(SIZES, (*stack, *LAYER), spec, len(stack), over)


# Round trips

# The mesh axis of the stack's first dimension; it must not be one of the matrices' too.


# What is moved


@pytest.mark.parametrize(
    ("stack", "spec", "over", "exchanged", "sliced", "gathered", "own"),
    [
        ((8,), P(None, "a", "b"), None, ("a", "b"), (), (), 2),
        ((3,), P(None, "a", "b"), None, ("a", "b"), (), (), 1),
        ((12,), P(None, "a", ("b", "c")), None, ("a", "b", "c"), (), (), 2),
        ((8,), P(None, "a", "b"), ("a",), ("a",), (), ("b",), 4),
        ((8,), P(None, "a"), ("b", "a"), ("a",), ("b",), (), 2),
        ((8,), P(), ("a", "b"), (), ("a", "b"), (), 2),
        ((8,), P(), None, (), (), (), 8),
        ((8,), P("a", "b"), None, ("b",), (), (), 2),  # half of the stack is 4 layers
        ((8,), P("a", "b"), ("a", "b"), ("b",), (), (), 2),
        ((8,), P(None, "one"), None, (), (), (), 8),
        # A single layer is gathered.
        ((), P("a", "b"), None, (), (), ("a", "b"), 1),
        ((1,), P(None, "a", "b"), None, (), (), ("a", "b"), 1),
        ((), P("a"), ("b",), (), (), ("a",), 1),
        ((2,), P("a", "b"), None, (), (), ("b",), 1),
    ],
)
def test_mesh_axes(
    stack: Any, spec: P, over: Any, exchanged: Any, sliced: Any, gathered: Any, own: int
) -> None:
    found = exchange_of(stack, spec, over).of_one()
    assert (found.exchanged, found.sliced, found.gathered) == (exchanged, sliced, gathered)
    assert found.own == own


@pytest.mark.parametrize(
    ("layers", "idle"), [(8, 0), (7, 1), (3, 5), (12, 2), (9, 3), (16, 0), (15, 0)]
)
def test_devices_that_have_only_copies_are_idle(layers: int, idle: int) -> None:
    exchange = exchange_of((layers,), P(None, "a", ("b", "c")))

    def body(x: Any) -> Any:
        found = exchange.idle()
        return jnp.full((1,), 0 if found is None else found)

    axes = P(("a", "b", "c"))
    mapped = jax.shard_map(body, mesh=MESH, in_specs=P(), out_specs=axes, check_vma=False)
    found = np.asarray(jax.jit(mapped)(0.0))
    assert found.sum() == idle
    assert not found[: 8 - idle].any()
