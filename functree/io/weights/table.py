"""A table from patterns of paths to names in files ─► for each array the text of its name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from functree.errors import FunctreeValueError, Problem
from functree.io.weights.tensor_names import TensorName
from functree.labels.leaf import Leaf
from functree.tree.globs import captured, capturing_pattern, match_text, meant_glob
from functree.tree.paths import Path

_WILDCARD = re.compile(r"(\.?)(\*\*|\*)")


class Named(NamedTuple):
    """The name of an array, and the row of the table that gives it.

    Attributes:
        text: the name, with `.T` and such behind it.
        pattern: the pattern of the row.
        row: the name in the row, in which wildcards may be.
    """

    text: str
    pattern: str
    row: str

    @property
    def name(self) -> TensorName:
        """What the text says."""
        return TensorName.parse(self.text)


def row_text(pattern: str, name: str) -> str:
    """A row of a table as it is written."""
    return f'"{pattern}": "{name}"'


def check_table(table: Mapping[str, str], failure: str) -> None:
    """Raise an error that lists the rows which fit no tree.

    Raises:
        RuleError: a pattern is no glob.
        FunctreeValueError: a name has another number of wildcards than its pattern, or asks for a
            part that there cannot be.
    """
    problems: list[Problem] = []
    for pattern, name in table.items():
        ours, theirs = capturing_pattern(pattern).groups, len(_WILDCARD.findall(name))
        row = row_text(pattern, name)
        if ours != theirs:
            why = f"the pattern has {ours} of `*`, and the name has {theirs}"
            remedy = "write as many in a name as in its pattern: each stands for the same text"
            problems.append(Problem(None, None, row, why, remedy))
        part = TensorName.parse(name).part
        if not part.is_there:
            why = f"of {part.of} parts there are 0 to {part.of - 1}, and none is asked for"
            remedy = "`[0/3]` is the first of 3 parts, and `[0:2/4]` the first two of 4"
            problems.append(Problem(None, None, row, why, remedy))
    if problems:
        raise FunctreeValueError(failure, problems)


def names_of(
    leaves: Sequence[Leaf], table: Mapping[str, str]
) -> tuple[dict[Path, Named], list[Problem]]:
    """The name of each array that has one, by the first pattern that matches its path; and a
    problem for each row by which none is named."""
    patterns = {pattern: capturing_pattern(pattern) for pattern in table}
    named: dict[Path, Named] = {}
    matching: set[str] = set()
    for leaf in leaves:
        text = match_text(leaf.path)
        for pattern, compiled in patterns.items():
            found = compiled.fullmatch(text)
            if found is None:
                continue
            matching.add(pattern)
            if leaf.path not in named:
                name = _filled(table[pattern], captured(found))
                named[leaf.path] = Named(name, pattern, table[pattern])
    return named, list(_unused(leaves, table, named, matching))


def _unused(
    leaves: Sequence[Leaf],
    table: Mapping[str, str],
    named: Mapping[Path, Named],
    matching: set[str],
) -> Iterator[Problem]:
    used = {one.pattern for one in named.values()}
    for pattern in table:
        row = row_text(pattern, table[pattern])
        if pattern not in matching:
            near = meant_glob(pattern, [leaf.path for leaf in leaves])
            yield Problem(None, None, row, f"matches no array{near}")
        elif pattern not in used:
            why = "matches only arrays that an earlier pattern names"
            yield Problem(None, None, row, why, "write the narrower pattern first")


def _filled(name: str, texts: Sequence[str]) -> str:
    """A name, with a text in the place of each wildcard."""
    rest = iter(texts)

    def fill(found: re.Match[str]) -> str:
        # `**` may stand for no part at all, and then it has no dot either.
        text = next(rest)
        return found[1] + text if text else ""

    return _WILDCARD.sub(fill, name).removeprefix(".")
