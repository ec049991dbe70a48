"""`label_paths` gives each leaf the path that filters match, and the leaf that it follows.

The leaves of a tree ─► the same leaves, with these labels.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from functree.labels.filters import Filter, Glob, first_name
from functree.labels.leaves import FollowedLeaf, Leaf, Root
from functree.labels.optimizer.followed_parameters import TrainedModel, followed_by, following
from functree.tree.interfaces import TrainingState
from functree.tree.paths import Path, first_beginning
from functree.tree.skeleton.skeleton import Skeleton

MODEL, OPTIMIZER = "model", "opt_state"
# The fields that depend on the model, or on nothing. Layouts apply to all other fields, including
# fields that a subclass adds.
FOLLOWING = (OPTIMIZER, "step", "key")


def names_field(pattern: Filter) -> bool:
    """Return whether a pattern begins with a field of a training state.

    The fields `step` and `key` have nothing below them, so `key.weight` is a path in a model.
    """
    if first_name(pattern) in ((MODEL,), (OPTIMIZER,), ("state",)):
        return True
    return isinstance(pattern, Glob) and pattern.pattern in FOLLOWING


class Scope(NamedTuple):
    """The part of a tree to which one layout applies.

    Attributes:
        start: the number of keys above the part.
        argument: the index of the argument's name in the paths of a call; None outside calls.
        arguments: the names of all arguments of the call.
        shared: whether the layout is for all arguments of a call. With such a layout, an argument
            that is a bare array has no path that filters match.
        by_rules: whether the layout comes from the function's rules, not from an option for this
            argument.
    """

    start: int = 0
    argument: int | None = None
    arguments: tuple[str, ...] = ()
    shared: bool = False
    by_rules: bool = False


def label_paths(
    leaves: Sequence[Leaf], states: Mapping[Path, TrainingState], scope: Scope
) -> Sequence[Leaf]:
    """Label leaves with the paths that a layout's filters match, and with the leaves they follow.

    Args:
        leaves: the leaves of the part of the tree that the layout is for.
        states: the concrete or abstract training states in this part, by path.
        scope: the part's position in the tree.
    """
    labeled = [_labeled(leaf, scope) for leaf in leaves]
    inside: dict[Path, list[tuple[int, Leaf]]] = {}
    if states:
        for i, leaf in enumerate(leaves):
            state = first_beginning(leaf.path, states)
            if state is not None:
                inside.setdefault(state, []).append((i, leaf))
    for path, members in inside.items():
        first = scope.start if scope.argument is None else scope.argument
        for i, leaf in _in_training_state(path, states[path], members):
            roots = [_root(leaf.path, k, len(path), scope) for k in range(first, len(path) + 1)]
            labeled[i] = leaf._replace(roots=tuple(roots))
    return labeled


def _labeled(leaf: Leaf, scope: Scope) -> Leaf:
    """Label a leaf outside all training states."""
    seen: Path | None = Path(leaf.path[scope.start :])
    if scope.shared and not seen:
        seen = None
    if scope.argument is None:
        return leaf._replace(seen=seen)
    path = Path(leaf.path[scope.argument :])
    return leaf._replace(seen=seen, roots=(Root(_ARGUMENT.format(path[0]), path),))


_ARGUMENT = "the argument `{}`"


def _root(path: Path, index: int, field: int, scope: Scope) -> Root:
    """Describe the name at an index of a path; `field` is the index of a training state's field."""
    what = "the key `{}` above a training state"
    if index == scope.argument:
        what = _ARGUMENT
    elif index == field:
        what = "the field `{}` of a training state"
    return Root(what.format(path[index]), Path(path[index:]))


def _in_training_state(
    path: Path, state: TrainingState, members: Sequence[tuple[int, Leaf]]
) -> Iterator[tuple[int, Leaf]]:
    """Yield the labeled leaves of one training state, each with the index that `members` gives it.

    Each leaf is labeled with its path in the model and the leaf that it follows.
    """
    # The optimizer's code uses paths in the model for parameters, and paths in the optimizer's
    # state for the state's leaves.
    parameters: dict[Path, Leaf | None] = {}
    of_optimizer: dict[int, Leaf] = {}
    batched = any(leaf.path[len(path)] == "step" and leaf.shape for _, leaf in members)
    for i, leaf in members:
        field, below = leaf.path[len(path)], Path(leaf.path[len(path) + 1 :])
        if field == OPTIMIZER:
            of_optimizer[i] = leaf._replace(path=below)
            continue
        if field in FOLLOWING:
            independent = FollowedLeaf(None, (None,) * len(leaf.shape), batched=batched)
            yield i, leaf._replace(seen=None, follows=independent)
            continue
        if field == MODEL:
            inner = leaf._replace(path=below, seen=below)
            parameters[below] = inner if state.wrt(inner) else None
        elif not below:
            below = Path((field,))  # a bare array in a field that a subclass adds
        yield i, leaf._replace(seen=below)
    trained = TrainedModel(Skeleton.of(state.model, parameters), parameters)
    known = trained.parameters
    follows = followed_by(state.tx, trained, list(of_optimizer.values()))
    for (i, inner), followed in zip(of_optimizer.items(), follows, strict=True):
        leaf = following(inner, followed, known)
        seen = followed.path
        if followed.path is not None:
            followed = followed._replace(path=Path((*path, MODEL, *followed.path)))
        followed = followed._replace(batched=batched)
        full_path = Path((*path, OPTIMIZER, *leaf.path))
        yield i, leaf._replace(path=full_path, seen=seen, follows=followed)
