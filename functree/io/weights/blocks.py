"""One of our weights, or a block of it ─► the tensor of a file, or its block, joined and transposed."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from functree.io.weights.files import Tensor


class Form(NamedTuple):
    """How a file has one of our weights.

    Attributes:
        shape: our shape, without that of the layers.
        joined: how many of our dimensions each dimension of the tensor joins.
        transposed: whether the tensor has (out, in).
    """

    shape: tuple[int, ...]
    joined: tuple[int, ...]
    transposed: bool

    @staticmethod
    def of(shape: Sequence[int], axes: Sequence[str | None], transposed: bool) -> "Form":
        """That of published models, which join the heads with the size of one.

        Examples:
            >>> from functree.io.weights.blocks import Form
            >>> Form.of((32, 4, 8), ("embed", "heads", "head_dim"), True).stored
            (32, 32)
        """
        joined: list[int] = []
        for name in axes:
            if name == "head_dim" and len(axes) > 1:
                joined[-1] += 1
            else:
                joined.append(1)
        return Form(tuple(shape), tuple(joined), transposed)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        shape = tuple(math.prod(part) for part in self._parts(self.shape))
        return shape[::-1] if self.transposed else shape

    def to_file(self, weight: np.ndarray) -> np.ndarray:
        """The tensor of a weight."""
        shape = self.stored
        return np.ascontiguousarray(weight.reshape(shape[::-1]).T if self.transposed else weight.reshape(shape))

    def read(self, tensor: Tensor, index: Sequence[slice]) -> np.ndarray:
        """A block of our weight.

        Args:
            tensor: the tensor that holds it.
            index: a slice for each of our dimensions.
        """
        outer: list[slice] = []
        shape: list[int] = []
        inner: list[slice] = []
        for sizes, taken in zip(self._parts(self.shape), self._parts(index), strict=True):
            # Of several dimensions that are joined, the first is cut in the file, and the others in memory.
            start, stop, _ = taken[0].indices(sizes[0])
            rest = math.prod(sizes[1:])
            outer.append(slice(start * rest, stop * rest))
            shape += [stop - start, *sizes[1:]]
            inner += [slice(None), *taken[1:]]
        block = tensor.read(outer[::-1]).T if self.transposed else tensor.read(outer)
        return block.reshape(shape)[tuple(inner)]

    def _parts(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """The values of our dimensions, by those of the tensor."""
        ends = np.cumsum(self.joined)
        return [values[end - number : end] for end, number in zip(ends, self.joined, strict=True)]
