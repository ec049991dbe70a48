"""A leaf and the decision about it ─► the problems of the leaf; those of a tree ─► one error."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from functree.devices.meshes import MeshView
from functree.devices.specs import axes_text
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
from functree.layout.decision import Decision, Fault, Named, Source
from functree.tree.paths import Path


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


def is_clean(decision: Decision) -> bool:
    """Whether a leaf with this decision is unsharded and without fault, whatever its sizes are."""
    if decision.faults:
        return False
    return all(
        not one.mesh_axes and one.blocked is None and one.named is not Named.MISSING
        for one in decision.dimensions
    )


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
    seen: set[str] = set()
    for dimension in decision.dimensions[:dim]:
        seen.update(dimension.mesh_axes)
    again: dict[str, None] = {}
    for axis in axes:
        if axis in seen:
            again[axis] = None
        seen.add(axis)
    for axis in again:
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
