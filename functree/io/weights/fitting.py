"""`fitted` finds the tensors that hold each array, and lists all problems."""

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
from functree.io.weights.blocks import TensorForm
from functree.io.weights.files import Tensor
from functree.io.weights.table import Named, TensorName
from functree.labels.leaf import Leaf
from functree.tree.arrays import array_text, dtype_text, is_key
from functree.tree.paths import Path


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
