"""One of our weights ─► the tensors of the files that have it, joined and transposed, by blocks."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from functree.errors import FunctreeError
from functree.io.casts import Loss, cast_on_host, lost_on_host
from functree.io.weights.files import Tensor
from functree.labels.leaf import Leaf
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
        kept: how many dimensions before these are the same in both: that of the experts, where a
            tensor has all of them.
        part: which of how many parts of a tensor it is, along the first dimension that is not kept.
    """

    shape: tuple[int, ...]
    joined: tuple[int, ...]
    transposed: bool
    kept: int = 0
    part: tuple[int, int] = (0, 1)

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
        shape = self._in_file([math.prod(part) for part in self._parts(self.shape)])
        shape[self.kept] *= self.part[1]
        return tuple(shape)

    def to_file(self, weight: np.ndarray) -> np.ndarray:
        """The tensor of a weight."""
        tensor = weight.reshape([math.prod(part) for part in self._parts(self.shape)])
        tensor = tensor.transpose(self._in_file(list(range(tensor.ndim))))
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
        outer = self._in_file(outer)
        cut = outer[self.kept]
        first = self.part[0] * (tensor.shape[self.kept] // self.part[1])
        outer[self.kept] = slice(first + cut.start, first + cut.stop)
        block = tensor.read(outer)
        # The order in the file, reversed twice, is our own.
        block = block.transpose(self._in_file(list(range(block.ndim))))
        return block.reshape(shape)[tuple(inner)]

    def _in_file(self, values: list[T]) -> list[T]:
        """Values of dimensions in the order of the tensor's; of those, again in ours."""
        kept, others = values[: self.kept], values[self.kept :]
        return [*kept, *(others[::-1] if self.transposed else others)]

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
        names: the name of the tensor, or those of all layers, or of all experts of all layers.
        stacked: how many leading dimensions the tensors are over: none, the layers, or experts too.
        form: how a tensor has it.
    """

    path: Path
    shape: tuple[int, ...]
    names: list[str]
    stacked: int
    form: TensorForm

    def name_at(self, index: Sequence[int]) -> str:
        """The name of the tensor of a layer, or of an expert of a layer."""
        return self.names[int(np.ravel_multi_index(tuple(index), self.shape[: self.stacked]))]

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
            taken = [range(*part.indices(size)) for part, size in sizes]
            layers = np.empty(list(map(len, taken)), dtype)
            outer = taken[: self.stacked]
            for place in np.ndindex(*map(len, outer)):
                at = [indices[i] for indices, i in zip(outer, place, strict=True)]
                layers[place] = read(self.name_at(at), index[self.stacked :])
            return layers

        array = jax.make_array_from_callback(self.shape, sharding, block)
        before = tensors[self.names[0]].dtype
        return array, Loss(self.path, array.size, before, dtype, sum(lost.values()))


_PART = re.compile(r"\[(\d+)/(\d+)\]$")


def weights_of(
    model: Transformer, family: WeightMap, tensors: Collection[str] = ()
) -> Iterator[Weight]:
    """Each array of a model, in the order of its leaves.

    Args:
        model: the model.
        family: its family.
        tensors: the tensors in the files, by which one of several spellings of a name is chosen.

    Raises:
        FunctreeError: the family does not name one.
    """
    for leaf in read(model).leaves:
        name = family.weights.get(str(leaf.path))
        if name is None:
            raise FunctreeError(
                f"the family has no name for `{leaf.path}`: add it to its `weights`"
            )
        weight = _weight(leaf, name)
        for other in family.others.get(str(leaf.path), ()):
            if weight.names[0] not in tensors and _weight(leaf, other).names[0] in tensors:
                weight = _weight(leaf, other)
        yield weight


def _weight(leaf: Leaf, name: str) -> Weight:
    """A leaf, by the name of it in a table."""
    transposed, name = name.endswith(".T"), name.removesuffix(".T")
    part = (0, 1)
    if found := _PART.search(name):
        part = int(found[1]), int(found[2])
        name = name[: found.start()]
    # A file has a tensor for each layer, perhaps for each expert of it, and our array all of them.
    names, stacked = [name], 0
    for place in ("{layer}", "{expert}"):
        if place in name:
            sizes = range(leaf.value.shape[stacked])
            names = [one.replace(place, str(i)) for one in names for i in sizes]
            stacked += 1
    shape, axes = leaf.value.shape[stacked:], leaf.axes[stacked:]
    form = TensorForm.of(shape, axes, transposed)
    # A tensor of all experts has their dimension in front, which `.T` leaves there.
    kept = int(stacked == 1 and axes[0] == "experts")
    return Weight(leaf.path, leaf.value.shape, names, stacked, form._replace(kept=kept, part=part))
