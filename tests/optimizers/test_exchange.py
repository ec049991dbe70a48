"""Shards of matrices become whole matrices, and shards again."""

import math
from itertools import pairwise, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from functree.optimizers.exchange import Exchange
from tests.lib.covering import selected_cells

P = PartitionSpec
SIZES = {"a": 2, "b": 2, "c": 2, "one": 1}
MESH = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 4)
LAYER = (4, 8)


def exchange_of(stack: tuple[int, ...], spec: P, over: Any = None) -> Exchange:
    return Exchange.of(SIZES, (*stack, *LAYER), spec, len(stack), over)


# Round trips

STACKS = [(), (1,), (2,), (3,), (8,), (12,), (2, 3)]
SPECS = [P(), P("a", "b"), P(("c", "a")), P(None, ("b", "a")), P("a", ("c", "one", "b"))]
OVER = [None, ("a",), ("c", "b", "a"), ("one",)]
# The mesh axis of the stack's first dimension; it must not be one of the matrices' too.
STACK_AXES = [None, "c"]


def cells() -> list[tuple[Any, ...]]:
    """The table without what no array can be: a mesh axis twice, a stack that does not divide."""
    found = []
    for stack, spec, over, axis in product(STACKS, SPECS, OVER, STACK_AXES):
        used = [name for one in spec for name in ((one,) if isinstance(one, str) else one or ())]
        if axis is None or (stack and stack[0] % 2 == 0 and axis not in used):
            found.append((stack, spec, over, axis))
    return found


def round_trip(exchange: Exchange, specs: list[P]) -> Any:
    """A function of the arrays of each stack. It adds its sum to each matrix, which has to be whole
    for that."""

    def body(arrays: list[Any]) -> list[Any]:
        x = exchange.whole(arrays)
        assert x.shape == (exchange.own, *LAYER)
        return exchange.shards(x + x.sum((1, 2), keepdims=True))

    mapped = jax.shard_map(body, mesh=MESH, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(mapped)


def arrays(*stacks: tuple[int, ...]) -> list[Any]:
    """Different numbers for each layer of each stack."""
    total = [math.prod(stack) for stack in stacks]
    matrices = np.arange(sum(total) * 32, dtype=np.float32).reshape(-1, *LAYER)
    starts = pairwise(np.cumsum([0, *total]))
    return [matrices[i:j].reshape(*one, *LAYER) for one, (i, j) in zip(stacks, starts, strict=True)]


def check(result: list[Any], given: list[Any]) -> None:
    for x, new in zip(given, result, strict=True):
        np.testing.assert_allclose(new, x + x.sum((-1, -2), keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(("stack", "spec", "over", "axis"), selected_cells(cells()))
def test_round_trip(stack: tuple[int, ...], spec: P, over: Any, axis: str | None) -> None:
    of_stack = P(axis, *[None] * (len(stack) - 1)) if stack else P()
    whole = P(*of_stack, *spec)
    exchange = exchange_of(stack, whole, over).of_one()
    given = arrays(stack)
    check(round_trip(exchange, [whole])(given), given)


def test_stacks_together() -> None:
    one, two, three = exchange_of((3,), P(None, "a", "b")), exchange_of((), P("a", "b")), (2, 2)
    exchange = one.joined_with([two, exchange_of(three, P(None, None, "a", "b"))])
    assert one.kind == two.kind
    assert (exchange.layers, exchange.own) == (8, 2)
    given = arrays((3,), (), three)
    specs = [P(None, "a", "b"), P("a", "b"), P(None, None, "a", "b")]
    check(round_trip(exchange, specs)(given), given)


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
