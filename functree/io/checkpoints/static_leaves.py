"""The leaves of a tree that are not saved ─► their texts, by which a restore finds one that
differs; and what cannot be saved at all."""

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

# Python's numbers, which could be arrays. By `type`, not `isinstance`: numpy's float64 is a `float`
# too, and is saved as an array.
_NUMBERS = (bool, int, float, complex)


def static_texts(tree: Tree) -> dict[str, str]:
    """The static leaves of a tree by path, as text. Those that have only an address are not in it:
    it is another one in each process."""
    found: dict[str, str] = {}
    for path, leaf in leaves_of(tree):
        if is_array(leaf):
            continue
        text = _text(leaf)
        if text is not None:
            found[str(path)] = _short(text)
    return found


def unsaveable(tree: Tree) -> Iterator[Problem]:
    """The problems of leaves that look like arrays, and whose values a checkpoint cannot keep.

    They would be taken for static ones, and come back as they are in `like`.
    """
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, jax.Ref):
            yield Problem(
                path,
                tuple(leaf.shape),
                "a mutable reference",
                "has values that can change while they are written",
                "save what is in it: `jax.freeze(ref)`, or `ref[...]`",
            )
        elif unheld(leaf) is not None:
            yield unheld_problem(path, leaf)


def warn_of_changes(saved: Mapping[str, str], like: Tree) -> None:
    """Warn of static leaves that were others when a tree was saved: they come from `like`."""
    numbers: list[str] = []
    others: list[str] = []
    lost = dict(saved)
    for path, leaf in leaves_of(like):
        then = saved.get(str(path))
        lost.pop(str(path), None)
        if then is None or is_array(leaf):
            continue
        now = _text(leaf)
        # Shortened both: the first versions kept texts of any length.
        if now is not None and _short(now) != _short(then):
            kind = numbers if type(leaf) in _NUMBERS else others
            kind.append(f"`{path}` was {_short(then)} and is {_short(now)}")
    # Where `like` has None, or nothing: a leaf that is an array there is an error of its own.
    for name, then in lost.items():
        others.append(f"`{name}` was {_short(then)} and is not in `like`")
    if numbers:
        remedy = "a number that is to be saved has to be an array: `jnp.asarray(...)`"
        warn(f"Python numbers are not restored, and come from `like`: {listed(numbers)}; {remedy}")
    if others:
        remedy = "make `like` as the tree that was saved, or keep what is to be saved in `meta=`"
        warn(f"static leaves are not restored, and come from `like`: {listed(others)}; {remedy}")


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
# A `repr` of the user's may raise anything; that of `reprlib` is then an address.
_REPR = reprlib.Repr()
_REPR.maxother = sys.maxsize


def _text(value: object) -> str | None:
    """A value as text that is the same in all processes; None if it has only an address."""
    try:
        return _structured(value)
    except (RecursionError, AttributeError, _OnlyAddressError):
        return None  # or it contains itself, or lacks one of its fields


class _OnlyAddressError(Exception):
    """A value, or something in it, has no text but an address."""


def _structured(value: Any) -> str:
    """The text of a value by what is in it: a set has its elements in another order in each
    process."""
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
    # A function or a class: without its module, which is `__main__` in the script that trains.
    qualified = getattr(value, "__qualname__", None)
    if isinstance(qualified, str):
        return qualified
    if dataclasses.is_dataclass(value):
        fields = [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
        return _joined(name, map(_structured, fields))
    text = _REPR.repr_instance(value, 0)
    # The text of a value is whatever it is; of others, an address is not the same in the next run.
    if not isinstance(value, str | bytes) and _ADDRESS.search(text):
        raise _OnlyAddressError
    return text


def _joined(name: str, parts: Iterable[str]) -> str:
    return f"{name}({', '.join(parts)})"


_LONGEST = 200


def _short(text: str) -> str:
    """A text of a bounded length, with a digest of what is left out."""
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: _LONGEST // 2]}... (sha256 {digest[:16]})"
