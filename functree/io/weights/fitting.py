"""Arrays and the names of their tensors ─► how each is read; or all that does not fit."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import jax

from functree.errors import MAX_PATHS, Problem, count, did_you_mean, listed, nearest
from functree.io.weights.blocks import TensorForm, Weight
from functree.io.weights.files import Tensor
from functree.io.weights.table import Named, row_text
from functree.io.weights.tensor_names import WHOLE, Part, TensorName
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


_KEY = Fault(
    "is a random key, which is read from no tensor",
    "is a random key, which is read from no tensor",
    "load the parts of the tree that have weights",
)


class Fitting(NamedTuple):
    """How arrays are read.

    Attributes:
        weights: how each is read that can be.
        problems: why the others cannot be.
        asked: the names of all tensors that they are to be read from.
    """

    weights: Sequence[Weight]
    problems: Sequence[Problem]
    asked: Collection[str]


def fitted(
    leaves: Sequence[Leaf], named: Mapping[Path, Named], tensors: Mapping[str, Tensor], cast: bool
) -> Fitting:
    """How each array is read, or why it cannot be.

    Args:
        leaves: the arrays.
        named: the name of each that has one.
        tensors: all tensors in the files.
        cast: whether they may have other dtypes.
    """
    weights: list[Weight] = []
    nameless: list[Leaf] = []
    asked: set[str] = set()
    faults: dict[str, dict[Path, list[Fault]]] = defaultdict(dict)  # by the pattern of the row
    for leaf in leaves:
        if leaf.path not in named:
            nameless.append(leaf)
            continue
        one = named[leaf.path]
        fault = _not_named(leaf, one.name)
        found = [] if fault is None else [fault]
        if fault is None:
            names, stacked = one.name.of_layers(leaf.shape)
            asked.update(names)
            weight, found = _weight(leaf, one, names, stacked, tensors, cast)
            weights += [] if weight is None else [weight]
        faults[one.pattern][leaf.path] = found
    unasked = {name: tensor for name, tensor in tensors.items() if name not in asked}
    problems = [*_faulty(leaves, faults, tensors), *_nameless(nameless, unasked)]
    return Fitting(weights, problems, asked)


def unread_problems(
    tensors: Iterable[str], read: Collection[str], left_out: Collection[str]
) -> Iterator[Problem]:
    """The problems of tensors that nothing is read from, unless a pattern leaves them out; and
    those of patterns that leave none out.

    Args:
        tensors: the names of all tensors in the files.
        read: the names of those that something is read from.
        left_out: patterns of names.
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
    remedy = f"give `names` rows for them, or leave them out: left_out={json.dumps(whats)}"
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


def _not_named(leaf: Leaf, name: TensorName) -> Fault | None:
    """Why an array is in no tensors of such a name; None if it may be."""
    if is_key(leaf.value.dtype):
        return _KEY
    if name.stacked > len(leaf.shape) or 0 in leaf.shape[: name.stacked]:
        why = f"`{name.name}` is a tensor for each element of a dimension, and it has none"
        return Fault(why, why)
    return None


def _weight(
    leaf: Leaf,
    named: Named,
    names: list[str],
    stacked: int,
    tensors: Mapping[str, Tensor],
    cast: bool,
) -> tuple[Weight | None, list[Fault]]:
    """How an array is read, or why it cannot be.

    Args:
        leaf: the array.
        named: its name.
        names: those of all tensors that have it.
        stacked: how many of its dimensions these are over.
        tensors: all tensors in the files.
        cast: whether it may have another dtype.
    """
    if missing := [one for one in names if one not in tensors]:
        return None, [_missing(missing, named, whole=len(missing) == len(names))]
    shape, axes = leaf.shape[stacked:], leaf.axes[stacked:]
    # In front of a matrix may be dimensions of layers or experts, which `.T` leaves there.
    kept = max(leaf.stacked - stacked, 0)
    kept += int(axes[kept : kept + 1] == ("experts",))
    form = TensorForm.fitting(shape, tensors[names[0]].shape, named.name, kept)
    faults: list[Fault] = []
    for (stored, dtype), own in _by_type(names, tensors).items():
        fits = form is not None and form.stored == stored
        if fits and (cast or dtype == str(leaf.value.dtype)):
            continue
        remedy = f"to have it as {dtype_text(leaf.value.dtype)}: cast=True"
        if not fits:
            remedy = _transposed(named, shape, stored, kept) or _other_order(
                named.name.part, shape, stored
            )
        all_of_them = len(own) == len(names)
        where = (named.text, named.row) if all_of_them else (listed(own), listed(own))
        found = array_text(tensors[own[0]])
        found += "" if named.name.part == WHOLE else ", of which a part is asked for"
        why, of_row = (f"the files have `{one}` as {found}" for one in where)
        faults.append(Fault(why, of_row, remedy))
    if faults or form is None:
        return None, faults
    return Weight(leaf.path, leaf.shape, names, stacked, form), []


def _by_type(
    names: Sequence[str], tensors: Mapping[str, Tensor]
) -> dict[tuple[tuple[int, ...], str], list[str]]:
    """Names of tensors by their shape and dtype: layers may differ."""
    found: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
    for name in names:
        found[tensors[name].shape, str(tensors[name].dtype)].append(name)
    return found


def _transposed(named: Named, shape: Sequence[int], stored: Sequence[int], kept: int) -> str:
    """What to write if a tensor has the transpose; empty if it does not."""
    name = named.name
    other = name._replace(transposed=not name.transposed)
    if TensorForm.fitting(shape, stored, other, kept) is None:
        return ""
    row = named.row.removesuffix(".T") if name.transposed else f"{named.row}.T"
    return f"transposed? write {row_text(named.pattern, row)}"


def _other_order(part: Part, shape: Sequence[int], stored: Sequence[int]) -> str:
    """What to do with a tensor that has the elements of an array in another order; empty if it has
    others."""
    if math.prod(shape) * part.of != math.prod(stored) * (part.stop - part.first):
        return ""
    return (
        "it has as many elements, in an order that no row says: load an array in the order of the "
        "files, and transpose it in a function of `ft.jit`"
    )


def _missing(missing: Sequence[str], named: Named, *, whole: bool) -> Fault:
    """That tensors are not in the files."""
    where = named.name.name if whole else listed(missing)
    row = TensorName.parse(named.row).name if whole else where
    return Fault(f"the files have no `{where}`", f"the files have no `{row}`", missing=missing[0])


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
        if is_key(leaf.value.dtype):
            yield leaf.problem(_KEY.why, _KEY.remedy)
            continue
        path = ".".join("*" if type(key) is int else part_text(key) for key in leaf.path)
        # As many as a message shows: each looks at all names.
        if path not in known and len(known) < MAX_PATHS:
            known[path] = _row_for(leaf, path, unread)
        yield leaf.problem("no pattern of `names` matches it", known.get(path, ""))


def _row_for(leaf: Leaf, path: str, unread: Mapping[str, Tensor]) -> str:
    """A row for an array and those in other layers, by the nearest name; empty if none is near."""
    fitting: dict[str, str] = {}
    for name, tensor in unread.items():
        for text in (name, f"{name}.T"):
            if TensorForm.fitting(leaf.shape, tensor.shape, TensorName.parse(text), 0) is not None:
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
