"""Arrays and the names of their tensors ─► how each is read; or all that does not fit."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from functree.errors import MAX_PATHS, Problem, count, did_you_mean, listed, nearest
from functree.io.weights.blocks import TensorForm, Weight
from functree.io.weights.files import Tensor
from functree.io.weights.table import WHOLE, Named, TensorName, row_text
from functree.labels.leaf import Leaf
from functree.tree.arrays import array_text, dtype_text, is_key
from functree.tree.paths import Path, part_text


class Fault(NamedTuple):
    """Why an array cannot be read.

    Attributes:
        why: what is wrong with it.
        of_row: the same for each array of its row of the table, by the name in the row.
        remedy: what to do.
        missing: the name of a tensor that is not in the files; empty if all are.
    """

    why: str
    of_row: str
    remedy: str = ""
    missing: str = ""


class Terms(NamedTuple):
    """On which terms arrays are loaded; they differ between the functions that load.

    Attributes:
        dtypes: whether an array has the dtype in `like`, which the files have too or from which
            they are cast, or the dtype of the files.
        dtype: what to do about a tensor of another dtype.
        unread: what to do about tensors that nothing is read from, before the list of their names;
            may be empty.
        lost: what to do about values that a dtype does not hold.
    """

    dtypes: Literal["like", "cast", "files"]
    dtype: str
    unread: str
    lost: str


def fitted(
    leaves: Sequence[Leaf],
    shardings: Sequence[Sharding | None],
    named: Mapping[Path, Named],
    tensors: Mapping[str, Tensor],
    terms: Terms,
) -> tuple[list[Weight], list[Problem], set[str]]:
    """How each array is read that can be; why the others cannot be; and the names of all tensors
    that they are to be read from.

    Args:
        leaves: the arrays.
        shardings: where each is created.
        named: the name of each that has one.
        tensors: all tensors in the files.
        terms: what is cast, and what messages say to do.
    """
    weights: list[Weight] = []
    problems: list[Problem] = []
    nameless: list[Leaf] = []
    asked: set[str] = set()
    faults: dict[str, dict[Path, list[Fault]]] = defaultdict(dict)  # by the pattern of the row
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if is_key(leaf.value.dtype):
            why = "is a random key, which is read from no tensor"
            problems.append(leaf.problem(why, "load the parts of the tree that have weights"))
            continue
        if leaf.path not in named:
            nameless.append(leaf)
            continue
        row, name = named[leaf.path], named[leaf.path].name
        stacked = len(name.places)
        if stacked > len(leaf.shape) or 0 in leaf.shape[:stacked]:
            why = f"`{name.name}` is a tensor for each element of a dimension, and it has none"
            problems.append(leaf.problem(why, ""))
            continue
        wanted = _Wanted(leaf, row, name, name.tensors(leaf.shape), tensors)
        asked.update(wanted.names)
        dtype = wanted.dtype(terms)
        found = faults[row.pattern][leaf.path] = list(wanted.faults(dtype, terms))
        if not found and (form := wanted.form()) is not None:
            parts = wanted.names, stacked, form
            weights.append(Weight(leaf.path, leaf.shape, dtype, sharding, *parts))
    unasked = {name: tensor for name, tensor in tensors.items() if name not in asked}
    problems += [*_faulty(leaves, faults, tensors), *_nameless(nameless, unasked)]
    return weights, problems, asked


def unread_problems(
    tensors: Iterable[str], read: Collection[str], left_out: Collection[str], advice: str
) -> Iterator[Problem]:
    """The problems of tensors that nothing is read from, unless a pattern leaves them out; and
    those of patterns that leave none out.

    Args:
        tensors: the names of all tensors in the files.
        read: the names of those that something is read from.
        left_out: patterns of names.
        advice: what to do about the others, before the list of their names; may be empty.
    """
    tensors = list(tensors)
    unread = [name for name in tensors if name not in read]
    for pattern in left_out:
        if any(fnmatchcase(name, pattern) for name in unread):
            continue
        why = "each tensor that it matches is read"
        if not any(fnmatchcase(name, pattern) for name in tensors):
            near = did_you_mean(pattern, dict.fromkeys(map(_of_any_number, tensors)))
            why = f"matches no tensor of the files{near}"
        yield Problem(None, None, f'left_out "{pattern}"', why)
    alike: dict[str, list[str]] = defaultdict(list)
    for name in unread:
        if not any(fnmatchcase(name, pattern) for pattern in left_out):
            alike[_of_any_number(name)].append(name)
    whats = [key if names[1:] else names[0] for key, names in alike.items()]
    remedy = advice and f"{advice}{json.dumps(whats)}"
    for names in alike.values():
        others = f", nor from {count(len(names) - 1, 'tensor')} like it" if names[1:] else ""
        yield Problem(None, None, names[0], f"no array is read from it{others}", remedy)


def untied(leaves: Sequence[Leaf], named: Mapping[Path, Named]) -> Iterator[Problem]:
    """The problems of places of one array that are to be read from different tensors."""
    first: dict[int, Leaf] = {}
    for leaf in leaves:
        if not isinstance(leaf.value, jax.Array) or leaf.path not in named:
            continue
        other = first.setdefault(id(leaf.value), leaf)
        if named[leaf.path].text != named[other.path].text:
            why = f"is one array with `{other.path}` in `like`, and has another name"
            yield leaf.problem(why, "untie them in `like`: `ft.copy` one of them")


class _Wanted(NamedTuple):
    """An array that is to be read, and what it is to be read from.

    Attributes:
        leaf: the array.
        row: the row of the table that names it.
        name: what this says.
        names: the names of all tensors that have it.
        tensors: all tensors in the files.
    """

    leaf: Leaf
    row: Named
    name: TensorName
    names: list[str]
    tensors: Mapping[str, Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without the dimensions that have a tensor for each of their elements."""
        return self.leaf.shape[len(self.name.places) :]

    def dtype(self, terms: Terms) -> np.dtype:
        """The dtype that it gets."""
        if terms.dtypes == "files" and self.names[0] in self.tensors:
            return self.tensors[self.names[0]].dtype
        return np.dtype(self.leaf.value.dtype)

    def form(
        self, stored: Sequence[int] | None = None, name: TensorName | None = None
    ) -> TensorForm | None:
        """How a tensor has it, by default the first one; None if it does not."""
        stacked = len(self.name.places)
        # `.T` leaves dimensions of layers and of experts in front.
        kept = max(self.leaf.stacked - stacked, 0)
        kept += int(self.leaf.axes[stacked + kept :][:1] == ("experts",))
        if stored is None:
            stored = self.tensors[self.names[0]].shape
        return TensorForm.fitting(self.shape, stored, name or self.name, kept)

    def faults(self, dtype: np.dtype, terms: Terms) -> Iterator[Fault]:
        """Why it cannot be read, as an array of a dtype."""
        if missing := [one for one in self.names if one not in self.tensors]:
            name = row = listed(missing)
            if len(missing) == len(self.names):
                name, row = self.name.name, TensorName.parse(self.row.row).name
            why, of_row = (f"the files have no `{one}`" for one in (name, row))
            yield Fault(why, of_row, missing=missing[0])
            return
        by_type: dict[tuple[tuple[int, ...], np.dtype], list[str]] = defaultdict(list)
        for one in self.names:
            by_type[self.tensors[one].shape, self.tensors[one].dtype].append(one)
        form = self.form()
        for (stored, other), own in by_type.items():
            fits = form is not None and stored == self.tensors[self.names[0]].shape
            if fits and (terms.dtypes == "cast" or other == dtype):
                continue
            remedy = terms.dtype.format(dtype=dtype_text(dtype))
            if not fits:
                remedy = self._transposed(stored) or self._other_order(stored)
            name = row = listed(own)
            if len(own) == len(self.names):
                name, row = self.row.text, self.row.row
            found = array_text(self.tensors[own[0]])
            found += "" if self.name.part == WHOLE else ", of which a part is asked for"
            why, of_row = (f"the files have `{one}` as {found}" for one in (name, row))
            yield Fault(why, of_row, remedy)

    def _transposed(self, stored: Sequence[int]) -> str:
        """What to write if a tensor has the transpose; empty if it does not."""
        is_plain = self.name.order is None
        other = self.name._replace(order=() if is_plain else None)
        if self.name.order or self.form(stored, other) is None:
            return ""
        row = f"{self.row.row}.T" if is_plain else self.row.row.removesuffix(".T")
        return f"transposed? write {row_text(self.row.pattern, row)}"

    def _other_order(self, stored: Sequence[int]) -> str:
        """What to do with a tensor that has the elements in another order; empty if it does not."""
        part = self.name.part
        if math.prod(self.shape) * part.of != math.prod(stored) * (part.stop - part.first):
            return ""
        return (
            "it has as many elements, in an order that no row says: load an array in the order of "
            "the files, and transpose it in a function of `ft.jit`"
        )


def _faulty(
    leaves: Sequence[Leaf],
    faults: Mapping[str, Mapping[Path, Sequence[Fault]]],
    tensors: Iterable[str],
) -> Iterator[Problem]:
    """The problems of arrays that cannot be read. What is wrong with all of a row is said by the
    row, so that a message tells it once for all layers, with the remedy of the first one."""
    by_path = {leaf.path: leaf for leaf in leaves}
    searches = MAX_PATHS  # as many as a message shows: each looks at all names
    for of_row in faults.values():
        alike = len({tuple(one.of_row for one in own) for own in of_row.values()}) == 1
        for number, (path, own) in enumerate(of_row.items()):
            for fault in own:
                remedy = fault.remedy
                if fault.missing and searches and not (alike and number):
                    searches -= 1
                    if near := nearest(fault.missing, tensors, 1):
                        remedy = f"`{fault.missing}`: did you mean `{near[0]}`?"
                yield by_path[path].problem(fault.of_row if alike else fault.why, remedy)


def _nameless(leaves: Sequence[Leaf], unread: Mapping[str, Tensor]) -> Iterator[Problem]:
    """The problems of arrays without a name, with the nearest name of a tensor that would fit."""
    known: dict[str, str] = {}  # by the path in any layer
    for leaf in leaves:
        path = ".".join("*" if type(key) is int else part_text(key) for key in leaf.path)
        # As many as a message shows: each looks at all names.
        if path not in known and len(known) < MAX_PATHS:
            known[path] = _row_for(leaf, path, unread)
        yield leaf.problem("no pattern of `table` matches it", known.get(path, ""))


def _row_for(leaf: Leaf, path: str, unread: Mapping[str, Tensor]) -> str:
    """A row for an array and those in other layers, by the nearest name; empty if none is near."""
    fitting: dict[str, str] = {}
    for name, tensor in unread.items():
        for text in (name, f"{name}.T"):
            if TensorForm.fitting(leaf.shape, tensor.shape, TensorName.parse(text)) is not None:
                fitting.setdefault(name, text)
    # Also one that is far: these have the shape, and nothing else is read from them.
    near = nearest(str(leaf.path), fitting, 1, cutoff=0.4)
    if not near:
        return ""
    name = fitting[near[0]]
    if path.count("*") == _of_any_number(name).count("*"):
        return f"add a row, such as {row_text(path, _of_any_number(name))}"
    return f"add a row, such as {row_text(str(leaf.path), name)}"


def _of_any_number(name: str) -> str:
    """The name of a tensor with `*` for each number in it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
