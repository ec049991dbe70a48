"""A `Decision` records how layouts shard each dimension of a leaf, and why.

A leaf ─► a `Decision`. This module also finds the problems of a leaf, and makes the error that
lists a tree's problems.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from jax.sharding import PartitionSpec

from functree.devices.meshes import (
    MeshView,
    axes_text,
    invalid_entry,
    mesh_axes,
    spec_of,
    spec_text,
)
from functree.errors import (
    Problem,
    ShardingError,
    count,
    did_you_mean,
    listed,
    longer_form,
    near_name,
)
from functree.labels.leaves import Leaf
from functree.tree.paths import Path

Fault = tuple[str, str]
"""A mistake in a leaf, and its remedy."""


class Source(NamedTuple):
    """The rule, layout or parameter that sharded a dimension.

    Attributes:
        parts: a rule, `FSDP`, a spec, or the parameter that the spec comes from. They are formatted
            only for messages.
        is_rule: whether missing mesh axes are reported once for the layout. If not, as for a spec,
            they are reported for each leaf.
    """

    parts: tuple[object, ...]
    is_rule: bool = False

    def __str__(self) -> str:
        return " ".join(map(str, self.parts))


class Named(IntEnum):
    """The state of a dimension's name after some layouts have decided."""

    UNASKED = 0  # no rules have been applied to the leaf
    MISSING = 1  # no rule mentions the name, which is an error
    MENTIONED = 2  # `axes=` of an `FSDP` lists the name, so the name needs no rule
    CLOSED = 3  # only the rule `...: None` covers the name
    DECIDED = 4  # a layout has settled the dimension, by its name or its index


class Dimension(NamedTuple):
    """The decision about one dimension of a leaf.

    Attributes:
        mesh_axes: the mesh axes that shard the dimension; `()` if it is unsharded.
        source: the source of the sharding; None if the dimension is unsharded, or if the leaf
            follows another leaf, which reports the problems of both.
        named: the state of the dimension's name.
        blocked: the fault if rules mention the name but none of them could apply; otherwise None. A
            later layout that settles the dimension removes this fault.
    """

    mesh_axes: tuple[str, ...] = ()
    source: Source | None = None
    named: Named = Named.UNASKED
    blocked: Fault | None = None


# Most dimensions are unsharded, so they share one object.
WHOLE = Dimension()


class Decision(NamedTuple):
    """The sharding of one leaf.

    Attributes:
        dimensions: one value for each dimension of the leaf.
        reasons: one for each layout that decided something, in order. A reason consists of parts,
            which are formatted only for a plan.
        faults: the faults that later layouts cannot correct.
        memory_kind: the memory kind; None for the default.
        specified: whether the leaf has a layout. It is False if the layout is `None`.
        follows: the path of the followed leaf; None unless both leaves have the same dimensions.
        choices: a pair for each filter that chose a layout: the key of a `StateSharding`, and the
            index of its filter.
    """

    dimensions: tuple[Dimension, ...]
    reasons: tuple[tuple[object, ...], ...] = ()
    faults: tuple[Fault, ...] = ()
    memory_kind: str | None = None
    specified: bool = True
    follows: Path | None = None
    choices: tuple[tuple[object, int], ...] = ()

    @property
    def reason(self) -> str:
        """The reasons as text, for a plan."""
        return reasons_text(self.reasons)

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that shard each dimension."""
        return tuple(dimension.mesh_axes for dimension in self.dimensions)

    @property
    def spec(self) -> PartitionSpec:
        """The spec, with one entry for each dimension."""
        return spec_of(self.mesh_axes)

    @property
    def used(self) -> set[str]:
        """The mesh axes that shard any dimension."""
        return set(chain.from_iterable(self.mesh_axes))

    def because(self, *parts: object) -> "Decision":
        """Return the decision with one more reason."""
        return self._replace(reasons=(*self.reasons, parts))

    def wrong(self, *faults: Fault) -> "Decision":
        """Return the decision with more faults."""
        return self._replace(faults=(*self.faults, *faults))

    def with_dimension(self, dim: int, dimension: Dimension) -> "Decision":
        """Return the decision with one dimension replaced."""
        before, after = self.dimensions[:dim], self.dimensions[dim + 1 :]
        return self._replace(dimensions=(*before, dimension, *after))

    def settle(self) -> "Decision":
        """Return the decision with all names decided, so that they need no rule."""
        settled = [
            dimension._replace(named=Named.DECIDED, blocked=None) for dimension in self.dimensions
        ]
        return self._replace(dimensions=tuple(settled))


def reasons_text(reasons: Iterable[Iterable[object]]) -> str:
    """Format reasons for a plan."""
    return "; ".join([", ".join(map(str, parts)) for parts in reasons])


def whole(leaf: Leaf) -> Decision:
    """Return a decision in which all dimensions are unsharded and no name is mentioned."""
    return Decision((WHOLE,) * len(leaf.value.shape))


def undecided(leaf: Leaf) -> Decision:
    """Return the initial decision: the `PartitionSpec` in a leaf's annotation, or unsharded."""
    start = whole(leaf)
    if leaf.spec is None:
        return start
    return apply_spec(leaf, leaf.spec, start, "its annotation")


def apply_spec(
    leaf: Leaf, spec: PartitionSpec, before: Decision, because: str, *, settles: bool = True
) -> Decision:
    """Shard the unsharded dimensions according to a spec.

    A dimension that is already sharded differently causes a fault.

    Args:
        leaf: the leaf.
        spec: the spec.
        before: the decision of earlier layouts.
        because: the reason.
        settles: whether the spec settles all dimensions, so that their names need no rule.
    """
    faults: list[Fault] = []
    if len(spec.partitions) > len(leaf.shape):
        have = (
            f"{len(spec.partitions)} {'entry' if len(spec.partitions) == 1 else 'entries'} "
            f"for {count(len(leaf.shape), 'dimension')}"
        )
        faults.append(
            (f"{spec_text(spec)} has {have}", "write at most one entry for each dimension")
        )
    invalid = invalid_entry(spec)
    if invalid is not None:
        # The other checks would compare an invalid entry with mesh axes.
        wrong = (f"{spec_text(spec)}: {invalid}", "write names of mesh axes, or `None`")
        return before.wrong(*faults, wrong)
    if spec.unreduced or spec.reduced:
        why = f"{spec_text(spec)} describes partial sums, which exist only inside a computation"
        faults.append((why, "write a spec without `unreduced` and `reduced`"))
    dimensions = list(before.dimensions)
    source = Source((spec_text(spec),))
    # Entries for dimensions that the leaf lacks are already a fault.
    for i, written in enumerate(spec.partitions[: len(dimensions)]):
        if written is PartitionSpec.UNCONSTRAINED:
            why = f"entry {i} of the spec is `P.UNCONSTRAINED`, which does not define a sharding"
            faults.append((why, "write a mesh axis or `None`"))
            continue
        axes = mesh_axes(written)
        if not axes:
            continue  # later layouts may shard the dimension
        have, _, named, blocked = dimensions[i]
        # An earlier layout may shard the dimension over the same mesh axes.
        if have and have != axes:
            faults.append(conflict(i, leaf, have, axes, source))
        else:
            dimensions[i] = Dimension(axes, source, named, blocked)
    applied = before._replace(dimensions=tuple(dimensions))
    if settles:
        applied = applied.settle()
    return applied.because(because).wrong(*faults)


def conflict(
    dim: int, leaf: Leaf, have: Sequence[str], want: Sequence[str], source: Source
) -> Fault:
    """Return the fault for a dimension that `source` and an earlier layout shard differently."""
    already = f"{leaf.dimension(dim)} is already sharded over {axes_text(have)}"
    return (
        f"{already}, but {source} shards it over {axes_text(want)}",
        "after `|`, shard only dimensions that the earlier layouts leave unsharded",
    )


def layout_problem(leaf: Leaf, fault: Fault) -> Problem:
    """Return a fault of a leaf as a problem."""
    why, remedy = fault
    # An optimizer's state contains copies of the model, and the copies' arrays need not fit the
    # model's annotations. `ft.plan_optimizer` handles such copies. Leaves that follow a parameter
    # need no advice.
    if leaf.follows is None and any(map(is_optimizer_state, leaf.within)):
        remedy += USE_PLAN_OPTIMIZER
    return leaf.problem(why, remedy)


USE_PLAN_OPTIMIZER = "; for an optimizer's state, use `ft.plan_optimizer`"


def is_optimizer_state(cls: type) -> bool:
    """Return whether instances of a class are states of an optax transformation."""
    return issubclass(cls, tuple) and cls.__module__.split(".")[0] == "optax"


def absent(names: Collection[str], leaves: Sequence[Leaf]) -> list[str]:
    """Return the names that no leaf has as an axis, without repeats."""
    present = present_axes(leaves)
    return [name for name in dict.fromkeys(names) if name not in present]


def present_axes(leaves: Sequence[Leaf]) -> set[str | None]:
    """Return the axes of leaves; `None` stands for dimensions without a name."""
    # A large model has few different `Axes`, so duplicates are removed before the union.
    different = {leaf.axes for leaf in leaves}
    return set[str | None]().union(*different)


def near_misses(
    leaves: Sequence[Leaf], decisions: Sequence[Decision], unused: Sequence[str]
) -> tuple[list[Problem], list[str]]:
    """Return the problems of axes that only `...: None` covers, probably because of a typo.

    Such an axis resembles an axis that a rule names but no leaf has. If one of the two names is a
    longer form of the other (`hidden`, `hidden_dim`), the result has a warning instead of problems,
    since the names may mean different axes.
    """
    problems, warnings = list[Problem](), list[str]()
    if not unused:
        return problems, warnings
    for name, having in _closed_axes(leaves, decisions).items():
        near, form = near_name(name, unused), longer_form(name, unused)
        why = f'"{name}" has no rule except `...: None`'
        remedy = f"use the same name, `{name}` or `{near or form}`, in the rule and in the axes"
        if near is not None:
            why += f", and no leaf has the axis `{near}`, which a rule names"
            remedy += f', or add the rule `"{name}": None` if the two names mean different axes'
            problems += [leaf.problem(why, remedy) for leaf in having]
        elif form is not None:
            # An activation has no path.
            paths = [f"`{leaf.path}`" for leaf in having if leaf.path]
            where = f" in {listed(paths)}" if paths else ""
            why += f", so it is left unsharded{where}, and no leaf has the axis"
            remedy += f', or add the rule `"{name}": None` if the two names mean different axes'
            warnings.append(f"{why} `{form}`, which a rule names: {remedy}")
    return problems, warnings


def _closed_axes(
    leaves: Sequence[Leaf], decisions: Sequence[Decision]
) -> Mapping[str, Sequence[Leaf]]:
    """Return the axes that only `...: None` covers, each with its leaves."""
    closed: dict[str, list[Leaf]] = {}
    # Many leaves share one decision object, and most leaves have no such axis.
    without: set[int] = set()
    for leaf, decision in zip(leaves, decisions, strict=True):
        if id(decision) in without:
            continue
        names: dict[str, None] = {}
        # Not strict: an annotation that does not fit has fewer or more axes than the leaf.
        for name, dimension in zip(leaf.axes, decision.dimensions, strict=False):
            if name is not None and dimension.named is Named.CLOSED:
                names[name] = None
        for name in names:
            closed.setdefault(name, []).append(leaf)
        if not names:
            without.add(id(decision))
    return closed


def leaf_problems(
    leaf: Leaf, decision: Decision, mesh: MeshView, mentioned: Collection[str] = ()
) -> list[Problem]:
    """Return the problems of one leaf: the layouts' faults, and mismatches with the mesh.

    `mentioned` contains the axes that rules name.
    """
    faults = list(decision.faults)
    for dim, dimension in enumerate(decision.dimensions):
        if dimension.blocked is not None:
            faults.append(dimension.blocked)
        elif dimension.named is Named.MISSING:
            faults.append(_unmentioned(str(leaf.axes[dim]), mentioned))
    parts = mesh.parts(decision.mesh_axes)
    for dim, dimension in enumerate(decision.dimensions):
        if dimension.source is not None:
            faults += _dimension_faults(leaf, dim, decision, dimension.source, parts[dim], mesh)
    return [layout_problem(leaf, fault) for fault in faults]


def _unmentioned(name: str, mentioned: Collection[str]) -> Fault:
    """Return the fault for an axis that no rule names."""
    near = near_name(name, mentioned)
    if near is not None:
        # The names differ by one edit, so the rule or the annotation probably contains a typo.
        hint = f"; did you mean the rule for `{near}`?"
        remedy = f"use the same name, `{name}` or `{near}`, in the rule and in the axes, or add"
    else:
        hint = did_you_mean(name, mentioned)
        remedy = f"add a rule for `{name}`, or"
    return f"no rule names `{name}`{hint}", f'{remedy} `"{name}": None` to leave `{name}` unsharded'


def _dimension_faults(
    leaf: Leaf, dim: int, decision: Decision, source: Source, parts: int, mesh: MeshView
) -> list[Fault]:
    """Return the faults of one dimension of a leaf, which `source` divides into `parts`."""
    faults: list[Fault] = []
    axes = decision.dimensions[dim].mesh_axes
    missing = [axis for axis in axes if axis not in mesh.sizes]
    # If the source is a rule, its missing mesh axes are reported once, for the layout.
    if not source.is_rule:
        for axis in missing:
            near = did_you_mean(axis, mesh.sizes)
            why = f"{source} names `{axis}`, but the mesh {mesh} has no such axis{near}"
            faults.append((why, "use an axis that the mesh has"))
    # Each mesh axis that an earlier dimension uses, or that this one repeats, is reported once.
    seen = {axis for dimension in decision.dimensions[:dim] for axis in dimension.mesh_axes}
    again = [axis for i, axis in enumerate(axes) if axis in seen or axis in axes[:i]]
    for axis in dict.fromkeys(again):
        why = f"mesh axis `{axis}` is used twice, the second time by {source} for "
        why += leaf.dimension(dim)
        faults.append((why, "use the mesh axis once: it can shard only one dimension of an array"))
    # If a mesh axis does not exist, the number of shards is unknown.
    if missing:
        return faults
    if leaf.value.shape[dim] % parts:
        faults.append(_indivisible(leaf, dim, axes, parts, source))
    return faults


def _indivisible(
    leaf: Leaf, dim: int, mesh_axes: Sequence[str], parts: int, source: Source
) -> Fault:
    """Return the fault for a size that is not a multiple of the number of shards."""
    size, text, where = leaf.shape[dim], leaf.dimension(dim), axes_text(mesh_axes)
    padded = -(-size // parts) * parts  # the next multiple
    if not source.is_rule:
        why = f"{text} has size {size}; {where}={parts} needs a multiple of {parts}"
        return (
            why,
            f"pad {text} to {padded}, or write `None` in the spec to leave it unsharded",
        )
    # `FSDP` shards only dimensions that it can divide, so a rule shards this dimension by its name.
    name = leaf.axes[dim]
    why = f"{text} has size {size}; {source} needs a multiple of {where}={parts}"
    pad, whole = f"pad {text} to {padded}", f'with `"{name}": None`'
    if leaf.path:
        alone = "leave this leaf unsharded with a path filter (`StateSharding`)"
        return why, f'{pad}, {alone}, or leave every "{name}" unsharded {whole}'
    if dim == 0:  # the rows of a bare array are usually examples
        pad += " with rows that you mask, drop the excess rows"
    return why, f'{pad}, or leave every "{name}" unsharded {whole}'


def refuse(problems: Sequence[Problem], mesh: MeshView, where: str = "") -> ShardingError:
    """Return one error for all problems of a tree on a mesh.

    Args:
        problems: the problems.
        mesh: the mesh.
        where: the beginning of the message, which names the function that lays out the tree.
    """
    paths: set[object] = set()
    for problem in problems:
        # A problem with a path but no shape is about a module that lacks a named leaf.
        if problem.path is not None and problem.shape is not None:
            paths.add(problem.path)
    what = "the layout does not fit the tree"
    if paths:
        what = f"{count(len(paths), 'leaf')} cannot be laid out"
    return ShardingError(f"{where}{what} on mesh {mesh}", problems)
