"""A ledger ─► JSON, and back."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from functree.compiled.collective import Collective
from functree.compiled.memory import BytesByPath, Memory
from functree.layout.json_text import loaded
from functree.tree.paths import Path

FORMAT = 1

_NUMBER, _NAME = (int, None), (str, None)
_FORM = {
    "backend": str,
    "mesh": {...: int},
    "collectives": [
        {
            "kind": str,
            "mesh_axes": ([str], None),
            "group_size": _NUMBER,
            "bytes": int,
            "count": _NUMBER,
            "paths": [str],
            "arguments": [str],
            "phase": _NAME,
            "source": _NAME,
            "op": str,
        }
    ],
    "memory": {"arguments": {...: int}, "outputs": int, "aliases": int, "temporaries": int, "peak": int},
    "warnings": [str],
    "warnings_known": bool,
    "not_understood": [str],
}


class LedgerParts(NamedTuple):
    """What a ledger consists of."""

    collectives: Sequence[Collective]
    memory: Memory
    backend: str
    sizes: Mapping[str, int]
    warnings: Sequence[str]
    warnings_known: bool
    not_understood: Sequence[str]


def ledger_json(parts: LedgerParts) -> str:
    """A ledger as JSON."""
    memory = parts.memory
    return json.dumps(
        {
            "functree": "ledger",
            "format": FORMAT,
            "backend": parts.backend,
            "mesh": dict(parts.sizes),
            "collectives": [_collective(one) for one in parts.collectives],
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
        },
        indent=1,
    )


def read_ledger_json(text: str) -> LedgerParts:
    """The parts of a ledger from its JSON.

    Raises:
        FunctreeError: the text is something else.
    """
    data = loaded(text, "ledger", FORMAT, _FORM)
    memory = data["memory"]
    arguments = BytesByPath({Path(path): size for path, size in memory["arguments"].items()})
    return LedgerParts(
        [_read_collective(one) for one in data["collectives"]],
        Memory(arguments, memory["outputs"], memory["aliases"], memory["temporaries"], memory["peak"]),
        data["backend"],
        data["mesh"],
        data["warnings"],
        data["warnings_known"],
        data["not_understood"],
    )


def _collective(one: Collective) -> dict[str, Any]:
    fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    return {**fields, "paths": [str(path) for path in one.paths]}


def _read_collective(data: Mapping[str, Any]) -> Collective:
    axes = data["mesh_axes"]
    return Collective(
        data["kind"],
        None if axes is None else tuple(axes),
        data["group_size"],
        data["bytes"],
        data["count"],
        tuple(map(Path, data["paths"])),
        tuple(data["arguments"]),
        data["phase"],
        data["source"],
        data["op"],
    )
