"""A manifest and a tree like the one that was saved ─► the arrays that are restored: each with what
was saved for it, and where it is created. All that differs is one error."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from functree.devices.placement import is_sharded_as
from functree.errors import CheckpointError, Problem, count, listed
from functree.io.casts import cast_on_devices, cast_on_host, lost_on_host
from functree.io.checkpoints.engine import from_stored, stored_form, stored_sharding
from functree.io.checkpoints.manifest import Manifest, SavedArray
from functree.io.laid_out import is_enabled, misplaced
from functree.labels.filters import (
    ClassFilter,
    Conjunction,
    Disjunction,
    ExactPath,
    Filter,
    FunctionFilter,
    Glob,
    Negation,
    Regex,
    Search,
    meant,
)
from functree.labels.leaf import Leaf, meeting
from functree.labels.leaves import Leaves
from functree.tree.arrays import array_text, dtype_text, is_key
from functree.tree.paths import Path


class Wanted(NamedTuple):
    """An array that is restored.

    Attributes:
        leaf: the array in `like`.
        row: what was saved for it.
        sharding: where it is created; None for an array of numpy, and for one that is not committed
            to a device.
    """

    leaf: Leaf
    row: SavedArray
    sharding: Sharding | None

    @property
    def name(self) -> str:
        """The name of what is stored."""
        return str(self.row.same_as or self.row.path)

    @property
    def target(self) -> Any:
        """What is read."""
        shape, dtype = stored_form(self.row.shape, self.row.dtype)
        if self.sharding is None or not is_enabled(dtype):
            return np.empty(shape, dtype)
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=stored_sharding(self.sharding, len(shape))
        )

    def array(self, stored: Any) -> tuple[Any, int | jax.Array]:
        """The array from what was read, with the dtype of that in `like`; and how many of its
        values this dtype does not hold."""
        dtype = self.leaf.value.dtype
        array = from_stored(stored, self.row.dtype, self.sharding)
        if self.sharding is not None and isinstance(array, jax.Array):
            if array.dtype == dtype and is_sharded_as(array, self.sharding):
                return array, 0
            return cast_on_devices(array, dtype, self.sharding)
        if array.dtype == dtype:
            return self._from_host(array, self.sharding), 0
        return self._from_host(array, self.sharding), lost_on_host(np.asarray(array), dtype)

    def _from_host(self, array: Any, sharding: Sharding | None) -> Any:
        """The array from one of the host: it is committed to no device, or was read by numpy since
        JAX has no such dtype."""
        value = self.leaf.value
        if sharding is not None:
            return jax.make_array_from_callback(
                array.shape, sharding, lambda index: cast_on_host(array[index], value.dtype)
            )
        array = cast_on_host(array, value.dtype)
        if isinstance(value, jax.Array):
            return jnp.asarray(array)
        return array[()] if isinstance(value, np.generic) else array


def wanted_arrays(
    folder: FilePath,
    manifest: Manifest,
    leaves: Leaves,
    shardings: Sequence[Sharding | None],
    only: Filter | None,
    cast: bool,
) -> list[Wanted]:
    """The arrays that are restored.

    Args:
        folder: the checkpoint, for the message.
        manifest: what it says.
        leaves: the arrays in `like`.
        shardings: where each of them is created.
        only: the filter of those that are restored.
        cast: whether they may have other dtypes.

    Raises:
        CheckpointError: they differ from those that were saved.
    """
    rows = {row.path: row for row in manifest.rows}
    alone = [row for row in manifest.rows if row.path not in set(leaves.paths)]
    taken: list[tuple[Leaf, Sharding | None]] = []
    for leaf, to in zip(leaves.leaves, shardings, strict=True):
        if only is None or only(leaf):
            taken.append((leaf, to))
    if only is not None:
        alone = _matched(folder, only, leaves.leaves, alone)
    problems: list[Problem] = []
    for leaf, _ in taken:
        problems += _differences(leaf, rows.get(leaf.path), cast)
    for row in alone:
        why = "was saved, and `like` has no such array"
        problems.append(Problem(row.path, row.shape, _row_text(row), why))
    if problems:
        differ = {Path(problem.path or ()) for problem in problems}
        remedy = ""
        # Without these it would match nothing, which is an error.
        if only is not None and all(leaf.path in differ for leaf, _ in taken):
            remedy = f"correct only={only!r}, which matches nothing else, or `like`"
        elif not differ.issuperset((*rows, *leaves.paths)):
            remedy = _remedy(differ, only)
        # One of another dtype is a problem with a remedy of its own.
        for i, problem in enumerate(problems):
            if not problem.remedy:
                problems[i] = problem._replace(remedy=remedy)
    for leaf, to in taken:
        problems += misplaced(leaf, to)
    problems += _untied([leaf for leaf, _ in taken], rows)
    problems += meeting(leaf for leaf, _ in taken)
    if problems:
        wrong = count(len({problem.path for problem in problems}), "leaf")
        raise CheckpointError(f"{wrong} cannot be restored from {folder}", problems)
    return [Wanted(leaf, rows[leaf.path], to) for leaf, to in taken]


# The most paths in one remedy: a longer filter nobody would read.
_MOST = 6


def _remedy(differ: Collection[Path], only: Filter | None) -> str:
    """How to restore all arrays but some."""
    if len(differ) > _MOST:
        return "to restore the rest, and take these from `like`: a filter without them as `only=`"
    # As JSON: a key of a dict may have a quote or a backslash in it, and is to be pasted.
    texts = [json.dumps(str(path), ensure_ascii=False) for path in sorted(differ, key=str)]
    globs = " | ".join(f"ft.glob({text})" for text in texts)
    written = f"~{globs}" if len(texts) == 1 else f"~({globs})"
    if only is not None:
        written = f"({only!r}) & {written}"
    return f"to restore the rest, and take these from `like`: only={written}"


def _differences(leaf: Leaf, row: SavedArray | None, cast: bool) -> Iterator[Problem]:
    """In what an array in `like` differs from the one that was saved."""
    if row is None:
        yield leaf.problem("is in `like`, and was not saved", "")
        return
    if leaf.shape != row.shape:
        yield leaf.problem(f"was saved as {_row_text(row)}: another shape", "")
    if leaf.value.dtype == row.dtype:
        return
    saved, wanted = dtype_text(row.dtype), dtype_text(leaf.value.dtype)
    if is_key(row.dtype) or is_key(leaf.value.dtype):
        kinds = is_key(row.dtype) and is_key(leaf.value.dtype)
        other = "random keys of another kind" if kinds else "and random keys are no numbers"
        how = (
            "make `like` with the same `jax.random.key(..., impl=)`"
            if kinds
            else "save and restore typed keys alike"
        )
        yield leaf.problem(f"was saved as {saved}: {other}", how)
    elif not cast:
        yield leaf.problem(f"was saved as {saved}", f"to have it as {wanted}: cast=True")


def _row_text(row: SavedArray) -> str:
    """An array that was saved, in messages."""
    return array_text(row) + (f'   "{row.axes}"' if any(row.axes) else "")


def _matched(
    folder: FilePath, only: Filter, leaves: Sequence[Leaf], alone: Sequence[SavedArray]
) -> list[SavedArray]:
    """The arrays that only the checkpoint has, and that a filter matches.

    Raises:
        CheckpointError: the filter, or a pattern, a class or a function in it, matches nothing on
            either side. With a typing error it would restore nothing, or everything under a `~`.
    """
    saved: list[Leaf] = []
    for row in alone:
        value = jax.ShapeDtypeStruct(row.shape, row.dtype)
        saved.append(Leaf(row.path, value, row.axes, seen=row.path, buffer=row.buffer))
    matched = [row for row, leaf in zip(alone, saved, strict=True) if _matches(only, leaf)]
    lost: list[Filter] = []
    for part in _naming(only):
        if not any(map(part, leaves)) and not any(_matches(part, leaf) for leaf in saved):
            lost.append(part)
    both = [*leaves, *saved]
    if not lost and not matched and both and not any(map(only, leaves)):
        # Each part matches something, and they nothing together; or it is a property of no array.
        lost = [only]
    if lost:
        remedy = "correct the filter, or leave it out"
        raise CheckpointError(
            f"only={only!r}: {listed([repr(part) for part in lost])} matches no array of {folder}, "
            f"and none of `like`{meant(lost[0], both)}",
            [leaf.problem("does not match", remedy) for leaf in both],
        )
    return matched


def _matches(item: Filter, leaf: Leaf) -> bool:
    """Whether a filter matches an array that only the checkpoint has: classes and functions are
    asked of `like` alone, and match no such array."""
    match item:
        case Conjunction():
            return all(_matches(part, leaf) for part in item.parts)
        case Disjunction():
            return any(_matches(part, leaf) for part in item.parts)
        case Negation():
            return not _matches(item.part, leaf)
        case ClassFilter() | FunctionFilter():
            return False
    return item(leaf)


def _naming(item: Filter) -> Iterator[Filter]:
    """The parts of a filter that were written for certain arrays, and not for a property that no
    array may have."""
    match item:
        case Glob() | ExactPath() | Regex() | Search() | ClassFilter() | FunctionFilter():
            yield item
        case Conjunction() | Disjunction():
            for part in item.parts:
                yield from _naming(part)
        case Negation():
            yield from _naming(item.part)


def _untied(leaves: Sequence[Leaf], rows: Mapping[Path, SavedArray]) -> Iterator[Problem]:
    """The places of one array in `like` for which two different arrays were saved."""
    first: dict[int, SavedArray] = {}  # by the array in `like`
    for leaf in leaves:
        row = rows.get(leaf.path)
        if row is None or not isinstance(leaf.value, jax.Array):
            continue
        other = first.setdefault(id(leaf.value), row)
        stored_once = (other.same_as or other.path) == (row.same_as or row.path)
        if not stored_once and (row.digest is None or row.digest != other.digest):
            why = f"is one array with `{other.path}` in `like`, and two arrays were saved"
            yield leaf.problem(why, "untie them in `like`: `ft.copy` one of them")
