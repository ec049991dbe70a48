"""A ledger ─► JSON, and back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from functree.argument_checks import shown
from functree.compiled.collective import MOVES, Collective
from functree.compiled.memory import BytesByPath, Memory
from functree.errors import FunctreeValueError
from functree.report.json_text import SIZE, loaded
from functree.tree.paths import Path

FORMAT = 1

# What a collective and a ledger have in JSON: see `functree.report.json_text.Form`.
_NUMBER, _NAME = (SIZE, None), (str, None)
_FORM = {
    "backend": str,
    "mesh": {...: SIZE},
    "collectives": [
        {
            "kind": str,
            "mesh_axes": ([str], None),
            "group_size": _NUMBER,
            "bytes": SIZE,
            "count": _NUMBER,
            "paths": [str],
            "arguments": [str],
            "phase": _NAME,
            "source": _NAME,
            "op": str,
        }
    ],
    "memory": {
        "arguments": {...: SIZE},
        "outputs": SIZE,
        "aliases": SIZE,
        "temporaries": SIZE,
        "peak": SIZE,
    },
    "warnings": [str],
    "warnings_known": bool,
    "not_understood": [str],
}
_ADDED = {"idle": [str]}


class LedgerParts(NamedTuple):
    """What a ledger consists of, for `Ledger`, which is above this module."""

    collectives: Sequence[Collective]
    memory: Memory
    backend: str
    sizes: Mapping[str, int]
    warnings: Sequence[str]
    warnings_known: bool
    not_understood: Sequence[str]
    idle: Sequence[str]


def ledger_json(parts: LedgerParts) -> str:
    """A ledger as JSON."""
    memory = parts.memory
    return json.dumps(
        {
            "functree": "ledger",
            "format": FORMAT,
            "backend": parts.backend,
            "mesh": dict(parts.sizes),
            "collectives": list(map(_collective, parts.collectives)),
            "memory": {
                "arguments": {str(path): size for path, size in memory.arguments.items()},
                "outputs": memory.outputs,
                "aliases": memory.aliases,
                "temporaries": memory.temporaries,
                "peak": memory.peak,
            },
            "warnings": list(parts.warnings),
            "warnings_known": parts.warnings_known,
            "not_understood": list(parts.not_understood),
            "idle": list(parts.idle),
        },
        indent=1,
    )


def read_ledger_json(text: str) -> LedgerParts:
    """The parts of a ledger from its JSON.

    Raises:
        FunctreeError: the text is something else.
    """
    data = loaded(text, "ledger", FORMAT, _FORM, _ADDED)
    memory = data["memory"]
    # By paths again, so that `memory.arguments` is looked up as that of a ledger that was read from
    # a program.
    arguments = BytesByPath({Path(path): size for path, size in memory["arguments"].items()})
    return LedgerParts(
        list(map(_read_collective, data["collectives"])),
        Memory(
            arguments, memory["outputs"], memory["aliases"], memory["temporaries"], memory["peak"]
        ),
        data["backend"],
        data["mesh"],
        data["warnings"],
        data["warnings_known"],
        data["not_understood"],
        data.get("idle", []),
    )


def _collective(one: Collective) -> dict[str, Any]:
    return {**vars(one), "paths": list(map(str, one.paths))}


def _read_collective(data: Mapping[str, Any]) -> Collective:
    # JSON has lists in the place of tuples. Names that a later functree has added are left out.
    axes = data["mesh_axes"]
    if axes is not None:
        axes = tuple(axes)
    if len(data["paths"]) != len(data["arguments"]):
        raise FunctreeValueError(
            f"the JSON is not of a whole ledger: {data['op']!r} has {len(data['paths'])} `paths` "
            f"and {len(data['arguments'])} `arguments`"
        )
    moves = data.get("moves")  # of a functree that did not know it, there is none
    if moves not in (None, *MOVES):
        raise FunctreeValueError(
            f"the JSON is not of a ledger: {data['op']!r} has `moves` {shown(moves)}, which is "
            f"{', '.join(MOVES)} or null"
        )
    return Collective(
        kind=data["kind"],
        mesh_axes=axes,
        group_size=data["group_size"],
        bytes=data["bytes"],
        count=data["count"],
        paths=tuple(map(Path, data["paths"])),
        arguments=tuple(data["arguments"]),
        phase=data["phase"],
        source=data["source"],
        op=data["op"],
        moves=moves,
    )
