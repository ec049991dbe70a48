"""`compiled_once` makes eager calls of a function with a scan share one compilation.

A function with a scan ─► the same function, jitted for calls outside jit.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx

from functree.devices.meshes import compiling

_P = ParamSpec("_P")
_T = TypeVar("_T")


def compiled_once(
    fn: Callable[_P, _T], jit: Callable[..., Any] = eqx.filter_jit
) -> Callable[_P, _T]:
    """Wrap a function so that calls outside jit run it jitted.

    The body of a `lax.scan` is a new object in each call. Without this decorator, JAX would compile
    every eager call again, and keep every program in memory.

    Args:
        fn: a function that all calls share, such as a module-level function.
        jit: the function that jits it.

    Examples:
        >>> from functree.transforms.compiled_once import compiled_once
        >>> @compiled_once
        ... def total(xs):
        ...     return jax.lax.scan(lambda sum, x: (sum + x, None), 0.0, xs)[0]
        >>> print(total(jnp.arange(4.0)))
        6.0
    """
    jitted = jit(fn)

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return fn(*args, **kwargs) if compiling() else jitted(*args, **kwargs)

    return run
