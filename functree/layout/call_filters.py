"""The leaves of a call and the rules of its function ─► an error for filters of the rules that
decide about no leaf."""

from collections.abc import Sequence

from functree.devices.meshes import MeshView
from functree.errors import Problem, ShardingError
from functree.labels.filters.filter import Filter, FunctionFilter, may_name, names_field
from functree.labels.leaf import Leaf, is_in_module
from functree.labels.leaves import Leaves
from functree.labels.training_state import FOLLOWING, MODEL, OPTIMIZER, STATE
from functree.layout.decide import decide, filter_problems, grouped
from functree.layout.layout import DeadFilter, Layout
from functree.layout.prefix import Part
from functree.tree.paths import Path


def check_filters(name: str, leaves: Leaves, parts: Sequence[Part], rules: Layout) -> None:
    """Check that each filter in the rules of a function decides about a leaf of a call.

    Rules are for all arguments together: a filter for the first one matches nothing in the second.
    A call without a module, such as that of a loss function for two arrays, says nothing about
    filters, which are written for models.

    Args:
        name: the name of the function.
        leaves: the leaves of the call.
        parts: the layouts of its arguments.
        rules: the rules, which are the layout of some of the arguments.

    Raises:
        ShardingError: a filter decides about no leaf.
    """
    own: list[Leaf] = []
    for part, group in grouped(leaves, parts):
        if part.layout is rules:
            own += group
    if not any(map(is_in_module, own)):
        return
    # Sizes and mesh axes say nothing about filters.
    dead = decide(rules, own, MeshView({})).dead
    if not leaves.training:
        # One layout lays out a training state, and is used for its model alone too.
        dead = tuple([one for one in dead if not _is_for_training_state(one.item, own)])
    problems = filter_problems([_only_bare(one, own) for one in dead])
    if problems:
        raise ShardingError(f"{name}: the rules have filters that lay out nothing", problems)


def _is_for_training_state(item: Filter, leaves: Sequence[Leaf]) -> bool:
    """Whether a filter names a field of a training state, so that without one it matches
    nothing."""
    # A model may have fields with such names, too, so `**.key.weight` is not for the key of a
    # training state, which has nothing below it.
    probe = leaves[0]
    if not isinstance(item, FunctionFilter):
        alone = [field for field in FOLLOWING if field != OPTIMIZER]
        return any(may_name(item, field) for field in (MODEL, STATE, OPTIMIZER)) or any(
            names_field(item, probe._replace(aliases=(Path((field,)),))) for field in alone
        )
    # What a function looks for is known only by calling it.
    for leaf in leaves:
        for field in (MODEL, STATE, OPTIMIZER):
            below = Path((field, *leaf.patterned[0]))
            if leaf.patterned[0] and names_field(item, leaf._replace(aliases=(below,))):
                return True
    return False


def _only_bare(dead: DeadFilter, leaves: Sequence[Leaf]) -> DeadFilter:
    """The filter, whose problem names a bare array that it matches, if there is one."""
    for leaf in leaves:
        if leaf.activation and dead.item(leaf._replace(aliases=())):
            why = f"matches no leaf of a module, and the bare array `{leaf.path}` is laid out by "
            why += "its annotation and `AxisRules`"
            return dead._replace(problem=_bare_problem(dead.problem, why))
    return dead


def _bare_problem(problem: Problem, why: str) -> Problem:
    remedy = "write the layout of a bare array in `in_shardings=`, and remove the filter"
    return problem._replace(why=why, remedy=remedy)
