"""A call of a gradient function ─► `Piece`: the function, traced for one piece of the batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functree.devices.varying import varying_axes
from functree.transforms.accumulate.carried import ArrayType, Carried
from functree.transforms.accumulate.equations import Function
from functree.transforms.accumulate.places import parameters_of
from functree.transforms.accumulate.roles import Call, Role
from functree.transforms.grad.known_gradient import KnownGradient
from functree.tree.arrays import AnyArray
from functree.tree.skeleton.skeleton import Skeleton


class Piece(NamedTuple):
    """A gradient function, traced for one piece.

    Attributes:
        function: the traced function of the number of a piece and of the operands.
        skeleton: its result, without the arrays.
        carried: for the index of an operand that is taken from the piece before, that of the array
            in the result that it is there.
        parameters: for the index of each gradient in the result, that of its parameter among the
            operands.
    """

    function: Function
    skeleton: Skeleton
    carried: dict[int, int]
    parameters: dict[int, int]

    @property
    def types(self) -> Sequence[ArrayType]:
        """The types of the arrays in the result."""
        return self.function.out_avals


def operands_of(call: Call, steps: int) -> list[Any]:
    """The arrays of a call, as a piece takes them: those of the whole batch, and all keys."""
    operands: list[Any] = []
    for leaf, role in zip(call.leaves.leaves, call.roles, strict=True):
        match role:
            case Role.KEY:
                operands.append(jax.random.split(leaf.value, steps))
            case Role.CARRIED:
                operands.append(_strong(leaf.value))
            case _:
                operands.append(leaf.value)
    return operands


def _strong(value: AnyArray) -> jax.Array:
    """An array for a loop to carry. One that was made of a Python number has a weak type, which a
    sum with another array would change."""
    array = jnp.asarray(value)
    return jax.lax.convert_element_type(array, array.dtype)


def traced_piece(
    fn: Callable[..., Any],
    call: Call,
    operands: Sequence[Any],
    steps: int,
    gradient: KnownGradient | None,
) -> tuple[Piece, Sequence[Any]]:
    """A gradient function, traced for one piece, and the operands as it takes them.

    Args:
        fn: the function.
        call: the call.
        operands: the arrays of the call, as a piece takes them.
        steps: the number of pieces.
        gradient: what the function returns, if that is known.

    Raises:
        FunctreeError: the function does not return what is carried, or not with its types.
    """
    name = call.arguments.signature.name
    carried = Carried.of(name, call.values_at(call.arguments.carried), gradient)
    while True:
        piece = _traced(fn, call, operands, steps, carried, gradient)
        carried.check_types(
            [call.leaves.leaves[i] for i in piece.carried],
            [jax.typeof(operands[i]) for i in piece.carried],
            [piece.types[k] for k in piece.carried.values()],
        )
        varying = _varying_as(operands, piece)
        if varying is None:
            return piece, operands
        operands = varying


def _traced(
    fn: Callable[..., Any],
    call: Call,
    operands: Sequence[Any],
    steps: int,
    carried: Carried,
    gradient: KnownGradient | None,
) -> Piece:
    found: list[tuple[Skeleton, range, dict[int, int]]] = []

    def piece(i: jax.Array, *operands: jax.Array) -> list[AnyArray]:
        values: list[Any] = []
        for value, role in zip(operands, call.roles, strict=True):
            match role:
                case Role.BATCH:
                    values.append(_examples(value, i, steps))
                case Role.KEY:
                    values.append(jax.lax.dynamic_index_in_dim(value, i, keepdims=False))
                case _:
                    values.append(value)
        result = call.run(fn, values)
        skeleton, arrays = Skeleton.apart(result)
        # Of the tree that was made in the trace, and not of one that is built with abstract arrays,
        # which the class of a node may refuse.
        parameters = parameters_of(result, call, gradient)
        found.append((skeleton, carried.indices(result), parameters))
        return arrays

    function = jax.make_jaxpr(piece)(jnp.zeros((), jnp.int32), *operands)
    skeleton, following, parameters = found[-1]
    return Piece(function, skeleton, dict(zip(call.carried, following, strict=True)), parameters)


def _examples(x: jax.Array, i: jax.Array, steps: int) -> jax.Array:
    """Every `steps`-th example from the i-th on.

    A contiguous piece of a sharded batch would be on a few devices only. This one has examples of
    every device, so it is sharded like the batch and no data moves.
    """
    apart = jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:]))
    return jax.lax.dynamic_index_in_dim(apart, i, axis=1, keepdims=False)


def _varying_as(operands: Sequence[Any], piece: Piece) -> Sequence[Any] | None:
    """The operands, of which those that are carried vary along the mesh axes of a shard_map along
    which the next values do; None if they do so already."""
    new = list(operands)
    changed = False
    for operand, result in piece.carried.items():
        more = varying(piece.types[result]) - varying_axes(operands[operand])
        if more:
            new[operand] = jax.lax.pcast(operands[operand], tuple(sorted(more)), to="varying")
            changed = True
    return new if changed else None


def varying(kind: ArrayType) -> frozenset[str]:
    """The mesh axes along which an array of a type varies."""
    manual = kind.manual_axis_type  # None outside of shard_map
    return frozenset() if manual is None else frozenset(manual.varying)
