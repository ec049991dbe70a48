"""`fitted` finds the tensors that hold each array, and lists all problems."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Sharding

from functree.errors import MAX_PATHS, Problem, count, did_you_mean, listed, nearest
from functree.io.casts import Loss, cast_on_host, lost_on_host
from functree.io.laid_out import ENABLE, is_enabled, not_enabled
from functree.io.weights.blocks import TensorForm, with_joined_heads
from functree.io.weights.files import Tensor
from functree.io.weights.table import WHOLE, Named, TensorName, row_text
from functree.labels.leaf import Leaf
from functree.tree.arrays import array_text, dtype_text, is_key
from functree.tree.paths import Path, part_text


class Fault(NamedTuple):
    """A reason why an array cannot be read.

    Attributes:
        why: the reason, with `{}` for a name.
        name: the tensors' names, for `{}`.
        row: the name in the table's row, for `{}` if all arrays of the row have the same faults.
        remedy: the change that fixes the fault.
        missing: the name of the first missing tensor; empty if no tensor is missing.
    """

    why: str
    name: str
    row: str
    remedy: str
    missing: str = ""


class Terms(NamedTuple):
    """The source of the dtypes, and the remedies, for a function that loads arrays.

    Attributes:
        dtypes: the source of the arrays' dtypes. With "files", arrays have the files' dtypes. With
            "like", arrays have the dtypes in `like`, and the files must have the same dtypes. With
            "cast", tensors are cast to the dtypes in `like`.
        dtype: the remedy for a tensor with a different dtype.
        misfit: the remedy for a tensor that is missing or has a different shape.
        unread: the beginning of the remedy for tensors that no array uses, before the list of
            their names. If it is empty, there is no remedy.
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
        form = cast(TensorForm, self.form())  # not None, since the array has no faults
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

    def faults(self) -> Iterator[Fault]:
        """Yield the reasons why the array cannot be read."""
        if missing := [one for one in self.names if one not in self.tensors]:
            yield self._missing(missing)
            return
        by_type: dict[tuple[tuple[int, ...], np.dtype], list[str]] = defaultdict(list)
        for one in self.names:
            by_type[self.tensors[one].shape, self.tensors[one].dtype].append(one)
        for own in by_type.values():
            misfit = self._misfit(self.tensors[own[0]])
            if misfit is not None:
                name = row = listed(own)
                if len(own) == len(self.names):
                    name, row = self.row.text, self.row.row
                why, remedy = misfit
                yield Fault(why, name, row, remedy)

    def _missing(self, missing: Sequence[str]) -> Fault:
        """Return the fault for missing tensors."""
        name = row = listed(missing)
        if len(missing) == len(self.names):
            name, row = self.row.name.name, TensorName.parse(self.row.row).name
        why = f"the files have no `{{}}`; expected {self._expected()}"
        return Fault(why, name, row, self.terms.misfit, missing[0])

    def _misfit(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return why a tensor does not fit the array, and a remedy, or None if it fits."""
        found = f"the files have `{{}}` as {array_text(tensor)}"
        dtypes, wanted = self.terms.dtypes, dtype_text(self.dtype)
        if self.form() is None or tensor.shape != self.tensors[self.names[0]].shape:
            hint = self._transposed(tensor.shape) or self._other_order(tensor.shape)
            remedy = "\n".join(filter(None, (hint, self.terms.misfit)))
            is_part = self.row.name.part != WHOLE
            than = ", but the part must be " if is_part else ", not as "
            return found + than + self._expected(), remedy
        if dtypes == "like" and tensor.dtype != self.dtype:
            return f"{found}, not as {wanted}", self.terms.dtype.format(dtype=wanted)
        if dtypes == "files" and tensor.dtype != self.dtype:
            why = f"its tensors have different dtypes: {found}, but the first tensor is {wanted}"
            return why, self.terms.dtype
        if dtypes == "files" and not is_enabled(tensor.dtype):
            return f"{found}: {not_enabled(tensor.dtype)}", f"{ENABLE}\n{self.terms.dtype}"
        return None

    def _expected(self) -> str:
        """Format the expected dtype and shape of a tensor, or of its part.

        Files may join dimensions differently. This shape joins them as published models do.
        """
        sizes = with_joined_heads(self.shape, self.leaf.axes[self.stacked :])
        order = self.row.name.order
        if order == ():
            sizes[self.kept :] = sizes[self.kept :][::-1]
        elif order is not None and len(order) == len(sizes):
            sizes = [sizes[order.index(dimension)] for dimension in range(len(sizes))]
        return f"{dtype_text(self.dtype)}[{', '.join(map(str, sizes))}]"

    def _transposed(self, stored: Sequence[int]) -> str:
        """Return a remedy if adding or removing `.T` makes the tensor fit, or an empty string."""
        name, row = self.row.name, self.row.row
        if name.order:
            return ""
        other = name._replace(order=() if name.order is None else None)
        if TensorForm.fitting(self.shape, stored, other, self.kept) is None:
            return ""
        row = f"{row}.T" if name.order is None else row.removesuffix(".T")
        text = row_text(self.row.pattern, row)
        return f"if the tensor's dimensions are in the opposite order, write {text}"

    def _other_order(self, stored: Sequence[int]) -> str:
        """Return a remedy for a tensor with the array's number of elements, or an empty string."""
        part = self.row.name.part
        if math.prod(self.shape) * part.of != math.prod(stored) * (part.stop - part.first):
            return ""
        return (
            "load an array with the tensor's shape, and transpose it in an `ft.jit` function: "
            "no row can describe this order of the elements"
        )


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
    nameless: list[Leaf] = []
    asked: set[str] = set()
    faults: dict[str, list[tuple[Leaf, list[Fault]]]] = defaultdict(list)  # by the pattern of a row
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if is_key(leaf.value.dtype):
            why = "is a random key, which cannot be read from a tensor"
            problems.append(
                leaf.problem(why, "load only the parts of the tree that contain no random keys")
            )
            continue
        if leaf.path not in named:
            nameless.append(leaf)
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
        faults[row.pattern].append((leaf, list(weight.faults())))
        weights.append(weight)
    unasked = {name: tensor for name, tensor in tensors.items() if name not in asked}
    problems += [*_faulty(faults.values(), tensors), *_nameless(nameless, unasked)]
    return weights, problems, asked


def unread_problems(
    tensors: Iterable[str], read: Collection[str], left_out: Collection[str], advice: str
) -> Iterator[Problem]:
    """Yield problems for unread tensors, and for `left_out` patterns that match none of them.

    Args:
        tensors: the names of all tensors in the files.
        read: the names of the tensors that are read.
        left_out: patterns for names of tensors that need not be read.
        advice: the beginning of the remedy for unread tensors, before the list of their names. If
            it is empty, there is no remedy.
    """
    tensors = list(tensors)
    unread = [name for name in tensors if name not in read]
    for pattern in left_out:
        if any(fnmatchcase(name, pattern) for name in unread):
            continue
        why = "matches only tensors that are read: remove the pattern"
        if not any(fnmatchcase(name, pattern) for name in tensors):
            near = did_you_mean(pattern, dict.fromkeys(map(_of_any_number, tensors)))
            why = f"matches no tensor in the files{near}"
        yield Problem(None, None, f'left_out "{pattern}"', why)
    alike: dict[str, list[str]] = defaultdict(list)
    for name in unread:
        if not any(fnmatchcase(name, pattern) for pattern in left_out):
            alike[_of_any_number(name)].append(name)
    whats = [key if names[1:] else names[0] for key, names in alike.items()]
    remedy = advice and f"{advice}{json.dumps(whats)}"
    for names in alike.values():
        others = f" or {count(len(names) - 1, 'similarly named tensor')}" if names[1:] else ""
        yield Problem(None, None, names[0], f"no array uses this tensor{others}", remedy)


def _faulty(
    faults: Iterable[Sequence[tuple[Leaf, Sequence[Fault]]]], tensors: Iterable[str]
) -> Iterator[Problem]:
    """Yield the problems of arrays that cannot be read.

    If all arrays of a row have the same problems, the problems contain the row's name instead of
    the tensors' names. A message then shows each problem once for all layers.
    """
    searches = MAX_PATHS  # as many as a message shows, since each search looks at all names
    for of_row in faults:
        alike = len({tuple((one.why, one.row) for one in own) for _, own in of_row}) == 1
        for number, (leaf, own) in enumerate(of_row):
            for fault in own:
                remedy = fault.remedy
                if fault.missing and searches and not (alike and number):
                    searches -= 1
                    if near := nearest(fault.missing, tensors, 1):
                        remedy = f"did you mean `{near[0]}` instead of `{fault.missing}`?\n{remedy}"
                name = fault.row if alike else fault.name
                yield leaf.problem(fault.why.format(name), remedy)


def _nameless(leaves: Sequence[Leaf], unread: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield a problem for each array without a name, with a suggested row as its remedy."""
    known: dict[str, str] = {}  # suggested rows, by path with `*` for each number
    for leaf in leaves:
        path = ".".join("*" if type(key) is int else part_text(key) for key in leaf.path)
        # As many as a message shows, since each search looks at all names.
        if path not in known and len(known) < MAX_PATHS:
            known[path] = _row_for(leaf, path, unread)
        yield leaf.problem("no pattern in `table` matches it", known.get(path, ""))


def _row_for(leaf: Leaf, path: str, unread: Mapping[str, Tensor]) -> str:
    """Suggest a row for an array and its counterparts in other layers, or return ''."""
    fitting: dict[str, str] = {}
    for name, tensor in unread.items():
        for text in (name, f"{name}.T"):
            if TensorForm.fitting(leaf.shape, tensor.shape, TensorName.parse(text)) is not None:
                fitting.setdefault(name, text)
    # A low cutoff is enough: these tensors have the right shape, and no other array uses them.
    near = nearest(str(leaf.path), fitting, 1, cutoff=0.4)
    if not near:
        return ""
    name = fitting[near[0]]
    if path.count("*") == _of_any_number(name).count("*"):
        return f"add a row, such as {row_text(path, _of_any_number(name))}"
    return f"add a row, such as {row_text(str(leaf.path), name)}"


def _of_any_number(name: str) -> str:
    """Replace each number in a tensor's name with `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
