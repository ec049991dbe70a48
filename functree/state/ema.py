"""An optimizer ─► one whose state also keeps a running average of the parameters; a training state ─► that average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from functree.errors import FunctreeError
from functree.state.train import TrainState, updated
from functree.tree.nodes import children


class AveragedState(NamedTuple):
    """The state of `ft.with_ema`: the optimizer's own, and the average of the parameters."""

    inner: Any
    average: Any


def with_ema(tx: optax.GradientTransformation, decay: float = 0.999) -> optax.GradientTransformationExtraArgs:
    """The same optimizer, which keeps an exponential moving average of the parameters in its state.

    The average is laid out as the parameters are (`ft.plan_optimizer`), saved with the rest, and read by `ft.averaged`.
    It is kept in float32 at least, in which a small step is not lost.

    Args:
        tx: any optax optimizer; the whole of it, since what changes its updates afterwards is not averaged.
        decay: how much of the old average stays in each step.

    Raises:
        FunctreeError: `decay` is not between 0 and 1.

    Examples:
        >>> import optax
        >>> ts = ft.TrainState.create({"w": jnp.zeros(2)}, ft.with_ema(optax.sgd(1.0), decay=0.5))
        >>> ts = ft.apply_gradients(ts, {"w": -jnp.ones(2)})
        >>> ts.model["w"].tolist(), ft.averaged(ts)["w"].tolist()
        ([1.0, 1.0], [0.5, 0.5])
    """
    if not 0 <= decay < 1:
        raise FunctreeError(f"with_ema(decay={decay!r}): a number from 0 up to, and without, 1")
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> AveragedState:
        return AveragedState(inner.init(params), jax.tree.map(_wide, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AveragedState]:
        if params is None:
            raise FunctreeError(
                "with_ema averages the parameters: call `tx.update(gradients, state, params)` with them"
            )
        updates, after = inner.update(updates, state.inner, params, **extra)

        def averaged(old: Any, parameter: Any, change: Any) -> Any:
            return decay * old + (1 - decay) * updated(change, parameter).astype(old.dtype)

        return updates, AveragedState(after, jax.tree.map(averaged, state.average, params, updates))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def averaged(ts: TrainState[Any]) -> Any:
    """The model with the averaged parameters; what is not trained is the model's own.

    Args:
        ts: made with an optimizer of `ft.with_ema`.

    Raises:
        FunctreeError: its optimizer keeps no average, or several.
    """
    found = _averages(ts.opt_state)
    if len(found) != 1:
        raise FunctreeError(
            f"the optimizer keeps {'no average' if not found else f'{len(found)} averages'} of the parameters: "
            "`TrainState.create(model, ft.with_ema(tx))`"
        )
    return jax.tree.map(
        lambda x, own: own if _is_empty(x) else x.astype(own.dtype), found[0], ts.model, is_leaf=_is_empty
    )


def _is_empty(node: Any) -> bool:
    """What an optimizer has in the place of a parameter that it does not see."""
    return node is None or isinstance(node, optax.MaskedNode)


def _averages(node: Any) -> list[Any]:
    if isinstance(node, AveragedState):
        return [node.average]
    return [average for _, child in children(node) or () for average in _averages(child)]
