"""A glob becomes a regular expression, and a path becomes a text to match with the expression."""

import re
from collections.abc import Iterable
from functools import lru_cache

from functree.errors import RuleError, did_you_mean, nearest
from functree.tree.paths import Path, part_text, tokens

# A path is matched as a text with control characters, because a key may contain any printable
# character. Keys that contain these control characters are not supported.
_SEPARATOR = (
    "\x1f"  # before each key of a path: the key "a.b" must not look like the two keys a and b
)
_NO_STRING = "\x1e"  # before a key that is not a string: the keys 0 and "0" must differ


def match_text(path: Path) -> str:
    """Format a path as the text that globs are matched against."""
    text = ""
    for key in path:
        text += _SEPARATOR
        text += key if isinstance(key, str) else _NO_STRING + part_text(key)
    return text


@lru_cache(maxsize=4096)
def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a glob to a regular expression for `match_text`, with a group for each wildcard.

    Raises:
        RuleError: if the glob cannot be parsed.
    """
    expression = ""
    before = None
    for part in tokens(pattern):
        # `**.**` means the same as `**`. With the expression twice in a row, a failing match would
        # take quadratic time.
        if part != "**" or before != "**":
            expression += _part_regex(part, pattern)
        before = part
    return re.compile(expression)


def captured(found: re.Match[str]) -> list[str]:
    """Return the text that each wildcard matched.

    The text of `**` is any number of keys, separated by dots.
    """
    texts: list[str] = []
    for group in found.groups():
        keys = group.replace(_NO_STRING, "").removeprefix(_SEPARATOR)
        texts.append(keys.replace(_SEPARATOR, "."))
    return texts


def literal_text(pattern: str) -> str | None:
    """Return the only `match_text` that a glob without wildcards matches.

    The result is None for a glob with wildcards.
    """
    if any("*" in token and token[0] not in '"[' for token in tokens(pattern)):
        return None
    return match_text(Path.parse(pattern))


def _part_regex(token: str, pattern: str) -> str:
    """Return the regular expression for one key of a glob.

    Raises:
        RuleError: if the key cannot be parsed.
    """
    if token == "**":
        return f"((?:{_SEPARATOR}[^{_SEPARATOR}]*)*)"
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
    return _SEPARATOR + number + token.replace("*", f"([^{_SEPARATOR}]*)")


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
