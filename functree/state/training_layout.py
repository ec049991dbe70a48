"""The layout of a model ─► the layout of its training state: of model, optimizer state, model state, and the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from functree.layout.decision import Decision, whole
from functree.layout.host import OnHost
from functree.layout.layout import Composition, Layout, Modified, Resolution, Unspecified
from functree.layout.meshes import MeshView
from functree.layout.optimizer.optimizer_state import origins_of
from functree.layout.optimizer.origins import Origin, Trained
from functree.layout.optimizer.plan_optimizer import Derived, Placed
from functree.layout.plan.plan import Plan
from functree.layout.state_sharding import StateSharding
from functree.tree.filters.filter import Filter
from functree.tree.leaf import Leaf
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

MODEL, STATE, OPTIMIZER = "model", "state", "opt_state"
# The layout of the model does not decide for these fields, unless it names them. It decides for all other fields.
DERIVED = (OPTIMIZER, "step", "key")


class TrainStateLike(Protocol):
    """The attributes of a training state that its layout needs. (`TrainState` imports this module.)"""

    @property
    def model(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def wrt(self) -> Filter: ...


class Position(NamedTuple):
    """The position of a leaf: the path of its training state, the field, and the path below this field."""

    state: Path
    field: str
    below: Path


@dataclass(frozen=True, repr=False, eq=False)
class TrainingLayout(Modified):
    """The layout of a tree that contains training states, from the layout of the model.

    The layout of the model itself decides for the models and their state, for leaves outside of the training states,
    and for fields that a subclass adds. In an optimizer's state each leaf is laid out like its parameter
    (`ft.plan_optimizer`). The step and the key are replicated. If the layout names a leaf by its field, as the filter
    `opt_state.**` does, it decides for this leaf.

    Args:
        layout: the layout of the model.
        states: the training states, concrete or abstract, by path.
    """

    states: Mapping[Path, TrainStateLike]

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        if isinstance(self.layout, Unspecified):
            return self.layout.resolve(leaves, mesh)
        positions = [self._position(leaf.patterned[0]) for leaf in leaves]
        parts = [_TrainState(path, state, leaves, positions) for path, state in self.states.items()]
        # The leaves with all that is known about them: those of the optimizer have the axes of their parameters.
        known = list(leaves)
        for part in parts:
            for i, origin in part.origins.items():
                known[i] = origin.describe(leaves[i], part.parameters)
        known = [_renamed(leaf, leaves[i].patterned[0], positions[i]) for i, leaf in enumerate(known)]
        direct = [i for i, position in enumerate(positions) if self._decides(known[i], position, mesh)]
        found = self.layout.resolve([known[i] for i in direct], mesh)
        decided = dict(zip(direct, found.decisions, strict=True))
        for part in parts:
            decided |= part.derived(known, decided, mesh)
        # The rest are steps and keys.
        decisions = [decided.get(i) or whole(leaf, NOT_OF_MODEL).settle() for i, leaf in enumerate(leaves)]
        return Resolution(decisions, found.problems, found.unused, known)

    def _position(self, path: Path) -> Position | None:
        """The position of a path; None if it is in no training state."""
        for depth in range(len(path)):
            if path[:depth] in self.states:
                return Position(Path(path[:depth]), path[depth], Path(path[depth + 1 :]))
        return None

    def _decides(self, leaf: Leaf, position: Position | None, mesh: MeshView) -> bool:
        """Whether the layout of the model decides for a leaf itself."""
        if position is None or position.field not in DERIVED:
            return True
        return _names_field(self.layout, leaf, position, mesh)


NOT_OF_MODEL = "does not depend on the model"


class _TrainState:
    """One training state of a tree.

    Attributes:
        model: the indices of the leaves of its model, by their paths in the model.
        parameters: the leaves that the optimizer updates, by their paths in the model.
        origins: the origins of the leaves of the optimizer's state, by their indices.
    """

    def __init__(self, path: Path, state: TrainStateLike, leaves: Sequence[Leaf], positions: Sequence[Position | None]):
        own = [(i, position) for i, position in enumerate(positions) if position and position.state == path]
        self.model: dict[Path, int] = {position.below: i for i, position in own if position.field == MODEL}
        optimizer = {i: position.below for i, position in own if position.field == OPTIMIZER}
        # The optimizer sees paths in the model for the parameters, and paths in its own state for its leaves.
        parameters: dict[Path, Leaf | None] = {}
        for below, i in self.model.items():
            leaf = leaves[i]._replace(path=below, aliases=())
            parameters[below] = leaf if state.wrt(leaf) else None
        trained = Trained(Skeleton.of(state.model), parameters)
        opt_leaves = [leaves[i]._replace(path=below, aliases=()) for i, below in optimizer.items()]
        self.parameters: dict[Path, Leaf] = trained.parameters
        self.origins: dict[int, Origin] = dict(zip(optimizer, origins_of(state.tx, trained, opt_leaves), strict=True))

    def derived(self, leaves: Sequence[Leaf], decided: Mapping[int, Decision], mesh: MeshView) -> dict[int, Decision]:
        """The decisions for the leaves of the optimizer's state for which the layout does not decide itself."""
        open_origins = {i: origin for i, origin in self.origins.items() if i not in decided}
        parameters = {path: decided[self.model[path]] for path in self.parameters}
        placed = {path: Placed(decision.mesh_axes, decision.memory_kind) for path, decision in parameters.items()}
        derived = Derived(list(open_origins.values()), placed, None)
        found = derived.resolve([leaves[i] for i in open_origins], mesh)
        decisions: dict[int, Decision] = {}
        for (i, origin), decision in zip(open_origins.items(), found.decisions, strict=True):
            # If no layout was given for a parameter, none was given for its statistics either.
            specified = origin.parameter is None or parameters[origin.parameter].specified
            decisions[i] = decision._replace(specified=specified)
        return decisions


def _renamed(leaf: Leaf, path: Path, position: Position | None) -> Leaf:
    """The leaf with several paths for filters: from the root, from its training state, and from its model."""
    if position is None:
        return leaf
    aliases = [path, Path((position.field, *position.below))]
    if position.field in (MODEL, STATE):
        aliases.append(position.below)
    return leaf._replace(aliases=tuple(dict.fromkeys(aliases)))


def _names_field(layout: Layout, leaf: Leaf, position: Position, mesh: MeshView) -> bool:
    """Whether a layout names the field of a leaf."""
    match layout:
        case StateSharding():
            # It does if the filter that decides would not match the leaf in a field with another name. A filter such
            # as `**.bias` would match it there too: it is meant for the model.
            other = (Path((*position.state, "", *position.below)), Path(("", *position.below)))
            index = layout.first(leaf)
            return index is not None and index != layout.first(leaf._replace(aliases=other))
        case Plan():  # without a row for the leaf, it has a fault
            return not layout.resolve([leaf], mesh).decisions[0].faults
        case Composition():
            return any(_names_field(part, leaf, position, mesh) for part in layout.parts)
        case OnHost():
            return _names_field(layout.layout, leaf, position, mesh)
    return False
