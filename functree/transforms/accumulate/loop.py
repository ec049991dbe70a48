"""A traced piece and its operands ─► the mean of the results over the pieces."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

from functree.transforms.accumulate.carried import ArrayType
from functree.transforms.accumulate.parts.held import Devices, Held
from functree.transforms.accumulate.parts.plan import Plan, make_plan
from functree.transforms.accumulate.parts.run import run_plan
from functree.transforms.accumulate.piece import Piece, varying
from functree.transforms.accumulate.placement import Placement
from functree.transforms.accumulate.roles import Call, Role


@dataclass(frozen=True)
class InParts:
    """How sums over the batch stay in parts on its devices, until the loop is over.

    Attributes:
        devices: the devices that have the parts.
        plan: which values of a piece are in parts.
        specs: the spec of each gradient, by its index in the result.
    """

    devices: Devices
    plan: Plan
    specs: dict[int, PartitionSpec]

    def spec(self, index: int) -> PartitionSpec:
        """The spec of an array in the result."""
        return self.specs.get(index, PartitionSpec())

    @classmethod
    def of(cls, piece: Piece, call: Call, placement: Placement, steps: int) -> "InParts | None":
        """How the sums of a piece stay in parts; None if none do."""
        axes = placement.batch or ()
        # Inside of a shard_map it is the user who sums over its mesh axes.
        if not axes or jax.sharding.get_abstract_mesh().manual_axes:
            return None
        devices = Devices(placement.mesh, axes)
        if devices.number == 1:
            return None
        dims: list[int | None] = [None]
        for leaf, role in zip(call.leaves.leaves, call.roles, strict=True):
            divides = role is Role.BATCH and leaf.shape[0] % (steps * devices.number) == 0
            dims.append(0 if divides else None)
        plan = make_plan(piece.function, dims, _summed(piece), axes, devices.number)
        if plan is None:
            return None
        known = placement.specs or {}
        return cls(devices, plan, {k: known[i] for k, i in piece.parameters.items() if i in known})


def _summed(piece: Piece) -> list[bool]:
    """For each array in the result, whether it is summed over the pieces."""
    following = piece.carried.values()
    return [
        k not in following and jnp.issubdtype(kind.dtype, jnp.inexact)
        for k, kind in enumerate(piece.types)
    ]


def mean_over_pieces(
    piece: Piece, operands: Sequence[Any], steps: int, in_parts: InParts | None
) -> list[jax.Array]:
    """The arrays of the result: the mean of those that are summed, and the last of the others.

    Args:
        piece: the piece.
        operands: its operands.
        steps: the number of pieces.
        in_parts: how sums stay in parts; None if they do not.
    """
    summed, following = _summed(piece), {k: i for i, k in piece.carried.items()}
    parts = [False] * len(summed) if in_parts is None else in_parts.plan.results
    run = jaxpr_as_fun(piece.function)

    def add(total: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], None]:
        given = [i, *operands]
        for k, operand in following.items():
            given[1 + operand] = total[k]
        new = list(run(*given)) if in_parts is None else _run_in_parts(in_parts, given)
        for k, one in enumerate(new):
            # The last piece's replaces the others.
            new[k] = one.astype(total[k].dtype)
            if summed[k]:
                new[k] += total[k]
        return new, None

    # The loop carries the sum: stacked outputs would need the memory of the gradients of all
    # pieces.
    start: list[jax.Array] = []
    for k, kind in enumerate(piece.types):
        if k in following:
            start.append(operands[following[k]])
        elif in_parts is not None and parts[k]:
            start.append(in_parts.devices.zeros(kind, _wide(kind.dtype), in_parts.spec(k)))
        else:
            start.append(_zeros(kind))
    total, _ = jax.lax.scan(add, start, jnp.arange(steps, dtype=jnp.int32))
    for k, kind in enumerate(piece.types):
        if in_parts is not None and parts[k]:
            # The sum of a gradient is a part of the backward pass, which the ledger tells by this
            # name.
            scope = jax.named_scope("transpose(jvp())") if k in piece.parameters else nullcontext()
            with scope:
                total[k] = in_parts.devices.sharded(Held(total[k], True), in_parts.spec(k))
        if summed[k]:
            total[k] = (total[k] / steps).astype(kind.dtype)
    return total


def _run_in_parts(in_parts: InParts, given: Sequence[Any]) -> list[jax.Array]:
    """The result of a piece; what is in parts as these."""
    found = run_plan(in_parts.plan, in_parts.devices, list(map(Held, given)))
    return [held.array for held in found]


def _zeros(kind: ArrayType) -> jax.Array:
    """The sum of no pieces. The carry of a scan must keep its type, with its sharding, and what
    varies in shard_map."""
    dtype = _wide(kind.dtype)
    if AxisType.Explicit in kind.sharding.mesh.axis_types:
        zeros = jnp.zeros(kind.shape, dtype, out_sharding=kind.sharding)
    else:
        zeros = jnp.zeros(kind.shape, dtype)
    along = tuple(sorted(varying(kind)))
    return jax.lax.pcast(zeros, along, to="varying") if along else zeros


def _wide(dtype: np.dtype) -> np.dtype:
    """The dtype of a sum, float32 or wider: in a narrower one, small terms would be lost in
    rounding."""
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)
    return dtype
