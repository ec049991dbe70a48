"""One of our weights ─► the tensors of the files that have it, joined and transposed, by blocks."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from functree.errors import FunctreeError
from functree.io.casts import Loss, cast_on_host, lost_on_host
from functree.io.weights.files import Tensor
from functree.io.weights.tensor_names import WHOLE, Part, TensorName
from functree.labels.leaf import Leaf
from functree.labels.leaves import read
from functree.nn.transformer import Transformer
from functree.nn.weight_map import WeightMap
from functree.tree.paths import Path

T = TypeVar("T")


def joined_as(shape: Sequence[int], stored: Sequence[int]) -> tuple[int, ...] | None:
    """How many dimensions of a shape each dimension of another one joins; None if it is no such
    shape. A dimension of size 1 may be joined with either neighbour, which is the same.

    Examples:
        >>> from functree.io.weights.blocks import joined_as
        >>> joined_as((32, 4, 8), (32, 32)), joined_as((4, 8, 32), (32, 32))
        ((1, 2), (2, 1))
        >>> joined_as((4, 1), (4,)), joined_as((6,), (2, 3))
        ((2,), None)
    """
    sizes = list(shape)
    joined: list[int] = []
    for size in stored:
        taken = 1
        # As few as make its size: what is left of size 1 goes to the next one.
        while taken < len(sizes) and math.prod(sizes[:taken]) != size:
            taken += 1
        if math.prod(sizes[:taken]) != size or not sizes:
            return None
        sizes = sizes[taken:]
        joined.append(taken)
    if joined and math.prod(sizes) == 1:
        joined[-1] += len(sizes)
        sizes = []
    return None if sizes else tuple(joined)


def _joins(sizes: Sequence[int]) -> bool:
    """Whether a dimension that joins these has more of them than one; of size 1 none counts."""
    return sum(size > 1 for size in sizes) > 1


class TensorForm(NamedTuple):
    """How a file has one of our weights.

    Attributes:
        shape: our shape, without that of the layers.
        joined: how many of our dimensions each dimension of the tensor joins.
        transposed: whether the tensor has (out, in).
        kept: how many dimensions before these are the same in both: that of the experts, where a
            tensor has all of them.
        part: which part of a tensor it is.
        cut: the dimension of the tensor that has the parts.
    """

    shape: tuple[int, ...]
    joined: tuple[int, ...]
    transposed: bool
    kept: int = 0
    part: Part = WHOLE
    cut: int = 0

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

    @staticmethod
    def fitting(
        shape: Sequence[int], stored: Sequence[int], name: TensorName, kept: int
    ) -> "TensorForm | None":
        """That in which a tensor of some shape has ours; None if it has none.

        Dimensions are joined at one place only, as heads are. At two places, (3, embed, heads,
        head_dim) would be read from (3 * heads * head_dim, embed) too, where both products happen
        to be equal, and silently wrong.

        Args:
            shape: our shape, without that of the layers.
            stored: that of the tensor.
            name: whether it is transposed, and which part of it is ours.
            kept: how many dimensions in front are not transposed.
        """
        kept = kept if name.transposed else 0
        form = TensorForm(tuple(shape), (), name.transposed, kept, name.part)
        # The parts are along the first dimension that they fit: of (out, in) mostly that of `out`.
        for cut in range(len(stored)) if name.part != WHOLE else (0,):
            own = list(stored)
            if name.part != WHOLE:
                each, rest = divmod(own[cut], name.part.of)
                if rest:
                    continue
                own[cut] = each * (name.part.stop - name.part.first)
            joined = joined_as(shape, form._in_file(own))
            if joined is None or joined[:kept] != (1,) * kept:
                continue
            form = form._replace(joined=joined, cut=cut)
            if sum(map(_joins, form._parts(shape))) < 2:
                return form
        return None

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        shape = self._in_file([math.prod(part) for part in self._parts(self.shape)])
        if self.part != WHOLE:
            shape[self.cut] = shape[self.cut] // (self.part.stop - self.part.first) * self.part.of
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
        if self.part != WHOLE:
            taken_of_part = outer[self.cut]
            first = self.part.first * (tensor.shape[self.cut] // self.part.of)
            outer[self.cut] = slice(first + taken_of_part.start, first + taken_of_part.stop)
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
        self, tensors: Mapping[str, Tensor], sharding: Sharding | None, dtype: DTypeLike | None
    ) -> tuple[jax.Array | np.ndarray, Loss]:
        """The array, of which each device reads its own block; and what it lost by its dtype, of
        the blocks of this process.

        Args:
            tensors: all tensors, by name.
            sharding: where it is created; None for an array of numpy.
            dtype: its dtype; None for that of the files.
        """
        before = tensors[self.names[0]].dtype
        to = np.dtype(before if dtype is None else dtype)
        lost: dict[str, int] = {}  # by block, of which several devices may have copies

        def read(name: str, index: Sequence[slice]) -> np.ndarray:
            found = self.form.read(tensors[name], index)
            lost[f"{name} {index}"] = lost_on_host(found, to)
            return cast_on_host(found, to)

        def block(index: Any) -> np.ndarray:
            if not self.stacked:
                return read(self.names[0], index)
            # Cast layer by layer into the block: of float32 files that are read as bfloat16, the
            # layers of a whole model would not fit into memory side by side.
            sizes = zip(index, self.shape, strict=True)
            taken = [range(*part.indices(size)) for part, size in sizes]
            layers = np.empty(list(map(len, taken)), to)
            outer = taken[: self.stacked]
            for place in np.ndindex(*map(len, outer)):
                at = [indices[i] for indices, i in zip(outer, place, strict=True)]
                layers[place] = read(self.name_at(at), index[self.stacked :])
            return layers

        array: jax.Array | np.ndarray
        if sharding is None:
            array = np.asarray(block((slice(None),) * len(self.shape)))
        else:
            array = jax.make_array_from_callback(self.shape, sharding, block)
        return array, Loss(self.path, array.size, before, to, sum(lost.values()))


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


def _weight(leaf: Leaf, text: str) -> Weight:
    """A leaf, by the name of it in a table."""
    name = TensorName.parse(text)
    names, stacked = name.of_layers(leaf.shape)
    shape, axes = leaf.shape[stacked:], leaf.axes[stacked:]
    form = TensorForm.of(shape, axes, name.transposed)
    # A tensor of all experts has their dimension in front, which `.T` leaves there, and the parts
    # are along the next one.
    kept = int(stacked == 1 and axes[0] == "experts")
    return Weight(
        leaf.path, leaf.shape, names, stacked, form._replace(kept=kept, part=name.part, cut=kept)
    )
