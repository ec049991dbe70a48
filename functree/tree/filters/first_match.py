"""Ordered filters ─► the index of the first one that matches a leaf."""

import re
from collections.abc import Callable, Sequence

from functree.tree.filters.filter import Filter, Glob
from functree.tree.globs import glob_regex, last_part, literal_end, literal_text, match_text
from functree.tree.leaf import Leaf


class FirstMatch:
    """Ordered filters ─► the index of the first that matches a leaf.

    Runs of globs are one regular expression and one dict of literal paths, so that a leaf is not asked fifty times.
    """

    def __init__(self, filters: Sequence[Filter]):
        self.steps: list[Callable[[Leaf], int | None]] = []
        run: list[tuple[int, Glob]] = []
        for index, item in enumerate(filters):
            if isinstance(item, Glob):
                run.append((index, item))
                continue
            self.steps += _glob_steps(run)
            run = []
            self.steps.append(_single_step(index, item))
        self.steps += _glob_steps(run)

    def __call__(self, leaf: Leaf) -> int | None:
        for step in self.steps:
            index = step(leaf)
            if index is not None:
                return index
        return None


def _single_step(index: int, item: Filter) -> Callable[[Leaf], int | None]:
    return lambda leaf: index if item(leaf) else None


def _glob_steps(run: Sequence[tuple[int, Glob]]) -> list[Callable[[Leaf], int | None]]:
    """One step for a run of globs: the least index among the literal ones and the patterns that match.

    Most globs end in a plain key: those are only tried on paths that end in it.
    """
    if not run:
        return []
    literals: dict[str, int] = {}
    ending: dict[str, list[tuple[int, str]]] = {}
    for index, item in run:
        literal = literal_text(item.pattern)
        if literal is None:
            ending.setdefault(literal_end(item.pattern), []).append((index, glob_regex(item.pattern)))
        else:
            literals.setdefault(literal, index)
    matches = {end: _first_of(patterns) for end, patterns in ending.items()}
    last = run[-1][0] + 1

    def first(leaf: Leaf) -> int | None:
        least = last
        for path in leaf.patterned:
            text = match_text(path)
            least = min(least, literals.get(text, last))
            for end in ("", last_part(text)):
                if end in matches:
                    least = min(least, matches[end](text, last))
        return None if least == last else least

    return [first]


def _first_of(patterns: Sequence[tuple[int, str]]) -> Callable[[str, int], int]:
    match = re.compile("|".join(f"({regex})" for _, regex in patterns)).fullmatch

    def first(text: str, none: int) -> int:
        found = match(text)
        return none if found is None or found.lastindex is None else patterns[found.lastindex - 1][0]

    return first
