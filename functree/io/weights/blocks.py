"""A `TensorForm` describes how a tensor in a file stores an array, and reads the array's blocks."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from functree.io.weights.files import Tensor
from functree.io.weights.table import WHOLE, Part, TensorName


def joined_as(shape: Sequence[int], stored: Sequence[int]) -> tuple[int, ...] | None:
    """For each dimension of `stored`, count the dimensions of `shape` that it joins.

    Dimensions of size 1 are ignored in both shapes. The result is None if the shapes do not fit.

    Examples:
        >>> from functree.io.weights.blocks import joined_as
        >>> joined_as((32, 4, 8), (32, 32)), joined_as((4, 8, 32), (32, 32))
        ((1, 2), (2, 1))
        >>> joined_as((4, 1), (4,)), joined_as((4,), (1, 4))
        ((1,), (0, 1))
        >>> joined_as((6,), (2, 3))
    """
    sizes = [size for size in shape if size != 1]
    joined: list[int] = []
    for size in stored:
        taken = 0
        while math.prod(sizes[:taken]) != size:
            taken += 1
            if taken > len(sizes):
                return None
        sizes = sizes[taken:]
        joined.append(taken)
    return None if sizes else tuple(joined)


class TensorForm(NamedTuple):
    """The form in which a tensor in a file stores an array.

    Attributes:
        shape: the shape of the array, without leading dimensions in which each index has its own
            tensor.
        joined: for each of the tensor's dimensions, how many dimensions of `shape` it joins, not
            counting dimensions of size 1. The tensor's dimensions are in the array's order.
        order: the indices of the tensor's dimensions, in the array's order.
        part: the part of the tensor that stores the array.
        cut: the index of the tensor's dimension that is divided into parts.
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
        """Find the form in which a tensor stores an array, or return None if no form fits.

        Only one dimension of the tensor may join several dimensions of the array, as for heads. If
        two could, (3 * heads * head_dim, embed) might be read as (3, embed, heads, head_dim) when
        the products happen to be equal. The array would be silently wrong.

        Args:
            shape: the shape of the array, without leading dimensions in which each index has its
                own tensor.
            stored: the shape of the tensor.
            name: the tensor's name, which selects the order of its dimensions and a part of it.
            kept: how many leading dimensions `.T` keeps first.
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
        # The first dimension that fits is divided into parts, usually `out` of (out, in).
        for cut in range(len(stored)) if name.part != WHOLE else (0,):
            sizes = list(stored)
            if name.part != WHOLE:
                each, rest = divmod(sizes[cut], name.part.of)
                if rest:
                    continue
                sizes[cut] = each * (name.part.stop - name.part.first)
            joined = joined_as(shape, [sizes[dimension] for dimension in order])
            kept_sizes = [sizes[dimension] for dimension in order[:kept]]
            if joined is None or kept_sizes != list(shape[:kept]):
                continue
            if sum(number > 1 for number in joined) < 2:
                return TensorForm(tuple(shape), joined, order, name.part, cut)
        return None

    def read(self, tensor: Tensor, index: Sequence[slice]) -> np.ndarray:
        """Read a block of the array.

        Args:
            tensor: the tensor that stores the array.
            index: a slice for each dimension of `shape`.
        """
        taken = [range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True)]
        ours = [i for i, size in enumerate(self.shape) if size != 1]
        outer: list[slice] = []
        shape: list[int] = []
        inner: list[slice] = []
        for number in self.joined:
            joined, ours = ours[:number], ours[number:]
            if not joined:
                outer.append(slice(0, 1))  # a dimension of size 1
                continue
            # Only the first of the joined dimensions is sliced in the file. A slice of the other
            # dimensions would be scattered in the file, so they are sliced in memory.
            first, others = taken[joined[0]], joined[1:]
            sizes = [self.shape[i] for i in others]
            rest = math.prod(sizes)
            outer.append(slice(first.start * rest, first.stop * rest))
            shape += [len(first), *sizes]
            inner += [slice(None), *(index[i] for i in others)]
        stored = [slice(None)] * len(self.order)
        for dimension, part in zip(self.order, outer, strict=True):
            stored[dimension] = part
        if self.part != WHOLE:
            of_part = stored[self.cut]
            first = self.part.first * (tensor.shape[self.cut] // self.part.of)
            stored[self.cut] = slice(first + of_part.start, first + of_part.stop)
        block = tensor.read(stored).transpose(self.order).reshape(shape)[tuple(inner)]
        return block.reshape([len(indices) for indices in taken])
