"""The paths that a checkpoint and a tree do not share ─► the `only=` that restores the rest."""

import json
from collections.abc import Collection

from functree.tree.filters.filter import Filter
from functree.tree.paths import Path, part_text

_MOST = 6  # globs in one message


def without(differ: Collection[Path], paths: Collection[Path], only: Filter | None) -> str:
    """What to write to restore all but some paths; empty if there is nothing short to write.

    Args:
        differ: the paths of the arrays that differ.
        paths: the paths of all arrays, of the checkpoint and of the tree.
        only: what was written already.

    Examples:
        >>> without([Path("head.w")], [Path("head.w"), Path("body.w")], None)
        'to restore the rest, and take these from `like`: only=~ft.glob("head.**")'
    """
    shared = set(paths) - set(differ)
    globs = min(filter(None, (_by_subtree(differ, shared), _by_name(differ, shared))), key=len)
    if not shared or len(globs) > _MOST:
        return ""
    each = [f"ft.glob({json.dumps(glob, ensure_ascii=False)})" for glob in globs]
    rest = f"~{each[0]}" if len(each) == 1 else f"~({' | '.join(each)})"
    written = rest if only is None else f"({only!r}) & {rest}"
    return f"to restore the rest, and take these from `like`: only={written}"


def _by_subtree(differ: Collection[Path], shared: Collection[Path]) -> list[str]:
    """A glob for each largest subtree in which all paths differ."""
    kept = {path[:n] for path in shared for n in range(len(path) + 1)}
    globs = dict[str, None]()
    for path in sorted(differ, key=str):
        top = next((path[:n] for n in range(len(path)) if path[:n] not in kept), None)
        globs[str(path) if top is None else f"{Path(top)}.**"] = None
    return list(globs)


def _by_name(differ: Collection[Path], shared: Collection[Path]) -> list[str]:
    """A glob for each name that no shared path ends with; empty if there is a path without one."""
    names = {path[-1:] for path in shared}
    if any(path[-1:] in names for path in differ):
        return []
    return sorted({f"**.{part_text(path[-1])}" for path in differ if path})
