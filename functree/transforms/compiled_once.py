"""A function that scans ─► the same, compiled once for its calls outside of a program."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import equinox as eqx

from functree.devices.meshes import compiling

_P = ParamSpec("_P")
_T = TypeVar("_T")


def compiled_once(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, compiled by `eqx.filter_jit` where it is called outside of a program.

    The body of a `lax.scan` is a new object in each call. So JAX would compile it in each eager
    call, and keep the program.

    Args:
        fn: a function of a module, so that there is one for all calls.

    Examples:
        >>> from functree.transforms.compiled_once import compiled_once
        >>> @compiled_once
        ... def total(xs):
        ...     return jax.lax.scan(lambda sum, x: (sum + x, None), 0.0, xs)[0]
        >>> print(total(jnp.arange(4.0)))
        6.0
    """
    jitted = eqx.filter_jit(fn)

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return fn(*args, **kwargs) if compiling() else jitted(*args, **kwargs)

    return run
