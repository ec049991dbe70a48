"""The paths that a checkpoint and a tree do not share ─► the `only=` that restores the rest."""

import json
from collections.abc import Collection

from functree.labels.filters import Filter
from functree.tree.paths import Path, part_text

# The most globs in one message: a longer filter nobody would read.
_MOST = 6


def without(differ: Collection[Path], paths: Collection[Path], only: Filter | None) -> str:
    """What to write to restore all but some paths; empty if there is nothing short to write.

    Args:
        differ: the paths of the arrays that differ.
        paths: the paths of all arrays, of the checkpoint and of the tree.
        only: what was written already.

    Examples:
        >>> without([Path("head.w")], [Path("head.w"), Path("body.w")], None)
        'to restore the rest, and take these from `like`:
        only=~ft.glob("head.**")'
    """
    shared = set(paths) - set(differ)
    globs, by_name = _by_subtree(differ, shared), _by_name(differ, shared)
    if by_name and len(by_name) < len(globs):
        globs = by_name
    if not shared or len(globs) > _MOST:
        return ""
    # As JSON: a key of a dict may have a quote or a backslash in it, and is to be pasted.
    each = [f"ft.glob({json.dumps(glob, ensure_ascii=False)})" for glob in globs]
    written = f"~{each[0]}" if len(each) == 1 else f"~({' | '.join(each)})"
    if only is not None:
        written = f"({only!r}) & {written}"
    return f"to restore the rest, and take these from `like`: only={written}"


def _by_subtree(differ: Collection[Path], shared: Collection[Path]) -> list[str]:
    """A glob for each largest subtree in which all paths differ."""
    # The subtrees, by their paths, in which some array is shared: these cannot be left out.
    kept: set[tuple[object, ...]] = set()
    for path in shared:
        kept.update(path[:n] for n in range(len(path) + 1))
    globs: list[str] = []
    for path in sorted(differ, key=str):
        glob = str(path)
        for n in range(len(path)):
            if path[:n] not in kept:
                glob = f"{Path(path[:n])}.**"
                break
        if glob not in globs:  # several paths are in one subtree
            globs.append(glob)
    return globs


def _by_name(differ: Collection[Path], shared: Collection[Path]) -> list[str]:
    """A glob for each name that no shared path ends with; empty if there is a path without one.

    After surgery in each block of a model this is one glob, such as `**.bias`.
    """
    names = {path[-1:] for path in shared}
    if any(path[-1:] in names for path in differ):
        return []
    return sorted({f"**.{part_text(path[-1])}" for path in differ if path})
