"""An equation ─► how each device can compute its own part of the result from what it has.

What is in parts is a sum with one term on each device. Some equations make such a sum: a product
over the batch, of which each device has its own examples. Some pass one on: they are linear, so the
sum of what each device computes of its part is what they compute of the sum.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from functree.transforms.accumulate.equations import Equation
from functree.transforms.accumulate.parts.dimensions import Dimension


class Kind(Enum):
    """What each device takes of an operand."""

    OWN = "its own block of a dimension"
    PART = "its own part"
    WHOLE = "all of it"
    ONCE = "all of it on one device, and zeros on the others"


class Use(NamedTuple):
    """What each device takes of an operand.

    Attributes:
        kind: what.
        dim: the dimension of which it takes its own block.
    """

    kind: Kind
    dim: int = 0


PART, WHOLE, ONCE = Use(Kind.PART), Use(Kind.WHOLE), Use(Kind.ONCE)


def uses_that_begin(
    equation: Equation, dims: Sequence[Dimension], number: int
) -> Sequence[Use] | None:
    """How the operands are used by an equation that sums over the batch; None if it does not.

    Args:
        equation: the equation.
        dims: the dimension of each operand that is the batch's.
        number: the number of parts.
    """
    rule = _SUMS.get(equation.primitive.name)
    uses = None if rule is None else rule(equation, dims)
    for operand, use in zip(equation.invars, uses or (), strict=False):
        if use.kind is Kind.OWN and operand.aval.shape[use.dim] % number:
            return None
    return uses


def uses_that_pass_on(
    equation: Equation, in_parts: Sequence[bool], dims: Sequence[Dimension]
) -> Sequence[Use] | None:
    """How the operands are used by an equation that is linear in those that are in parts; None if
    it is not, or if more would be moved.

    Args:
        equation: the equation.
        in_parts: for each operand, whether it is in parts.
        dims: the dimension of each operand that is the batch's.
    """
    # What is sharded over the batch would be gathered, and a larger result be summed.
    if any(dim is not None for dim in dims):
        return None
    own = [one.aval.size for one, part in zip(equation.invars, in_parts, strict=True) if part]
    if equation.outvars[0].aval.size > sum(own):
        return None
    rule = _LINEAR.get(equation.primitive.name)
    return None if rule is None else rule(equation, in_parts)


# Sums over the batch


def _product(equation: Equation, dims: Sequence[Dimension]) -> Sequence[Use] | None:
    (left, right), _ = equation.params["dimension_numbers"]
    for one, other in zip(left, right, strict=True):
        if dims[0] == one or dims[1] == other:
            return [Use(Kind.OWN, one), Use(Kind.OWN, other)]
    return None


def _sum(equation: Equation, dims: Sequence[Dimension]) -> Sequence[Use] | None:
    (dim,) = dims
    if dim is None or dim not in equation.params["axes"]:
        return None
    return [Use(Kind.OWN, dim)]


def _convolution(equation: Equation, dims: Sequence[Dimension]) -> Sequence[Use] | None:
    """The gradient by a kernel: the batch is in the place of the channels, over which a convolution
    sums."""
    params = equation.params
    numbers = params["dimension_numbers"]
    one, other = numbers.lhs_spec[1], numbers.rhs_spec[1]
    if params["feature_group_count"] > 1 or not (dims[0] == one or dims[1] == other):
        return None
    return [Use(Kind.OWN, one), Use(Kind.OWN, other)]


def _scatter(equation: Equation, dims: Sequence[Dimension]) -> Sequence[Use] | None:
    """The gradient by a table: rows are added up at the places of the batch."""
    numbers = equation.params["dimension_numbers"]
    rank = len(equation.invars[2].aval.shape)
    outer = [i for i in range(rank) if i not in numbers.update_window_dims]
    place = dims[1]
    if place is None and dims[2] in outer:
        place = outer.index(dims[2])
    # Along a batching dimension each update goes to its own part of the operand.
    if place is None or place in numbers.scatter_indices_batching_dims or place >= len(outer):
        return None
    return [ONCE, Use(Kind.OWN, place), Use(Kind.OWN, outer[place])]


_Begins = Callable[[Equation, Sequence[Dimension]], Sequence[Use] | None]
_SUMS = MappingProxyType[str, _Begins]({
    "conv_general_dilated": _convolution,
    "dot_general": _product,
    "reduce_sum": _sum,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
})  # fmt: skip

# What is linear


def _added(equation: Equation, in_parts: Sequence[bool]) -> Sequence[Use]:
    """All operands together: what is not in parts counts once."""
    return [PART if own else ONCE for own in in_parts]


def _first(equation: Equation, in_parts: Sequence[bool]) -> Sequence[Use] | None:
    """The first operand, for given others, such as places and divisors."""
    if not in_parts[0]:
        return None
    return [PART, *[WHOLE] * (len(in_parts) - 1)]


def _factor(equation: Equation, in_parts: Sequence[bool]) -> Sequence[Use] | None:
    """One operand, for a given other one."""
    own = list(in_parts).index(True)
    return [PART if i == own else WHOLE for i in range(len(in_parts))]


def _converted(equation: Equation, in_parts: Sequence[bool]) -> Sequence[Use] | None:
    """To a dtype with at least as many digits: else each part would be rounded, and not the sum."""
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if not (jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)):
        return None
    if jnp.finfo(after).nmant < jnp.finfo(before).nmant:
        return None
    return _first(equation, in_parts)


def _selected(equation: Equation, in_parts: Sequence[bool]) -> Sequence[Use] | None:
    """The cases, by the same choice on all devices."""
    if not any(in_parts[1:]):
        return None
    return [WHOLE, *_added(equation, in_parts[1:])]


_PassesOn = Callable[[Equation, Sequence[bool]], Sequence[Use] | None]
_LINEAR = MappingProxyType[str, _PassesOn]({
    **dict.fromkeys(("add", "add_any", "concatenate", "sub"), _added),
    **dict.fromkeys(("dot_general", "mul"), _factor),
    **dict.fromkeys((
        "broadcast_in_dim", "copy", "copy_p", "div", "dynamic_slice", "name", "neg", "reduce_sum",
        "reshape", "reshard", "rev", "sharding_constraint", "slice", "squeeze", "transpose",
    ), _first),
    "convert_element_type": _converted,
    "select_n": _selected,
})  # fmt: skip
