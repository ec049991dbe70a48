"""A `Path` holds the plain keys from a tree's root to a leaf, and can be parsed from its text."""

import ast
import json
import re
from collections.abc import Container, Hashable, Iterable, Iterator
from itertools import repeat
from typing import Any, Self

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from functree.argument_checks import shown
from functree.errors import RuleError

Key = Hashable
"""A plain key: a field name, a dict key or an index."""

Keys = tuple[Key, ...]
"""The plain keys of a path.

A walk visits many nodes, so it makes a `Path` only for the paths that are kept.
Python's garbage collector tracks each `Path`, but not plain tuples of strings.
"""


# Keys have the type `Any`, so that callers can index a path whose keys they know.
class Path(tuple[Any, ...]):
    """The keys from a tree's root to a leaf: field names, dict keys, list indices.

    A path is a tuple. Its text joins the keys with dots. A string key that is not an identifier is
    quoted. A dict key that is neither a string nor an integer is written in brackets. Each text
    therefore parses back to its path, unless a key, such as an Enum, has no Python literal.

    Args:
        keys: the plain keys, outermost first; or the text of a path.

    Raises:
        RuleError: if `keys` is not iterable.
        RuleError: if `keys` is a string that is not the text of a path.

    Examples:
        >>> path = ft.Path(("blocks", 3, "attn", "query"))
        >>> str(path)
        'blocks.3.attn.query'
        >>> ft.Path.parse('a."b.c"."0".0')
        Path('a."b.c"."0".0')
        >>> path[:2] == ("blocks", 3)
        True
    """

    __slots__ = ()

    def __new__(cls, keys: Iterable[Key] = ()) -> Self:
        # This case comes first, because most paths are made from a tuple of keys.
        if type(keys) is tuple:
            return super().__new__(cls, keys)
        if isinstance(keys, str):
            return super().__new__(cls, map(_plain, tokens(keys), repeat(keys)))
        if not isinstance(keys, Iterable):
            raise RuleError(
                f"Path: cannot make a path from {shown(keys)}: "
                "pass a sequence of keys, or a string such as `blocks.3.attn`"
            )
        return super().__new__(cls, keys)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a path.

        Raises:
            RuleError: if `text` is not a string.
            RuleError: if `text` is not the text of a path.
        """
        if not isinstance(text, str):
            raise RuleError(
                f"Path.parse: cannot parse {shown(text)}: pass a string such as `blocks.3.attn`"
            )
        return cls(text)

    @classmethod
    def of(cls, key_path: Iterable[Any]) -> Self:
        """Convert a JAX key path, such as `jax.tree_util.tree_flatten_with_path` returns."""
        return cls(map(plain_key, key_path))

    def __str__(self) -> str:
        return ".".join(map(part_text, self))

    def __repr__(self) -> str:
        return f"Path({str(self)!r})"

    def __truediv__(self, key: Key) -> "Path":
        return Path((*self, key))


ROOT = Path()


def first_beginning(path: Keys, paths: Container[Keys]) -> Path | None:
    """Return the shortest prefix of a path that a collection of paths contains, or None.

    The prefix may be the path itself.
    """
    for depth in range(len(path) + 1):
        if path[:depth] in paths:
            return Path(path[:depth])
    return None


def plain_key(key: Any) -> Any:
    """Return the field name, dict key or index in a JAX key."""
    match key:
        case GetAttrKey():
            return key.name
        case SequenceKey():
            return key.idx
        case DictKey() | FlattenedIndexKey():
            return key.key
    return key


def part_text(key: Key) -> str:
    """Format one key of a path."""
    if isinstance(key, str):
        return key if key.isidentifier() else json.dumps(key, ensure_ascii=False)
    # The exact type is compared, since `True` is an int, and its text would parse as a name.
    if type(key) is int:
        return str(key)
    return f"[{key!r}]"


# A token is a quoted key, a key in brackets, or a run of other characters up to the next dot. A key
# in brackets may contain quoted strings and one more level of brackets.
QUOTED = r'"(?:[^"\\]|\\.)*"'
"""The regular expression of a quoted key."""
_SINGLE = QUOTED.replace('"', "'")
_TOKEN = re.compile(rf'{QUOTED}|\[(?:[^\[\]"\']|{QUOTED}|{_SINGLE}|\[[^\]]*\])*\]|[^."\[\]]+')


def tokens(text: str) -> Iterator[str]:
    """Yield the keys in the text of a path or a glob, each as written.

    Raises:
        RuleError: if the text cannot be parsed.
    """
    at = 0
    # `<=`, because a key must follow each dot, even at the end of the text.
    while text and at <= len(text):
        token = _TOKEN.match(text, at)
        if token is None or (token.end() < len(text) and text[token.end()] != "."):
            raise RuleError(
                f"{text!r} is not a path: cannot parse it from character {at}; "
                "separate keys with single dots, "
                'and quote each key that is not an identifier (`a."b.c"`)'
            )
        yield token.group()
        at = token.end() + 1


# Python refuses to parse far longer integers (`sys.set_int_max_str_digits`); indices are shorter.
_MOST_DIGITS = 1000


def _plain(token: str, text: str) -> Key:
    """Return the key that one token of a path's text stands for.

    Raises:
        RuleError: if the token is not a key.
    """
    if token[0] == '"':
        try:
            return json.loads(token)
        except json.JSONDecodeError as error:
            raise RuleError(
                f"{text!r} is not a path: {token} is not a valid JSON string: {error.msg}"
            ) from error
    if token[0] == "[":
        return _literal(token[1:-1], text)
    if re.fullmatch(r"-?\d+", token) and len(token) <= _MOST_DIGITS:
        return int(token)
    if token.isidentifier():
        return token
    remedy = f"quote it (`{json.dumps(token)}`)"
    if "*" in token:
        remedy = "to match paths with a pattern, use a filter, as in `ft.select(tree).where(...)`"
    elif "{" in token:
        remedy = "write one of the paths that the braces abbreviate"
    raise RuleError(f"{text!r} is not a path: {token!r} is not an identifier; {remedy}")


def _literal(source: str, text: str) -> Key:
    """Return the key that is written in brackets as a Python literal.

    Raises:
        RuleError: if the text in brackets is not a literal.
        RuleError: if the key cannot be hashed.
    """
    try:
        key = ast.literal_eval(source)
        hash(key)
    # Python's parser raises the last two for literals that are nested too deeply.
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise RuleError(
            f"{text!r} is not a path: [{source}] is not a Python literal that can be a key"
        ) from error
    return key
