"""The position of a leaf in a tree ─► a `Path`: plain keys, and a text that can be parsed into the
same keys."""

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
"""A plain key: the name of a field, the key of a dict, or an index."""

Keys = tuple[Key, ...]
"""The plain keys of a path.

A `Path` is made only where one is kept: a walk meets far more nodes than it finds, and Python's
garbage collector looks at each `Path`, but not at tuples of texts.
"""


# Its keys are `Any` for who indexes a path whose keys are known.
class Path(tuple[Any, ...]):
    """The keys from a tree's root to a leaf: field names, dict keys, list indices.

    A path is a tuple. Its text has the keys with dots between them. A string key that is not an
    identifier is quoted, and a dict key that is neither a string nor an integer is written in
    brackets, so that each text is parsed into the path that it was made from.

    Args:
        keys: the plain keys, outermost first; or the text of a path.

    Raises:
        RuleError: the text is not a path.

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
        # First of all, because most paths are made of the keys that were met in a tree.
        if type(keys) is tuple:
            return super().__new__(cls, keys)
        if isinstance(keys, str):
            return super().__new__(cls, map(_plain, tokens(keys), repeat(keys)))
        if not isinstance(keys, Iterable):
            raise RuleError(
                "a path has a sequence of keys, or a text such as `blocks.3.attn`, "
                f"not {shown(keys)}"
            )
        return super().__new__(cls, keys)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The path that has this text."""
        if not isinstance(text, str):
            raise RuleError(
                f"a path is parsed from a text, such as `blocks.3.attn`, not from {shown(text)}"
            )
        return cls(text)

    @classmethod
    def of(cls, key_path: Iterable[Any]) -> Self:
        """The path of a JAX key path, as `jax.tree_util.tree_flatten_with_path` returns it."""
        return cls(plain_key(key) for key in key_path)

    def __str__(self) -> str:
        return ".".join(map(part_text, self))

    def __repr__(self) -> str:
        return f"Path({str(self)!r})"

    def __truediv__(self, key: Key) -> "Path":
        return Path((*self, key))


def first_beginning(path: Keys, paths: Container[Keys]) -> Path | None:
    """The shortest beginning of a path, or the path itself, that is one of some paths."""
    for depth in range(len(path) + 1):
        if path[:depth] in paths:
            return Path(path[:depth])
    return None


def plain_key(key: Any) -> Any:
    """JAX's key ─► the field name, dict key or index in it."""
    match key:
        case GetAttrKey():
            return key.name
        case SequenceKey():
            return key.idx
        case DictKey() | FlattenedIndexKey():
            return key.key
    return key


def part_text(key: Key) -> str:
    """The text of one key in a path."""
    if isinstance(key, str):
        return key if key.isidentifier() else json.dumps(key, ensure_ascii=False)
    # By type and not by isinstance: `True` is an int, and would be parsed as a name.
    if type(key) is int:
        return str(key)
    return f"[{key!r}]"


# A token is a quoted key, a key in brackets (which may contain quoted texts and one more level of
# brackets), or a run of other characters up to the next dot.
QUOTED = r'"(?:[^"\\]|\\.)*"'
"""The regular expression of a quoted key."""
_SINGLE = QUOTED.replace('"', "'")
_TOKEN = re.compile(rf'{QUOTED}|\[(?:[^\[\]"\']|{QUOTED}|{_SINGLE}|\[[^\]]*\])*\]|[^."\[\]]+')


def tokens(text: str) -> Iterator[str]:
    """The parts of the text of a path or a glob, each as written. Raises RuleError at the first
    that is invalid."""
    at = 0
    # `<=`: after a dot at the end of the text one more part must follow, and its absence is an
    # error.
    while text and at <= len(text):
        token = _TOKEN.match(text, at)
        if token is None or (token.end() < len(text) and text[token.end()] != "."):
            raise RuleError(
                f"{text!r} is not a path: cannot read it from character {at}; "
                "parts are joined by single dots, "
                'and a key that is not an identifier is quoted (`a."b.c"`)'
            )
        yield token.group()
        at = token.end() + 1


# Python does not read longer numbers (`sys.set_int_max_str_digits`), and no sequence is so long.
_MOST_DIGITS = 1000


def _plain(token: str, text: str) -> Key:
    """The key that one token of a path's text is for."""
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
        remedy = "for all paths that fit a pattern use a filter, as in `ft.select(tree).where(...)`"
    elif "{" in token:
        remedy = "with braces a plan prints several paths at once: write one of them"
    raise RuleError(f"{text!r} is not a path: {token!r} is not an identifier; {remedy}")


def _literal(source: str, text: str) -> Key:
    """The key that is written in brackets as a Python literal."""
    try:
        key = ast.literal_eval(source)
        hash(key)
    # The last two of what is nested too deeply for Python's parser.
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise RuleError(
            f"{text!r} is not a path: [{source}] is not a Python literal that can be a key"
        ) from error
    return key
