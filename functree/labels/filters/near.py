"""A filter that matches none of some leaves ─► what may have been meant."""

from collections.abc import Iterable

from functree.errors import did_you_mean
from functree.labels.filters.filter import (
    ClassFilter,
    ExactPath,
    Filter,
    Glob,
    Regex,
    Search,
)
from functree.labels.leaf import Leaf
from functree.tree.near_patterns import meant_pattern
from functree.tree.paths import Path


def meant(item: Filter, leaves: Iterable[Leaf]) -> str:
    """The text `; did you mean ...?` with a pattern or path that matches one of the leaves; empty
    if none is near, and for a filter that is no pattern."""
    paths: dict[Path, None] = {}
    for leaf in leaves:
        if leaf.seen is not None:
            paths[leaf.seen] = None
        paths.update(dict.fromkeys(root.path for root in leaf.roots))
    match item:
        case Glob():
            return meant_pattern(item.pattern, paths)
        case Regex():
            return did_you_mean(item.pattern.pattern, paths)
        case Search():
            return did_you_mean(item.pattern, paths)
        case ExactPath():
            return did_you_mean(item.path, paths)
        case ClassFilter():
            return _of_another_cell(item, leaves)
    return ""


def _of_another_cell(item: ClassFilter, leaves: Iterable[Leaf]) -> str:
    """The end of a message about a class, if the tree has another class of that name."""
    within = {cls for leaf in leaves for cls in leaf.within}
    for cls in item.classes:
        if any(other.__qualname__ == cls.__qualname__ for other in within - {cls}):
            return (
                f"; the tree has another class `{cls.__name__}`: was the cell that defines it run "
                "again? Make the tree anew, or name the class by its path"
            )
    return ""
