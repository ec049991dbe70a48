"""Two ledgers ─► what differs between them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from functree.compiled.collective import Collective
from functree.compiled.fold import axes_text, full_paths
from functree.compiled.memory import Memory
from functree.layout.diff import Change, changes
from functree.layout.plan.fold import bytes_text
from functree.tree.paths import Path


class _Moved(NamedTuple):
    """All that is moved by one kind of collective, over the same mesh axes and in the same phase, for one parameter."""

    runs: int
    bytes: int


def moved_changes(before: Sequence[Collective], after: Sequence[Collective]) -> Iterator[Change]:
    """What differs in what two programs move. Names of instructions and lines of source are not compared."""
    return changes(
        _by_parameter(before),
        _by_parameter(after),
        lambda key: key[0][0] if len(key[0]) == 1 else Path(),
        _properties,
        lambda key, moved: (_what(key), bytes_text(moved.bytes)),
    )


def memory_changes(before: Memory, after: Memory) -> Iterator[Change]:
    """What differs in the memory of two programs."""
    for name in ("outputs", "aliases", "temporaries", "peak"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield Change(Path(), f"bytes of {name}", old, new)
    yield from changes(
        before.arguments,
        after.arguments,
        lambda path: path,
        lambda path, size: {"bytes on each device": size},
        lambda path, size: ("argument", bytes_text(size)),
    )


_Key = tuple[tuple[Path, ...], str, tuple[str, ...] | None, str | None]


def _by_parameter(collectives: Sequence[Collective]) -> dict[_Key, _Moved]:
    found: dict[_Key, _Moved] = {}
    for one in collectives:
        key = (tuple(full_paths(one)), one.kind, one.mesh_axes, one.phase)
        runs, size = found.get(key, (0, 0))
        found[key] = _Moved(runs + (one.count or 1), size + one.total)
    return found


def _properties(key: _Key, moved: _Moved) -> dict[str, int]:
    what = _what(key)
    return {f"bytes of {what}": moved.bytes, f"runs of {what}": moved.runs}


def _what(key: _Key) -> str:
    paths, kind, axes, phase = key
    of = f" for {', '.join(map(str, paths))}" if len(paths) > 1 else ""
    return f"{kind} over {axes_text(axes)}{f' ({phase})' if phase else ''}{of}"
