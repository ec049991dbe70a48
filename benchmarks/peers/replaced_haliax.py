"""This module has `haliax.named_jit` built on `ft.jit`, which the tests of haliax import.

It keeps haliax's names and conventions.
"""

import contextlib
import functools
from typing import Any

import haliax as real
import jax
from replaced import replaced

import functree as ft

__all__ = ["haliax", "hax", "named_jit"]


def named_jit(
    fun: Any = None,
    axis_resources: Any = None,
    *,
    in_axis_resources: Any = None,
    out_axis_resources: Any = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    **options: Any,
) -> Any:
    """Compile a function under haliax's own axis mapping.

    The mapping constrains the arguments and the result.
    """
    if fun is None:
        return functools.partial(
            named_jit,
            axis_resources=axis_resources,
            in_axis_resources=in_axis_resources,
            out_axis_resources=out_axis_resources,
            donate_args=donate_args,
            donate_kwargs=donate_kwargs,
            **options,
        )
    inputs, outputs = (
        axis_resources if one is None else one for one in (in_axis_resources, out_axis_resources)
    )

    @functools.wraps(fun)
    def body(*args: Any, **kwargs: Any) -> Any:
        with real.axis_mapping(axis_resources) if axis_resources else contextlib.nullcontext():
            args, kwargs = real.shard((args, kwargs), inputs) if inputs else (args, kwargs)
            result = fun(*args, **kwargs)
            return real.shard(result, outputs) if outputs else result

    several = donate_args if isinstance(donate_args, tuple | list) else ()
    donated = tuple(i for i, given in enumerate(several) if given is True)
    return ft.jit(body, donate=... if donate_args is True else donated, **options)


# `with jax.set_mesh(mesh):`, which haliax supports too, replaces the deprecated `with mesh:`.
CURRENT: list[Any] = []


def _entered(mesh: Any) -> Any:
    CURRENT.append(jax.set_mesh(mesh))
    return mesh


jax.sharding.Mesh.__enter__ = _entered
jax.sharding.Mesh.__exit__ = lambda mesh, *error: CURRENT.pop().__exit__(*error)


haliax = hax = replaced(real, named_jit=named_jit)
