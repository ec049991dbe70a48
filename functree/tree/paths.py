"""A leaf's place in a tree ─► a `Path`: plain keys, and a text that reads back as the same keys."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Self

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from functree.errors import RuleError


class Path(tuple[Any, ...]):
    """The keys from a tree's root to a leaf: field names, dict keys, list indices.

    A tuple whose text is the path as one would write it. A string key that is not an identifier is quoted, and
    a dict key that is neither a string nor an integer stands in brackets, so that text and path round-trip.

    Args:
        keys: the plain keys, outermost first; or the text of a path.

    Raises:
        RuleError: the text is no path.

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

    def __new__(cls, keys: Iterable[Any] = ()) -> Self:
        return super().__new__(cls, map(_plain, tokens(keys), repeat(keys)) if isinstance(keys, str) else keys)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The path whose text this is."""
        return cls(text)

    @classmethod
    def of(cls, key_path: Iterable[Any]) -> Self:
        """The path of JAX's key path (`jax.tree_util.tree_flatten_with_path` gives them)."""
        return cls(plain_key(key) for key in key_path)

    def __str__(self) -> str:
        return ".".join(map(part_text, self))

    def __repr__(self) -> str:
        return f"Path({str(self)!r})"

    def __truediv__(self, key: Any) -> "Path":
        return Path((*self, key))


def plain_key(key: Any) -> Any:
    """JAX's key ─► the field name, dict key or index that it holds."""
    match key:
        case GetAttrKey():
            return key.name
        case SequenceKey():
            return key.idx
        case DictKey() | FlattenedIndexKey():
            return key.key
    return key


def part_text(key: Any) -> str:
    """One key as it stands in a path's text."""
    if isinstance(key, str):
        return key if key.isidentifier() else json.dumps(key, ensure_ascii=False)
    if type(key) is int:
        return str(key)
    return f"[{key!r}]"


_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SINGLE = _QUOTED.replace('"', "'")
_TOKEN = re.compile(rf'{_QUOTED}|\[(?:[^\[\]"\']|{_QUOTED}|{_SINGLE}|\[[^\]]*\])*\]|[^."\[\]]+')


def tokens(text: str) -> Iterator[str]:
    """The parts of a path's or glob's text, each as written. Raises RuleError at the first that is none."""
    at = 0
    while text and at <= len(text):
        token = _TOKEN.match(text, at)
        if token is None or (token.end() < len(text) and text[token.end()] != "."):
            raise RuleError(
                f"{text!r} is not a path: cannot read it from character {at}; parts are joined by single dots, "
                'and a key that is not an identifier is quoted (`a."b.c"`)'
            )
        yield token.group()
        at = token.end() + 1


def _plain(token: str, text: str) -> Any:
    if token[0] == '"':
        try:
            return json.loads(token)
        except json.JSONDecodeError as error:
            raise RuleError(f"{text!r} is not a path: {token} is not quoted as JSON is: {error.msg}") from error
    if token[0] == "[":
        return _literal(token[1:-1], text)
    if re.fullmatch(r"-?\d+", token):
        return int(token)
    if token.isidentifier():
        return token
    raise RuleError(f"{text!r} is not a path: {token!r} is no identifier; quote it (`{json.dumps(token)}`)")


def _literal(source: str, text: str) -> Any:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError) as error:
        raise RuleError(f"{text!r} is not a path: [{source}] is no literal key") from error
