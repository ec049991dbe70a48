"""`TrainState` holds everything that one training step passes to the next."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from functree.argument_checks import KEY, Takes, check, check_tree
from functree.calls.program import around
from functree.devices.meshes import MeshLike, mesh_view
from functree.devices.placement import check_deleted, explicit_mesh, is_concrete, mesh_of
from functree.errors import FunctreeValueError, Problem, StateError, count, listed
from functree.labels.filters import Filter, FilterLike, as_filter, is_trainable
from functree.labels.leaves import Leaf, Leaves, arrays_by_path, read
from functree.labels.optimizer.followed_parameters import check_optimizer
from functree.labels.optimizer.stack_treatment import warn_of_stacks
from functree.layout.decide import ShownByPlan, current_plan, short_text
from functree.layout.layout import LayoutTree
from functree.layout.plan_optimizer import nothing_to_train, plan_optimizer, select_trained
from functree.placing.shard import shard
from functree.state.state import State, StateRef, apart, place_state, strong
from functree.tree.arrays import AnyArray, Tree, array_text
from functree.tree.interfaces import TrainingState
from functree.tree.nodes import children, rebuilt
from functree.tree.skeleton.skeleton import Skeleton, abstract_result

M = TypeVar("M")
N = TypeVar("N")


class TrainState(eqx.Module, TrainingState, ShownByPlan, Generic[M]):
    """A training state: a model, its optimizer's state and the step.

    `TrainState.create` builds it. The model's layout applies to the whole training state. The
    optimizer's state is laid out as in `ft.plan_optimizer`, and the model's state according to the
    layout's rules. The step and the key are replicated. Filters are matched against paths within
    the model. A pattern that begins with a field of the training state, such as
    `opt_state.0.mu.**`, is matched against paths that begin with that field.

    Attributes:
        step: the number of updates.
        model: the model.
        opt_state: the optimizer's state, for the parameters that the optimizer updates.
        state: the model's state, which is an `ft.State` or an `eqx.nn.State`, or None.
        key: a random key, for example for dropout, or None.
        tx: the optimizer, which is static. Build it once: two optimizers with the same options are
            unequal, so the step would compile again for a new one.
        wrt: a static filter that selects the parameters to update.

    Examples:
        >>> import optax
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules({"embed": None, "hidden": "model"})
        >>> model = ft.nn.Linear(8, 16, key=jax.random.key(0))
        >>> ts = ft.TrainState.create(
        ...     model, optax.adam(1e-3), layout=rules, mesh=mesh
        ... )
        >>> ts.opt_state[0].mu.weight.sharding.spec, int(ts.step)
        (P(None, 'model'), 0)
    """

    step: Int[Array, ""]
    model: M
    opt_state: Tree
    state: State | eqx.nn.State | None
    key: PRNGKeyArray | None
    tx: Any = eqx.field(static=True)
    wrt: Filter = eqx.field(static=True)

    def __repr__(self) -> str:
        # A training state of specs, as a plan returns it, has no short text and is shown in full.
        return short_text(self) or super().__repr__()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the current shardings of the arrays in IPython."""
        printer.text(str(current_plan(self) or repr(self)))

    # Callers of `TrainState.create` pass no type argument, so the type of `model` determines M.
    @classmethod
    def create(
        cls: "type[TrainState[Any]]",
        model: N,
        tx: optax.GradientTransformation,
        *,
        layout: LayoutTree = None,
        mesh: MeshLike = None,
        state: State | eqx.nn.State | None = None,
        key: PRNGKeyArray | None = None,
        wrt: FilterLike = is_trainable,
    ) -> "TrainState[N]":
        """Create the training state before the first step.

        Under `ft.init`, each array of the training state is created sharded.

        Args:
            model: the model, which may be traced or abstract. The state that it declares is
                created, unless `state` is given. An abstract model gets an abstract step and
                optimizer state. Weakly typed arrays become strongly typed, as in the results of a
                step.
            tx: any optax optimizer.
            layout: the model's layout, with which the whole training state is placed. With a
                layout, the arrays must be concrete.
            mesh: a mesh, or None for the current mesh.
            state: the model's state, if it is already made: an `ft.State`, or an `eqx.nn.State`,
                which has no axis names and is therefore replicated.
            key: a random key, for the attribute `key`.
            wrt: a filter. Parameters that it does not match are frozen.

        Raises:
            FunctreeError: if `tx` is not an optimizer.
            FunctreeError: if no parameter matches `wrt`.
            FunctreeError: if an array is deleted.
            RuleError: if `wrt` is not a filter.
            RuleError: if a pattern in `wrt` matches no leaf.
            RuleError: if `layout` is not a layout.
            StateError: if `state` is not given and `ft.make_state` cannot make the model's state,
                for example because the model contains an `eqx.nn.StateIndex`.
            ShardingError: if the layout does not fit.

        Examples:
            >>> import optax
            >>> def make(key):
            ...     return ft.TrainState.create(
            ...         ft.nn.Linear(8, 16, key=key), optax.sgd(0.1)
            ...     )
            >>> mesh = ft.make_mesh(data=2, model=4)
            >>> rules = ft.AxisRules({"embed": None, "hidden": "model"})
            >>> ft.init(make, rules, mesh)(jax.random.key(0)).model.bias.sharding.spec
            P('model',)
        """
        check_optimizer(tx, ("init", "update"))
        check(
            "TrainState.create: invalid arguments", state=(state, STATE), key=(key, KEY.or_none())
        )
        check_tree("TrainState.create", model)
        if mesh is not None:
            mesh_view(mesh)
        leaves, name = read(model), type(model).__name__
        check_deleted("TrainState.create", {"model": model, "state": state, "key": key})
        if state is None:
            model, made = place_state(model, leaves.leaves)
            if made:
                # The leaves lose the initial values of the refs, which have moved to the state.
                kept = tuple(leaf for leaf in leaves.leaves if not leaf.is_below(StateRef))
                paths = [leaf.path for leaf in kept]
                state, leaves = made, Leaves(kept, (), Skeleton.of(model, paths))
        chosen = as_filter(wrt)
        trained = select_trained(leaves, chosen, name)
        if not trained.parameters:
            raise nothing_to_train(name, wrt)
        model, params = _strong(model), _strong(trained.tree(lambda leaf: leaf.value))
        start = partial(_start, tx)
        if any(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in leaves.leaves):
            # `tx.init` allocates arrays even for abstract parameters, and these arrays may exceed
            # any device's memory.
            start = partial(abstract_result, start)
        # On Explicit axes, an optimizer that computes with arrays needs their mesh to be current.
        on = explicit_mesh(leaf.value for leaf in leaves.leaves)
        with around(on):
            step, opt_state = start(params)
        if layout is None and on is not None and all(_lies_on(on, leaf) for leaf in leaves.leaves):
            # On Explicit axes, JAX replicates the arrays that an optimizer creates.
            specs = {leaf.path: leaf.value.sharding.spec for leaf in leaves.leaves}
            planned = plan_optimizer(tx, model, lambda path, leaf: specs[path], on, wrt=wrt)
            opt_state = shard(opt_state, planned)
        warn_of_stacks(tx, trained)
        ts = cls(step, model, apart(opt_state, model), _strong(state), key, tx, chosen)
        if layout is None:
            return ts
        return shard(ts, layout, mesh)


def _lies_on(mesh: Mesh | AbstractMesh, leaf: Leaf) -> bool:
    return is_concrete(leaf.value) and leaf.value.committed and mesh_of(leaf.value) == mesh


def _start(tx: optax.GradientTransformation, params: Tree) -> tuple[jax.Array, Tree]:
    """Return the step and the optimizer's state before the first update."""
    return jnp.zeros((), jnp.int32), _strong(tx.init(params))


STATE = Takes(
    "an `ft.State` or an `eqx.nn.State`", lambda value: isinstance(value, State | eqx.nn.State)
).or_none()
TRAIN_STATE = Takes("an `ft.TrainState`", lambda value: isinstance(value, TrainState))

TS = TypeVar("TS", bound=TrainState[Any])
T = TypeVar("T")


def apply_gradients(
    ts: TS, grads: Tree, *, state: State | eqx.nn.State | None = None, **extra: Any
) -> TS:
    """Return the training state after one update.

    Args:
        ts: the training state before the update. Fields that a subclass adds are unchanged.
        grads: a tree like the model, from `ft.grad` or `ft.value_and_grad`. Values for frozen
            parameters are ignored, and may be None.
        state: the model's state after the step, if the model has state.
        **extra: further arguments for the optimizer's `update`, such as `value=`.

    Raises:
        FunctreeError: if a parameter has no gradient.
        FunctreeError: if a parameter and its gradient differ in shape.
        FunctreeError: if an array is deleted.
        StateError: if `state` does not have the structure of the model's state.

    Examples:
        >>> import optax
        >>> ts = ft.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.5))
        >>> ts = ft.apply_gradients(ts, {"w": jnp.ones(3)})
        >>> ts.model["w"].tolist(), int(ts.step)
        ([0.5, 0.5, 0.5], 1)
    """
    check("apply_gradients: invalid arguments", ts=(ts, TRAIN_STATE))
    leaves = read(ts.model)
    by_path = arrays_by_path(grads)
    check_deleted("apply_gradients", {"ts": ts, "grads": grads, "state": state})
    # Both lists contain None for frozen parameters, which the optimizer does not get.
    params: list[AnyArray | None] = []
    gradients: list[AnyArray | None] = []
    problems: list[Problem] = []
    for leaf in leaves.leaves:
        if not ts.wrt(leaf):
            params.append(None)
            gradients.append(None)
            continue
        grad = by_path.get(leaf.path)
        params.append(leaf.value)
        gradients.append(grad)
        if grad is None:
            problems.append(leaf.problem("has no gradient", _DIFFERENTIATE))
        elif grad.shape != leaf.shape:
            why = f"differs in shape from its gradient, {array_text(grad)}"
            problems.append(leaf.problem(why, _OF_THIS_MODEL))
    if problems:
        wrong = count(len(problems), "parameter")
        raise FunctreeValueError(f"apply_gradients: {wrong} cannot be updated", problems)
    spread = leaves.skeleton.spread
    updates, opt_state = _updates(ts, spread(gradients), spread(params), extra)
    model = jax.tree.map(updated, updates, ts.model, is_leaf=lambda node: node is None)
    if state is None:
        state = ts.state
    elif not _same_pieces(state, ts.state):
        raise StateError(
            f"apply_gradients got {_pieces(state)}, but the model has {_pieces(ts.state)}: "
            "pass the state of this model"
        )
    # The constructor is not called, since a subclass may have more fields and its own constructor.
    fields = dict(children(ts) or ())
    fields |= {"step": ts.step + 1, "model": model, "opt_state": _strong(opt_state), "state": state}
    return rebuilt(ts, list(fields.values()))


def _updates(
    ts: TrainState[Any], gradients: Tree, params: Tree, extra: Mapping[str, Any]
) -> tuple[Tree, Tree]:
    """Compute the updates of the parameters, and the optimizer's next state."""
    update = optax.with_extra_args_support(ts.tx).update
    moments = jax.tree.map(_on_device, ts.opt_state)
    try:
        return update(gradients, moments, params, **extra)
    except (TypeError, ValueError) as error:
        # Only a failed update gets the note: to detect another model's moments in advance, each
        # update would have to trace `init`.
        error.add_note(_OF_ANOTHER_MODEL)
        raise


_DIFFERENTIATE = (
    "pass the same filter to `ft.grad(loss, wrt=...)` and `TrainState.create(..., wrt=...)`"
)
_OF_ANOTHER_MODEL = (
    "functree: if the model in this training state was changed, the optimizer's state still fits "
    "the old model. Create a new training state: "
    "`ft.TrainState.create(ts.model, ts.tx, wrt=ts.wrt, ...)`"
)
_OF_THIS_MODEL = "pass the gradient of this model, from `ft.grad` or `ft.value_and_grad`"


def _same_pieces(state: Tree, before: Tree) -> bool:
    """Return whether two states may belong to the same model."""
    # Equinox empties a state when a new state is made from it, so its pieces cannot be compared.
    if isinstance(before, eqx.nn.State):
        return isinstance(state, eqx.nn.State)
    return jax.tree.structure(state) == jax.tree.structure(before)


def _pieces(state: Tree) -> str:
    """Format the pieces of a model's state for a message, without their values."""
    if state is None:
        return "no state"
    if not isinstance(state, State):
        return f"a {type(state).__name__}"
    if not state:
        return "an empty State"
    return f"a State of {listed([f'`{path}`' for path in state])}"


def _strong(tree: T) -> T:
    """Replace weak types in a tree, since they would make a step compile twice.

    `eqx.nn.PReLU` and L-BFGS contain weakly typed arrays.
    """
    # Arrays are replaced by identity, so that an array that occurs twice stays one array.
    new: dict[int, AnyArray] = {}
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and jax.typeof(x).weak_type:
            new[id(x)] = strong(x)
    if not new:
        return tree
    return jax.tree.map(lambda x: new.get(id(x), x), tree)


def _on_device(x: object) -> object:
    """Move an array from host memory, where the update cannot be computed, to the device."""
    if not isinstance(x, jax.Array) or jax.typeof(x).memory_space != jax.memory.Space.Host:
        return x
    return jax.device_put(x, jax.memory.Space.Device)


def updated(update: Any, parameter: Any) -> Any:
    """Add an update to its parameter, in the parameter's dtype. A frozen parameter is unchanged."""
    if update is None:
        return parameter
    # Under strict dtype promotion, JAX does not add a float32 update to a bfloat16 parameter.
    return (parameter.astype(update.dtype) + update).astype(parameter.dtype)
