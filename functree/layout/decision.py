"""A leaf ─► a `Decision`: what layouts have decided about each of its dimensions, and why."""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from jax.sharding import PartitionSpec

from functree.devices.specs import axes_text, entry, invalid_entry, mesh_axes, spec_text
from functree.labels.leaf import Leaf
from functree.tree.paths import Path

Fault = tuple[str, str]
"""What is wrong with a leaf, and what to change."""


class ChosenBy(NamedTuple):
    """The filter that chose a layout for a leaf.

    Attributes:
        key: what tells the `StateSharding` from others.
        number: the index of the filter.
        text: the filter as a user writes it.
    """

    key: object
    number: int
    text: str

    def __str__(self) -> str:
        return self.text


class Reason(NamedTuple):
    """Why a layout has decided so. It is a value; its text is made where it is printed.

    Attributes:
        parts: what decided, in order: rules, a spec, the reasons of an inner layout. Anything whose
            `str` is what a user should read.
        chosen_by: the filter that chose the layout, or a word for what did; empty if none did.
    """

    parts: tuple[object, ...]
    chosen_by: ChosenBy | str = ""

    def __str__(self) -> str:
        separator = ", "
        if any(isinstance(part, Reason) for part in self.parts):
            separator = "; "  # the text of an inner reason has commas itself
        text = separator.join(map(str, self.parts))
        if not self.chosen_by:
            return text
        return f"{self.chosen_by}: {text}"

    def choices(self) -> Iterator[ChosenBy]:
        """The filters that chose layouts, here and in inner reasons."""
        if isinstance(self.chosen_by, ChosenBy):
            yield self.chosen_by
        for part in self.parts:
            if isinstance(part, Reason):
                yield from part.choices()


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


class Named(IntEnum):
    """What layouts have said about the name of a dimension."""

    UNASKED = 0  # no rules by names have decided about the leaf
    MISSING = 1  # rules by names do not mention it, which is an error
    MENTIONED = 2  # `FSDP` names it in `axes`, so that no rule has to
    CLOSED = 3  # only the rule `...: None` is for it
    DECIDED = 4  # a layout has decided about the dimension, by its name or its index


class Dimension(NamedTuple):
    """What is decided about one dimension of a leaf.

    Attributes:
        mesh_axes: the mesh axes that shard it; `()` if it is unsharded.
        source: what has sharded it; None if it is unsharded.
        named: what layouts have said about its name.
        blocked: why its rules could not apply, although they mention it. A later layout that
            decides about the dimension removes this fault.
    """

    mesh_axes: tuple[str, ...] = ()
    source: Source | None = None
    named: Named = Named.UNASKED
    blocked: Fault | None = None


# One object for the many dimensions about which there is nothing more to say.
WHOLE = Dimension()


class Decision(NamedTuple):
    """How one leaf is sharded.

    Attributes:
        dimensions: one for each dimension of the leaf.
        reasons: one for each layout that had something to decide, in their order.
        faults: what is wrong, and cannot be corrected by later layouts.
        memory_kind: the kind of memory; None for the default.
        specified: False if the layout of the leaf is `None`.
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
        return self.each(lambda i, one: one._replace(named=Named.DECIDED, blocked=None))


def whole(leaf: Leaf) -> Decision:
    """A decision in which all dimensions are unsharded and no name has been mentioned."""
    return Decision((WHOLE,) * len(leaf.shape))


def undecided(leaf: Leaf) -> Decision:
    """The first decision about a leaf: by the `PartitionSpec` in its annotation, or unsharded."""
    start = whole(leaf)
    if leaf.spec is None:
        return start
    return apply_spec(leaf, leaf.spec, start, "its annotation")


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
    applied = before._replace(dimensions=tuple(dimensions))
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
