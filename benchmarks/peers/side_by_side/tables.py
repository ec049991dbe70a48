"""`said_table` turns each library's messages about each mistake into tables."""

import re

from side_by_side import LIBRARIES, MISTAKES

_LONGEST = 200  # characters of a message in a cell


def said_table(found: dict[str, dict[str, str]]) -> list[str]:
    """Return a table for each mistake, with a row for each library."""
    rows: list[str] = []
    for mistake, what in MISTAKES.items():
        rows += [
            f"### {what[0].upper()}{what[1:]}",
            "",
            "| | message |",
            "|---|---|",
        ]
        rows += [
            f"| {LIBRARIES[name]} | {cell(found[name][mistake])} |"
            for name in LIBRARIES
        ]
        rows.append("")
    return rows[:-1]


def cell(message: str) -> str:
    """Return a message on one line, truncated, with Markdown's characters escaped."""
    line = (
        re.sub(r"\s+", " ", message)
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("_", "\\_")
    )
    if len(line) <= _LONGEST:
        return line
    begin = line[:_LONGEST].rsplit(" ", 1)[0]
    if begin.count("`") % 2:  # the cut is within inline code
        begin = begin[: begin.rindex("`")].rstrip()
    return f"{begin} …"
