"""This module has `jax.jit` and `pjit` built on `ft.jit`, which the tests of jax import.

It keeps jax's names and conventions.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax as real
import jax.numpy as jnp
from replaced import replaced

import functree as ft

__all__ = ["jax", "jit", "pjit"]

NUMBERS = bool | int | float | complex
# The meshes that the deprecated `with mesh:` has entered. `ft.jit` gets the last one as `mesh=`.
ENTERED: list[Any] = []


def _several(which: Any) -> tuple[Any, ...]:
    if which is None:
        return ()
    return tuple(which) if isinstance(which, Iterable) and not isinstance(which, str) else (which,)


def _traced(tree: Any) -> Any:
    """Turn Python numbers into arrays, because `jax.jit` traces them and `ft.jit` does not."""
    return real.tree.map(lambda x: jnp.asarray(x) if isinstance(x, NUMBERS) else x, tree)


class Stage:
    """A result of `trace`, `lower` or `compile` that accepts Python numbers in calls."""

    def __init__(self, stage: Any):
        self._stage = stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage(*_traced(args), **_traced(kwargs))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name not in ("lower", "compile"):
            return value
        return lambda *args, **kwargs: Stage(value(*args, **kwargs))


class Replaced:
    """A function compiled by `ft.jit` that traces Python numbers, like `jax.jit`."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]):
        self._given, self._options = fun, options
        self._made = {None: ft.jit(fun, **options)}
        functools.update_wrapper(self, self._made[None], updated=())
        self._positions = {n for n in _several(options.get("static_argnums")) if n >= 0}
        self._names = set(_several(options.get("static_argnames")))
        parameters = list(inspect.signature(self._made[None]).parameters)
        self._names |= {
            parameters[n]
            for n in _several(options.get("static_argnums"))
            if -n <= len(parameters) > n
        }
        self._positions |= {parameters.index(name) for name in self._names if name in parameters}

    @property
    def _fun(self) -> Any:
        mesh = ENTERED[-1] if ENTERED else None
        if mesh not in self._made:
            self._made[mesh] = ft.jit(self._given, **self._options, mesh=mesh)
        return self._made[mesh]

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = tuple(x if i in self._positions else _traced(x) for i, x in enumerate(args))
        return made, {name: x if name in self._names else _traced(x) for name, x in kwargs.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._arguments(args, kwargs)
        return self._fun(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Stage:
        args, kwargs = self._arguments(args, kwargs)
        return Stage(self._fun.trace(*args, **kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Stage:
        args, kwargs = self._arguments(args, kwargs)
        return Stage(self._fun.lower(*args, **kwargs))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._arguments(args, kwargs)
        return self._fun.eval_shape(*args, **kwargs)

    def _cache_size(self) -> int:
        return len(self._fun.compilations)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.endswith("__"):
            raise AttributeError(name)
        return getattr(self._fun, name)


def jit(
    fun: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    *,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    **options: Any,
) -> Any:
    options |= {"in_shardings": in_shardings, "out_shardings": out_shardings}
    if donate_argnums is not None or donate_argnames is not None:
        options["donate"] = (*_several(donate_argnums), *_several(donate_argnames))
    for name in ("device", "backend", "abstracted_axes"):
        if options.get(name, ...) is None:
            del options[name]
    if fun is None:
        return lambda fun: Replaced(fun, options)
    return Replaced(fun, options)


pjit = jit


def _entered(mesh: Any) -> Any:
    ENTERED.append(mesh)
    return mesh


real.sharding.Mesh.__enter__ = _entered
real.sharding.Mesh.__exit__ = lambda mesh, *error: ENTERED.pop() and None


jax = replaced(real, jit=jit)
