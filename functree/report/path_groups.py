"""Paths that differ only in their indices ─► one text for all of them."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from functree.tree.paths import Path, part_text

_T = TypeVar("_T")


def grouped(values: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """The values with equal keys, in the order in which the keys come first."""
    groups: dict[Hashable, list[_T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def pattern_of(path: Path) -> tuple[object, ...]:
    """A path without its indices. An int that is the key of a dict counts as an index too."""
    return tuple("*" if isinstance(key, int) else key for key in path)


def but_for_key(paths: Sequence[Path], from_end: int) -> Hashable:
    """What paths of one length have in common, but for the key at this position from the end: it is
    equal for `attn.query` and `attn.key`. None if they have no such key, or it is an index: those
    of layers are joined by `common_path`, as far as that is exact."""
    if len(paths[0]) < from_end:
        return None
    keys = [frozenset(keys) for keys in zip(*paths, strict=True)]
    if any(isinstance(key, int) for key in keys.pop(-from_end)):
        return None
    return from_end, *keys


def common_path(paths: Sequence[Path]) -> str:
    """`blocks.{0-10,12}.w` for the paths `blocks.0.w` to `blocks.10.w` and `blocks.12.w`."""
    return ".".join(common_parts(paths)) or "(the array)"


def common_parts(paths: Sequence[Path]) -> list[str]:
    """The parts of such a text: `blocks`, `{0-10,12}`, `w`."""
    # Where several keys differ, `{0-1}.{0-1}` is exact only if the paths are all combinations. The
    # caller knows whether they are.
    return [alternatives(keys) for keys in zip(*paths, strict=True)]


def alternatives(keys: Sequence[object]) -> str:
    """The text of a key that may be one of several: `{0-3}`, `{query,key}`."""
    different = list(dict.fromkeys(keys))
    if len(different) == 1:
        return part_text(different[0])
    indices = [key for key in different if isinstance(key, int)]
    if len(indices) == len(different):
        return "{" + _ranges(sorted(indices)) + "}"
    return "{" + ",".join(map(part_text, different)) + "}"


def _ranges(indices: Sequence[int]) -> str:
    """The text of sorted indices: `0-3,5` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts: list[str] = []
    for first, *others in runs:
        texts.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(texts)
