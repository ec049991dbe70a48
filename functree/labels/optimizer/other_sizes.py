"""The shapes of parameters ─► other shapes, by which their dimensions can be told apart."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from functree.labels.leaf import Leaf
from functree.tree.paths import Path

Shape = tuple[int, ...]

Stacks = Mapping[tuple[int, int], int]
"""The other size of each dimension of a stack, by its index and its real size."""


def other_shapes(parameters: Mapping[Path, Leaf], steps: Mapping[Path, int]) -> dict[Path, Shape]:
    """Other shapes of parameters. In each of them all sizes are different from each other and from
    the real ones, but all parameters of a stack have the same number of layers.

    Args:
        parameters: the leaves by path.
        steps: by how much the sizes of each are changed, at least; negative for smaller sizes.
    """
    stacks = _stacks(parameters, steps)
    return {path: _distinct(leaf, steps[path], stacks) for path, leaf in parameters.items()}


def _stacks(parameters: Mapping[Path, Leaf], steps: Mapping[Path, int]) -> Stacks:
    """Other sizes of stacks: one for each real size, since an optimizer may map a function over the
    layers, and then all arrays must have as many of them.

    A stack in a stack may have the same size, and its dimensions are still told apart.
    """
    taken: dict[tuple[int, int], set[int]] = {}
    smaller: set[tuple[int, int]] = set()
    for path, leaf in parameters.items():
        for stack in enumerate(leaf.shape[: leaf.stacked]):
            taken.setdefault(stack, set()).update(leaf.shape)
            if steps[path] < 0:
                smaller.add(stack)
    new: dict[tuple[int, int], int] = {}
    for stack, sizes in taken.items():
        step = -1 if stack in smaller else 1
        new[stack] = _other_size(stack[1], step, {*sizes, *new.values()})
    return new


def _distinct(leaf: Leaf, step: int, stacks: Stacks) -> Shape:
    """Other sizes of one parameter, which are different from each other and from the real sizes.

    Optimizers decide by sizes: adafactor factors large dimensions, and the two largest ones. So the
    sizes are close to the real ones, and in the same order.

    Args:
        leaf: the parameter.
        step: by how much the sizes are changed, at least; negative for smaller sizes.
        stacks: the sizes of the dimensions of its stacks.
    """
    shape, out = leaf.shape, list(leaf.shape)
    for stack in enumerate(shape[: leaf.stacked]):
        out[stack[0]] = stacks[stack]
    taken = {*shape, *out}
    for i in _in_order(shape, range(leaf.stacked, len(shape)), step):
        out[i] = _other_size(shape[i], step, taken)
        taken.add(out[i])
    return tuple(out)


def _in_order(shape: Sequence[int], dims: Iterable[int], step: int) -> list[int]:
    """Dimensions in the order of their sizes, so that a size that has to be changed by more than
    the step stays behind the one before it."""
    return sorted(dims, key=lambda i: (shape[i], i), reverse=step < 0)


def _other_size(real: int, step: int, taken: Collection[int]) -> int:
    """A size that is not taken, the next one from a real size on."""
    way = 1 if step > 0 else -1
    size = real + step
    while size > 0 and size in taken:
        size += way
    # There is no smaller size left. This changes the order, but sizes must be positive and
    # different.
    while size <= 0 or size in taken:
        size += 1
    return size
