"""Two ledgers ─► what differs between them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from functree.compiled.collective import Collective
from functree.compiled.memory import Memory
from functree.compiled.table_rows import axes_text, full_paths
from functree.report.diff import Change, SharedWhat, changes
from functree.report.table import Bytes
from functree.tree.paths import Path


class _Total(NamedTuple):
    """What collectives of one kind, mesh axes and phase move for one parameter."""

    runs: int
    bytes: int


def moved_changes(before: Sequence[Collective], after: Sequence[Collective]) -> Iterator[Change]:
    """What differs in what two programs move.

    Names of instructions and lines of source are not compared: both change when nothing else does.
    """
    return changes(
        _by_parameter(before),
        _by_parameter(after),
        _path,
        _properties,
        lambda key, total: (_what(key), Bytes(total.bytes)),
    )


def moved_total(before: Sequence[Collective], after: Sequence[Collective]) -> Change:
    """The bytes that two programs move to each device, all together."""
    old, new = (Bytes(sum(one.total for one in moved)) for moved in (before, after))
    return Change(Path(), "moved to each device", old, new)


def memory_changes(before: Memory, after: Memory) -> Iterator[Change]:
    """What differs in the memory of two programs."""
    for name in ("outputs", "aliases", "temporaries", "peak"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield Change(Path(), f"bytes of {name}", Bytes(old), Bytes(new))
    yield from changes(
        before.arguments,
        after.arguments,
        lambda path: path,
        lambda path, size: {"bytes on each device": Bytes(size)},
        lambda path, size: ("argument", Bytes(size)),
    )


_Key = tuple[tuple[Path, ...], str, tuple[str, ...] | None, str | None]
"""The parameters, the kind, the mesh axes and the phase of some collectives."""


def _by_parameter(collectives: Sequence[Collective]) -> dict[_Key, _Total]:
    found: dict[_Key, _Total] = {}
    for one in collectives:
        key = (tuple(full_paths(one)), one.kind, one.mesh_axes, one.phase)
        runs, size = found.get(key, (0, 0))
        if one.count is None:
            runs += 1  # as in `Ledger.totals`, a loop of unknown length counts once
        else:
            runs += one.count
        found[key] = _Total(runs, size + one.total)
    return found


def _path(key: _Key) -> Path:
    """The parameter that is served, if it is only one; of several, `_what` tells the paths."""
    paths, *_ = key
    if len(paths) != 1:
        return Path()
    return paths[0]


def _properties(key: _Key, total: _Total) -> dict[str, int]:
    return {_what(key, "bytes of "): Bytes(total.bytes), _what(key, "runs of "): total.runs}


def _what(key: _Key, of: str = "") -> str:
    paths, kind, axes, phase = key
    text = f"{of}{kind} over {axes_text(axes)}"
    if phase:
        text += f" ({phase})"
    return SharedWhat.of(f"{text} for ", paths) if len(paths) > 1 else text
