"""A checkpoint stores the texts of static leaves, so that a restore can warn about changes."""

import dataclasses
import functools
import hashlib
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from functree.errors import Problem, listed, warn
from functree.labels.leaf import array_problem
from functree.tree.arrays import Tree, is_array, unheld
from functree.tree.nodes import leaves_of


def static_texts(tree: Tree) -> dict[str, str]:
    """Return the texts of a tree's static leaves by path.

    Leaves whose text contains a memory address are omitted, since addresses differ between
    processes.
    """
    texts: dict[str, str] = {}
    for path, leaf in leaves_of(tree):
        if not is_array(leaf) and (text := _text(leaf)) is not None:
            texts[str(path)] = text
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
        elif (fault := unheld(leaf)) is not None:
            yield array_problem(path, leaf, *fault)


def warn_of_changes(saved: Mapping[str, str], like: Tree) -> None:
    """Warn about static leaves in `like` that differ from the saved leaves."""
    differ: list[str] = []
    leaves = {str(path): leaf for path, leaf in leaves_of(like)}
    for name, then in saved.items():
        # This leaf is None or missing in `like`.
        if name not in leaves:
            differ.append(f"`{name}` was saved as {then}, but is missing from `like`")
            continue
        leaf = leaves[name]
        # An array at this path causes a separate error.
        if not is_array(leaf) and (now := _text(leaf)) not in (None, then):
            differ.append(f"`{name}` was saved as {then}, but is {now} in `like`")
    if differ:
        warn(
            f"static leaves are not restored, but come from `like`: {listed(differ)}; build `like` "
            "in the same way as the saved tree, save numbers as arrays (`jnp.asarray(...)`), or "
            "save these values in `meta=`"
        )


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_LONGEST = 200
# A user's `__repr__` may raise any error. In that case, `reprlib` returns a text with an address.
_REPR = reprlib.Repr()
_REPR.maxother = sys.maxsize


def _text(value: object) -> str | None:
    """Return a value's text if it is equal in all processes, or None.

    A long text is shortened, and ends with a digest of the whole text.
    """
    try:
        text = _structured(value)
    except (RecursionError, AttributeError, ValueError):
        return None  # the text has an address, or the value contains itself or lacks a field
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: _LONGEST // 2]}... (sha256 {digest[:16]})"


def _structured(value: Any) -> str:
    """Build a value's text from its contents. Sets are sorted, since their order may vary.

    Raises:
        ValueError: if the text contains a memory address.
    """
    name = type(value).__qualname__
    if isinstance(value, set | frozenset):
        return f"{name}({', '.join(sorted(map(_structured, value)))})"
    if isinstance(value, functools.partial):
        parts = map(_structured, (value.func, value.args, value.keywords))
        return f"{name}({', '.join(parts)})"
    # A function's or class's module is left out, since it is `__main__` in a training script.
    qualified = getattr(value, "__qualname__", None)
    if isinstance(qualified, str):
        return qualified
    if dataclasses.is_dataclass(value):
        parts = [_structured(getattr(value, one.name)) for one in dataclasses.fields(value)]
        return f"{name}({', '.join(parts)})"
    text = _REPR.repr_instance(value, 0)
    # A string that looks like an address stays the same. Other addresses change with each run.
    if not isinstance(value, str | bytes) and _ADDRESS.search(text):
        raise ValueError("the text contains a memory address")
    return text
