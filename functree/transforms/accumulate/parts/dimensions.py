"""An equation, and the dimension of each operand that is the batch's ─► that of each result.

Nothing depends on it but which sums are kept in parts: a wrong dimension would cost an exchange,
and no value would be another.
"""

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType

from functree.transforms.accumulate.equations import Equation

Dimension = int | None
"""The dimension of an array that is the batch's; None if there is none."""


def batch_dimensions(equation: Equation, given: Sequence[Dimension]) -> list[Dimension]:
    """The dimension of each result that is the batch's, for an equation without inner functions.

    Args:
        equation: the equation.
        given: that of each operand.
    """
    if all(dim is None for dim in given):
        return [None] * len(equation.outvars)
    name = equation.primitive.name
    known = _RULES.get(name)
    if known is None and name.startswith(("reduce_", "arg")) and "axes" in equation.params:
        known = _reduced
    if known is None:
        return _alike(equation, given)
    return [known(equation, given)]


def _alike(equation: Equation, given: Sequence[Dimension]) -> list[Dimension]:
    """Those of results that have the rank and there the size of an operand."""
    found: list[Dimension] = []
    for result in equation.outvars:
        shape = getattr(result.aval, "shape", ())
        own: Dimension = None
        for operand, dim in zip(equation.invars, given, strict=True):
            if dim is None or own is not None:
                continue
            before = operand.aval.shape
            if len(before) == len(shape) and before[dim] == shape[dim]:
                own = dim
        found.append(own)
    return found


def _transposed(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    (dim,) = given
    return None if dim is None else equation.params["permutation"].index(dim)


def _reshaped(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    """The dimension before which there are as many elements: the batch is the outermost factor of
    what it is joined with, and of what it is divided into."""
    dim = given[0]
    if dim is None:
        return None
    outside = math.prod(equation.invars[0].aval.shape[:dim])
    shape = equation.outvars[0].aval.shape
    for i, size in enumerate(shape):
        if size > 1 and math.prod(shape[:i]) == outside:
            return i
    return None


def _broadcast(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    dim = given[0]
    return None if dim is None else equation.params["broadcast_dimensions"][dim]


def _squeezed(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    return _left(given[0], equation.params["dimensions"])


def _reduced(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    return _left(given[0], equation.params["axes"])


def _left(dim: Dimension, removed: Sequence[int]) -> Dimension:
    """A dimension, after others were removed; None if it was removed itself."""
    if dim is None or dim in removed:
        return None
    return dim - sum(other < dim for other in removed)


def _product(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    (of_left, of_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
    left, right = (len(one.aval.shape) for one in equation.invars[:2])
    free = [i for i in range(left) if i not in (*of_left, *batch_left)]
    others = [i for i in range(right) if i not in (*of_right, *batch_right)]
    order = [(0, i) for i in batch_left] + [(0, i) for i in free] + [(1, i) for i in others]
    for operand, dim in enumerate(given[:2]):
        if (operand, dim) in order:
            return order.index((operand, dim))
    if given[1] in batch_right:
        return batch_right.index(given[1])
    return None


def _convolved(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    numbers = equation.params["dimension_numbers"]
    if given[0] is not None and given[0] == numbers.lhs_spec[0]:
        return numbers.out_spec[0]
    # The gradient by the kernel of a convolution is one too, in which the channels are the batch.
    if given[1] is not None and given[1] == numbers.rhs_spec[0]:
        return numbers.out_spec[1]
    return None


def _gathered(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    numbers = equation.params["dimension_numbers"]
    of_operand, of_places = given[0], given[1]
    rank = len(equation.outvars[0].aval.shape)
    outer = [i for i in range(rank) if i not in numbers.offset_dims]
    if of_places is not None and of_places < len(outer):
        return outer[of_places]
    if of_operand is None:
        return None
    batching = numbers.operand_batching_dims
    if of_operand in batching:
        return outer[numbers.start_indices_batching_dims[batching.index(of_operand)]]
    gone = (*numbers.collapsed_slice_dims, *batching)
    if of_operand in gone:
        return None
    size = equation.invars[0].aval.shape[of_operand]
    if equation.params["slice_sizes"][of_operand] != size:
        return None
    return numbers.offset_dims[of_operand - sum(other < of_operand for other in gone)]


def _first(equation: Equation, given: Sequence[Dimension]) -> Dimension:
    """What is written into keeps its dimensions."""
    return given[0]


_Rule = Callable[[Equation, Sequence[Dimension]], Dimension]
_RULES = MappingProxyType[str, _Rule]({
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolved,
    "dot_general": _product,
    "dynamic_update_slice": _first,
    "gather": _gathered,
    "reshape": _reshaped,
    "scatter": _first,
    "scatter-add": _first,
    "scatter_add": _first,
    "squeeze": _squeezed,
    "transpose": _transposed,
})  # fmt: skip
