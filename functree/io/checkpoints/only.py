"""The filter of `restore(only=)` ─► the saved arrays that it matches; an error for what it names in
vain."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path as FilePath

import jax

from functree.errors import CheckpointError, Problem, count, listed, warn
from functree.io.checkpoints.manifest import SavedArray, is_named
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
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves
from functree.tree.interfaces import HoldsState


def saved_leaves(rows: Iterable[SavedArray], only: Filter) -> list[Leaf]:
    """Arrays that were saved, as leaves that a filter can be asked about.

    They have no classes, only the names of them: each is below those classes of which a filter may
    ask, and whose name is among these.
    """
    asked = _classes(only)
    found: list[Leaf] = []
    for row in rows:
        within: list[type] = []
        for cls in asked:
            if any(is_named(cls, name) for name in row.classes or ()):
                within.append(cls)
        found.append(_leaf(row, tuple(within)))
    return found


def check_only(
    folder: FilePath, only: Filter, leaves: Leaves, alone: Sequence[SavedArray]
) -> list[Leaf]:
    """Look for what a filter names in vain: a part with a typing error would restore nothing, or
    under a `~` everything, without a word.

    Args:
        folder: the checkpoint, for messages.
        only: the filter.
        leaves: the arrays in `like`.
        alone: the arrays that only the checkpoint has.

    Returns:
        What the filter matches of `alone`.

    Raises:
        CheckpointError: the filter, or a pattern, a class or a function in it, matches nothing.
    """
    saved = saved_leaves(alone, only)
    both = [*leaves.leaves, *saved]
    named = list(_naming(only))
    lost = [part for part in named if not any(map(part, both))]
    if not lost and not any(map(only, both)) and both:
        # Each part matches something, and they nothing together; or it is a property of no array.
        lost = [only]
    if lost:
        near = meant(lost[0], both)
        remedy = "correct the filter, or leave it out"
        problems: list[Problem] = []
        for leaf in both:
            problems.append(leaf.problem("does not match", remedy))
        raise CheckpointError(
            f"only={only!r}: {listed([repr(part) for part in lost])} matches no array of {folder}, "
            f"and none of `like`{near}",
            problems,
        )
    _warn_of_unknown(folder, only, alone)
    return [leaf for leaf in saved if only(leaf)]


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


def _classes(only: Filter) -> tuple[type, ...]:
    """The classes of which a filter may ask: those in it, and that by which state is known."""
    found: dict[type, None] = {HoldsState: None}
    for part in _naming(only):
        if isinstance(part, ClassFilter):
            found.update(dict.fromkeys(part.classes))
    return tuple(found)


def _leaf(row: SavedArray, within: tuple[type, ...]) -> Leaf:
    value = jax.ShapeDtypeStruct(row.shape, row.dtype)
    return Leaf(row.path, value, row.axes, within, row.path, buffer=row.buffer)


def _warn_of_unknown(folder: FilePath, only: Filter, alone: Sequence[SavedArray]) -> None:
    """Warn of arrays of which nobody knows whether a filter by class matches them."""
    asked = _classes(only)
    unknown: list[str] = []
    for row in alone:
        # It may be below all of these classes, and a buffer.
        most = _leaf(row._replace(buffer=True), asked)
        if row.classes is None and only(_leaf(row, ())) != only(most):
            unknown.append(str(row.path))
    if unknown:
        warn(
            f"{folder} was saved by a version that kept no classes, so {only!r} may be about "
            f"{count(len(unknown), 'array')} that `like` does not have, and that are not restored: "
            f"{listed(unknown)}"
        )
