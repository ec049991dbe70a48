"""A model's layout ─► the layout of a training state: the model, the optimizer's state, its own, and the rest."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from functree.layout.checks import decided_spec
from functree.layout.host import OnHost
from functree.layout.layouts import Composition, Decision, Layout, Resolution, Unsaid, whole
from functree.layout.meshes import MeshView
from functree.layout.optimizer import Derived, Origin, described, parameters, trace_state
from functree.layout.plan import Plan
from functree.layout.row import Row
from functree.layout.state_sharding import StateSharding
from functree.tree.axes import Names
from functree.tree.leaf import Leaf
from functree.tree.leaves import read
from functree.tree.paths import Path

MODEL, STATE, OPTIMIZER = "model", "state", "opt_state"
FOLLOWING = (OPTIMIZER, "step", "key")  # what a layout for the model says nothing of; any other field goes by it


class Trained(Protocol):
    """What is asked of a training state."""

    @property
    def model(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def wrt(self) -> Any: ...


class Place(NamedTuple):
    """Where a leaf stands: the path of its training state, the field of that, and the path below."""

    state: Path
    field: str
    below: Path


class Training(Layout):
    """A layout for a model, standing over a tree in which training states have one.

    The models and their state go by the layout itself, and so does what is in no training state, or in a field that a
    subclass adds; of an optimizer's state each leaf goes as its parameter does (`ft.plan_optimizer`); the step and the
    key are whole. Where the layout speaks of a leaf by its field, as `opt_state.**` does, that holds.

    Args:
        layout: of the model.
        states: the training states, concrete or abstract, by path.
    """

    def __init__(self, layout: Layout, states: Mapping[Path, Trained]):
        self.layout: Layout = layout
        self.states: Mapping[Path, Trained] = states

    @property
    def given_names(self) -> Mapping[type, Names]:
        return self.layout.given_names

    @property
    def own_mesh(self) -> Any:
        return self.layout.own_mesh

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        if isinstance(self.layout, Unsaid):
            return self.layout.resolve(leaves, mesh)
        places = [self._place(leaf.patterned[0]) for leaf in leaves]
        known, origins = list(leaves), dict[Path, dict[int, Origin]]()
        for path, state in self.states.items():
            mine = {i: p.below for i, p in enumerate(places) if p and p.state == path and p.field == OPTIMIZER}
            rows = _rows(path, leaves, places)
            origins[path] = _origins(state, mine, rows)
            for i, origin in origins[path].items():
                known[i] = described(leaves[i], origin, rows)
        known = [_renamed(leaf, leaves[i].patterned[0], places[i]) for i, leaf in enumerate(known)]
        direct = [i for i, place in enumerate(places) if self._direct(known[i], place, mesh)]
        found = self.layout.resolve([known[i] for i in direct], mesh)
        decided = dict(zip(direct, found.decisions, strict=True))
        for path, mine in origins.items():
            rows = _rows(path, leaves, places, decided)
            waiting = {i: origin for i, origin in mine.items() if i not in decided}
            derived = Derived(list(waiting.values()), rows, None).resolve([known[i] for i in waiting], mesh)
            unsaid = {row.path for row in rows.values() if row.spec is None}
            for (i, origin), decision in zip(waiting.items(), derived.decisions, strict=True):
                decided[i] = decision._replace(said=origin.parameter not in unsaid)
        decisions = [decided.get(i) or whole(leaf, COUNTS)._replace(unsettled=()) for i, leaf in enumerate(leaves)]
        return Resolution(decisions, found.problems, found.unused, known)

    def _place(self, path: Path) -> Place | None:
        depth = next((n for n in range(len(path)) if path[:n] in self.states), None)
        return None if depth is None else Place(Path(path[:depth]), path[depth], Path(path[depth + 1 :]))

    def _direct(self, leaf: Leaf, place: Place | None, mesh: MeshView) -> bool:
        """Whether the layout itself decides for a leaf."""
        follows = place is not None and place.field in FOLLOWING
        return place is None or not follows or _speaks_of(self.layout, leaf, place, mesh)


COUNTS = "does not depend on the model"


def _renamed(leaf: Leaf, path: Path, place: Place | None) -> Leaf:
    """The leaf whose path patterns see from the root, from its training state on, and below its model."""
    if place is None:
        return leaf
    names = [path, Path((place.field, *place.below))]
    names += [place.below] if place.field in (MODEL, STATE) else []
    return leaf._replace(names=tuple(dict.fromkeys(names)))


def _speaks_of(layout: Layout, leaf: Leaf, place: Place, mesh: MeshView) -> bool:
    """Whether a layout speaks of a leaf by its field: it would say something else, were the field another one."""
    match layout:
        case StateSharding():
            other = [Path((*place.state, "", *place.below)), Path(("", *place.below))]
            index = layout.first(leaf)
            return index is not None and index != layout.first(leaf._replace(names=tuple(other)))
        case Plan():  # it has a row, or a problem
            return not layout.resolve([leaf], mesh).decisions[0].problems
        case Composition():
            return any(_speaks_of(part, leaf, place, mesh) for part in layout.parts)
        case OnHost():
            return _speaks_of(layout.layout, leaf, place, mesh)
    return False


def _origins(state: Trained, below: Mapping[int, Path], rows: Mapping[Path, Row]) -> dict[int, Origin]:
    """What the leaves of an optimizer's state come from; `below` are their paths in it."""
    params = parameters(state.model, state.wrt)
    rows = {leaf.path: rows[leaf.path] for leaf in read(params).leaves if leaf.path in rows}
    known, origins = trace_state(state.tx, params, rows)
    by_path = {leaf.path: origin for leaf, origin in zip(known.leaves, origins, strict=True)}
    return {i: by_path.get(path, Origin(None, (), derived=False)) for i, path in below.items()}


def _rows(
    state: Path,
    leaves: Sequence[Leaf],
    places: Sequence[Place | None],
    decided: Mapping[int, Decision] | None = None,
) -> dict[Path, Row]:
    """The arrays of a training state's model, as the optimizer's plan asks for them; with specs, if decided."""
    rows = {}
    for i, place in enumerate(places):
        if place is not None and place.state == state and place.field == MODEL:
            leaf, decision = leaves[i], (decided or {}).get(i)
            spec = decided_spec(decision) if decision is not None and decision.said else None
            kind = decision.memory_kind if decision is not None else None
            rows[place.below] = Row(
                place.below, leaf.shape, leaf.value.dtype, leaf.axes, spec, "", leaf.shape, 0, 0, 0, kind
            )
    return rows
