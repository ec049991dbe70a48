"""A function ─► the values that it closes over, and the leaves in them, whatever they are."""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from functree.tree.nodes import children
from functree.tree.paths import Path


def closed_over(fun: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    code, cells = getattr(fun, "__code__", None), getattr(fun, "__closure__", None)
    found: dict[str, Any] = {}
    if not code or not cells:
        return found
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def used_globals(fun: Any) -> dict[str, Any]:
    """The global variables that a function and the functions in it use, by name. Names of
    attributes may be among them."""
    if not isinstance(fun, FunctionType):
        return {}
    known = fun.__globals__
    found: dict[str, Any] = {}
    waiting = [fun.__code__]
    while waiting:
        code = waiting.pop()
        found.update((name, known[name]) for name in code.co_names if name in known)
        # The code of an inner function, such as the loss in a step.
        waiting.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
    return found


def held(values: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The leaves of some variables, and of what functions among them keep, with their paths, the
    outermost first.

    Not by `functree.tree.nodes.walk`: a program may close over what is no tree for JAX, such as a
    dict with keys of several types, or a list that contains itself.
    """
    waiting = deque[tuple[Path, Any]](_named(values))
    # By identity; with the objects, so that their identities stay their own.
    seen: dict[int, Any] = {}
    while waiting:
        path, node = waiting.popleft()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        below = _below(node)
        if below is not None:
            waiting.extend((path / key, child) for key, child in below)
            continue
        yield path, node
        # These paths begin with the variable, since the function itself need not have a name.
        if callable(node):
            waiting.extend(_named(kept_by(node)))


def _named(values: Mapping[str, Any]) -> Iterable[tuple[Path, Any]]:
    """Variables with their paths, which are their names."""
    return ((Path((name,)), value) for name, value in values.items())


def _below(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """The (key, child) pairs of a node; None for a leaf, and for what cannot be flattened."""
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, list | tuple):
        return enumerate(node)
    try:
        return children(node)
    except (TypeError, ValueError):  # such as an `eqx.nn.State` of which a new one was made
        return None


def kept_by(fun: Any) -> dict[str, Any]:
    """The variables and defaults of a function; for a callable that wraps another one, that one and
    its arguments."""
    if isinstance(fun, functools.partial):
        return {"func": fun.func, "args": fun.args, **fun.keywords}
    if isinstance(fun, MethodType):
        return {"self": fun.__self__, "func": fun.__func__}
    if not isinstance(fun, FunctionType):
        wrapped = getattr(fun, "__wrapped__", None)  # such as that of `jax.jit`
        return {} if wrapped is None else {"fun": wrapped}
    return {**closed_over(fun), "defaults": fun.__defaults__, **(fun.__kwdefaults__ or {})}
