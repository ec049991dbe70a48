"""Arrays and the names of their tensors ─► the arrays that are read; or all that does not fit."""

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
    """Why an array cannot be read.

    Attributes:
        why: what is wrong with it, with `{}` for the name of its tensor.
        name: this name.
        row: the name in the row of the table.
        remedy: what to do.
        missing: the name of a tensor that is not in the files; empty if all are.
    """

    why: str
    name: str
    row: str
    remedy: str
    missing: str = ""


class Terms(NamedTuple):
    """On which terms arrays are loaded; they differ between the functions that load.

    Attributes:
        dtypes: whether an array has the dtype in `like`, which the files have too or from which
            they are cast, or the dtype of the files.
        dtype: what to do about a tensor of another dtype.
        misfit: what to do about one that is missing or has another shape.
        unread: what to do about tensors that nothing is read from, before the list of their names;
            may be empty.
        lost: what to do about values that a dtype does not hold.
    """

    dtypes: Literal["like", "cast", "files"]
    dtype: str
    misfit: str
    unread: str
    lost: str


class Weight(NamedTuple):
    """One of our arrays, and the tensors that have it.

    Attributes:
        leaf: the array in `like`.
        sharding: where it is created; None for an array of numpy.
        row: the row of the table that names it.
        names: the name of the tensor, or the names for all layers, or all experts of all layers.
        tensors: all tensors in the files.
        terms: what is cast, and what messages say to do.
    """

    leaf: Leaf
    sharding: Sharding | None
    row: Named
    names: list[str]
    tensors: Mapping[str, Tensor]
    terms: Terms

    @property
    def stacked(self) -> int:
        """How many dimensions in front have a tensor for each of their elements."""
        return len(self.row.name.places)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without these dimensions."""
        return self.leaf.shape[self.stacked :]

    @property
    def kept(self) -> int:
        """How many dimensions in front `.T` leaves there: of layers and of experts."""
        kept = max(self.leaf.stacked - self.stacked, 0)
        return kept + int(self.leaf.axes[self.stacked + kept :][:1] == ("experts",))

    @property
    def dtype(self) -> np.dtype:
        """The dtype that it gets."""
        if self.terms.dtypes == "files" and self.names[0] in self.tensors:
            return self.tensors[self.names[0]].dtype
        return np.dtype(self.leaf.value.dtype)

    def array(self) -> tuple[jax.Array | np.ndarray, Loss]:
        """The array, of which each device reads its own block; and what it lost by its dtype, of
        the blocks of this process."""
        form = cast(TensorForm, self.form())  # it has no fault
        dtype, whole = self.dtype, self.leaf.shape
        lost: dict[str, int] = {}  # by block, of which several devices may have copies

        def read(name: str, index: Sequence[slice]) -> np.ndarray:
            found = form.read(self.tensors[name], index)
            lost[f"{name} {index}"] = lost_on_host(found, dtype)
            return cast_on_host(found, dtype)

        def block(index: Any) -> np.ndarray:
            if not self.stacked:
                return read(self.names[0], index)
            # Cast layer by layer into the block: of float32 files that are read as bfloat16, the
            # layers of a whole model would not fit into memory side by side.
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
        """How the first tensor has it; None if it does not."""
        stored = self.tensors[self.names[0]].shape
        return TensorForm.fitting(self.shape, stored, self.row.name, self.kept)

    def faults(self) -> Iterator[Fault]:
        """Why it cannot be read."""
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
        """That tensors are missing."""
        name = row = listed(missing)
        if len(missing) == len(self.names):
            name, row = self.row.name.name, TensorName.parse(self.row.row).name
        why = f"the files have no `{{}}`, which has to be {self._expected()}"
        return Fault(why, name, row, self.terms.misfit, missing[0])

    def _misfit(self, tensor: Tensor) -> tuple[str, str] | None:
        """Why a tensor does not have it, and what to do."""
        found = f"the files have `{{}}` as {array_text(tensor)}"
        dtypes, wanted = self.terms.dtypes, dtype_text(self.dtype)
        if self.form() is None or tensor.shape != self.tensors[self.names[0]].shape:
            hint = self._transposed(tensor.shape) or self._other_order(tensor.shape)
            remedy = "\n".join(filter(None, (hint, self.terms.misfit)))
            is_part = self.row.name.part != WHOLE
            than = ", of which a part is asked for: " if is_part else ", and not as "
            return found + than + self._expected(), remedy
        if dtypes == "like" and tensor.dtype != self.dtype:
            return f"{found}, and not as {wanted}", self.terms.dtype.format(dtype=wanted)
        if dtypes == "files" and tensor.dtype != self.dtype:
            why = f"its layers have several dtypes: {found}, and the first as {wanted}"
            return why, self.terms.dtype
        if dtypes == "files" and not is_enabled(tensor.dtype):
            return f"{found}: {not_enabled(tensor.dtype)}", f"{ENABLE}\n{self.terms.dtype}"
        return None

    def _expected(self) -> str:
        """What a tensor, or the part of it, has to be. Dimensions may be joined at another place;
        here they are as published models have them."""
        sizes = with_joined_heads(self.shape, self.leaf.axes[self.stacked :])
        order = self.row.name.order
        if order == ():
            sizes[self.kept :] = sizes[self.kept :][::-1]
        elif order is not None and len(order) == len(sizes):
            sizes = [sizes[order.index(dimension)] for dimension in range(len(sizes))]
        return f"{dtype_text(self.dtype)}[{', '.join(map(str, sizes))}]"

    def _transposed(self, stored: Sequence[int]) -> str:
        """What to write if a tensor has the transpose; empty if it does not."""
        name, row = self.row.name, self.row.row
        if name.order:
            return ""
        other = name._replace(order=() if name.order is None else None)
        if TensorForm.fitting(self.shape, stored, other, self.kept) is None:
            return ""
        row = f"{row}.T" if name.order is None else row.removesuffix(".T")
        return f"transposed? write {row_text(self.row.pattern, row)}"

    def _other_order(self, stored: Sequence[int]) -> str:
        """What to do with a tensor that has the elements in another order; empty if it does not."""
        part = self.row.name.part
        if math.prod(self.shape) * part.of != math.prod(stored) * (part.stop - part.first):
            return ""
        return (
            "it has as many elements, in an order that no row says: load an array in the order of "
            "the files, and transpose it in a function of `ft.jit`"
        )


def fitted(
    leaves: Sequence[Leaf],
    shardings: Sequence[Sharding | None],
    named: Mapping[Path, Named],
    tensors: Mapping[str, Tensor],
    terms: Terms,
) -> tuple[list[Weight], list[Problem], set[str]]:
    """The arrays that have a tensor; all that is wrong; and the names of all tensors that they are
    to be read from.

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
    faults: dict[str, list[tuple[Leaf, list[Fault]]]] = defaultdict(list)  # by the pattern of a row
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


def _faulty(
    faults: Iterable[Sequence[tuple[Leaf, Sequence[Fault]]]], tensors: Iterable[str]
) -> Iterator[Problem]:
    """The problems of arrays that cannot be read. What is wrong with all of a row is said by the
    row, so that a message tells it once for all layers, with the remedy of the first one."""
    searches = MAX_PATHS  # as many as a message shows: each looks at all names
    for of_row in faults:
        alike = len({tuple((one.why, one.row) for one in own) for _, own in of_row}) == 1
        for number, (leaf, own) in enumerate(of_row):
            for fault in own:
                remedy = fault.remedy
                if fault.missing and searches and not (alike and number):
                    searches -= 1
                    if near := nearest(fault.missing, tensors, 1):
                        remedy = f"`{fault.missing}`: did you mean `{near[0]}`?\n{remedy}"
                name = fault.row if alike else fault.name
                yield leaf.problem(fault.why.format(name), remedy)


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
