"""A model's layout ─► the layout of a training state: the model, the optimizer's state, its own, and the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

from functree.layout.checks import decided_spec, local_shape
from functree.layout.layouts import Decision, Layout, Resolution, Unsaid, whole
from functree.layout.meshes import MeshView
from functree.layout.optimizer import Derived, Origin, described, parameters, trace_state
from functree.layout.row import Row
from functree.layout.state_sharding import StateSharding
from functree.tree.axes import Names
from functree.tree.leaf import Leaf
from functree.tree.leaves import read
from functree.tree.paths import Path

MODEL, STATE, OPTIMIZER = "model", "state", "opt_state"


class Training(Layout):
    """A layout for a model, standing over a training state that has one.

    The model and its state go by the layout itself; of the optimizer's state each leaf as its parameter does
    (`ft.plan_optimizer`), unless a pattern speaks of `opt_state`; the rest is whole.

    Args:
        layout: of the model.
        model: concrete or abstract.
        tx: the optimizer.
        wrt: the filter of the parameters that it updates.
    """

    def __init__(self, layout: Layout, model: Any, tx: Any, wrt: Any):
        self.layout: Layout = layout
        self.model: Any = model
        self.tx: Any = tx
        self.wrt: Any = wrt

    @property
    def given_names(self) -> Mapping[type, Names]:
        return self.layout.given_names

    @property
    def own_mesh(self) -> Any:
        return self.layout.own_mesh

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        if isinstance(self.layout, Unsaid):
            return self.layout.resolve(leaves, mesh)
        fields = [leaf.patterned[0][0] for leaf in leaves]
        below = [Path(leaf.patterned[0][1:]) for leaf in leaves]
        direct = {i: self._below(leaves[i]) for i, field in enumerate(fields) if field in (MODEL, STATE)}
        direct |= {i: leaves[i] for i, field in enumerate(fields) if field == OPTIMIZER and self._named(leaves[i])}
        found = self.layout.resolve(list(direct.values()), mesh)
        decided = dict(zip(direct, found.decisions, strict=True))
        of_model = {below[i]: (leaves[i], decided[i]) for i in decided if fields[i] == MODEL}
        waiting = [i for i, field in enumerate(fields) if field == OPTIMIZER and i not in decided]
        known = list(leaves)
        if waiting:
            relabelled, derived = self._derived([leaves[i] for i in waiting], of_model, mesh)
            decided |= dict(zip(waiting, derived, strict=True))
            for i, leaf in zip(waiting, relabelled, strict=True):
                known[i] = leaf
        decisions = [decided.get(i) or whole(leaf, COUNTS)._replace(unsettled=()) for i, leaf in enumerate(leaves)]
        return Resolution(decisions, found.problems, found.unused, known)

    def _below(self, leaf: Leaf) -> Leaf:
        """A leaf of the model or its state, whose path patterns see with its field and without."""
        path = leaf.patterned[0]
        return leaf._replace(names=(path, Path(path[1:])))

    def _named(self, leaf: Leaf) -> bool:
        """Whether a filter speaks of a leaf by a path that begins with `opt_state`."""
        if not isinstance(self.layout, StateSharding):
            return False
        path = leaf.patterned[0]
        index, without = (self.layout.first(leaf._replace(names=(p,))) for p in (path, Path(path[1:])))
        return index is not None and index != without

    def _derived(
        self, leaves: Sequence[Leaf], of_model: Mapping[Path, tuple[Leaf, Decision]], mesh: MeshView
    ) -> tuple[list[Leaf], list[Decision]]:
        """The leaves of the optimizer's state with their parameters' axes, and decisions from those for the model."""
        params = parameters(self.model, self.wrt)
        rows = {leaf.path: _row(*of_model[leaf.path], mesh) for leaf in read(params).leaves if leaf.path in of_model}
        known, origins = trace_state(self.tx, params, rows)
        by_path = {leaf.path: origin for leaf, origin in zip(known.leaves, origins, strict=True)}
        unknown = Origin(None, (), derived=False)
        mine = [by_path.get(Path(leaf.patterned[0][1:]), unknown) for leaf in leaves]
        relabelled = [described(leaf, origin, rows) for leaf, origin in zip(leaves, mine, strict=True)]
        found = Derived(mine, rows, None).resolve(relabelled, mesh).decisions
        unsaid = {path for path, (_, decision) in of_model.items() if not decision.said}
        return relabelled, [d._replace(said=o.parameter not in unsaid) for d, o in zip(found, mine, strict=True)]


COUNTS = "does not depend on the model"


def _row(leaf: Leaf, decision: Decision, mesh: MeshView) -> Row:
    """A parameter as the optimizer's plan asks for it."""
    local = local_shape(leaf.shape, decision.entries, mesh)
    spec, kind = decided_spec(decision), decision.memory_kind
    return Row(leaf.path, leaf.shape, leaf.value.dtype, leaf.axes, spec, decision.reason, local, 0, 0, 0, kind)
