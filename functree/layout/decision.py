"""A leaf ─► a `Decision`: what layouts have decided about each of its dimensions, and why.

This module also has the problems of a leaf, and the error that lists the problems of a tree.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from jax.sharding import PartitionSpec

from functree.devices.meshes import MeshView
from functree.devices.specs import axes_text, entry, invalid_entry, mesh_axes, spec_text
from functree.errors import (
    Problem,
    ShardingError,
    count,
    did_you_mean,
    listed,
    longer_form,
    near_name,
    warn,
)
from functree.labels.leaf import Leaf
from functree.tree.paths import Path

Fault = tuple[str, str]
"""What is wrong with a leaf, and what to change."""


class Reason(NamedTuple):
    """Why a layout has decided so. It is a value; its text is made where it is printed.

    Attributes:
        parts: what decided, in order: rules, a spec, the reasons of an inner layout. Anything whose
            `str` is what a user should read.
        chosen_by: the filter that chose the layout, as a user writes it, or a word for what did;
            empty if none did.
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
        choices: the filters that chose layouts, as pairs: what tells a `StateSharding` from others,
            and the index of its filter.
    """

    dimensions: tuple[Dimension, ...]
    reasons: tuple[Reason, ...] = ()
    faults: tuple[Fault, ...] = ()
    memory_kind: str | None = None
    specified: bool = True
    follows: Path | None = None
    choices: tuple[tuple[object, int], ...] = ()

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

    def settle(self) -> "Decision":
        """The same decision, in which no later layout has to mention the names of dimensions."""
        settled = [one._replace(named=Named.DECIDED, blocked=None) for one in self.dimensions]
        return self._replace(dimensions=tuple(settled))


def whole(leaf: Leaf) -> Decision:
    """A decision in which all dimensions are unsharded and no name has been mentioned."""
    return Decision((WHOLE,) * len(leaf.shape))


def undecided(leaf: Leaf) -> Decision:
    """The first decision about a leaf: by the `PartitionSpec` in its annotation, or unsharded."""
    start = whole(leaf)
    if leaf.spec is None:
        return start
    return apply_spec(leaf, leaf.spec, start, "its annotation")


def apply_spec(
    leaf: Leaf, spec: PartitionSpec, before: Decision, because: str, *, settles: bool = True
) -> Decision:
    """Shard the unsharded dimensions by a spec. A dimension that is already sharded in another way
    is a fault.

    Args:
        leaf: the leaf.
        spec: the spec.
        before: the decision of earlier layouts.
        because: the reason.
        settles: whether the spec decides about all dimensions by their index, so that their names
            need no rule.
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
    """The fault that a dimension is already sharded, and `source` shards it in another way."""
    already = f"{leaf.dimension(dim)} is already sharded over {axes_text(have)}"
    return (
        f"{already}, and {source} shards it over {axes_text(want)}",
        "let the layout after `|` shard only dimensions that the layout before it leaves unsharded",
    )


def layout_problem(leaf: Leaf, fault: Fault) -> Problem:
    """A fault of a leaf's layout as its problem."""
    why, remedy = fault
    # The arrays of an optimizer's state are in copies of the model, and may have other shapes than
    # its annotations say. Where they follow their parameters, it was taken care of.
    if leaf.follows is None and any(map(is_optimizer_state, leaf.within)):
        remedy += USE_PLAN_OPTIMIZER
    return leaf.problem(why, remedy)


def followed_paths(leaves: Iterable[Leaf]) -> dict[Path, Path | None]:
    """The path of the parameter that each leaf follows, by the path of the leaf."""
    return {leaf.path: leaf.follows.path for leaf in leaves if leaf.follows is not None}


def without_repeats(
    problems: Sequence[Problem], follows: Mapping[Path, Path | None]
) -> list[Problem]:
    """The problems without those of leaves that follow a parameter which has the same problem.

    Args:
        problems: the problems of some leaves.
        follows: the path of the parameter by that of the leaf that follows it.
    """
    known = {(one.path, one.why) for one in problems}
    kept: list[Problem] = []
    for one in problems:
        parameter = None if one.path is None else follows.get(Path(one.path))
        if parameter is None or (parameter, one.why) not in known:
            kept.append(one)
    return kept


USE_PLAN_OPTIMIZER = "; for an optimizer's state use `ft.plan_optimizer`"


def is_optimizer_state(cls: type) -> bool:
    """Whether instances of a class are the state of an optax transformation."""
    return issubclass(cls, tuple) and cls.__module__.split(".")[0] == "optax"


def missing_axes(what: str, mesh_axes: Sequence[str], mesh: MeshView, remedy: str) -> list[Problem]:
    """The problems of a rule that names mesh axes which the mesh does not have, even if no leaf
    needs the rule."""
    problems: list[Problem] = []
    for axis in mesh_axes:
        if axis not in mesh.sizes:
            why = f"the mesh {mesh} has no axis `{axis}`{did_you_mean(axis, mesh.sizes)}"
            problems.append(Problem(None, None, what, why, remedy))
    return problems


def absent(names: Collection[str], leaves: Sequence[Leaf]) -> list[str]:
    """The names, each once, that no leaf has as an axis."""
    if not names:
        return []
    present = present_axes(leaves)
    return [name for name in dict.fromkeys(names) if name not in present]


def present_axes(leaves: Sequence[Leaf]) -> set[str | None]:
    """The axes of leaves; `None` is for dimensions without a name."""
    # A large model has few different axes, so a set of them first.
    different = {leaf.axes for leaf in leaves}
    return set[str | None]().union(*different)


def near_misses(
    leaves: Sequence[Leaf], decisions: Sequence[Decision], unused: Sequence[str]
) -> list[Problem]:
    """The problems of axes that only `...: None` is for, if an unused rule has a similar name.

    If one of two names is a longer form of the other (`hidden`, `hidden_dim`), they may well be
    different axes, so this is only warned of.
    """
    found: list[Problem] = []
    if not unused:
        return found
    for name, having in _closed_axes(leaves, decisions).items():
        near, form = near_name(name, unused), longer_form(name, unused)
        why = f'"{name}" has no rule but `...: None`'
        remedy = "write the same name in both"
        if near is not None:
            why += f", and no leaf has the axis of rule `{near}`"
            remedy += f', or add `"{name}": None` if they are different axes'
            found += [leaf.problem(why, remedy) for leaf in having]
        elif form is not None:
            # An activation is in no tree, and has no path.
            paths = [f"`{leaf.path}`" for leaf in having if leaf.path]
            where = f" in {listed(paths)}" if paths else ""
            why += f", so it is left unsharded{where}, and no leaf has the axis of rule"
            remedy += f', or add `"{name}": None` to the rules if they are different axes'
            warn(f"{why} `{form}`: {remedy}")
    return found


def _closed_axes(
    leaves: Sequence[Leaf], decisions: Sequence[Decision]
) -> Mapping[str, Sequence[Leaf]]:
    """The axes that only `...: None` is for, each with its leaves."""
    found: dict[str, list[Leaf]] = {}
    # Many leaves share one decision object, and most have no such axis.
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
            found.setdefault(name, []).append(leaf)
        if not names:
            without.add(id(decision))
    return found


def leaf_problems(
    leaf: Leaf, decision: Decision, mesh: MeshView, mentioned: Collection[str] = ()
) -> list[Problem]:
    """The problems of one leaf: those that the layouts found, and those that the mesh causes.

    `mentioned` are the axes that rules name.
    """
    faults = list(decision.faults)
    for dim, dimension in enumerate(decision.dimensions):
        if dimension.blocked is not None:
            faults.append(dimension.blocked)
        elif dimension.named is Named.MISSING:
            faults.append(_unmentioned(str(leaf.axes[dim]), mentioned))
    for dim, dimension in enumerate(decision.dimensions):
        if dimension.source is not None:
            faults += _dimension_faults(leaf, dim, decision, dimension.source, mesh)
    return [layout_problem(leaf, fault) for fault in faults]


def _unmentioned(name: str, mentioned: Collection[str]) -> Fault:
    """The fault that no rule names an axis."""
    near = near_name(name, mentioned)
    if near is not None:
        # So similar that it is a typo, and it may be in the rule as well as in the annotation.
        hint = f"; did you mean the rule for `{near}`?"
    else:
        hint = did_you_mean(name, mentioned)
    return (
        f"no rule names `{name}`{hint}",
        f'add a rule for "{name}", or `"{name}": None` to leave it unsharded',
    )


def _dimension_faults(
    leaf: Leaf, dim: int, decision: Decision, source: Source, mesh: MeshView
) -> list[Fault]:
    """What is wrong with one sharded dimension of a leaf."""
    found: list[Fault] = []
    axes = decision.dimensions[dim].mesh_axes
    missing = [axis for axis in axes if axis not in mesh.sizes]
    # Those of a rule are one problem of the layout, and not one for each leaf.
    if not source.is_rule:
        for axis in missing:
            near = did_you_mean(axis, mesh.sizes)
            why = f"{source} names `{axis}`, and the mesh {mesh} has no such axis{near}"
            found.append((why, "name an axis of the mesh"))
    # Mesh axes that an earlier dimension uses, or that this dimension uses more than once. Each is
    # reported once.
    seen = {axis for dimension in decision.dimensions[:dim] for axis in dimension.mesh_axes}
    again = [axis for i, axis in enumerate(axes) if axis in seen or axis in axes[:i]]
    for axis in dict.fromkeys(again):
        why = f"{source} uses mesh axis `{axis}` twice, the second time for {leaf.dimension(dim)}"
        found.append((why, "name the mesh axis once: it shards one dimension of an array"))
    # If a mesh axis does not exist, the number of parts is not known.
    if missing:
        return found
    parts = parts_over(axes, mesh)
    if leaf.shape[dim] % parts:
        found.append(_indivisible(leaf, dim, axes, parts, source))
    return found


def _indivisible(
    leaf: Leaf, dim: int, mesh_axes: Sequence[str], parts: int, source: Source
) -> Fault:
    """The fault that a size is not a multiple of the number of parts."""
    size, text, where = leaf.shape[dim], leaf.dimension(dim), axes_text(mesh_axes)
    padded = -(-size // parts) * parts  # the next multiple
    if not source.is_rule:
        why = f"{text} has size {size}; {where}={parts} needs a multiple of {parts}"
        return why, f"pad {text} to {padded}, or write `None` there to leave it unsharded"
    # Rules shard dimensions that have names, and FSDP only dimensions that it can divide.
    name = leaf.axes[dim]
    why = f"{text} has size {size}; {source} needs a multiple of {where}={parts}"
    pad, whole = f"pad {text} to {padded}", f'by `"{name}": None`'
    if leaf.path:
        alone = "leave this leaf unsharded by a path filter (`StateSharding`)"
        return why, f'{pad}, {alone}, or every "{name}" {whole}'
    if dim == 0:  # the rows of a bare array are most often examples
        pad += " with rows that do not count, drop what is left over"
    return why, f'{pad}, or leave every "{name}" unsharded {whole}'


def parts_over(mesh_axes: Iterable[str], mesh: MeshView) -> int:
    """The number of parts into which mesh axes divide an array. One that the mesh does not have
    counts as 1, since it is a problem already."""
    return math.prod(mesh.sizes.get(axis, 1) for axis in mesh_axes)


def local_shape(
    shape: Sequence[int], mesh_axes: Sequence[Sequence[str]], mesh: MeshView
) -> tuple[int, ...]:
    """The shape of the shard on one device."""
    sizes: list[int] = []
    for size, axes in zip(shape, mesh_axes, strict=True):
        parts = parts_over(axes, mesh)
        # Rounded up: a plan with `check=False` has rows with sizes that the mesh does not divide.
        sizes.append(-(-size // parts))
    return tuple(sizes)


def refuse(problems: Sequence[Problem], mesh: MeshView, where: str = "") -> ShardingError:
    """The one error for all problems of a tree on a mesh.

    Args:
        problems: the problems.
        mesh: the mesh.
        where: the beginning of the message, which says what lays out the tree.
    """
    leaves = leaves_at_fault(problems)
    if not leaves:
        return ShardingError(f"{where}the layout does not fit the tree on mesh {mesh}", problems)
    return ShardingError(f"{where}{leaves} cannot be laid out on mesh {mesh}", problems)


def leaves_at_fault(problems: Sequence[Problem]) -> str:
    """The number of leaves with problems as a text: `2 leaves`. Empty if no problem is about a
    single leaf."""
    paths: set[object] = set()
    for problem in problems:
        # A problem with a path and without a shape is about a module: about names for a leaf that
        # it does not have.
        if problem.path is not None and problem.shape is not None:
            paths.add(problem.path)
    if not paths:
        return ""
    return count(len(paths), "leaf")
