"""A program under `ft.jit`, or a sharded training, beside the same of Equinox: the same tree, and
the same values."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

import functree as ft
from tests.lib.meshes import MESH

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


def train_alike(
    model: Any,
    loss: Callable[[Any, Any], Any],
    tx: Any,
    batch: Any,
    layout: Any,
    *,
    spec: ft.P = ft.P("data"),  # noqa: B008 (it is immutable)
    after: Callable[[Any], Any] = lambda model: model,
    tolerance: float = TOLERANCE,
) -> Any:
    """The training state after two sharded steps that donate it. They are compiled once, and give
    what two steps of Equinox on one device give.

    Args:
        model: the model, of which copies are trained.
        loss: of a model and a batch.
        tx: the optimizer.
        batch: of both steps.
        layout: of the training state, and the ambient rules.
        spec: of the batch.
        after: what becomes of a model after each step.
        tolerance: of the values.
    """
    ts = ft.TrainState.create(ft.copy(model), tx, layout=layout, mesh=MESH)

    @ft.jit(rules=layout, donate="ts")
    def step(ts: Any, batch: Any) -> Any:
        value, gradients = ft.value_and_grad(loss)(ts.model, batch)
        ts = ft.apply_gradients(ts, gradients)
        return eqx.tree_at(lambda ts: ts.model, ts, after(ts.model)), value

    @eqx.filter_jit
    def plain(model: Any, opt_state: Any, batch: Any) -> Any:
        value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
        updates, opt_state = tx.update(gradients, opt_state)
        return after(eqx.apply_updates(model, updates)), opt_state, value

    opt_state, placed = (
        tx.init(eqx.filter(model, eqx.is_inexact_array)),
        ft.shard(batch, spec, MESH),
    )
    for _ in range(2):
        ts, found = step(ts, placed)
        model, opt_state, expected = plain(model, opt_state, batch)
        assert_alike(found, expected, tolerance)
    assert_alike(ts.model, model, tolerance)
    assert len(step.compilations) == 1
    return ts


def assert_parts(tree: Any) -> None:
    """A tree is the same after it was taken apart and put together."""
    static, arrays = ft.split(tree)
    assert_alike(ft.merge(static, arrays), tree)
    assert_alike(ft.unpack(ft.pack(tree)), tree)
