"""An array, and the tensors of the files that have it ─► its values, joined and transposed, by
blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from functree.io.casts import Loss, cast_on_host, lost_on_host
from functree.io.weights.files import Tensor
from functree.io.weights.table import WHOLE, Part, TensorName
from functree.tree.paths import Path

T = TypeVar("T")


def joined_as(shape: Sequence[int], stored: Sequence[int]) -> tuple[int, ...] | None:
    """How many dimensions of a shape each dimension of another one joins; None if it is no such
    shape. A dimension of size 1 may be joined with either neighbour, which is the same; one that
    only the other shape has joins none.

    Examples:
        >>> from functree.io.weights.blocks import joined_as
        >>> joined_as((32, 4, 8), (32, 32)), joined_as((4, 8, 32), (32, 32))
        ((1, 2), (2, 1))
        >>> joined_as((4, 1), (4,)), joined_as((4,), (1, 4))
        ((2,), (0, 1))
        >>> joined_as((6,), (2, 3))
    """
    sizes = list(shape)
    joined: list[int] = []
    for size in stored:
        taken = 0 if size == 1 and sizes[:1] != [1] else 1
        # As few as make its size: what is left of size 1 goes to the next one.
        while taken < len(sizes) and math.prod(sizes[:taken]) != size:
            taken += 1
        if taken > len(sizes) or math.prod(sizes[:taken]) != size:
            return None
        sizes = sizes[taken:]
        joined.append(taken)
    if math.prod(sizes) != 1:
        return None
    if joined:
        joined[-1] += len(sizes)
    return tuple(joined)


def _joins(sizes: Sequence[int]) -> bool:
    """Whether a dimension that joins these has more of them than one; of size 1 none counts."""
    return sum(size > 1 for size in sizes) > 1


class TensorForm(NamedTuple):
    """How a file has an array.

    Attributes:
        shape: the shape of the array, without the dimensions that have a tensor for each element.
        joined: how many of these dimensions each dimension of the tensor joins, in our order.
        order: the dimensions of the tensor in our order.
        part: which part of the tensor the array is.
        cut: the dimension of the tensor that has the parts.
    """

    shape: tuple[int, ...]
    joined: tuple[int, ...]
    order: tuple[int, ...]
    part: Part = WHOLE
    cut: int = 0

    @staticmethod
    def fitting(
        shape: Sequence[int], stored: Sequence[int], name: TensorName, kept: int = 0
    ) -> "TensorForm | None":
        """The form in which a tensor of some shape has ours; None if it has none.

        Dimensions are joined at one place only, as heads are. At two places, (3, embed, heads,
        head_dim) would be read from (3 * heads * head_dim, embed) too, where both products happen
        to be equal, and silently wrong.

        Args:
            shape: our shape, without that of the layers.
            stored: the shape of the tensor.
            name: how the tensor is transposed, and which part of it is ours.
            kept: how many dimensions in front `.T` leaves there.
        """
        order = name.order
        if order is None:
            order, kept = tuple(range(len(stored))), 0
        elif order == ():
            order = (*range(kept), *range(kept, len(stored))[::-1])
        else:
            kept = 0
        if sorted(order) != list(range(len(stored))):
            return None
        # The parts are along the first dimension that they fit: of (out, in) mostly `out`.
        for cut in range(len(stored)) if name.part != WHOLE else (0,):
            sizes = list(stored)
            if name.part != WHOLE:
                each, rest = divmod(sizes[cut], name.part.of)
                if rest:
                    continue
                sizes[cut] = each * (name.part.stop - name.part.first)
            joined = joined_as(shape, [sizes[dimension] for dimension in order])
            if joined is None or joined[:kept] != (1,) * kept:
                continue
            form = TensorForm(tuple(shape), joined, order, name.part, cut)
            if sum(map(_joins, form._groups(shape))) < 2:
                return form
        return None

    def read(self, tensor: Tensor, index: Sequence[slice]) -> np.ndarray:
        """A block of our array.

        Args:
            tensor: the tensor that holds it.
            index: a slice for each of our dimensions.
        """
        outer: list[slice] = []
        shape: list[int] = []
        inner: list[slice] = []
        for sizes, taken in zip(self._groups(self.shape), self._groups(index), strict=True):
            if not sizes:
                outer.append(slice(0, 1))  # a dimension of one that ours lacks
                continue
            # Of several dimensions that are joined, the first is cut in the file, and the others in
            # memory: in the file a block of those is many pieces, and not one slice.
            start, stop, _ = taken[0].indices(sizes[0])
            rest = math.prod(sizes[1:])
            outer.append(slice(start * rest, stop * rest))
            shape += [stop - start, *sizes[1:]]
            inner += [slice(None), *taken[1:]]
        stored = [slice(None)] * len(self.order)
        # A tensor without dimensions has none of the groups.
        for dimension, part in zip(self.order, outer, strict=False):
            stored[dimension] = part
        if self.part != WHOLE:
            of_part = stored[self.cut]
            first = self.part.first * (tensor.shape[self.cut] // self.part.of)
            stored[self.cut] = slice(first + of_part.start, first + of_part.stop)
        return tensor.read(stored).transpose(self.order).reshape(shape)[tuple(inner)]

    def _groups(self, values: Sequence[T]) -> Iterator[Sequence[T]]:
        """The values of our dimensions, by the dimensions of the tensor."""
        for number in self.joined:
            yield values[:number]
            values = values[number:]
        # Those of size 1 that a tensor without dimensions does not have.
        if values:
            yield values


class Weight(NamedTuple):
    """One of our arrays, and the tensors that have it.

    Attributes:
        path: its path.
        shape: its shape.
        dtype: its dtype.
        sharding: where it is created; None for an array of numpy.
        names: the name of the tensor, or the names for all layers, or all experts of all layers.
        stacked: how many leading dimensions the tensors are over: none, the layers, or experts too.
        form: how a tensor has it.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None
    names: list[str]
    stacked: int
    form: TensorForm

    def array(self, tensors: Mapping[str, Tensor]) -> tuple[jax.Array | np.ndarray, Loss]:
        """The array, of which each device reads its own block; and what it lost by its dtype, of
        the blocks of this process."""
        lost: dict[str, int] = {}  # by block, of which several devices may have copies

        def read(name: str, index: Sequence[slice]) -> np.ndarray:
            found = self.form.read(tensors[name], index)
            lost[f"{name} {index}"] = lost_on_host(found, self.dtype)
            return cast_on_host(found, self.dtype)

        def block(index: Any) -> np.ndarray:
            if not self.stacked:
                return read(self.names[0], index)
            # Cast layer by layer into the block: of float32 files that are read as bfloat16, the
            # layers of a whole model would not fit into memory side by side.
            sizes = zip(index, self.shape, strict=True)
            taken = [range(*part.indices(size)) for part, size in sizes]
            layers = np.empty(list(map(len, taken)), self.dtype)
            outer = taken[: self.stacked]
            for place in np.ndindex(*map(len, outer)):
                at = [indices[i] for indices, i in zip(outer, place, strict=True)]
                number = np.ravel_multi_index(at, self.shape[: self.stacked])
                layers[place] = read(self.names[int(number)], index[self.stacked :])
            return layers

        array: jax.Array | np.ndarray
        if self.sharding is None:
            array = np.asarray(block((slice(None),) * len(self.shape)))
        else:
            array = jax.make_array_from_callback(self.shape, self.sharding, block)
        before = tensors[self.names[0]].dtype
        return array, Loss(self.path, array.size, before, self.dtype, sum(lost.values()))
