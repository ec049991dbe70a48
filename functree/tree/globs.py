"""A glob over the parts of a path ─► a regular expression; a path ─► the text that this expression
is matched with."""

import re
from collections.abc import Iterable
from functools import lru_cache

from functree.errors import RuleError, did_you_mean, nearest
from functree.tree.paths import QUOTED, Path, part_text, tokens

# Paths are matched as texts with control characters in them, because a key may contain any
# printable character.
_SEPARATOR = (
    "\x1f"  # before each part of a path: the key "a.b" must not look like the two keys a and b
)
_NO_STRING = "\x1e"  # before a key that is not a string: the keys 0 and "0" must differ
# A key that contains one of these characters itself is escaped by a third one.
_ESCAPED = {"\x1d": "\x1d", "\x1c": _NO_STRING, "\x1b": _SEPARATOR}
_ESCAPES = str.maketrans({character: f"\x1d{by}" for by, character in _ESCAPED.items()})


def match_text(path: Path) -> str:
    """The text of a path that globs are matched with."""
    text = ""
    for key in path:
        # This runs for each leaf and filter. Most keys are identifiers, which need no escapes.
        if not (type(key) is str and key.isidentifier()):
            key = _escaped(key)
        text += _SEPARATOR + key
    return text


def _escaped(key: object) -> str:
    if isinstance(key, str):
        return key.translate(_ESCAPES)
    return _NO_STRING + part_text(key).translate(_ESCAPES)


def _unescaped(key: str) -> str:
    """What `_escaped` was made from: a string key itself, and the text of another one."""
    key = key.removeprefix(_NO_STRING)
    # In one pass: a character that was escaped is not the begin of another escape.
    return re.sub("\x1d(.)", lambda found: _ESCAPED[found[1]], key)


@lru_cache(maxsize=4096)
def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A glob as a compiled expression for `match_text`. Raises RuleError for a part that cannot be
    read."""
    return re.compile(glob_regex(pattern))


@lru_cache(maxsize=4096)
def capturing_pattern(pattern: str) -> re.Pattern[str]:
    """As `glob_pattern`, with a group for each wildcard; `captured` has what these match."""
    return re.compile(glob_regex(pattern, groups=True))


def captured(found: re.Match[str]) -> list[str]:
    """The text that each wildcard stands for: of `**` keys with dots between them, or none."""
    texts: list[str] = []
    for group in found.groups():
        keys = group.removeprefix(_SEPARATOR).split(_SEPARATOR)
        texts.append(".".join(map(_unescaped, keys)))
    return texts


def glob_regex(pattern: str, *, groups: bool = False) -> str:
    """The regular expression for `match_text`, without groups, or with one for each wildcard.
    Raises RuleError for a part that cannot be read."""
    try:
        return _regex(pattern, groups)
    except RuleError:
        _refuse_shell(pattern)
        raise


def _regex(pattern: str, groups: bool) -> str:
    expression = ""
    before = None
    for part in tokens(pattern):
        # `**.**` means the same as `**`, and two such expressions in a row would take quadratic
        # time to fail.
        if part != "**" or before != "**":
            expression += _part_regex(part, pattern, groups)
        before = part
    return expression


# A part as shells and `fnmatch` read it: `?` is any character, and `[qkv]`, `[0-9]` and `[!b]` are
# one of some. A key in brackets is a part alone, and is refused only if it is no literal; a number
# in brackets is meant as an index.
_SHELL_PART = re.compile(r"(?<![^.])(?:[\w*?-]|\[[!^]?[\w-]+\])+(?![^.])")
_INDEXED = re.compile(r"\w*(?:\[-?\d+\])+")


def _refuse_shell(pattern: str) -> None:
    """Raise RuleError if a part of what is no glob has the wildcards of shells."""
    for part in _SHELL_PART.findall(re.sub(QUOTED, '"', pattern)):
        if "?" in part or ("[" in part and not _INDEXED.fullmatch(part)):
            raise RuleError(
                f"glob {pattern!r}: cannot read {part!r}; only `*` and `**` are wildcards: "
                "write `*` for any text within one part, or a glob for each, as in "
                '`ft.glob("**.wq") | ft.glob("**.wk")`; '
                "a filter may also be a regular expression (`re.compile`)"
            ) from None


def literal_text(pattern: str) -> str | None:
    """The only `match_text` that a glob without wildcards matches; None for a glob with
    wildcards."""
    if any("*" in token and token[0] not in '"[' for token in tokens(pattern)):
        return None
    return match_text(Path.parse(pattern))


def _part_regex(token: str, pattern: str, groups: bool) -> str:
    """The expression for one part of a glob."""
    if token == "**":
        parts = f"(?:{_SEPARATOR}[^{_SEPARATOR}]*)*"
        return f"({parts})" if groups else parts
    if "{" in token and token[0] not in '"[':
        raise RuleError(
            f"glob {pattern!r}: {token!r} is how a plan prints several paths at once, and no glob: "
            "write `*` in its place, or a glob for each, as in "
            '`ft.glob("blocks.*.up") | ft.glob("blocks.*.down")`'
        )
    if "*" not in token or token[0] in '"[':
        return re.escape(match_text(Path.parse(token)))
    if "**" in token or not re.fullmatch(r"[\w*]+", token):
        raise RuleError(
            f"glob {pattern!r}: cannot read {token!r}; `*` matches any text within one part, "
            "`**` alone between dots matches any number of parts, "
            "and a key that is not an identifier is quoted"
        )
    # `1*` matches the list index 10 and also the dict key "10".
    number = f"{_NO_STRING}?" if token[0].isdigit() else ""
    text = f"([^{_SEPARATOR}]*)" if groups else f"[^{_SEPARATOR}]*"
    return _SEPARATOR + number + token.replace("*", text)


def meant_glob(pattern: str, paths: Iterable[Path]) -> str:
    """The text `; did you mean ...?` for a glob that matches no path: with the nearest keys that
    occur, and with a wildcard where parts are missing. Empty if that matches no path either.

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
    # Of no key alone is it known what it should be, but they may look like a path together.
    layers = [["*" if type(key) is int else part_text(key) for key in path] for path in paths]
    return did_you_mean(pattern, dict.fromkeys(map(".".join, layers)))
