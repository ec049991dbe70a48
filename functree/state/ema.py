"""An optimizer ─► the same optimizer, whose state also has a moving average of the parameters
(`ft.with_ema`)."""

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
    """The state of `ft.with_ema`: that of the inner optimizer, and the average of the
    parameters."""

    inner: Tree
    average: Tree


def with_ema(
    tx: optax.GradientTransformation, decay: float = 0.999
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps an exponential moving average of the parameters in its state.

    The average is laid out like the parameters (`ft.plan_optimizer`), saved with the rest of the
    state, and read by `ft.averaged`. It is in float32 or wider, so that a small step is not lost in
    rounding.

    Args:
        tx: any optax optimizer. It has to be the whole optimizer: if a later transformation changes
            the updates, the average does not see it.
        decay: the weight of the old average in each step.

    Raises:
        FunctreeError: `decay` is not in [0, 1).

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
    check("with_ema cannot average", decay=(decay, DECAY))
    inner = optax.with_extra_args_support(tx)

    def init(params: Tree) -> AveragedState:
        check_deleted("with_ema", params)
        return AveragedState(inner.init(params), jax.tree.map(_wide, params))

    def update(
        updates: Tree, state: Tree, params: Tree = None, **extra: Any
    ) -> tuple[Tree, AveragedState]:
        if params is None:
            raise FunctreeTypeError(
                "with_ema averages the parameters: pass them, "
                "as in `tx.update(gradients, state, params)`"
            )
        updates, after = inner.update(updates, state.inner, params, **extra)

        # The parameters after this step, which optax' caller computes only later.
        def averaged(old: jax.Array, parameter: jax.Array, change: jax.Array) -> jax.Array:
            return decay * old + (1 - decay) * updated(change, parameter).astype(old.dtype)

        return updates, AveragedState(after, jax.tree.map(averaged, state.average, params, updates))

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(x: jax.Array) -> jax.Array:
    """The array in float32, or in its own dtype if that is wider."""
    if jnp.finfo(x.dtype).bits < 32:
        return x.astype(jnp.float32)
    return x


def averaged(ts: TrainState[M]) -> M:
    """The model with the averaged parameters. What is not trained is taken from the model.

    Args:
        ts: a training state whose optimizer was made by `ft.with_ema`.

    Raises:
        FunctreeError: the optimizer keeps no average, or several; an average is deleted.
    """
    check("averaged has no average", ts=(ts, TRAIN_STATE))
    # `ft.with_ema` may be inside of another transformation.
    states = outermost(ts.opt_state, lambda _, node: isinstance(node, AveragedState))
    found = [state.average for _, state in states]
    if len(found) != 1:
        keeps = "no average"
        if found:
            keeps = f"{len(found)} averages"
        raise FunctreeValueError(
            f"the optimizer keeps {keeps} of the parameters: "
            "`TrainState.create(model, ft.with_ema(tx))`"
        )

    def parameter(average: Tree, own: Tree) -> Tree:
        if _is_empty(average):
            return own
        return average.astype(own.dtype)

    # What has its own dtype is returned as it is, also if nothing is left of it.
    check_deleted("averaged", found[0])
    return jax.tree.map(parameter, found[0], ts.model, is_leaf=_is_empty)


def _is_empty(node: Tree) -> bool:
    """Whether an average is missing, because its parameter is frozen (None) or masked by optax."""
    return node is None or isinstance(node, optax.MaskedNode)
