"""`eqx.filter_jit` by `ft.jit`, with the names and the habits of equinox: what the tests of equinox
import."""

import inspect
from typing import Any

import equinox as real
from replaced import replaced

import functree as ft

__all__ = ["eqx", "equinox", "filter_jit"]


def _donated(fun: Any, donate: str) -> Any:
    """The parameters that `donate="all"`, `"all-except-first"` and `"none"` mean."""
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
