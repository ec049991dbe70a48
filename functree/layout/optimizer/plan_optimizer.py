"""A model's layout and an optimizer ─► the layout of the optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from functree.errors import RuleError, did_you_mean
from functree.layout.decision import WHOLE, Decision, Dimension
from functree.layout.layout import Layout, LayoutLike, LayoutTree, Resolution, as_layout
from functree.layout.meshes import MeshLike, MeshView
from functree.layout.optimizer.optimizer_state import optimizer_state
from functree.layout.optimizer.origins import Optimizer, Origin, Trained
from functree.layout.plan.plan import Plan
from functree.layout.plan.resolver import agreed_view, plan_leaves, read_for
from functree.layout.prefix import Part
from functree.layout.specs import mesh_axes
from functree.parameters import check_tree
from functree.tree.filters.filter import FilterLike, as_filter, patterns
from functree.tree.filters.predicates import is_trainable
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves
from functree.tree.paths import Path


def plan_optimizer(
    tx: Optimizer,
    model: Any,
    layout: LayoutTree,
    mesh: MeshLike = None,
    *,
    wrt: FilterLike = is_trainable,
    otherwise: LayoutLike = None,
) -> Plan:
    """Plan the state of an optimizer, by the layout of the model alone.

    A leaf that belongs to a parameter and has its shape gets the spec of the parameter. A factored leaf gets the
    entries of the dimensions that it keeps. A leaf with additional leading dimensions gets the spec of the parameter
    after unsharded entries. Leaves that do not depend on the shapes of the parameters are replicated.

    Args:
        tx: any optax optimizer.
        model: a concrete or abstract model.
        layout: the layout of the model.
        mesh: the mesh, as in `ft.plan`.
        wrt: a filter for the parameters that the optimizer updates.
        otherwise: a layout for leaves that depend on the shapes of the parameters in a way that cannot be determined.

    Returns:
        The plan of `tx.init(parameters)`.

    Raises:
        ShardingError: the model cannot be laid out, or the spec of a leaf of the state cannot be determined and there
            is no `otherwise`.
        RuleError: `layout` or `otherwise` is not a layout; `wrt` is not a filter, or a pattern in it matches no leaf.
        FunctreeError: `tx` is not an optimizer.

    Examples:
        >>> import optax
        >>> plan = ft.plan_optimizer(optax.adam(1e-3), {"w": jnp.ones((4, 8))}, ft.P("data"), {"data": 2})
        >>> plan["0.mu.w"].spec, plan["0.count"].reason
        (P('data', None), 'does not depend on the parameters')
    """
    return plan_state(tx, model, layout, mesh, wrt, otherwise).plan


class PlannedState(NamedTuple):
    """The plan of an optimizer's state, and the parameters that the optimizer is initialized with."""

    plan: Plan
    parameters: Any


def plan_state(
    tx: Optimizer, model: Any, layout: LayoutTree, mesh: MeshLike, wrt: FilterLike, otherwise: LayoutLike
) -> PlannedState:
    """The same as `plan_optimizer`, with the parameters."""
    check_tree("plan_optimizer", model)
    leaves, parts = read_for(model, layout)
    view = agreed_view(mesh, parts)
    planned = _placed(plan_leaves(leaves, parts, view))
    trained = select_trained(leaves, wrt, type(model).__name__)
    state, origins = optimizer_state(tx, trained)
    derived = Derived(origins, planned, None if otherwise is None else as_layout(otherwise))
    whole_state = Part(derived, Path(), state.skeleton.treedef.num_leaves)
    return PlannedState(plan_leaves(state, [whole_state], view), trained.tree(lambda leaf: leaf.value))


def select_trained(leaves: Leaves, wrt: FilterLike, name: str) -> Trained:
    """The arrays of a model that a filter matches.

    Args:
        leaves: the leaves of the model.
        wrt: the filter.
        name: the name of the model's class, for the error.

    Raises:
        RuleError: a pattern in the filter matches no leaf.
    """
    matches = as_filter(wrt)
    # With a misspelled pattern in `~ft.glob(...)`, parameters that should be frozen would be trained.
    for pattern in patterns(matches):
        if not any(map(pattern, leaves.leaves)):
            near = did_you_mean(getattr(pattern, "pattern", ""), [leaf.path for leaf in leaves.leaves])
            raise RuleError(f"wrt={wrt!r}: {pattern!r} matches no leaf of {name}{near}")
    return Trained(leaves.skeleton, {leaf.path: leaf if matches(leaf) else None for leaf in leaves.leaves})


class Placed(NamedTuple):
    """What is decided about one parameter, as far as the optimizer's state follows it.

    Attributes:
        mesh_axes: for each dimension, the mesh axes that shard it.
        memory_kind: the kind of memory; None for the default.
    """

    mesh_axes: tuple[tuple[str, ...], ...]
    memory_kind: str | None


def _placed(plan: Plan) -> dict[Path, Placed]:
    """What the plan of a model says about each parameter, by path."""
    # Most rows share their spec with others. It has an entry for each dimension; a row without one is replicated.
    known: dict[tuple[int, int, str | None], Placed] = {}
    found: dict[Path, Placed] = {}
    for row in plan:
        key = id(row.spec), len(row.shape), row.memory_kind
        if key not in known:
            entries = [None] * len(row.shape) if row.spec is None else row.spec.partitions
            known[key] = Placed(tuple(map(mesh_axes, entries)), row.memory_kind)
        found[row.path] = known[key]
    return found


class Derived(Layout):
    """The layout of the leaves of one optimizer state.

    Args:
        origins: the origin of each leaf. The layout is for these leaves, in this order.
        parameters: what is decided about the parameters, by path.
        otherwise: the layout of leaves whose origin cannot be determined.
    """

    def __init__(self, origins: Sequence[Origin], parameters: Mapping[Path, Placed], otherwise: Layout | None):
        self.origins: Sequence[Origin] = origins
        self.parameters: Mapping[Path, Placed] = parameters
        self.otherwise: Layout | None = otherwise

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        # Most parameters have several leaves, such as the two moments of adam, about which the decision is one object.
        known: dict[tuple[Origin, int], Decision] = {}
        decisions: list[Decision] = []
        for leaf, origin in zip(leaves, self.origins, strict=True):
            key = origin, len(leaf.shape)
            decision = known.get(key)
            if decision is None:
                decision = known[key] = self._decide(leaf, origin)
            decisions.append(decision)
        lost = [i for i, origin in enumerate(self.origins) if not origin.derived]
        if self.otherwise is None or not lost:
            return Resolution(decisions)
        found = self.otherwise.resolve([leaves[i] for i in lost], mesh)
        for i, decision in zip(lost, found.decisions, strict=True):
            decisions[i] = decision._replace(reason=f"otherwise: {decision.reason}")
        return Resolution(decisions, found.problems, found.unused)

    def _decide(self, leaf: Leaf, origin: Origin) -> Decision:
        # The axes of the leaf are not asked: what is decided about the parameter is decided about them.
        start = Decision((WHOLE,) * len(leaf.shape))
        if not origin.derived:
            return start.wrong(UNDERIVABLE)
        if origin.parameter is None:
            return start.because(INDEPENDENT)
        if all(dim is None for dim in origin.dims):
            return start.because(INDEPENDENT if leaf.shape else f"one number for {origin.parameter}")
        parameter, name = self.parameters[origin.parameter], str(origin.parameter)
        source = f"the spec of {name}"
        axes = [() if dim is None else parameter.mesh_axes[dim] for dim in origin.dims]
        reason = f"as {name}"
        # Unless it has all dimensions in their order, the reason lists them.
        if not origin.has_all_of(len(parameter.mesh_axes)):
            reason += f", its dimensions {_kept(origin.dims)}"
        dimensions = tuple(Dimension(one, source) if one else WHOLE for one in axes)
        return Decision(dimensions, reason, memory_kind=parameter.memory_kind)


INDEPENDENT = "does not depend on the parameters"
UNDERIVABLE = (
    "depends on the shapes of the parameters in a way that cannot be determined, so it cannot get the spec of a "
    "parameter",
    "give a layout for such leaves: `otherwise=P()` replicates them; in a TrainState, by a pattern: "
    "`StateSharding({'opt_state.**': P(), ...: layout})`",
)


def _kept(dims: Sequence[int | None]) -> str:
    """The dimensions of a parameter in a reason: `0, 2`."""
    return ", ".join("unsharded" if dim is None else str(dim) for dim in dims)
