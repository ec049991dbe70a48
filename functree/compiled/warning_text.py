"""What a compiler has warned of ─► a few short lines, equal ones once with their number."""

import re
from collections.abc import Sequence

from functree.compiled.table_rows import source_end
from functree.errors import count

MOST = 4
"""The number of lines; the others are counted."""
LONGEST = 80

# "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
# efficiently for HLO operation %x = f32[8,16]{1,0} copy(...), metadata={op_name="w" ...} at f.py:3"
_REMATERIALIZED = re.compile(r"^\[SPMD\] (Involuntary full rematerialization)\.")
_ARRAY = re.compile(r"operation %\S+ = (\w+\[[\d,]*\])")
_NAME = re.compile(r'op_name="([^"]*)"')
_LINE = re.compile(r" at (\S+:\d+)$")


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """The warnings in short; none if there are none."""
    if not warnings:
        return []
    short: dict[str, int] = {}
    for warning in warnings:
        text = short_warning(warning)
        short[text] = short.get(text, 0) + 1
    lines = [f"the compiler warns {count(len(warnings), 'time')} (see `ledger.warnings`):"]
    for text, number in list(short.items())[:MOST]:
        lines.append(f"{text} (×{number})" if number > 1 else text)
    if len(short) > MOST:
        lines.append(f"and {len(short) - MOST} more")
    return lines


def short_warning(warning: str) -> str:
    """What a warning says, and of which array and line."""
    kind = _REMATERIALIZED.match(warning)
    if kind is None:
        text = warning.removeprefix("[SPMD] ")
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    text = kind[1].lower()
    array, name, line = (one.search(warning) for one in (_ARRAY, _NAME, _LINE))
    if array is not None:
        text += f" of {array[1]}"
    if line is not None:
        return f"{text}, {source_end(line[1])}"
    if name is not None:
        # The last part of a name such as `jit(step)/jvp(model)/dot_general` says most.
        text += f", {name[1].rpartition('/')[2]}"
    return text
