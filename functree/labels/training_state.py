"""The leaves of a tree with training states ─► the same leaves: those of the optimizer follow the
parameters, and patterns for the model match them from the training state on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from functree.labels.leaf import FollowedLeaf, Leaf
from functree.labels.optimizer.followed_parameters import TrainedModel
from functree.labels.optimizer.optimizer_state import followed_by, following
from functree.tree.interfaces import TrainingState
from functree.tree.paths import Path, first_beginning
from functree.tree.skeleton.skeleton import Skeleton

MODEL, STATE, OPTIMIZER = "model", "state", "opt_state"
# The fields that depend on the model, or on nothing. Layouts decide about all other fields, those
# that a subclass adds among them.
FOLLOWING = (OPTIMIZER, "step", "key")


def label_training_states(
    leaves: Sequence[Leaf], states: Mapping[Path, TrainingState]
) -> Sequence[Leaf]:
    """The leaves, with what those of training states follow.

    Args:
        leaves: the leaves of a tree, or of a part of it.
        states: the training states in it, by path, concrete or abstract.
    """
    if not states:
        return leaves
    positions = [_position(leaf.path, states) for leaf in leaves]
    labelled = list(leaves)
    for path, state in states.items():
        own = [i for i, position in enumerate(positions) if position and position.state == path]
        for i, leaf in _following(path, state, [(i, leaves[i], positions[i]) for i in own]):
            labelled[i] = leaf
    for i, position in enumerate(positions):
        if position is not None:
            labelled[i] = labelled[i]._replace(aliases=_aliases(leaves[i], position))
    return labelled


class _Position(NamedTuple):
    """Where a leaf is: the path of its training state, the field, and the path below this field."""

    state: Path
    field: str
    below: Path


def _position(path: Path, states: Mapping[Path, TrainingState]) -> _Position | None:
    """Where a leaf is; None if it is in no training state."""
    state = first_beginning(path, states)
    if state is None:
        return None
    field, *below = path[len(state) :]
    return _Position(state, field, Path(below))


def _following(
    path: Path, state: TrainingState, own: Iterable[tuple[int, Leaf, _Position | None]]
) -> Iterator[tuple[int, Leaf]]:
    """The leaves of one training state that follow others, by their indices.

    Args:
        path: the path of the training state.
        state: the training state.
        own: the index, the leaf and the position of each of its leaves.
    """
    # The optimizer sees paths in the model for the parameters, and paths in its own state for its
    # leaves.
    parameters: dict[Path, Leaf | None] = {}
    of_optimizer: dict[int, Leaf] = {}
    for i, leaf, position in own:
        if position is None or position.field not in (MODEL, *FOLLOWING):
            continue
        inner = leaf._replace(path=position.below, aliases=())
        if position.field == MODEL:
            parameters[position.below] = inner if state.wrt(inner) else None
        elif position.field == OPTIMIZER:
            of_optimizer[i] = inner
        else:
            yield i, leaf._replace(follows=FollowedLeaf(None, (None,) * len(leaf.shape)))
    trained = TrainedModel(Skeleton.of(state.model, parameters), parameters)
    known = trained.parameters
    follows = followed_by(state.tx, trained, list(of_optimizer.values()))
    for (i, inner), one in zip(of_optimizer.items(), follows, strict=True):
        leaf = following(inner, one, known)
        if one.path is not None:
            one = one._replace(path=Path((*path, MODEL, *one.path)))
        yield i, leaf._replace(path=Path((*path, OPTIMIZER, *leaf.path)), follows=one)


def _aliases(leaf: Leaf, position: _Position) -> tuple[Path, ...]:
    """The paths that patterns are matched with: from the root, from the training state, and from
    its model."""
    aliases = [leaf.patterned[0]]
    if position.field in (MODEL, STATE):
        aliases.append(position.below)
    # The last one begins with the field, which a filter may name.
    aliases.append(Path((position.field, *position.below)))
    return tuple(dict.fromkeys(aliases))
