"""A leaf ─► a `Decision`: what layouts have decided about each of its dimensions, and why."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import Problem
from functree.layout.specs import axes_text, entry, invalid_entry, mesh_axes, spec_text
from functree.tree.leaf import Leaf

Fault = tuple[str, str]
"""What is wrong with a leaf, and what to change."""


class Dimension(NamedTuple):
    """What is decided about one dimension of a leaf.

    Attributes:
        mesh_axes: the mesh axes that shard it; `()` if it is unsharded.
        source: the rule or spec that sharded it, for messages: `rule hidden→model`, `P('data')`.
        settled: False if it has a name that no layout has mentioned yet.
        closed: whether no rule is about its name except `...: None`.
        fault: why it may not stay as it is. A later layout that decides about the dimension removes the fault.
    """

    mesh_axes: tuple[str, ...] = ()
    source: str = ""
    settled: bool = True
    closed: bool = False
    fault: Fault | None = None


WHOLE = Dimension()


class Decision(NamedTuple):
    """How one leaf is sharded.

    Attributes:
        dimensions: one for each dimension of the leaf.
        reason: the reason, for the plan.
        faults: what is wrong, and cannot be corrected by later layouts.
        memory_kind: the kind of memory; None for the default.
        specified: False if no layout was given (`None`).
    """

    dimensions: tuple[Dimension, ...]
    reason: str = ""
    faults: tuple[Fault, ...] = ()
    memory_kind: str | None = None
    specified: bool = True

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension, the mesh axes that shard it."""
        return tuple(dimension.mesh_axes for dimension in self.dimensions)

    @property
    def spec(self) -> PartitionSpec:
        """The spec, with one entry for each dimension."""
        return PartitionSpec(*[entry(dimension.mesh_axes) for dimension in self.dimensions])

    def used(self, but: int | None = None) -> set[str]:
        """The mesh axes that shard the dimensions; those of the dimension `but` are not counted."""
        return {axis for i, dimension in enumerate(self.dimensions) if i != but for axis in dimension.mesh_axes}

    def because(self, reason: str) -> "Decision":
        """The same decision with one more reason."""
        return self._replace(reason="; ".join(filter(None, (self.reason, reason))))

    def wrong(self, *faults: Fault) -> "Decision":
        """The same decision with more faults."""
        return self._replace(faults=(*self.faults, *faults))

    def each(self, change: Callable[[int, Dimension], Dimension]) -> "Decision":
        """The same decision with each dimension changed."""
        return self._replace(dimensions=tuple(change(i, one) for i, one in enumerate(self.dimensions)))

    def settle(self) -> "Decision":
        """The same decision without faults about names: all dimensions are decided, whatever their names are."""
        return self.each(lambda i, one: one._replace(settled=True, closed=False, fault=None))


def whole(leaf: Leaf, reason: str = "") -> Decision:
    """A decision in which all dimensions are unsharded and no name has been mentioned."""
    # If the annotation does not fit, the leaf may have more dimensions than axes.
    names = (*leaf.axes, *[None] * (len(leaf.shape) - len(leaf.axes)))
    return Decision(tuple(WHOLE if name is None else _UNSETTLED for name in names), reason)


_UNSETTLED = Dimension(settled=False)


def decide_each(
    leaves: Sequence[Leaf],
    before: Sequence[Decision] | None,
    alike: Callable[[Leaf], Hashable],
    decide: Callable[[Leaf, Decision | None], Decision],
) -> list[Decision]:
    """A decision for each leaf, computed only once for leaves that are alike, as the layers of a large model are.

    Args:
        leaves: the leaves.
        before: the earlier decision about each leaf, or None.
        alike: a function from a leaf to everything that the decision about it depends on.
        decide: a function from a leaf and the earlier decision to the decision.
    """
    known: dict[Hashable, Decision] = {}
    found = []
    for i, leaf in enumerate(leaves):
        start = None if before is None else before[i]
        # The earlier decision is compared by its id, which is fast. Leaves that are alike share one object, because an
        # earlier call of this function made it; and `before` keeps it alive, so that its id is not used again.
        key = (id(start), alike(leaf))
        decision = known.get(key)
        if decision is None:
            decision = known[key] = decide(leaf, start)
        found.append(decision)
    return found


def undecided(leaf: Leaf) -> Decision:
    """The first decision about a leaf: unsharded, or sharded by the `PartitionSpec` in its annotation."""
    start = whole(leaf)
    return start if leaf.spec is None else apply_spec(leaf, leaf.spec, start, "its annotation")


def apply_spec(leaf: Leaf, spec: PartitionSpec, before: Decision, reason: str) -> Decision:
    """Shard the unsharded dimensions by a spec. A dimension that is already sharded in another way is a fault."""
    faults: list[Fault] = []
    if len(spec.partitions) > len(leaf.shape):
        why = f"{spec_text(spec)} has {len(spec.partitions)} entries for {len(leaf.shape)} dimensions"
        faults.append((why, "give one entry for each dimension, or fewer"))
    invalid = invalid_entry(spec)
    if invalid is not None:
        # An entry that is not a name cannot be compared with mesh axes, so the other checks are left out.
        return before.wrong(*faults, (f"{spec_text(spec)}: {invalid}", "write names of mesh axes, or `None`"))
    if spec.unreduced or spec.reduced:
        why = f"{spec_text(spec)} describes partial sums, which exist only inside a computation"
        faults.append((why, "write a spec without `unreduced` and `reduced`"))
    dimensions = list(before.dimensions)
    for i, written in enumerate(spec.partitions[: len(dimensions)]):
        if written is PartitionSpec.UNCONSTRAINED:
            why = f"dimension {i} is `P.UNCONSTRAINED`, which does not say how it is sharded"
            faults.append((why, "write a mesh axis or `None`"))
            continue
        axes = mesh_axes(written)
        if not axes:
            continue  # `None` leaves the dimension to later layouts
        have = dimensions[i].mesh_axes
        if have and have != axes:
            faults.append(conflict(i, leaf, have, axes, spec_text(spec)))
        else:
            dimensions[i] = Dimension(axes, spec_text(spec))
    return before._replace(dimensions=tuple(dimensions)).settle().because(reason).wrong(*faults)


def conflict(dim: int, leaf: Leaf, have: Sequence[str], want: Sequence[str], who: str) -> Fault:
    """The fault that a dimension is already sharded, and `who` shards it in another way."""
    have_text, want_text = axes_text(have), axes_text(want)
    why = f"{leaf.dimension(dim)} is already sharded over {have_text}, and {who} shards it over {want_text}"
    return why, "let the layout after `|` shard only dimensions that the layout before it leaves unsharded"


def unreadable(leaf: Leaf, misfit: Problem) -> Fault:
    """The fault that the axes of a leaf cannot be determined, for a layout that needs them."""
    return misfit.why, misfit.remedy + optimizer_remedy(leaf)


def optimizer_remedy(leaf: Leaf) -> str:
    """The end of the remedy for a leaf of an optimizer's state, or an empty text for other leaves.

    The arrays of an optimizer's state are in a copy of the model, and may have other shapes than its annotations say.
    """
    return USE_PLAN_OPTIMIZER if any(map(is_optimizer_state, leaf.within)) else ""


USE_PLAN_OPTIMIZER = "; for an optimizer's state use `ft.plan_optimizer`"


def is_optimizer_state(cls: type) -> bool:
    """Whether instances of a class are the state of an optax transformation."""
    return issubclass(cls, tuple) and cls.__module__.split(".")[0] == "optax"
