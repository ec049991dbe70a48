"""All that a training step hands on, as one module: `TrainState`."""

from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray

from functree.errors import FunctreeError, Problem, count
from functree.layout.layouts import Layout
from functree.layout.optimizer import parameters
from functree.layout.training import Training
from functree.state.state import State, holds_refs, make_state
from functree.transforms.placement import shard
from functree.tree.asks import is_trainable
from functree.tree.filters import Filter, as_filter
from functree.tree.leaf import array_text
from functree.tree.leaves import read

M = TypeVar("M")


class TrainState(eqx.Module, Generic[M]):
    """All that a training step hands on; made by `TrainState.create`.

    One layout for the model lays out the whole: the optimizer's state as `ft.plan_optimizer` says, the model's state by
    the same rules, the rest whole. A pattern is tried on the whole path (`model.blocks.0.up`, `opt_state.0.mu.**`), and
    on the path below `model`.

    Attributes:
        step: how many updates there were.
        model: the model.
        opt_state: of the optimizer, for the parameters that it updates.
        state: what the model declares by `ft.StateRef`s, or None.
        key: for dropout and the like, or None.
        tx: the optimizer, static. Made once: optax's are equal only by identity, and another one compiles anew.
        wrt: the filter of the parameters that it updates, static.

    Examples:
        >>> import optax
        >>> mesh, rules = ft.make_mesh(data=2, model=4), ft.AxisRules({"embed": None, "hidden": "model"})
        >>> model = ft.nn.Linear(8, 16, key=jax.random.key(0))
        >>> ts = ft.TrainState.create(model, optax.adam(1e-3), layout=rules, mesh=mesh)
        >>> ts.opt_state[0].mu.weight.sharding.spec, int(ts.step)
        (P(None, 'model'), 0)
    """

    step: Int[Array, ""]
    model: M
    opt_state: Any
    state: State | None
    key: PRNGKeyArray | None
    tx: Any = eqx.field(static=True)
    wrt: Filter = eqx.field(static=True)

    @classmethod
    def create(
        cls,
        model: M,
        tx: optax.GradientTransformation,
        *,
        layout: Any = None,
        mesh: Any = None,
        state: State | None = None,
        key: PRNGKeyArray | None = None,
        wrt: Any = is_trainable,
    ) -> "TrainState[M]":
        """A training state before the first step. Under `ft.init` each of its arrays is born sharded.

        Args:
            model: concrete, traced or abstract. If it declares state that has no place yet, that is made.
            tx: any optax optimizer.
            layout: of the model; everything is put where it says.
            mesh: a mesh, or None for the current one.
            state: of the model, if it was made already.
            key: handed on in `key`.
            wrt: a filter: what does not match is frozen, and the optimizer knows nothing of it.

        Raises:
            FunctreeError: no optimizer; no parameter matches `wrt`.
            ShardingError: the layout does not fit.

        Examples:
            >>> import optax
            >>> make = lambda key: ft.TrainState.create(ft.nn.Linear(8, 16, key=key), optax.sgd(0.1))
            >>> mesh, rules = ft.make_mesh(data=2, model=4), ft.AxisRules({"embed": None, "hidden": "model"})
            >>> ft.init(make, rules, mesh)(jax.random.key(0)).model.bias.sharding.spec
            P('model',)
        """
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise FunctreeError(f"{tx!r} is no optimizer: an optax GradientTransformation has `init` and `update`")
        if state is None and holds_refs(model):
            model, state = make_state(model)
        chosen = as_filter(wrt)
        params = parameters(model, chosen)
        if not jax.tree.leaves(params):
            raise FunctreeError(f"nothing to train: no array of {type(model).__name__} matches wrt={wrt!r}")
        made = cls(jnp.zeros((), jnp.int32), model, _own(tx.init(params), model), state, key, tx, chosen)
        return made if layout is None else shard(made, layout, mesh)

    def __layout__(self, layout: Layout) -> Layout:
        """The layout of the whole, by one for the model.

        The hook by which a prefix tree of layouts learns of it.
        """
        return Training(layout, self.model, self.tx, self.wrt)


def _own(opt_state: Any, model: Any) -> Any:
    """An optimizer's state without the model's own arrays, or one array twice: to donate both would be an error."""
    seen = {id(x) for x in jax.tree.leaves(model)}

    def fresh(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        new = jnp.copy(x) if id(x) in seen else x
        seen.add(id(new))
        return new

    return jax.tree.map(fresh, opt_state)


def apply_gradients(ts: TrainState[M], grads: Any, *, state: State | None = None, **extra: Any) -> TrainState[M]:
    """The training state after one update.

    Args:
        ts: before.
        grads: a tree like the model, from `ft.grad` or `ft.value_and_grad`; None, or anything, for what is frozen.
        state: the model's state after the step, if it has one.
        **extra: what the optimizer's `update` takes besides (`value=`, for L-BFGS `value_fn=` and `grad=`).

    Raises:
        FunctreeError: a parameter has no gradient, or one of another shape, by path.

    Examples:
        >>> import optax
        >>> ts = ft.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.5))
        >>> ts = ft.apply_gradients(ts, {"w": jnp.ones(3)})
        >>> ts.model["w"].tolist(), int(ts.step)
        ([0.5, 0.5, 0.5], 1)
    """
    leaves = read(ts.model)
    trained = [ts.wrt(leaf) for leaf in leaves.leaves]
    found = {leaf.path: leaf.value for leaf in read(grads).leaves}
    problems = []
    for leaf, wanted in zip(leaves.leaves, trained, strict=True):
        grad = found.get(leaf.path)
        if wanted and (grad is None or grad.shape != leaf.shape):
            why = "has no gradient" if grad is None else f"has a gradient {array_text(grad)}"
            remedy = (
                "differentiate by what the optimizer updates: `ft.grad(loss, wrt=...)`, `TrainState.create(wrt=...)`"
            )
            problems.append(Problem(leaf.path, leaf.shape, leaf.text, why, remedy))
    if problems:
        raise FunctreeError(f"{count(len(problems), 'parameter')} cannot be updated", problems)
    grads = leaves.tree(
        found[leaf.path] if wanted else None for leaf, wanted in zip(leaves.leaves, trained, strict=True)
    )
    params = leaves.tree(leaf.value if wanted else None for leaf, wanted in zip(leaves.leaves, trained, strict=True))
    update = optax.with_extra_args_support(ts.tx).update
    updates, opt_state = update(grads, ts.opt_state, params, **extra)
    model = jax.tree.map(_added, updates, ts.model, is_leaf=_is_none)
    state = ts.state if state is None else state
    return TrainState(ts.step + 1, model, opt_state, state, ts.key, ts.tx, ts.wrt)


def _is_none(node: Any) -> bool:
    return node is None


def _added(update: Any, parameter: Any) -> Any:
    """A parameter and its update, in the parameter's dtype."""
    return parameter if update is None else (parameter.astype(update.dtype) + update).astype(parameter.dtype)
