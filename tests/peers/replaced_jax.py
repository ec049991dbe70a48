"""`jax.jit` and `pjit` by `ft.jit`, with the names and the habits of jax: what the tests of jax import."""

import types
from collections.abc import Callable, Iterable
from typing import Any

import jax as real
import jax.numpy as jnp

import functree as ft

__all__ = ["jax", "jit", "pjit"]

NUMBERS = bool | int | float | complex


def _several(which: Any) -> tuple[Any, ...]:
    if which is None:
        return ()
    return tuple(which) if isinstance(which, Iterable) and not isinstance(which, str) else (which,)


class Replaced:
    """A function by `ft.jit`. Python numbers are traced, as by `jax.jit`; in `ft.jit` they are static."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]):
        self._fun = ft.jit(fun, **options)
        self.__wrapped__ = fun
        self._static = (_several(options.get("static_argnums")), _several(options.get("static_argnames")))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        numbers, names = self._static
        static = {n % max(len(args), 1) for n in numbers}
        made = tuple(x if i in static else _traced(x) for i, x in enumerate(args))
        return made, {name: x if name in names else _traced(x) for name, x in kwargs.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._arguments(args, kwargs)
        return self._fun(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._arguments(args, kwargs)
        return self._fun.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._arguments(args, kwargs)
        return self._fun.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._arguments(args, kwargs)
        return self._fun.eval_shape(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fun"], name)


def _traced(tree: Any) -> Any:
    return real.tree.map(lambda x: jnp.asarray(x) if isinstance(x, NUMBERS) else x, tree)


def jit(fun: Any = None, /, *, donate_argnums: Any = None, donate_argnames: Any = None, **options: Any) -> Any:
    donated = (*_several(donate_argnums), *_several(donate_argnames))
    if donated:
        options["donate"] = donated
    for name in ("device", "backend", "abstracted_axes"):
        if options.get(name, ...) is None:
            del options[name]
    if fun is None:
        return lambda fun: Replaced(fun, options)
    return Replaced(fun, options)


pjit = jit


class _Jax(types.ModuleType):
    """The module `jax` in which `jit` is ours. Functree itself uses the real one."""

    jit = staticmethod(jit)

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


jax = _Jax("jax")
