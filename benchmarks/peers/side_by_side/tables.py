"""What each library says of each mistake ─► the lines of the page's table."""

import re

from side_by_side import LIBRARIES, MISTAKES

_LONGEST = 240  # characters of a message in a cell


def said_table(found: dict[str, dict[str, str]]) -> list[str]:
    """A heading for each mistake, and a row for each library."""
    rows: list[str] = []
    for mistake, what in MISTAKES.items():
        rows += [
            f"### {what[0].upper()}{what[1:]}",
            "",
            "| | says |",
            "|---|---|",
        ]
        rows += [
            f"| {LIBRARIES[name]} | {cell(found[name][mistake])} |"
            for name in LIBRARIES
        ]
        rows.append("")
    return rows[:-1]


def cell(message: str) -> str:
    """A message on one line, its end cut off, with what Markdown would read as its own escaped."""
    line = (
        re.sub(r"\s+", " ", message)
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("_", "\\_")
    )
    if len(line) <= _LONGEST:
        return line
    begin = line[:_LONGEST].rsplit(" ", 1)[0]
    if begin.count("`") % 2:  # the end of this code is cut off
        begin = begin[: begin.rindex("`")].rstrip()
    return f"{begin} …"
