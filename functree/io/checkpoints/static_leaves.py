"""A checkpoint stores the texts of static leaves, so that a restore can warn about changes."""

import dataclasses
import enum
import functools
import hashlib
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from functree.errors import Problem, listed, warn
from functree.labels.leaf import unheld_problem
from functree.tree.arrays import Tree, is_array, unheld
from functree.tree.nodes import leaves_of

# Types of Python numbers, which could be saved as arrays. Compare them with `type(leaf)`: NumPy's
# float64 is a subclass of `float`, but is saved as an array.
_NUMBERS = (bool, int, float, complex)


def static_texts(tree: Tree) -> dict[str, str]:
    """Return the texts of a tree's static leaves by path.

    Leaves whose text contains a memory address are omitted, since addresses differ between
    processes.
    """
    texts: dict[str, str] = {}
    for path, leaf in leaves_of(tree):
        if is_array(leaf):
            continue
        text = _text(leaf)
        if text is not None:
            texts[str(path)] = _short(text)
    return texts


def unsaveable(tree: Tree) -> Iterator[Problem]:
    """Yield a problem for each leaf that looks like an array, but has values that cannot be saved.

    Otherwise, these leaves would be treated as static, and a restore would return the values from
    `like`.
    """
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, jax.Ref):
            yield Problem(
                path,
                tuple(leaf.shape),
                "a mutable reference",
                "has values that can change while they are written",
                "save its value: `jax.freeze(ref)` or `ref[...]`",
            )
        elif unheld(leaf) is not None:
            yield unheld_problem(path, leaf)


def warn_of_changes(saved: Mapping[str, str], like: Tree) -> None:
    """Warn about static leaves in `like` that differ from the saved leaves."""
    numbers: list[str] = []
    others: list[str] = []
    lost = dict(saved)
    for path, leaf in leaves_of(like):
        then = saved.get(str(path))
        lost.pop(str(path), None)
        if then is None or is_array(leaf):
            continue
        now = _text(leaf)
        # Both texts are shortened, since functree's first versions saved texts of any length.
        if now is not None and _short(now) != _short(then):
            kind = numbers if type(leaf) in _NUMBERS else others
            kind.append(f"`{path}` was saved as {_short(then)}, but is {_short(now)} in `like`")
    # These leaves are None or missing in `like`. An array at one of their paths causes a separate
    # error.
    for name, then in lost.items():
        others.append(f"`{name}` was saved as {_short(then)}, but is missing from `like`")
    if numbers:
        remedy = "to save a number, convert it to an array: `jnp.asarray(...)`"
        warn(f"Python numbers are not restored, but come from `like`: {listed(numbers)}; {remedy}")
    if others:
        remedy = "build `like` in the same way as the saved tree, or save these values in `meta=`"
        warn(f"static leaves are not restored, but come from `like`: {listed(others)}; {remedy}")


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
# A user's `__repr__` may raise any error. In that case, `reprlib` returns a text with an address.
_REPR = reprlib.Repr()
_REPR.maxother = sys.maxsize


def _text(value: object) -> str | None:
    """Return a value's text if it is equal in all processes, or None."""
    try:
        return _structured(value)
    except (RecursionError, AttributeError, _OnlyAddressError):
        return None  # the text has an address, or the value contains itself or lacks a field


class _OnlyAddressError(Exception):
    """An error for a value whose text contains a memory address."""


def _structured(value: Any) -> str:
    """Build a value's text from its contents. Sets and dicts are sorted: a set's order may vary."""
    name = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return str(value) if value.name is None else f"{name}.{value.name}"
    if isinstance(value, set | frozenset):
        return _joined(name, sorted(map(_structured, value)))
    if isinstance(value, tuple | list):
        return _joined(name, map(_structured, value))
    if isinstance(value, Mapping):
        return _joined(name, sorted(map(_structured, value.items())))
    if isinstance(value, functools.partial):
        return _joined(name, map(_structured, (value.func, value.args, value.keywords)))
    # A function's or class's module is left out, since it is `__main__` in a training script.
    qualified = getattr(value, "__qualname__", None)
    if isinstance(qualified, str):
        return qualified
    if dataclasses.is_dataclass(value):
        fields = [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
        return _joined(name, map(_structured, fields))
    text = _REPR.repr_instance(value, 0)
    # A string that looks like an address stays the same. Other addresses change with each run.
    if not isinstance(value, str | bytes) and _ADDRESS.search(text):
        raise _OnlyAddressError
    return text


def _joined(name: str, parts: Iterable[str]) -> str:
    return f"{name}({', '.join(parts)})"


_LONGEST = 200


def _short(text: str) -> str:
    """Shorten a long text, and add a digest of the whole text."""
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: _LONGEST // 2]}... (sha256 {digest[:16]})"
