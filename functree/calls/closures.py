"""These functions find the values that a function closes over, and the leaves in them.

A function ─► its variables ─► their leaves, with paths.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from functree.tree.nodes import children
from functree.tree.paths import Path


def closed_over(fun: Any) -> dict[str, Any]:
    """Return the variables that a function closes over, by name."""
    code, cells = getattr(fun, "__code__", None), getattr(fun, "__closure__", None)
    variables: dict[str, Any] = {}
    if not code or not cells:
        return variables
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return variables


def used_globals(fun: Any) -> dict[str, Any]:
    """Return the global variables that a function and its inner functions use, by name.

    The result may include a global that only shares its name with an attribute in the code.
    """
    if not isinstance(fun, FunctionType):
        return {}
    known = fun.__globals__
    variables: dict[str, Any] = {}
    waiting = [fun.__code__]
    while waiting:
        code = waiting.pop()
        variables.update((name, known[name]) for name in code.co_names if name in known)
        # This adds the code of inner functions, such as the loss in a step.
        waiting.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
    return variables


def held(values: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of some variables with their paths, outermost first.

    If a leaf is a function, its variables and defaults follow. `held` does not use
    `functree.tree.nodes.walk`, since a program may close over values that are not JAX trees.
    Examples are a dict with keys of several types and a list that contains itself.
    """
    waiting = deque[tuple[Path, Any]](_named(values))
    # Keyed by identity. Keeping the objects alive prevents the reuse of their ids.
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
        # These paths begin with the function's variables, since the function may have no name.
        if callable(node):
            waiting.extend(_named(kept_by(node)))


def _named(values: Mapping[str, Any]) -> Iterable[tuple[Path, Any]]:
    """Pair each variable with its path, which is its name."""
    return ((Path((name,)), value) for name, value in values.items())


def _below(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return a node's (key, child) pairs, or None for a leaf or an unreadable value."""
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, list | tuple):
        return enumerate(node)
    try:
        return children(node)
    except (TypeError, ValueError):  # such as an `eqx.nn.State` that was already updated
        return None


def kept_by(fun: Any) -> dict[str, Any]:
    """Return the variables and defaults of a function.

    For a callable that wraps another callable, return the inner callable and its bound arguments.
    """
    if isinstance(fun, functools.partial):
        return {"func": fun.func, "args": fun.args, **fun.keywords}
    if isinstance(fun, MethodType):
        return {"self": fun.__self__, "func": fun.__func__}
    if not isinstance(fun, FunctionType):
        wrapped = getattr(fun, "__wrapped__", None)  # such as the function inside `jax.jit`
        return {} if wrapped is None else {"fun": wrapped}
    return {**closed_over(fun), "defaults": fun.__defaults__, **(fun.__kwdefaults__ or {})}
