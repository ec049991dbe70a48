"""This module has `eqx.filter_jit` built on `ft.jit`, which the tests of equinox import.

It keeps equinox's names and conventions.
"""

import inspect
from typing import Any

import equinox as real
from replaced import replaced

import functree as ft

__all__ = ["eqx", "equinox", "filter_jit"]


def _donated(fun: Any, donate: str) -> Any:
    """Return the parameters for `donate="all"`, `"all-except-first"` and `"none"`."""
    if donate in ("all", "warn"):
        return ...
    if donate in ("all-except-first", "warn-except-first"):
        return tuple(inspect.signature(fun).parameters)[1:]
    return ()


def filter_jit(fun: Any = None, *, donate: str = "none", **options: Any) -> Any:
    if fun is None:
        return lambda fun: filter_jit(fun, donate=donate, **options)
    return ft.jit(fun, donate=_donated(fun, donate), **options)


eqx = equinox = replaced(real, filter_jit=filter_jit)
