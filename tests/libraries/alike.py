"""A program under `ft.jit` beside the same under `eqx.filter_jit`: the same tree, and the same
values."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

import functree as ft

TOLERANCE = 1e-5


def assert_alike(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Two trees have the same paths, the same values of arrays, and static leaves of the same
    types."""
    found, expected = (jax.tree_util.tree_leaves_with_path(x) for x in (found, expected))
    assert [keys for keys, _ in found] == [keys for keys, _ in expected]
    for (keys, x), (_, y) in zip(found, expected, strict=True):
        path = jax.tree_util.keystr(keys)
        if not eqx.is_array(y):
            assert type(x) is type(y), path
        elif jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
            assert (jax.random.key_data(x) == jax.random.key_data(y)).all(), path
        else:
            assert x.dtype == y.dtype, path
            np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=path)


def jit_alike(
    f: Callable[..., Any],
    *args: Any,
    plain: Callable[..., Any] | None = None,
    tolerance: float = TOLERANCE,
) -> Any:
    """The result of `ft.jit(f)`, which is that of `eqx.filter_jit(f)`, or of `plain` if it is
    given. It is called twice, the second time with copies, and compiles once."""
    jitted = ft.jit(f)
    found = jitted(*args)
    assert_alike(found, eqx.filter_jit(plain or f)(*args), tolerance)
    jitted(*jax.tree.map(lambda x: x, args))
    assert len(jitted.compilations) == 1
    return found


def assert_parts(tree: Any) -> None:
    """A tree is the same after it was taken apart and put together."""
    static, arrays = ft.split(tree)
    assert_alike(ft.merge(static, arrays), tree)
    assert_alike(ft.unpack(ft.pack(tree)), tree)
