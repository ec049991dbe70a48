"""Ordered filters ─► the index of the first one that matches a leaf."""

import re
from collections.abc import Callable, Sequence

from functree.labels.filters.filter import Filter, Glob
from functree.labels.leaf import Leaf
from functree.tree.globs import glob_regex, last_part, literal_end, literal_text, match_text


class FirstMatch:
    """A function from a leaf to the index of the first of some ordered filters that matches it.

    Consecutive globs are combined into regular expressions and a dict of literal paths: a layout
    may have fifty globs, and a model ten thousand leaves.
    """

    def __init__(self, filters: Sequence[Filter]):
        self.steps: list[Callable[[Leaf], int | None]] = []
        # The consecutive globs that have no step yet. Any other filter ends such a run, because it
        # is tried between the globs before it and those after it.
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
        """The index of the first filter that matches the leaf; None if there is none."""
        for step in self.steps:
            index = step(leaf)
            if index is not None:
                return index
        return None


def _single_step(index: int, item: Filter) -> Callable[[Leaf], int | None]:
    """The step of one filter that is not a glob."""
    return lambda leaf: index if item(leaf) else None


def _glob_steps(run: Sequence[tuple[int, Glob]]) -> list[Callable[[Leaf], int | None]]:
    """One step for a run of globs, or none if the run is empty.

    Globs without wildcards are looked up in a dict. Most of the others end in a plain key
    (`**.bias`), and are tried only on paths that end in this key.
    """
    if not run:
        return []
    literals: dict[str, int] = {}
    # By the key that the globs end in; globs that end in a wildcard are at "", and are tried on
    # every path.
    ending: dict[str, list[tuple[int, str]]] = {}
    for index, item in run:
        literal = literal_text(item.pattern)
        if literal is None:
            ending.setdefault(literal_end(item.pattern), []).append(
                (index, glob_regex(item.pattern))
            )
        else:
            # Of two equal globs, the first one decides.
            literals.setdefault(literal, index)
    matches = {end: _first_of(patterns) for end, patterns in ending.items()}
    last = run[-1][0] + 1  # larger than each index of the run: no glob matches

    def first(leaf: Leaf) -> int | None:
        # Several globs may match, one by each of these ways and by each path of the leaf. The first
        # glob is the one with the least index.
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
    """A function from a path's text to the index of the first pattern that matches it, or to a
    given number."""
    # One group for each pattern: Python tries alternatives in their order, so the group that
    # matched is the first pattern that matches. The patterns have no groups of their own, which
    # would shift the numbers.
    match = re.compile("|".join(f"({regex})" for _, regex in patterns)).fullmatch

    def first(text: str, none: int) -> int:
        found = match(text)
        if found is None or found.lastindex is None:
            return none
        return patterns[found.lastindex - 1][0]

    return first
