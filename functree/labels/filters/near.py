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
from functree.tree.globs import meant_glob
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
            return meant_glob(item.pattern, paths)
        case Regex():
            return did_you_mean(item.pattern.pattern, paths)
        case Search():
            return did_you_mean(item.pattern, paths)
        case ExactPath():
            return did_you_mean(item.path, paths)
        case ClassFilter():
            return _of_that_name(item, leaves)
    return ""


def _of_that_name(item: ClassFilter, leaves: Iterable[Leaf]) -> str:
    """The end of a message about classes, if the tree has another class of one of their names."""
    within = {cls for leaf in leaves for cls in leaf.within}
    for cls in item.classes:
        for other in within - {cls}:
            if other.__name__ != cls.__name__:
                continue
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                return f"; the tree has the class `{other.__module__}.{other.__qualname__}`"
            return (
                f"; the tree has an earlier class `{cls.__name__}`: after its definition has run "
                "again, make the tree again, or write a pattern for its paths"
            )
    return ""
