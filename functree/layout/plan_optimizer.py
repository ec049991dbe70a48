"""`plan_optimizer` plans an optimizer's state from the model's layout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from functree.argument_checks import check_tree
from functree.devices.meshes import MeshLike
from functree.errors import FunctreeValueError, Problem
from functree.labels.filters import FilterLike, as_filter, check_wrt, is_trainable
from functree.labels.leaves import Leaf, Leaves, meeting
from functree.labels.optimizer.followed_parameters import Optimizer, TrainedModel, optimizer_state
from functree.labels.optimizer.stack_treatment import warn_of_stacks
from functree.layout.decide import Decisions, decide_parts, follow, plan_decisions
from functree.layout.decision import leaf_problems, refuse
from functree.layout.layout import LayoutLike, LayoutTree, Part, as_layout, read_on_mesh
from functree.layout.plan.plan import Plan
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
    """Plan an optimizer's state, using only the model's layout.

    A leaf with the shape of its parameter gets the parameter's spec. A factored leaf gets the
    entries of the dimensions that it keeps. A leaf with further leading dimensions gets an
    unsharded entry for each of them, followed by the parameter's spec. Leaves that do not depend on
    the parameters' shapes are replicated.

    The function warns if the optimizer treats a stack of layers differently from separate layers;
    see `ft.layerwise`.

    Args:
        tx: any optax optimizer.
        model: a concrete or abstract model.
        layout: the model's layout.
        mesh: the mesh, as in `ft.plan`.
        wrt: a filter for the parameters that the optimizer updates.
        otherwise: a layout for leaves that depend on the parameters' shapes in a way that cannot be
            determined.

    Returns:
        The plan of `tx.init(parameters)`.

    Raises:
        ShardingError: if the model cannot be laid out.
        ShardingError: if a leaf's spec cannot be determined and there is no `otherwise`.
        RuleError: if `layout` or `otherwise` is not a layout.
        RuleError: if `wrt` is not a filter.
        RuleError: if a pattern in `wrt` matches no leaf.
        FunctreeError: if `tx` is not an optimizer.
        FunctreeError: if no array of the model matches `wrt`.

    Examples:
        >>> import optax
        >>> model = {"w": jnp.ones((4, 8))}
        >>> plan = ft.plan_optimizer(
        ...     optax.adam(1e-3), model, ft.P("data"), {"data": 2}
        ... )
        >>> plan["0.mu.w"].spec, plan["0.count"].reason
        (P('data', None), "does not depend on the parameters' shapes")
    """
    planned, _ = plan_state(tx, model, layout, mesh, wrt, otherwise)
    return planned


def plan_state(
    tx: Optimizer,
    model: Any,
    layout: LayoutTree,
    mesh: MeshLike,
    wrt: FilterLike,
    otherwise: LayoutLike,
) -> tuple[Plan, Any]:
    """Return the plan of `plan_optimizer`, and the parameters that the optimizer gets."""
    check_tree("plan_optimizer", model)
    leaves, parts, view = read_on_mesh(model, layout, mesh)
    decided = decide_parts(leaves, parts, view)
    if decided.problems:
        raise refuse(decided.problems, view)
    trained = select_trained(leaves, wrt, type(model).__name__)
    state = optimizer_state(tx, trained)
    warn_of_stacks(tx, trained)
    parameters = dict(zip(leaves.paths, decided.decisions, strict=True))
    decisions = follow(state.leaves, parameters)
    problems: list[Problem] = []
    unused: Sequence[str] = ()
    if otherwise is not None:
        lost: dict[int, Leaf] = {}
        for i, leaf in enumerate(state.leaves):
            if leaf.follows is not None and not leaf.follows.known:
                # The copy follows nothing, so `otherwise` applies to it.
                lost[i] = leaf._replace(follows=None)
        others = replace(state, leaves=tuple(lost.values()))
        extra = decide_parts(others, [Part(as_layout(otherwise), Path())], view)
        for i, decision in zip(lost, extra.decisions, strict=True):
            decisions[i] = decision._replace(reasons=((f"otherwise: {decision.reason}",),))
        problems += extra.problems
        unused = extra.unused
    for leaf, decision in zip(state.leaves, decisions, strict=True):
        problems += leaf_problems(leaf, decision, view)
    planned = plan_decisions(state, Decisions(state.leaves, decisions, problems, unused), view)
    return planned, trained.tree(lambda leaf: leaf.value)


def select_trained(leaves: Leaves, wrt: FilterLike, name: str) -> TrainedModel:
    """Select the arrays of a model that a filter matches.

    Args:
        leaves: the model's leaves.
        wrt: the filter.
        name: the name of the model's class, for errors.

    Raises:
        RuleError: if a pattern in the filter matches no leaf.
        FunctreeError: if several arrays share a path.
        FunctreeError: if no array of the model matches the filter.
    """
    matches = as_filter(wrt)
    check_wrt(wrt, leaves.leaves, name)
    # The leaves of the state refer to their parameters by path.
    if problems := meeting(leaves.leaves):
        raise FunctreeValueError(f"{name} cannot be trained by an optimizer", problems)
    trained = TrainedModel(
        leaves.skeleton, {leaf.path: leaf if matches(leaf) else None for leaf in leaves.leaves}
    )
    if leaves.leaves and not trained.parameters:
        raise nothing_to_train(name, wrt)
    return trained


def nothing_to_train(name: str, wrt: FilterLike) -> FunctreeValueError:
    """Return the error for a filter that matches no array of a model."""
    return FunctreeValueError(
        f"no array of {name} matches wrt={wrt!r}, so there is nothing to train: "
        "pass a filter that matches its parameters"
    )
