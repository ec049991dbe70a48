"""One of our weights ─► the tensors of the files that have it, joined and transposed, by blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from functree.errors import FunctreeError
from functree.io.casts import Loss, cast_on_host, lost_on_host
from functree.io.weights.files import Tensor
from functree.labels.leaves import read
from functree.nn.transformer import Transformer
from functree.nn.weight_map import WeightMap
from functree.tree.paths import Path

T = TypeVar("T")


class TensorForm(NamedTuple):
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
    def of(shape: Sequence[int], axes: Sequence[str | None], transposed: bool) -> "TensorForm":
        """That of published models, which join the heads with the size of one.

        Examples:
            >>> from functree.io.weights.blocks import TensorForm
            >>> TensorForm.of((32, 4, 8), ("embed", "heads", "head_dim"), True).stored
            (32, 32)
        """
        joined: list[int] = []
        for name in axes:
            # Alone it is the scale of a norm over one head, which has one dimension there too.
            if name == "head_dim" and len(axes) > 1:
                joined[-1] += 1
            else:
                joined.append(1)
        return TensorForm(tuple(shape), tuple(joined), transposed)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        shape = tuple(math.prod(part) for part in self._parts(self.shape))
        return shape[::-1] if self.transposed else shape

    def to_file(self, weight: np.ndarray) -> np.ndarray:
        """The tensor of a weight."""
        tensor = weight.reshape(self.stored)
        if self.transposed:
            tensor = weight.reshape(self.stored[::-1]).T
        # Safetensors writes the memory of an array as it is: of a transposed view it would write
        # the untransposed values under the transposed shape.
        return np.ascontiguousarray(tensor)

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
            # Of several dimensions that are joined, the first is cut in the file, and the others in
            # memory: in the file a block of those is many pieces, and not one slice.
            start, stop, _ = taken[0].indices(sizes[0])
            rest = math.prod(sizes[1:])
            outer.append(slice(start * rest, stop * rest))
            shape += [stop - start, *sizes[1:]]
            inner += [slice(None), *taken[1:]]
        block = tensor.read(outer[::-1]).T if self.transposed else tensor.read(outer)
        return block.reshape(shape)[tuple(inner)]

    def _parts(self, values: Sequence[T]) -> list[Sequence[T]]:
        """The values of our dimensions, by those of the tensor."""
        parts: list[Sequence[T]] = []
        for number in self.joined:
            parts.append(values[:number])
            values = values[number:]
        return parts


class Weight(NamedTuple):
    """One of our arrays, and the tensors that have it.

    Attributes:
        path: its path in the model.
        shape: its shape.
        names: the name of the tensor, or those of all layers.
        stacked: whether the leading dimension is that of the layers.
        form: how a tensor has it.
    """

    path: Path
    shape: tuple[int, ...]
    names: list[str]
    stacked: bool
    form: TensorForm

    def array(
        self, tensors: Mapping[str, Tensor], sharding: NamedSharding, param_dtype: DTypeLike | None
    ) -> tuple[jax.Array, Loss]:
        """The array, of which each device reads its own block; and what it lost by its dtype, of
        the blocks of this process."""
        if param_dtype is None:
            param_dtype = tensors[self.names[0]].dtype
        dtype = np.dtype(param_dtype)
        lost: dict[str, int] = {}  # by block, of which several devices may have copies

        def read(name: str, index: Sequence[slice]) -> np.ndarray:
            found = self.form.read(tensors[name], index)
            lost[f"{name} {index}"] = lost_on_host(found, dtype)
            return cast_on_host(found, dtype)

        def block(index: Any) -> np.ndarray:
            if not self.stacked:
                return read(self.names[0], index)
            # Cast layer by layer into the block: of float32 files that are read as bfloat16, the
            # layers of a whole model would not fit into memory side by side.
            sizes = zip(index, self.shape, strict=True)
            layers = np.empty([len(range(*part.indices(size))) for part, size in sizes], dtype)
            for i, name in enumerate(self.names[index[0]]):
                layers[i] = read(name, index[1:])
            return layers

        array = jax.make_array_from_callback(self.shape, sharding, block)
        before = tensors[self.names[0]].dtype
        return array, Loss(self.path, array.size, before, dtype, sum(lost.values()))


def weights_of(model: Transformer, family: WeightMap) -> Iterator[Weight]:
    """Each array of a model, in the order of its leaves.

    Raises:
        FunctreeError: the family does not name one.
    """
    for leaf in read(model).leaves:
        name = family.weights.get(str(leaf.path))
        if name is None:
            raise FunctreeError(
                f"the family has no name for `{leaf.path}`: add it to its `weights`"
            )
        stacked, transposed = "{layer}" in name, name.endswith(".T")
        name, shape, axes = name.removesuffix(".T"), leaf.value.shape, leaf.axes
        names = [name]
        if stacked:
            # A file has a tensor for each layer, and our array all of them.
            names = [name.replace("{layer}", str(i)) for i in range(shape[0])]
            shape, axes = shape[1:], axes[1:]
        form = TensorForm.of(shape, axes, transposed)
        yield Weight(leaf.path, leaf.value.shape, names, stacked, form)
