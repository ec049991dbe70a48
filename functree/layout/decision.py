"""What layouts have decided about one leaf: a `Decision`, dimension by dimension, and how a spec is put into one."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.layout.specs import axes_text, entry, invalid_entry, mesh_axes, spec_text
from functree.tree.leaf import Leaf

Fault = tuple[str, str]
"""What is wrong with a leaf, and the remedy."""


class Dimension(NamedTuple):
    """What is decided about one dimension of a leaf.

    Attributes:
        mesh_axes: over which it is split; `()` where it is whole.
        source: what split it, as messages name it: `rule hidden→model`, `P('data')`.
        settled: False where it has a name, and no layout has mentioned that yet.
        closed: whether only `...: None` is about its name.
        fault: why it cannot stay as it is, unless a layout behind this one decides about it.
    """

    mesh_axes: tuple[str, ...] = ()
    source: str = ""
    settled: bool = True
    closed: bool = False
    fault: Fault | None = None


WHOLE = Dimension()


class Decision(NamedTuple):
    """Where one leaf goes.

    Attributes:
        dimensions: one for each dimension of the leaf.
        reason: why, for a person.
        faults: what is wrong whatever layouts come behind.
        memory_kind: where in a device's memory; None for the default.
        specified: False where no layout was given: `None`.
    """

    dimensions: tuple[Dimension, ...]
    reason: str = ""
    faults: tuple[Fault, ...] = ()
    memory_kind: str | None = None
    specified: bool = True

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension, the mesh axes over which it is split."""
        return tuple(dimension.mesh_axes for dimension in self.dimensions)

    @property
    def spec(self) -> PartitionSpec:
        """The spec, with one entry for each dimension."""
        return PartitionSpec(*[entry(dimension.mesh_axes) for dimension in self.dimensions])

    def used(self, but: int | None = None) -> set[str]:
        """The mesh axes that split a dimension, one of them left out."""
        return {axis for i, dimension in enumerate(self.dimensions) if i != but for axis in dimension.mesh_axes}

    def because(self, reason: str) -> "Decision":
        """The same, for one more reason."""
        return self._replace(reason="; ".join(filter(None, (self.reason, reason))))

    def wrong(self, *faults: Fault) -> "Decision":
        """The same, with more that is wrong."""
        return self._replace(faults=(*self.faults, *faults))

    def each(self, change: Callable[[int, Dimension], Dimension]) -> "Decision":
        """The same, with each dimension changed."""
        return self._replace(dimensions=tuple(change(i, one) for i, one in enumerate(self.dimensions)))

    def settle(self) -> "Decision":
        """The same, with nothing left to be decided about names."""
        return self.each(lambda i, one: one._replace(settled=True, closed=False, fault=None))


def whole(leaf: Leaf, reason: str = "") -> Decision:
    """Every dimension whole, and its name not mentioned yet."""
    names = (*leaf.axes, *[None] * (len(leaf.shape) - len(leaf.axes)))
    return Decision(tuple(WHOLE if name is None else _UNSETTLED for name in names), reason)


_UNSETTLED = Dimension(settled=False)


def decide_each(
    leaves: Sequence[Leaf],
    before: Sequence[Decision] | None,
    alike: Callable[[Leaf], Hashable],
    decide: Callable[[Leaf, Decision | None], Decision],
) -> list[Decision]:
    """A decision for each leaf, computed once for leaves that are alike: most of a large model's are.

    Args:
        leaves: the leaves.
        before: what was decided about each before, or None.
        alike: all of a leaf that the decision depends on.
        decide: a leaf, and what was decided before ─► the decision.
    """
    known: dict[Hashable, Decision] = {}
    found = []
    for i, leaf in enumerate(leaves):
        start = None if before is None else before[i]
        # By identity: what was decided before is one object for leaves that are alike, and lives as long as `before`.
        key = (id(start), alike(leaf))
        decision = known.get(key)
        if decision is None:
            decision = known[key] = decide(leaf, start)
        found.append(decision)
    return found


def undecided(leaf: Leaf) -> Decision:
    """Every dimension whole, or as the physical spec of the leaf's annotation has it."""
    start = whole(leaf)
    return start if leaf.spec is None else apply_spec(leaf, leaf.spec, start, "its annotation")


def apply_spec(leaf: Leaf, spec: PartitionSpec, before: Decision, reason: str) -> Decision:
    """A physical spec over what is still whole. What it splits differently from before is a fault."""
    faults: list[Fault] = []
    if len(spec.partitions) > len(leaf.shape):
        why = f"{spec_text(spec)} has {len(spec.partitions)} entries for {len(leaf.shape)} dimensions"
        faults.append((why, "give one entry for each dimension, or fewer"))
    invalid = invalid_entry(spec)
    if invalid is not None:
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
            continue
        have = dimensions[i].mesh_axes
        if have and have != axes:
            faults.append(conflict(i, leaf, have, axes, spec_text(spec)))
        else:
            dimensions[i] = Dimension(axes, spec_text(spec))
    return before._replace(dimensions=tuple(dimensions)).settle().because(reason).wrong(*faults)


def conflict(dim: int, leaf: Leaf, have: Sequence[str], want: Sequence[str], who: str) -> Fault:
    """The fault that a layout splits what one before it has split differently."""
    why = f"{leaf.dimension(dim)} is on {axes_text(have)} already, and {who} puts it on {axes_text(want)}"
    return why, "let the layout behind `|` shard only what the first leaves whole"


def unreadable(leaf: Leaf) -> Fault:
    """The fault that a leaf's axes cannot be determined, for a layout that has to know them."""
    problem: Any = leaf.misfit
    return problem.why, problem.remedy + optimizer_remedy(leaf)


def optimizer_remedy(leaf: Leaf) -> str:
    """What to add to a remedy for a leaf of a bare optimizer state: there the model's annotations need not fit."""
    inside = any(issubclass(cls, tuple) and cls.__module__.split(".")[0] == "optax" for cls in leaf.within)
    return "; for an optimizer's state use `ft.plan_optimizer`" if inside else ""
