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


_KEY = Fault(
    "is a random key, which is read from no tensor",
    "is a random key, which is read from no tensor",
    "load the parts of the tree that have weights",
)


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
    nameless: list[Leaf] = []
    asked: set[str] = set()
    faults: dict[str, dict[Path, list[Fault]]] = defaultdict(dict)  # by the pattern of the row
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if leaf.path not in named:
            nameless.append(leaf)
            continue
        one = named[leaf.path]
        of_row = faults[one.pattern][leaf.path] = list(_not_named(leaf, one.name))
        if of_row:
            continue
        names = one.name.tensors(leaf.shape)
        asked.update(names)
        if terms.dtypes == "files" and names[0] in tensors:
            value = jax.ShapeDtypeStruct(leaf.shape, tensors[names[0]].dtype)
            leaf = leaf._replace(value=value)
        form = _form(leaf, one, names, tensors)
        of_row += _faults(leaf, one, names, form, tensors, terms)
        if not of_row and form is not None:
            stacked, dtype = len(one.name.places), np.dtype(leaf.value.dtype)
            weights.append(Weight(leaf.path, leaf.shape, dtype, sharding, names, stacked, form))
    unasked = {name: tensor for name, tensor in tensors.items() if name not in asked}
    return weights, [*_faulty(leaves, faults, tensors), *_nameless(nameless, unasked)], asked


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


def _not_named(leaf: Leaf, name: TensorName) -> Iterator[Fault]:
    """Why an array is in no tensors of such a name."""
    stacked = len(name.places)
    if is_key(leaf.value.dtype):
        yield _KEY
    elif stacked > len(leaf.shape) or 0 in leaf.shape[:stacked]:
        why = f"`{name.name}` is a tensor for each element of a dimension, and it has none"
        yield Fault(why, why)


def _kept(leaf: Leaf, stacked: int) -> int:
    """How many dimensions of a tensor are of layers or experts, which `.T` leaves in front.

    Args:
        leaf: the array.
        stacked: how many of its dimensions have a tensor for each element.
    """
    kept = max(leaf.stacked - stacked, 0)
    return kept + int(leaf.axes[stacked + kept :][:1] == ("experts",))


def _form(
    leaf: Leaf, named: Named, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> TensorForm | None:
    """How the first tensor has an array; None if it does not."""
    if names[0] not in tensors:
        return None
    stacked = len(named.name.places)
    shape, stored = leaf.shape[stacked:], tensors[names[0]].shape
    return TensorForm.fitting(shape, stored, named.name, _kept(leaf, stacked))


def _faults(
    leaf: Leaf,
    named: Named,
    names: Sequence[str],
    form: TensorForm | None,
    tensors: Mapping[str, Tensor],
    terms: Terms,
) -> Iterator[Fault]:
    """Why an array cannot be read.

    Args:
        leaf: the array.
        named: its name.
        names: the names of all tensors that have it.
        form: how the first of them has it; None if it does not.
        tensors: all tensors in the files.
        terms: what is cast, and what messages say to do.
    """
    if missing := [one for one in names if one not in tensors]:
        yield _missing(missing, named, whole=len(missing) == len(names))
        return
    for (stored, dtype), own in _by_type(names, tensors).items():
        fits = form is not None and stored == tensors[names[0]].shape
        if fits and (terms.dtypes == "cast" or dtype == str(leaf.value.dtype)):
            continue
        remedy = terms.dtype.format(dtype=dtype_text(leaf.value.dtype))
        if not fits:
            remedy = _transposed(leaf, named, stored) or _other_order(leaf, named, stored)
        all_of_them = len(own) == len(names)
        where = (named.text, named.row) if all_of_them else (listed(own), listed(own))
        found = array_text(tensors[own[0]])
        found += "" if named.name.part == WHOLE else ", of which a part is asked for"
        why, of_row = (f"the files have `{one}` as {found}" for one in where)
        yield Fault(why, of_row, remedy)


def _by_type(
    names: Sequence[str], tensors: Mapping[str, Tensor]
) -> dict[tuple[tuple[int, ...], str], list[str]]:
    """Names of tensors by their shape and dtype: layers may differ."""
    found: dict[tuple[tuple[int, ...], str], list[str]] = defaultdict(list)
    for name in names:
        found[tensors[name].shape, str(tensors[name].dtype)].append(name)
    return found


def _transposed(leaf: Leaf, named: Named, stored: Sequence[int]) -> str:
    """What to write if a tensor has the transpose; empty if it does not."""
    name, stacked = named.name, len(named.name.places)
    if name.order:
        return ""
    other = name._replace(order=() if name.order is None else None)
    if TensorForm.fitting(leaf.shape[stacked:], stored, other, _kept(leaf, stacked)) is None:
        return ""
    row = f"{named.row}.T" if name.order is None else named.row.removesuffix(".T")
    return f"transposed? write {row_text(named.pattern, row)}"


def _other_order(leaf: Leaf, named: Named, stored: Sequence[int]) -> str:
    """What to do with a tensor that has the elements of an array in another order; empty if it has
    others."""
    part, shape = named.name.part, leaf.shape[len(named.name.places) :]
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
