"""A ledger ─► JSON, and back."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from functree.compiled.collective import Collective
from functree.compiled.memory import BytesByPath, Memory
from functree.errors import FunctreeError
from functree.layout.plan.codec import loaded
from functree.tree.paths import Path

FORMAT = 1


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
    data = loaded(text, "ledger", FORMAT)
    try:
        memory = dict(data["memory"])
        arguments = BytesByPath({Path(path): size for path, size in memory.pop("arguments").items()})
        return LedgerParts(
            [_read_collective(one) for one in data["collectives"]],
            Memory(arguments, **memory),
            data["backend"],
            dict(data["mesh"]),
            list(data["warnings"]),
            data["warnings_known"],
            list(data["not_understood"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise FunctreeError(f"the JSON is not of a whole ledger: {error!r}") from error


def _collective(one: Collective) -> dict[str, Any]:
    fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    return {**fields, "paths": [str(path) for path in one.paths]}


def _read_collective(data: Mapping[str, Any]) -> Collective:
    axes = data["mesh_axes"]
    return Collective(
        **{
            **data,
            "mesh_axes": None if axes is None else tuple(axes),
            "paths": tuple(map(Path, data["paths"])),
            "arguments": tuple(data["arguments"]),
        }
    )
