"""`fitted` finds the tensors that hold each array, and lists all problems.

A `TensorForm` describes how a tensor in a file stores an array, and reads the array's blocks.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Sharding

from functree.errors import Problem, count, listed
from functree.io.casts import Loss, cast_on_host, lost_on_host
from functree.io.laid_out import ENABLE, is_enabled, not_enabled
from functree.io.weights.files import Tensor
from functree.io.weights.table import WHOLE, Named, Part, TensorName
from functree.labels.leaves import Leaf
from functree.tree.arrays import array_text, dtype_text, is_key
from functree.tree.paths import Path


def joined_as(shape: Sequence[int], stored: Sequence[int]) -> tuple[int, ...] | None:
    """For each dimension of `stored`, count the dimensions of `shape` that it joins.

    Dimensions of size 1 are ignored in both shapes. The result is None if the shapes do not fit.

    Examples:
        >>> from functree.io.weights.fitting import joined_as
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
        return block.reshape(list(map(len, taken)))


class Terms(NamedTuple):
    """The source of the dtypes, and the remedies, for a function that loads arrays.

    Attributes:
        dtypes: the source of the arrays' dtypes. With "files", arrays have the files' dtypes. With
            "like", arrays have the dtypes in `like`, and the files must have the same dtypes. With
            "cast", tensors are cast to the dtypes in `like`.
        dtype: the remedy for a tensor with a different dtype.
        misfit: the remedy for a tensor that is missing or has a different shape.
        unread: the remedy for tensors that no array uses.
        lost: the remedy for values that a dtype cannot hold.
    """

    dtypes: Literal["like", "cast", "files"]
    dtype: str
    misfit: str
    unread: str
    lost: str


class Weight(NamedTuple):
    """An array to load, with the tensors that hold its values.

    Attributes:
        leaf: the array in `like`.
        sharding: the sharding of the new array; None to create a NumPy array.
        row: the array's name in the table, and the row that gives the name.
        names: the names of the array's tensors: a single name, or one name for each index of the
            dimensions that `stacked` counts.
        tensors: all tensors in the files.
        terms: the source of the dtypes, and the remedies.
    """

    leaf: Leaf
    sharding: Sharding | None
    row: Named
    names: list[str]
    tensors: Mapping[str, Tensor]
    terms: Terms

    @property
    def stacked(self) -> int:
        """The number of leading dimensions in which each index has its own tensor."""
        return len(self.row.name.places)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array without the dimensions that `stacked` counts."""
        return self.leaf.shape[self.stacked :]

    @property
    def kept(self) -> int:
        """The number of leading dimensions of `shape` (layers, experts) that `.T` keeps first."""
        kept = max(self.leaf.stacked - self.stacked, 0)
        return kept + int(self.leaf.axes[self.stacked + kept :][:1] == ("experts",))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array that is created."""
        if self.terms.dtypes == "files" and self.names[0] in self.tensors:
            return self.tensors[self.names[0]].dtype
        return np.dtype(self.leaf.value.dtype)

    def array(self) -> tuple[jax.Array | np.ndarray, Loss]:
        """Create the array, and count the values that its dtype cannot hold.

        Each process reads only its devices' blocks, and counts only the values in these blocks.
        """
        form = cast(TensorForm, self.form())  # not None, since the array has no problems
        dtype, whole = self.dtype, self.leaf.shape
        lost: dict[str, int] = {}  # by block, since several devices may have copies of a block

        def read(name: str, index: Sequence[slice]) -> np.ndarray:
            found = form.read(self.tensors[name], index)
            lost[f"{name} {index}"] = lost_on_host(found, dtype)
            return cast_on_host(found, dtype)

        def block(index: Any) -> np.ndarray:
            if not self.stacked:
                return read(self.names[0], index)
            # Each layer is cast when it is read. If float32 files are loaded as bfloat16, all
            # layers of a large model may not fit in memory before the cast.
            taken = [range(*part.indices(size)) for part, size in zip(index, whole, strict=True)]
            layers = np.empty(list(map(len, taken)), dtype)
            outer = taken[: self.stacked]
            for place in np.ndindex(*map(len, outer)):
                at = [indices[i] for indices, i in zip(outer, place, strict=True)]
                number = np.ravel_multi_index(at, whole[: self.stacked])
                layers[place] = read(self.names[int(number)], index[self.stacked :])
            return layers

        array: jax.Array | np.ndarray
        if self.sharding is None:
            array = np.asarray(block((slice(None),) * len(whole)))
        else:
            array = jax.make_array_from_callback(whole, self.sharding, block)
        before = self.tensors[self.names[0]].dtype
        return array, Loss(self.leaf.path, array.size, before, dtype, sum(lost.values()))

    def form(self) -> TensorForm | None:
        """Return the form of the array in the first tensor, or None if the tensor does not fit."""
        stored = self.tensors[self.names[0]].shape
        return TensorForm.fitting(self.shape, stored, self.row.name, self.kept)

    def problems(self) -> Iterator[Problem]:
        """Yield the reasons why the array cannot be read."""
        if missing := [name for name in self.names if name not in self.tensors]:
            called = TensorName.parse(self._called(missing)).name
            yield self.leaf.problem(f"the files have no `{called}`", self.terms.misfit)
            return
        alike: dict[tuple[tuple[int, ...], np.dtype], list[str]] = defaultdict(list)
        for name in self.names:
            alike[self.tensors[name].shape, self.tensors[name].dtype].append(name)
        for names in alike.values():
            tensor = self.tensors[names[0]]
            misfit = self._misfit(tensor)
            if misfit is not None:
                why, remedy = misfit
                found = f"the files have `{self._called(names)}` as {array_text(tensor)}"
                yield self.leaf.problem(found + why, remedy)

    def _called(self, names: Sequence[str]) -> str:
        """Return how a message names some of the array's tensors.

        If the table's row has wildcards, `*` replaces the numbers in the name, so that a message
        shows a problem of all layers only once.
        """
        if len(names) < len(self.names):
            return listed(names)
        return self.row.text if self.row.text == self.row.row else _of_any_number(self.row.text)

    def _misfit(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return why a tensor does not fit the array, and a remedy, or None if it fits."""
        dtypes, wanted = self.terms.dtypes, dtype_text(self.dtype)
        if self.form() is None or tensor.shape != self.tensors[self.names[0]].shape:
            return f", which does not fit {wanted}{list(self.shape)}", self.terms.misfit
        if dtypes == "like" and tensor.dtype != self.dtype:
            return f", not as {wanted}", self.terms.dtype.format(dtype=wanted)
        if dtypes == "files" and tensor.dtype != self.dtype:
            return f", but the array's first tensor as {wanted}", self.terms.dtype
        if dtypes == "files" and not is_enabled(tensor.dtype):
            return f": {not_enabled(tensor.dtype)}", f"{ENABLE}\n{self.terms.dtype}"
        return None


def fitted(
    leaves: Sequence[Leaf],
    shardings: Sequence[Sharding | None],
    named: Mapping[Path, Named],
    tensors: Mapping[str, Tensor],
    terms: Terms,
) -> tuple[list[Weight], list[Problem], set[str]]:
    """Find the tensors that hold each array.

    Args:
        leaves: the arrays.
        shardings: the sharding of each array.
        named: the arrays' names in the table, by path. Arrays without a name are absent.
        tensors: all tensors in the files.
        terms: the source of the dtypes, and the remedies.

    Returns:
        The arrays that have a name, all problems, and the names of the tensors that these arrays
            use.
    """
    weights: list[Weight] = []
    problems: list[Problem] = []
    asked: set[str] = set()
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if is_key(leaf.value.dtype):
            why = "is a random key, which cannot be read from a tensor"
            problems.append(
                leaf.problem(why, "load only the parts of the tree that contain no random keys")
            )
            continue
        if leaf.path not in named:
            why = "no pattern in `table` matches it"
            problems.append(leaf.problem(why, "add a row for this array to `table`"))
            continue
        row, name = named[leaf.path], named[leaf.path].name
        stacked = len(name.places)
        if stacked > len(leaf.shape) or 0 in leaf.shape[:stacked]:
            why = (
                f"its name `{name.name}` stands for several tensors, so the array needs a nonempty "
                "leading dimension for each of `layer` and `expert` in the name"
            )
            problems.append(leaf.problem(why, ""))
            continue
        weight = Weight(leaf, sharding, row, name.tensors(leaf.shape), tensors, terms)
        asked.update(weight.names)
        problems += weight.problems()
        weights.append(weight)
    return weights, problems, asked


def unread_problems(
    tensors: Iterable[str], read: Collection[str], left_out: Collection[str], remedy: str
) -> Iterator[Problem]:
    """Yield problems for unread tensors, and for `left_out` patterns that match none of them.

    Args:
        tensors: the names of all tensors in the files.
        read: the names of the tensors that are read.
        left_out: patterns for names of tensors that need not be read.
        remedy: the remedy for unread tensors.
    """
    unread = [name for name in tensors if name not in read]
    for pattern in left_out:
        if not any(fnmatchcase(name, pattern) for name in unread):
            why = "matches no tensor, or only tensors that are read"
            yield Problem(None, None, f'left_out "{pattern}"', why, "correct or remove the pattern")
    alike: dict[str, list[str]] = defaultdict(list)
    for name in unread:
        if not any(fnmatchcase(name, pattern) for pattern in left_out):
            alike[_of_any_number(name)].append(name)
    for names in alike.values():
        others = f" or {count(len(names) - 1, 'similarly named tensor')}" if names[1:] else ""
        yield Problem(None, None, names[0], f"no array uses this tensor{others}", remedy)


def _of_any_number(name: str) -> str:
    """Replace each number in a tensor's name with `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
