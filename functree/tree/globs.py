"""A glob over the parts of a path ─► a regular expression, and a path ─► the text that it matches."""

import json
import re
from typing import Any

from functree.errors import RuleError
from functree.tree.paths import Path, part_text, tokens

_SEPARATOR = "\x1f"  # before each part of a path, so that no key can look like two


def match_text(path: Path) -> str:
    """A path as globs see it. Escapes keep strings, integers and other keys apart."""
    return "".join([_SEPARATOR + (key if type(key) is str and key.isidentifier() else _escaped(key)) for key in path])


def _escaped(key: Any) -> str:
    return json.dumps(key, ensure_ascii=False)[1:-1] if isinstance(key, str) else "\x1e" + part_text(key)


def glob_regex(pattern: str) -> str:
    """The regular expression over `match_text`. Raises RuleError for a part that cannot be read."""
    return "".join(_part_regex(token, pattern) for token in tokens(pattern))


def literal_text(pattern: str) -> str | None:
    """The one `match_text` that a glob without wildcards matches; None for others."""
    if any("*" in token and token[0] not in '"[' for token in tokens(pattern)):
        return None
    return match_text(Path.parse(pattern))


def _part_regex(token: str, pattern: str) -> str:
    if token == "**":
        return f"(?:{_SEPARATOR}[^{_SEPARATOR}]*)*"
    if "*" not in token or token[0] in '"[':
        return re.escape(match_text(Path.parse(token)))
    if "**" in token or not re.fullmatch(r"[\w*]+", token):
        raise RuleError(
            f"glob {pattern!r}: cannot read {token!r}; `*` stands for any text within one part, `**` alone between dots "
            "for any number of parts, and a key that is not an identifier is quoted"
        )
    number = "\x1e?" if token[0].isdigit() else ""
    return _SEPARATOR + number + token.replace("*", f"[^{_SEPARATOR}]*")
