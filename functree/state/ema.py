"""`ft.with_ema` adds a moving average of the parameters to an optimizer's state."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from functree.argument_checks import DECAY, check
from functree.devices.placement import check_deleted
from functree.errors import FunctreeTypeError, FunctreeValueError
from functree.labels.optimizer.followed_parameters import check_optimizer
from functree.state.train import TRAIN_STATE, TrainState, updated
from functree.tree.arrays import Tree
from functree.tree.nodes import outermost

M = TypeVar("M")


class AveragedState(NamedTuple):
    """The state of `ft.with_ema`: the inner optimizer's state and the parameters' average."""

    inner: Tree
    average: Tree


def with_ema(
    tx: optax.GradientTransformation, decay: float = 0.999
) -> optax.GradientTransformationExtraArgs:
    """Build an optimizer that keeps an exponential moving average of the parameters in its state.

    `ft.averaged` returns the model with the averaged parameters. The average is sharded like the
    parameters and saved with the rest of the state. Its dtype is at least float32, so that rounding
    does not lose small steps.

    Args:
        tx: the whole optimizer, from optax. The average does not include changes that a later
            transformation makes to the updates.
        decay: the weight of the old average in each step.

    Raises:
        FunctreeError: if `tx` is not an optimizer.
        FunctreeError: if `decay` is not in [0, 1).

    Examples:
        >>> import optax
        >>> ts = ft.TrainState.create(
        ...     {"w": jnp.zeros(2)}, ft.with_ema(optax.sgd(1.0), decay=0.5)
        ... )
        >>> ts = ft.apply_gradients(ts, {"w": -jnp.ones(2)})
        >>> ts.model["w"].tolist(), ft.averaged(ts)["w"].tolist()
        ([1.0, 1.0], [0.5, 0.5])
    """
    check_optimizer(tx, ("init", "update"))
    check("with_ema: invalid arguments", decay=(decay, DECAY))
    inner = optax.with_extra_args_support(tx)

    def init(params: Tree) -> AveragedState:
        check_deleted("with_ema", params)
        return AveragedState(inner.init(params), jax.tree.map(_wide, params))

    def update(
        updates: Tree, state: Tree, params: Tree = None, **extra: Any
    ) -> tuple[Tree, AveragedState]:
        if params is None:
            raise FunctreeTypeError(
                "with_ema needs the parameters: call `tx.update(gradients, state, params)`"
            )
        updates, after = inner.update(updates, state.inner, params, **extra)

        # The caller computes the new parameters only after this function returns.
        def averaged(old: jax.Array, parameter: jax.Array, change: jax.Array) -> jax.Array:
            return decay * old + (1 - decay) * updated(change, parameter).astype(old.dtype)

        return updates, AveragedState(after, jax.tree.map(averaged, state.average, params, updates))

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(x: jax.Array) -> jax.Array:
    """Cast an array to float32, unless its dtype is wider."""
    if jnp.finfo(x.dtype).bits < 32:
        return x.astype(jnp.float32)
    return x


def averaged(ts: TrainState[M]) -> M:
    """Return the model with the averaged parameters. Frozen leaves are unchanged.

    Args:
        ts: a training state whose optimizer contains `ft.with_ema`.

    Raises:
        FunctreeError: if the optimizer keeps no average, or several averages.
        FunctreeError: if the average was deleted.
    """
    check("averaged: invalid arguments", ts=(ts, TRAIN_STATE))
    # `ft.with_ema` may be inside another transformation.
    states = outermost(ts.opt_state, lambda _, node: isinstance(node, AveragedState))
    averages = [state.average for _, state in states]
    if len(averages) != 1:
        keeps = "no average"
        if averages:
            keeps = f"{len(averages)} averages"
        raise FunctreeValueError(
            f"averaged: the optimizer keeps {keeps} of the parameters: wrap the whole "
            "optimizer once, as in `TrainState.create(model, ft.with_ema(tx))`"
        )

    def parameter(average: Tree, value: Tree) -> Tree:
        if _is_empty(average):
            return value
        return average.astype(value.dtype)

    # An average in the parameter's dtype is returned without a cast, so `astype` would raise no
    # error if the average was deleted.
    check_deleted("averaged", averages[0])
    return jax.tree.map(parameter, averages[0], ts.model, is_leaf=_is_empty)


def _is_empty(node: Tree) -> bool:
    """Return whether there is no average: the parameter is frozen (None) or masked by optax."""
    return node is None or isinstance(node, optax.MaskedNode)
