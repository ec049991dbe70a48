"""A glob over the parts of a path ─► a regular expression, and a path ─► the text that it matches."""

import re
from functools import lru_cache

from functree.errors import RuleError
from functree.tree.paths import Path, part_text, tokens

_SEPARATOR = "\x1f"  # before each part of a path, so that no key can look like two
_NO_STRING = "\x1e"  # before a key that is not a string, so that 0 and "0" differ
_ESCAPES = str.maketrans({"\x1d": "\x1d\x1d", _NO_STRING: "\x1d\x1c", _SEPARATOR: "\x1d\x1b"})


def match_text(path: Path) -> str:
    """A path as globs see it."""
    return "".join([_SEPARATOR + (key if type(key) is str and key.isidentifier() else _escaped(key)) for key in path])


def _escaped(key: object) -> str:
    return key.translate(_ESCAPES) if isinstance(key, str) else _NO_STRING + part_text(key).translate(_ESCAPES)


@lru_cache(maxsize=4096)
def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A glob as a compiled expression over `match_text`. Raises RuleError for a part that cannot be read."""
    return re.compile(glob_regex(pattern))


def glob_regex(pattern: str) -> str:
    """The regular expression over `match_text`, without groups. Raises RuleError for a part that cannot be read."""
    parts = list(tokens(pattern))
    again = [i > 0 and parts[i - 1] == part == "**" for i, part in enumerate(parts)]
    return "".join(_part_regex(part, pattern) for part, skip in zip(parts, again, strict=True) if not skip)


def literal_text(pattern: str) -> str | None:
    """The one `match_text` that a glob without wildcards matches; None for others."""
    if any("*" in token and token[0] not in '"[' for token in tokens(pattern)):
        return None
    return match_text(Path.parse(pattern))


def literal_end(pattern: str) -> str:
    """The `last_part` of all that a glob matches; empty where it ends in a wildcard or in a number."""
    end = list(tokens(pattern))[-1]
    return match_text(Path((end,))) if end.isidentifier() else ""


def last_part(text: str) -> str:
    """The last part of a `match_text`."""
    return text[text.rfind(_SEPARATOR) :]


def _part_regex(token: str, pattern: str) -> str:
    if token == "**":
        return f"(?:{_SEPARATOR}[^{_SEPARATOR}]*)*"
    if "*" not in token or token[0] in '"[':
        return re.escape(match_text(Path.parse(token)))
    if "**" in token or not re.fullmatch(r"[\w*]+", token):
        raise RuleError(
            f"glob {pattern!r}: cannot read {token!r}; `*` stands for any text within one part, `**` alone "
            "between dots for any number of parts, and a key that is not an identifier is quoted"
        )
    number = f"{_NO_STRING}?" if token[0].isdigit() else ""
    return _SEPARATOR + number + token.replace("*", f"[^{_SEPARATOR}]*")
