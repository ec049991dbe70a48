"""A model's layout ─► the layout of a training state: the model, the optimizer's state, its own, and the rest."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import AbstractMesh, Mesh

from functree.layout.decision import Decision, whole
from functree.layout.host import OnHost
from functree.layout.layout import Composition, Layout, Resolution, Unspecified
from functree.layout.meshes import MeshView
from functree.layout.optimizer.origins import Origin, Trained, find_origins
from functree.layout.optimizer.plan_optimizer import Derived
from functree.layout.plan.plan import Plan
from functree.layout.plan.row import Row
from functree.layout.state_sharding import StateSharding
from functree.tree.axes import Names
from functree.tree.filters.filter import Filter
from functree.tree.leaf import Leaf
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

MODEL, STATE, OPTIMIZER = "model", "state", "opt_state"
FOLLOWING = (OPTIMIZER, "step", "key")  # a layout for the model is not about these; any other field goes by it


class TrainStateLike(Protocol):
    """What is asked of a training state."""

    @property
    def model(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def wrt(self) -> Filter: ...


class Position(NamedTuple):
    """Where a leaf stands: the path of its training state, the field of that, and the path below."""

    state: Path
    field: str
    below: Path


class TrainingLayout(Layout):
    """A layout for a model, standing over a tree that has training states.

    The models and their state go by the layout itself, and so does what is in no training state, or in a field that a
    subclass adds; of an optimizer's state each leaf goes as its parameter does (`ft.plan_optimizer`); the step and the
    key are whole. Where the layout speaks of a leaf by its field, as `opt_state.**` does, that holds.

    Args:
        layout: of the model.
        states: the training states, concrete or abstract, by path.
    """

    def __init__(self, layout: Layout, states: Mapping[Path, TrainStateLike]):
        self.layout: Layout = layout
        self.states: Mapping[Path, TrainStateLike] = states

    @property
    def given_names(self) -> Mapping[type, Names]:
        return self.layout.given_names

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.layout.own_mesh

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        if isinstance(self.layout, Unspecified):
            return self.layout.resolve(leaves, mesh)
        positions = [self._position(leaf.patterned[0]) for leaf in leaves]
        parts = [_TrainState(path, state, leaves, positions) for path, state in self.states.items()]
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
        decisions = [decided.get(i) or whole(leaf, COUNTS).settle() for i, leaf in enumerate(leaves)]
        return Resolution(decisions, found.problems, found.unused, known)

    def _position(self, path: Path) -> Position | None:
        depth = next((n for n in range(len(path)) if path[:n] in self.states), None)
        return None if depth is None else Position(Path(path[:depth]), path[depth], Path(path[depth + 1 :]))

    def _decides(self, leaf: Leaf, position: Position | None, mesh: MeshView) -> bool:
        """Whether the layout itself decides for a leaf."""
        if position is None or position.field not in FOLLOWING:
            return True
        return _speaks_of(self.layout, leaf, position, mesh)


COUNTS = "does not depend on the model"


class _TrainState:
    """One training state of a tree: which leaves are its model's and its optimizer's, as indices."""

    def __init__(self, path: Path, state: TrainStateLike, leaves: Sequence[Leaf], positions: Sequence[Position | None]):
        mine = [(i, position) for i, position in enumerate(positions) if position and position.state == path]
        self.model: dict[Path, int] = {position.below: i for i, position in mine if position.field == MODEL}
        below = {i: position.below for i, position in mine if position.field == OPTIMIZER}
        # As the optimizer sees them: by their paths in the model, and in its own state.
        model = {path: leaves[i]._replace(path=path, aliases=()) for path, i in self.model.items()}
        trained = Trained(Skeleton.of(state.model), {p: leaf if state.wrt(leaf) else None for p, leaf in model.items()})
        own = [leaves[i]._replace(path=path, aliases=()) for i, path in below.items()]
        self.parameters: dict[Path, Leaf] = trained.parameters
        self.origins: dict[int, Origin] = dict(zip(below, find_origins(state.tx, trained, own), strict=True))

    def derived(self, leaves: Sequence[Leaf], decided: Mapping[int, Decision], mesh: MeshView) -> dict[int, Decision]:
        """The decisions for the leaves of the optimizer's state that follow a parameter."""
        waiting = {i: origin for i, origin in self.origins.items() if i not in decided}
        rows = {path: _row(leaf, decided[self.model[path]]) for path, leaf in self.parameters.items()}
        found = Derived(list(waiting.values()), rows, None).resolve([leaves[i] for i in waiting], mesh)
        return {
            i: decision._replace(specified=origin.parameter is None or rows[origin.parameter].spec is not None)
            for (i, origin), decision in zip(waiting.items(), found.decisions, strict=True)
        }


def _row(leaf: Leaf, decision: Decision) -> Row:
    """A parameter, as the layout of an optimizer's state asks for it."""
    spec = decision.spec if decision.specified else None
    shape, kind = leaf.shape, decision.memory_kind
    return Row(leaf.path, shape, leaf.value.dtype, leaf.axes, spec, "", shape, 0, 0, 0, kind)


def _renamed(leaf: Leaf, path: Path, position: Position | None) -> Leaf:
    """The leaf whose path patterns see from the root, from its training state on, and below its model."""
    if position is None:
        return leaf
    aliases = [path, Path((position.field, *position.below))]
    if position.field in (MODEL, STATE):
        aliases.append(position.below)
    return leaf._replace(aliases=tuple(dict.fromkeys(aliases)))


def _speaks_of(layout: Layout, leaf: Leaf, position: Position, mesh: MeshView) -> bool:
    """Whether a layout speaks of a leaf by its field: it would decide otherwise, were the field another one."""
    match layout:
        case StateSharding():
            other = (Path((*position.state, "", *position.below)), Path(("", *position.below)))
            index = layout.first(leaf)
            return index is not None and index != layout.first(leaf._replace(aliases=other))
        case Plan():  # it has a row, or a problem
            return not layout.resolve([leaf], mesh).decisions[0].faults
        case Composition():
            return any(_speaks_of(part, leaf, position, mesh) for part in layout.parts)
        case OnHost():
            return _speaks_of(layout.layout, leaf, position, mesh)
    return False
