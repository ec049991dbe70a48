"""A glob becomes a regular expression, and a path becomes a text to match with the expression."""

import re
from collections.abc import Iterable
from functools import lru_cache

from functree.errors import RuleError, did_you_mean, nearest
from functree.tree.paths import Path, part_text, tokens

# A path is matched as a text with control characters, because a key may contain any printable
# character.
_SEPARATOR = (
    "\x1f"  # before each key of a path: the key "a.b" must not look like the two keys a and b
)
_NO_STRING = "\x1e"  # before a key that is not a string: the keys 0 and "0" must differ
# These characters are escaped where they occur in a key.
_ESCAPED = {"\x1d": "\x1d", "\x1c": _NO_STRING, "\x1b": _SEPARATOR}
_ESCAPES = str.maketrans({character: f"\x1d{by}" for by, character in _ESCAPED.items()})


def match_text(path: Path) -> str:
    """Format a path as the text that globs are matched against."""
    text = ""
    for key in path:
        # This runs for each leaf and filter. Most keys are identifiers, which need no escaping.
        if not (type(key) is str and key.isidentifier()):
            key = _escaped(key)
        text += _SEPARATOR + key
    return text


def _escaped(key: object) -> str:
    if isinstance(key, str):
        return key.translate(_ESCAPES)
    return _NO_STRING + part_text(key).translate(_ESCAPES)


def _unescaped(key: str) -> str:
    """Undo `_escaped`: return a string key itself, and any other key as its text."""
    key = key.removeprefix(_NO_STRING)
    # All escapes are undone in one pass, so that an escaped character does not begin another one.
    return re.sub("\x1d(.)", lambda escape: _ESCAPED[escape[1]], key)


@lru_cache(maxsize=4096)
def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a glob to a regular expression for `match_text`.

    Raises:
        RuleError: if the glob cannot be parsed.
    """
    return re.compile(glob_regex(pattern))


@lru_cache(maxsize=4096)
def capturing_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a glob to an expression with a group for each wildcard, for `captured`.

    Raises:
        RuleError: if the glob cannot be parsed.
    """
    return re.compile(glob_regex(pattern, groups=True))


def captured(found: re.Match[str]) -> list[str]:
    """Return the text that each wildcard matched.

    The text of `**` is any number of keys, separated by dots.
    """
    texts: list[str] = []
    for group in found.groups():
        keys = group.removeprefix(_SEPARATOR).split(_SEPARATOR)
        texts.append(".".join(map(_unescaped, keys)))
    return texts


def glob_regex(pattern: str, *, groups: bool = False) -> str:
    """Return the regular expression of a glob for `match_text`.

    Args:
        pattern: the glob.
        groups: whether each wildcard is a group.

    Raises:
        RuleError: if the glob cannot be parsed.
    """
    expression = ""
    before = None
    for part in tokens(pattern):
        # `**.**` means the same as `**`. With the expression twice in a row, a failing match would
        # take quadratic time.
        if part != "**" or before != "**":
            expression += _part_regex(part, pattern, groups)
        before = part
    return expression


def literal_text(pattern: str) -> str | None:
    """Return the only `match_text` that a glob without wildcards matches.

    The result is None for a glob with wildcards.
    """
    if any("*" in token and token[0] not in '"[' for token in tokens(pattern)):
        return None
    return match_text(Path.parse(pattern))


def _part_regex(token: str, pattern: str, groups: bool) -> str:
    """Return the regular expression for one key of a glob.

    Raises:
        RuleError: if the key cannot be parsed.
    """
    if token == "**":
        parts = f"(?:{_SEPARATOR}[^{_SEPARATOR}]*)*"
        return f"({parts})" if groups else parts
    if "*" not in token or token[0] in '"[':
        return re.escape(match_text(Path.parse(token)))
    if "**" in token or not re.fullmatch(r"[\w*]+", token):
        raise RuleError(
            f"glob {pattern!r}: cannot parse {token!r}: write `*` for any text within one key, "
            "write `**` between dots for any number of keys, "
            "and quote each key that is not an identifier"
        )
    # `1*` matches both the list index 10 and the dict key "10".
    number = f"{_NO_STRING}?" if token[0].isdigit() else ""
    text = f"([^{_SEPARATOR}]*)" if groups else f"[^{_SEPARATOR}]*"
    return _SEPARATOR + number + token.replace("*", text)


def meant_glob(pattern: str, paths: Iterable[Path]) -> str:
    """Return the text `; did you mean ...?` for a glob that matches no path.

    A suggestion uses the nearest existing keys, or a wildcard where keys are missing.
    The text is empty if no suggestion matches a path.

    >>> meant_glob("**.bais", [Path.parse("layers.0.bias")])
    '; did you mean `**.bias`?'
    >>> meant_glob("layers.w", [Path.parse("layers.0.w")])
    '; did you mean `layers.*.w`?'
    """
    paths = list(paths)
    texts = list(map(match_text, paths))
    known = {part_text(key) for path in paths for key in path if isinstance(key, str)}
    parts: list[str] = []
    for part in tokens(pattern):
        is_key = "*" not in part and not part.startswith("[") and part not in known
        parts += (nearest(part, known, 1) if is_key else []) or [part]
    candidates = [parts]
    candidates += [[*parts[:i], "**", *parts[i + 1 :]] for i, x in enumerate(parts) if x == "*"]
    candidates += [[*parts[:i], "*", *parts[i:]] for i in range(1, len(parts))]
    if parts:
        candidates += [["**", *parts], [*parts, "**"]]
    for candidate in candidates:
        written = ".".join(candidate)
        if written != pattern and any(map(glob_pattern(written).fullmatch, texts)):
            return f"; did you mean `{written}`?"
    # No replacement of single keys matches, but the whole glob may resemble a path.
    layers = [["*" if type(key) is int else part_text(key) for key in path] for path in paths]
    return did_you_mean(pattern, dict.fromkeys(map(".".join, layers)))
