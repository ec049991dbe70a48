"""A leaf ─► a `Decision`: what layouts have decided about each of its dimensions, and why."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from functree.devices.specs import axes_text, entry, invalid_entry, mesh_axes, spec_text
from functree.labels.leaf import Leaf
from functree.tree.paths import Path

Fault = tuple[str, str]
"""What is wrong with a leaf, and what to change."""


class Reason(NamedTuple):
    """Why a layout has decided so. It is a value; its text is made where it is printed.

    Attributes:
        parts: what decided, in order: rules, a spec, the reasons of an inner layout. Anything whose
            `str` is what a user should read.
        chosen_by: the filter that chose the layout, as text; empty if none did.
    """

    parts: tuple[object, ...]
    chosen_by: str = ""

    def __str__(self) -> str:
        separator = ", "
        if any(isinstance(part, Reason) for part in self.parts):
            separator = "; "  # the text of an inner reason has commas itself
        text = separator.join(map(str, self.parts))
        if not self.chosen_by:
            return text
        return f"{self.chosen_by}: {text}"


class Source(NamedTuple):
    """What has sharded a dimension.

    Attributes:
        what: a rule, `FSDP`, a spec, or the parameter whose spec it is. Its `str` is for messages.
        is_rule: whether a layout looks for the mesh axes in the mesh once, for all leaves. Those of
            a spec are looked for leaf by leaf.
    """

    what: object
    is_rule: bool = False

    def __str__(self) -> str:
        if self.is_rule:
            return f"rule {self.what}"
        return str(self.what)


class Dimension(NamedTuple):
    """What is decided about one dimension of a leaf.

    Attributes:
        mesh_axes: the mesh axes that shard it; `()` if it is unsharded.
        source: what has sharded it; None if it is unsharded.
        settled: False if it has a name that no rule has mentioned yet.
        excused: whether `FSDP` names it in `axes`, so that no rule has to mention it.
        closed: whether no rule is about its name except `...: None`.
        fault: why it may not stay as it is. A later layout that decides about the dimension removes
            the fault.
    """

    mesh_axes: tuple[str, ...] = ()
    source: Source | None = None
    settled: bool = True
    excused: bool = False
    closed: bool = False
    fault: Fault | None = None


# One object each for the many dimensions about which there is nothing more to say.
WHOLE = Dimension()
_UNSETTLED = Dimension(settled=False)


class Decision(NamedTuple):
    """How one leaf is sharded.

    Attributes:
        dimensions: one for each dimension of the leaf.
        reasons: one for each layout that had something to decide, in their order.
        faults: what is wrong, and cannot be corrected by later layouts.
        memory_kind: the kind of memory; None for the default.
        specified: False if no layout was about the leaf: it was `None`, or the leaf is an
            activation and there are no rules.
        follows: the path of the leaf whose decision it is, if the two have the same dimensions.
    """

    dimensions: tuple[Dimension, ...]
    reasons: tuple[Reason, ...] = ()
    faults: tuple[Fault, ...] = ()
    memory_kind: str | None = None
    specified: bool = True
    follows: Path | None = None

    @property
    def reason(self) -> str:
        """The reasons as text, for a plan."""
        return "; ".join(map(str, self.reasons))

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
        found: set[str] = set()
        for i, dimension in enumerate(self.dimensions):
            if i != but:
                found.update(dimension.mesh_axes)
        return found

    def because(self, *parts: object) -> "Decision":
        """The same decision with one more reason."""
        return self._replace(reasons=(*self.reasons, Reason(parts)))

    def wrong(self, *faults: Fault) -> "Decision":
        """The same decision with more faults."""
        return self._replace(faults=(*self.faults, *faults))

    def with_dimension(self, dim: int, dimension: Dimension) -> "Decision":
        """The same decision with one dimension replaced."""
        before, after = self.dimensions[:dim], self.dimensions[dim + 1 :]
        return self._replace(dimensions=(*before, dimension, *after))

    def each(self, change: Callable[[int, Dimension], Dimension]) -> "Decision":
        """The same decision with each dimension changed."""
        dimensions = [change(i, one) for i, one in enumerate(self.dimensions)]
        return self._replace(dimensions=tuple(dimensions))

    def settle(self) -> "Decision":
        """The same decision, in which no later layout has to mention the names of dimensions."""
        return self.each(lambda i, one: one._replace(settled=True, closed=False, fault=None))


def whole(leaf: Leaf) -> Decision:
    """A decision in which all dimensions are unsharded and no name has been mentioned.

    An activation is unspecified until there are rules for it.
    """
    # If the annotation does not fit, the leaf may have more dimensions than axes.
    names = (*leaf.axes, *[None] * (len(leaf.shape) - len(leaf.axes)))
    dimensions: list[Dimension] = []
    for name in names:
        # No rule can mention a dimension without a name, so none has to.
        dimensions.append(WHOLE if name is None else _UNSETTLED)
    return Decision(tuple(dimensions), specified=not leaf.activation)


def undecided(leaf: Leaf) -> Decision:
    """The first decision about a leaf: by the `PartitionSpec` in its annotation, or unsharded."""
    start = whole(leaf)
    if leaf.spec is None:
        return start
    return apply_spec(leaf, leaf.spec, start, "its annotation")


def decide_each(
    leaves: Sequence[Leaf],
    before: Sequence[Decision] | None,
    alike: Callable[[Leaf], Hashable],
    decide: Callable[[Leaf, Decision | None], Decision],
) -> list[Decision]:
    """A decision for each leaf, computed only once for leaves that are alike, as the layers of a
    large model are.

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
        # The earlier decision is compared by its id, which is fast. Leaves that are alike share one
        # object, because an earlier call of this function made it; and `before` keeps it alive, so
        # that its id is not used again.
        key = (id(start), alike(leaf))
        decision = known.get(key)
        if decision is None:
            decision = known[key] = decide(leaf, start)
        found.append(decision)
    return found


def apply_spec(leaf: Leaf, spec: PartitionSpec, before: Decision, *because: object) -> Decision:
    """Shard the unsharded dimensions by a spec. A dimension that is already sharded in another way
    is a fault.

    Args:
        leaf: the leaf.
        spec: the spec.
        before: the decision of earlier layouts.
        *because: the parts of the reason.
    """
    faults: list[Fault] = []
    if len(spec.partitions) > len(leaf.shape):
        have = f"{len(spec.partitions)} entries for {len(leaf.shape)} dimensions"
        faults.append(
            (f"{spec_text(spec)} has {have}", "give one entry for each dimension, or fewer")
        )
    invalid = invalid_entry(spec)
    if invalid is not None:
        # An entry that is not a name cannot be compared with mesh axes, so the other checks are
        # left out.
        wrong = (f"{spec_text(spec)}: {invalid}", "write names of mesh axes, or `None`")
        return before.wrong(*faults, wrong)
    if spec.unreduced or spec.reduced:
        why = f"{spec_text(spec)} describes partial sums, which exist only inside a computation"
        faults.append((why, "write a spec without `unreduced` and `reduced`"))
    dimensions = list(before.dimensions)
    source = Source(spec_text(spec))
    # Entries for dimensions that the leaf does not have are a fault already.
    for i, written in enumerate(spec.partitions[: len(dimensions)]):
        if written is PartitionSpec.UNCONSTRAINED:
            why = f"dimension {i} is `P.UNCONSTRAINED`, which does not say how it is sharded"
            faults.append((why, "write a mesh axis or `None`"))
            continue
        axes = mesh_axes(written)
        if not axes:
            continue  # `None` leaves the dimension to later layouts
        have = dimensions[i].mesh_axes
        # An earlier layout may shard the dimension over the same mesh axes.
        if have and have != axes:
            faults.append(conflict(i, leaf, have, axes, source))
        else:
            dimensions[i] = Dimension(axes, source)
    # A spec is about all dimensions by their index, so their names need no rule.
    applied = before._replace(dimensions=tuple(dimensions), specified=True)
    return applied.settle().because(*because).wrong(*faults)


def conflict(
    dim: int, leaf: Leaf, have: Sequence[str], want: Sequence[str], source: Source
) -> Fault:
    """The fault that a dimension is already sharded, and `source` shards it in another way."""
    already = f"{leaf.dimension(dim)} is already sharded over {axes_text(have)}"
    return (
        f"{already}, and {source} shards it over {axes_text(want)}",
        "let the layout after `|` shard only dimensions that the layout before it leaves unsharded",
    )
