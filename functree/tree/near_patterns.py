"""A glob that matches no path ─► the nearest one that does."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, product

from functree.errors import did_you_mean, longer_form, nearest
from functree.tree.globs import glob_pattern, literal_text, match_text
from functree.tree.paths import Path, part_text, tokens


def meant_pattern(pattern: str, paths: Iterable[Path]) -> str:
    """The text `; did you mean ...?` with the nearest glob that matches a path; empty if none is
    near.

    A key may be misspelled, and parts may be missing.

    >>> meant_pattern("**.layer.*", [Path.parse("layers.0.w")])
    '; did you mean `**.layers.**`?'
    >>> meant_pattern("layers.w", [Path.parse("layers.0.w")])
    '; did you mean `layers.*.w`?'
    """
    written, paths = list(tokens(pattern)), list(paths)
    if not written:
        return ""
    texts = _different(written, paths)
    for parts in _spelled(written, paths):
        for candidate in _widened(parts):
            # Two in a row say no more than one.
            if candidate == written or ("**", "**") in pairwise(candidate):
                continue
            if any(map(glob_pattern(".".join(candidate)).fullmatch, texts)):
                return f"; did you mean `{'.'.join(candidate)}`?"
    # Of no key alone is it known what it should be, but they may look like a path together.
    if literal_text(pattern) is not None:
        return did_you_mean(pattern, paths)
    return did_you_mean(pattern, dict.fromkeys(map(_with_any_index, paths)))


def _with_any_index(path: Path) -> str:
    """The glob for a path in all layers of a list."""
    return ".".join("*" if type(key) is int else part_text(key) for key in path)


def _is_number(part: str) -> bool:
    return part[0].isdigit()


def _different(written: Sequence[str], paths: Iterable[Path]) -> list[str]:
    """What globs are matched with, of one path for all layers of a list."""
    # All layers have the same parts below them. Only a pattern with a number tells one from
    # another.
    if any(map(_is_number, written)):
        return list(map(match_text, paths))
    different: dict[tuple[object, ...], Path] = {}
    for path in paths:
        different.setdefault(tuple(0 if type(key) is int else key for key in path), path)
    return list(map(match_text, different.values()))


# A pattern of many unknown keys is for another tree, and no typo.
_MOST = 50


def _spelled(written: Sequence[str], paths: Iterable[Path]) -> Iterator[list[str]]:
    """The parts of a glob, with keys that occur in the place of those that do not."""
    # Of other keys, such as those of an Enum, the text is no part of a glob.
    keys = (key for path in paths for key in path if isinstance(key, str))
    known = dict.fromkeys(map(part_text, keys))
    choices: list[Sequence[str]] = []
    for part in written:
        if part in known or "*" in part or part.startswith("["):
            choices.append([part])
        elif _is_number(part):
            choices.append([part, "*"])  # no index is nearer than another
        else:
            form = longer_form(part, known)
            choices.append(nearest(part, known, 3) + ([] if form is None else [form]))
    for parts in islice(product(*choices), _MOST):
        yield list(parts)


def _widened(parts: list[str]) -> Iterator[list[str]]:
    """The parts of a glob, and then with wildcards where some may be missing."""
    yield parts
    # `**.layers.*` for what is deeper below.
    for i, part in enumerate(parts):
        if part == "*":
            yield [*parts[:i], "**", *parts[i + 1 :]]
    inside = range(1, len(parts))
    for i in inside:
        yield [*parts[:i], "*", *parts[i:]]
    yield ["**", *parts]
    yield [*parts, "**"]
    for i in inside:
        yield [*parts[:i], "**", *parts[i:]]
