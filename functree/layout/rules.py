"""`AxisRules` maps axes to mesh axes with an ordered table of rules.

The axes of a leaf or an activation ─► the mesh axes that shard each dimension.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.argument_checks import SHAPE, check, is_name
from functree.devices.meshes import MeshLike, MeshView, axes_text, entry, local_view, mesh_view
from functree.errors import Problem, RuleError, ShardingError, count, did_you_mean, warn
from functree.labels.annotations.given_names import invalid_names
from functree.labels.leaves import Leaf
from functree.layout.decision import (
    Decision,
    Dimension,
    Fault,
    Named,
    Source,
    absent,
    conflict,
    leaf_problems,
    near_misses,
    undecided,
)
from functree.layout.fsdp import FSDP, fsdp_axes, misspelt_axes
from functree.layout.layout import Composition, Layout, pairs_text, walk, written_pairs
from functree.tree.arrays import AnyArray
from functree.tree.axes import Axes, Names, dict_text, is_axis_name
from functree.tree.paths import ROOT


class Rule(NamedTuple):
    """An axis, and the mesh axes that shard it; `()` leaves it unsharded."""

    name: str
    mesh_axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}→{axes_text(self.mesh_axes)}"


@dataclass(frozen=True, init=False, repr=False)
class AxisRules(Layout):
    """A layout that maps axes to mesh axes with an ordered table of rules.

    The layout follows Flax Linen's algorithm: rules are tried in order, and a mesh axis shards at
    most one dimension of an array. For each axis, the first rule whose mesh axes are still free
    applies, so later rules for the axis are fallbacks. One table covers parameters and activations.

    Args:
        rules: `{axis: mesh axis, tuple of mesh axes, or None}`; or pairs, in which an axis may have
            several rules. `None` leaves the axis unsharded; a layout after `|` may still shard it.
            A final `...: None` leaves all other axes unsharded.
        names: `{cls: ft.names(...)}`, axes for the leaves of classes without annotations.
        unnamed: `P()` to leave arrays without axis names unsharded; an `FSDP` after `|` may still
            shard them. By default, such arrays raise an error.

    Raises:
        RuleError: if an axis or its mesh axes are invalid.
        RuleError: if `names` is invalid.
        RuleError: if `unnamed` is invalid.
        RuleError: if a rule names a mesh axis twice.
        RuleError: if a rule can never apply.

    Examples:
        >>> rules = ft.AxisRules(
        ...     {"batch": "data", "hidden": "model", "embed": None}
        ... )
        >>> rules.spec(ft.Axes("embed", "hidden"))
        P(None, 'model')
        >>> rules
        AxisRules({'batch': 'data', 'hidden': 'model', 'embed': None})
    """

    table: tuple[Rule, ...]
    closed: bool
    names: tuple[tuple[type, Names], ...]
    unnamed: PartitionSpec | Literal["error"]

    def __init__(
        self,
        rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        names: Mapping[type, Names] | None = None,
        unnamed: PartitionSpec | Literal["error"] = "error",
    ):
        pairs = written_pairs(rules, "AxisRules takes a mapping or (axis, mesh axes) pairs")
        vars(self).update(
            table=tuple(_rule(name, value) for name, value in pairs if name is not ...),
            closed=_closed(pairs),
            names=_checked_names({} if names is None else names),
            unnamed=_checked_unnamed(unnamed),
        )
        _check_reachable(self.table)

    @classmethod
    def identity(cls, mesh: MeshLike) -> "AxisRules":
        """Make rules in which each mesh axis shards the axis of the same name."""
        names = mesh_view(mesh).sizes
        return cls(zip(names, names, strict=True))

    def on(self, mesh: MeshLike) -> "AxisRules":
        """Return a copy without the rules whose mesh axes are not all in the mesh.

        An axis that loses all its rules is left unsharded.
        """
        sizes = mesh_view(mesh).sizes
        kept = [rule for rule in self.table if sizes.keys() >= set(rule.mesh_axes)]
        # Without any rule the axis would be an error, or be checked for a typo under `...: None`.
        kept += [Rule(name, ()) for name in self.mentioned if name not in dict(kept)]
        return AxisRules(_pairs(kept, self.closed), dict(self.names), self.unnamed)

    def spec(
        self, axes: str | Axes, shape: Sequence[int] | None = None, mesh: MeshLike = None
    ) -> PartitionSpec:
        """Return the spec of an array with these axes, with one entry for each axis.

        Args:
            axes: the axes, as `Axes` or a string.
            shape: the array's shape; without it, sizes are not checked.
            mesh: a mesh, or a dict of sizes; without it, mesh axes are not checked.

        Raises:
            FunctreeError: if `shape` is not a shape.
            ShardingError: if `shape` and `axes` have different lengths.
            ShardingError: if no rule names an axis.
            ShardingError: if other axes already use the mesh axes of all rules for an axis.
            ShardingError: if a rule names a mesh axis that `mesh` lacks.
            ShardingError: if the mesh axes do not divide a size.
        """
        check("AxisRules.spec: invalid arguments", shape=(shape, SHAPE.or_none()))
        view = None if mesh is None else mesh_view(mesh)
        return spec_of_axes(self, Axes.of(axes), shape, view)

    @property
    def given_names(self) -> Mapping[type, Names]:
        return dict(self.names)

    @property
    def rules(self) -> Layout:
        return self

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        start = so_far or undecided(leaf)
        if leaf.spec is not None:
            return start  # a `PartitionSpec` in an annotation overrides rules
        if leaf.misfit is not None:
            return start.wrong(leaf.misfit)
        # A scalar has no dimensions, so it needs no names.
        if not leaf.annotated and leaf.shape:
            if self.unnamed == "error":
                return start.wrong(unannotated(leaf))
            return start.because("no axis names (unnamed=P())")
        return self._apply(leaf, start)

    def _apply(self, leaf: Leaf, start: Decision) -> Decision:
        """Apply Linen's algorithm to the dimensions that are still unsharded."""
        dimensions, faults = list(start.dimensions), list(start.faults)
        applied: dict[int, Rule] = {}  # the rule that applied to each dimension
        # The outer loop is over rules: if two axes compete for a mesh axis, the earlier rule wins.
        for rule in self.table:
            for dim, name in enumerate(leaf.axes):
                if name != rule.name or dim in applied:
                    continue
                # A mesh axis that shards another dimension blocks the rule. Mesh axes that already
                # shard this dimension do not, since the rule may name the same mesh axes.
                used: set[str] = set()
                for other in (*dimensions[:dim], *dimensions[dim + 1 :]):
                    used.update(other.mesh_axes)
                if not used.isdisjoint(rule.mesh_axes):
                    continue
                applied[dim] = rule
                have, source = dimensions[dim].mesh_axes, Source(("rule", rule), is_rule=True)
                if not rule.mesh_axes:
                    continue
                if have and have != rule.mesh_axes:
                    faults.append(conflict(dim, leaf, have, rule.mesh_axes, source))
                    continue
                # The source is set even if these mesh axes already shard the dimension, so that
                # messages name the rule.
                split = dimensions[dim]._replace(mesh_axes=rule.mesh_axes, source=source)
                dimensions[dim] = split
        for dim, name in enumerate(leaf.axes):
            if name is None or dim in applied:
                dimensions[dim] = dimensions[dim]._replace(named=Named.DECIDED, blocked=None)
            else:
                dimensions[dim] = self._named(leaf, name, dim, dimensions)
        reasons, parts = start.reasons, _reason(leaf, start, applied, self.closed)
        if parts:
            reasons = (*reasons, parts)
        return start._replace(dimensions=tuple(dimensions), faults=tuple(faults), reasons=reasons)

    def _named(self, leaf: Leaf, name: str, dim: int, dimensions: Sequence[Dimension]) -> Dimension:
        """Return a dimension to which no rule applied, with the state of its name."""
        dimension = dimensions[dim]
        if name not in self.mentioned:
            named = Named.CLOSED if self.closed else Named.MISSING
            blocked = None if self.closed else dimension.blocked
            return dimension._replace(named=max(dimension.named, named), blocked=blocked)
        if self.closed or dimension.mesh_axes or dimension.named is Named.CLOSED:
            return dimension._replace(named=Named.DECIDED, blocked=None)
        if dimension.named is Named.DECIDED:
            return dimension
        # No earlier layout left the dimension unsharded on purpose.
        return dimension._replace(
            named=Named.DECIDED, blocked=self._blocked(leaf, name, dimensions)
        )

    def _blocked(self, leaf: Leaf, name: str, dimensions: Sequence[Dimension]) -> Fault:
        """Return the fault for an axis whose rules all name mesh axes that shard other dimensions.

        An axis without a `None` rule is never left unsharded silently.
        """
        owner: dict[str, int] = {}  # the dimension that each mesh axis shards
        for dim, dimension in enumerate(dimensions):
            owner.update(dict.fromkeys(dimension.mesh_axes, dim))
        wanted: list[str] = []
        for rule in self.table:
            if rule.name == name:
                wanted += rule.mesh_axes
        # At least one mesh axis is in use: a rule with free mesh axes would have applied.
        taken = next(axis for axis in wanted if axis in owner)
        why = f'no rule for "{name}" applies: `{taken}` already shards '
        why += f'{leaf.dimension(owner[taken])}, and no rule leaves "{name}" unsharded'
        remedy = f'after the rules for "{name}", add `("{name}", None)` to leave it unsharded'
        return why, f"{remedy}, or add a fallback to another mesh axis"

    @property
    def mentioned(self) -> Collection[str]:
        """The axes that the rules name, each once, in order."""
        return dict(self.table).keys()  # a rule is a pair

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """The rules, as a user writes them."""
        return _pairs(self.table, self.closed)

    def __repr__(self) -> str:
        texts = [("..." if name is ... else repr(name), repr(axes)) for name, axes in self.pairs]
        given = [pairs_text(texts)]
        if self.names:
            names = [(cls.__name__, repr(given)) for cls, given in self.names]
            given.append(f"names={dict_text(names)}")
        if self.unnamed != "error":
            given.append("unnamed=P()")
        return f"AxisRules({', '.join(given)})"


def with_rule(table: AxisRules, axis: str, mesh_axis: Any) -> AxisRules:
    """Return a table in which one rule replaces all rules for an axis.

    The new rule has the position of the first replaced rule.
    """
    pairs = [(axis, mesh_axis) if name == axis else (name, value) for name, value in table.pairs]
    if axis not in table.mentioned:
        pairs.insert(0, (axis, mesh_axis))
    # Other rules for the axis are dropped, since a rule after `None` is an error.
    kept = [pair for i, pair in enumerate(pairs) if pair[0] not in dict(pairs[:i])]
    return AxisRules(kept, dict(table.names), table.unnamed)


def unannotated(leaf: Leaf) -> tuple[str, str]:
    """Return why rules cannot lay out a leaf without names, and the remedy."""
    # A user would write names for the innermost class that is not a container.
    cls = next((cls for cls in reversed(leaf.within) if cls not in (list, tuple, dict)), None)
    names = "`names=`"
    if cls is not None and leaf.path and isinstance(leaf.path[-1], str):
        names = f'`names={{{cls.__name__}: ft.names({leaf.path[-1]}="<axes>")}}`'
    return (
        "has no axis names, and rules shard axes by name",
        f'annotate the array (`Float[Array, "<axes>"]`), pass {names} to the rules, lay the array '
        "out with a path filter, or pass `unnamed=P()` to the rules to leave it unsharded",
    )


def _pairs(rules: Iterable[Rule], closed: bool) -> list[tuple[Any, Any]]:
    """Return rules as a user writes them; `closed` adds a final `...: None`."""
    pairs: list[tuple[Any, Any]] = [(name, entry(axes)) for name, axes in rules]
    if closed:
        pairs.append((..., None))
    return pairs


def _reason(
    leaf: Leaf, start: Decision, applied: Mapping[int, Rule], closed: bool
) -> tuple[object, ...]:
    """Return the reason for each dimension's sharding: the rule that applied, or why none did."""
    parts: list[object] = []
    for dim, name in enumerate(leaf.axes):
        if dim in applied:
            parts.append(applied[dim])
        elif name is not None and closed:
            parts.append(f"{name}→None (...)")
        # Only the first layout's reason has this text, since later reasons would repeat it.
        elif dim < len(leaf.unnamed) and leaf.unnamed[dim] and not start.reasons:
            parts.append(f"`{leaf.unnamed[dim]}` unsharded: no name")
    if not parts and not start.reasons:
        parts.append("a scalar")
    return tuple(parts)


# Construction


def _rule(name: Any, value: Any) -> Rule:
    """Make a rule from the two sides that a user wrote.

    Raises:
        RuleError: if the axis or the mesh axes are invalid.
    """
    if not is_axis_name(name):
        raise RuleError(
            f"AxisRules: {name!r} is not an axis name: write an identifier (not `_`), or `...`, on "
            "the left side of a rule"
        )
    if value is None:
        return Rule(name, ())
    mesh_axes = (value,) if isinstance(value, str) else value
    # An empty tuple would mean `None`, but may be a forgotten name.
    is_sequence = isinstance(mesh_axes, tuple | list) and len(mesh_axes) > 0
    if not is_sequence or not all(map(is_name, mesh_axes)):
        raise RuleError(
            f"rule {name}→{value!r}: write a mesh axis, a tuple of mesh axes, or `None` on the "
            "right side"
        )
    rule = Rule(name, tuple(mesh_axes))
    for axis in mesh_axes:
        if mesh_axes.count(axis) > 1:
            raise RuleError(f"rule {rule}: mesh axis `{axis}` is named twice: name it once")
    return rule


def _closed(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether the rules end with `...: None`.

    Raises:
        RuleError: if `...` is not last.
        RuleError: if `...` maps to a mesh axis.
    """
    closed = False
    for name, _ in pairs:
        if closed:
            raise RuleError(
                "`...` must be the last rule, since no rule after it would apply: move `...` "
                "to the end"
            )
        # The test uses `is`, since a user may write any object, even one with an unusual `==`.
        closed = name is ...
    # A mesh axis for all other axes would shard the first such axis of each leaf.
    if closed and pairs[-1][1] is not None:
        raise RuleError(
            f"AxisRules: `...: {pairs[-1][1]!r}` is invalid, since `...` allows only `None`: name "
            "each axis that you want to shard"
        )
    return closed


def _check_reachable(rules: Sequence[Rule]) -> None:
    """Check that no rule comes after a rule that leaves its axis unsharded.

    Raises:
        RuleError: if a rule can never apply.
    """
    unsharded: set[str] = set()
    for rule in rules:
        if rule.name in unsharded:
            raise RuleError(
                f"rule {rule} can never apply, since `({rule.name!r}, None)` comes first: remove "
                "one of the two, or swap them"
            )
        if not rule.mesh_axes:
            unsharded.add(rule.name)


def _checked_unnamed(unnamed: Any) -> Any:
    """Check and return the argument `unnamed`.

    Raises:
        RuleError: if it is neither "error" nor `P()`.
    """
    if unnamed == "error" or (isinstance(unnamed, PartitionSpec) and not unnamed.partitions):
        return unnamed
    # Any other spec would fit only arrays of one rank, and would shard unnamed dimensions.
    raise RuleError(f'AxisRules: unnamed={unnamed!r} is invalid: write `P()` or "error"')


def _checked_names(names: Mapping[type, Names]) -> tuple[tuple[type, Names], ...]:
    """Return the pairs of `names=`, in an order that does not depend on the order of the argument.

    Raises:
        RuleError: if `names` is invalid.
    """
    invalid = invalid_names(names)
    if invalid is not None:
        raise RuleError(invalid)
    return tuple(sorted(names.items(), key=lambda pair: (pair[0].__qualname__, pair[0].__module__)))


def mentioned_axes(layouts: Iterable[Layout]) -> Collection[str]:
    """Return the axes that the `AxisRules` among some layouts name."""
    tables = [layout for layout in layouts if isinstance(layout, AxisRules)]
    return list(dict.fromkeys(name for table in tables for name in table.mentioned))


def own_problems(parts: Iterable[Layout], leaves: Sequence[Leaf], mesh: MeshView) -> list[Problem]:
    """Return the problems of layouts themselves: mesh axes that the mesh lacks, misspelled axes.

    Mesh axes are checked even if no leaf needs them.
    """
    problems: list[Problem] = []
    for layout in parts:
        match layout:
            case AxisRules():
                uses = [(Source(("rule", rule)), rule.mesh_axes) for rule in layout.table]
                problems += _missing_axes(uses, mesh, _MISSING)
            case FSDP():
                uses = [(layout, layout.mesh_axes)]
                problems += _missing_axes(uses, mesh, "use an axis that the mesh has")
                problems += misspelt_axes(layout, leaves)
    return problems


def _missing_axes(
    uses: Iterable[tuple[object, Sequence[str]]], mesh: MeshView, remedy: str
) -> list[Problem]:
    """Return a problem for each mesh axis that the mesh lacks, even if no leaf uses it.

    Each use consists of a rule or a layout, which messages format, and its mesh axes.
    """
    problems: list[Problem] = []
    for what, axes in uses:
        for axis in axes:
            if axis in mesh.sizes:
                continue
            near = did_you_mean(axis, mesh.sizes)
            why = f"the mesh {mesh} has no axis `{axis}`{near}"
            # The other remedies would leave a misspelled axis unsharded.
            how = "use an axis that the mesh has" if near else remedy
            problems.append(Problem(None, None, str(what), why, how))
    return problems


_MISSING = (
    "use an axis that the mesh has, add the missing axis to the mesh with size 1, or drop the rule "
    "with `rules.on(mesh)`, which must precede any `|`"
)


# Activations


def array_spec(
    layout: Layout, leaf: Leaf, mesh: MeshView | None
) -> tuple[PartitionSpec, list[Problem], list[str]]:
    """Return the spec that a layout gives to an activation, the problems, and the warnings.

    Args:
        layout: the layout.
        leaf: the activation, as `activation` returns it.
        mesh: the mesh; None to skip the checks of mesh axes and sizes.

    Returns:
        The spec, the problems of the activation and the layout, and the texts of warnings.
    """
    heard = list(_heard(layout))
    mentioned = mentioned_axes(heard)
    # Only rules apply to activations: `FSDP` would shard the largest dimension.
    decision = (layout.rules or layout).decide(leaf, None, mesh or MeshView({}))
    problems, warnings = near_misses([leaf], [decision], absent(mentioned, [leaf]))
    if mesh is None:
        # A mesh in which all used mesh axes have size 1 passes all checks.
        mesh = MeshView(dict.fromkeys(decision.used, 1))
    else:
        problems += own_problems(heard, [leaf], mesh)
    problems += leaf_problems(leaf, decision, mesh, mentioned)
    return decision.spec, problems, warnings


def _heard(layout: Layout) -> Iterator[Layout]:
    """Yield a layout and the layouts in it that may apply to activations.

    In a `StateSharding`, only the last layout may apply.
    """
    yield layout
    inner = layout.inner if isinstance(layout, Composition) else layout.inner[-1:]
    for part in inner:
        yield from _heard(part)


def activation(axes: Axes, value: AnyArray) -> Leaf:
    """Return a leaf for an array that is in no tree."""
    return Leaf(ROOT, value, axes, annotated=True)


def spec_of_axes(
    layout: Layout, axes: Axes, shape: Sequence[int] | None, mesh: MeshView | None
) -> PartitionSpec:
    """Return the spec that a layout gives to an array with these axes.

    Args:
        layout: the layout.
        axes: the array's axes.
        shape: its shape; None if it is unknown.
        mesh: the mesh; None to skip the checks of mesh axes.

    Raises:
        ShardingError: if the array cannot be laid out.
    """
    if shape is not None and len(shape) != len(axes):
        have = f"the shape {tuple(shape)} has {len(shape)}"
        raise ShardingError(
            f'"{axes}" names {count(len(axes), "dimension")}, but {have}: name each dimension'
        )
    # Any number of shards divides zero, so unknown sizes are not an error.
    sizes = (0,) * len(axes) if shape is None else tuple(shape)
    # No layout uses an activation's dtype.
    leaf = activation(axes, jax.ShapeDtypeStruct(sizes, np.float32))
    spec, problems, warnings = array_spec(layout, leaf, mesh)
    for text in warnings:
        warn(text)
    if problems:
        where = "" if mesh is None else f" on mesh {mesh}"
        what = f'"{axes}"' if shape is None else f'"{axes}" of shape {sizes}'
        told: list[Problem] = []
        for problem in problems:
            # There is no real array, so its problems have no path, and maybe no shape.
            if problem.path is not None:
                given = None if shape is None else sizes
                problem = problem._replace(path=None, shape=given, what=what)
            told.append(problem)
        raise ShardingError(f'"{axes}" cannot be laid out{where}', told)
    return spec


BATCH = "batch"
"""The name of the batch axis in the layers of `ft.nn`.

`forgotten_axes` looks for this name, not for the first axis. Under `jax.vmap`, the first axis of a
constrained array is not the batch, and may rightly be unsharded.
"""


def forgotten_axes(layout: Layout, axes: Axes, mesh: MeshView) -> tuple[str, ...]:
    """Return the mesh axes that do not shard an array because its batch has no rule.

    `FSDP` shards the parameters over these mesh axes, so the batch is nearly always sharded over
    them, too. However, no rule uses them, and only `...: None` covers the name `batch`.

    Args:
        layout: the layout.
        axes: the array's axes.
        mesh: the mesh. Its axes of size 1 are ignored.
    """
    if BATCH not in axes or layout.rules is None:
        return ()
    tables = [part for part in walk(layout.rules) if isinstance(part, AxisRules)]
    # Without `...: None`, a name without a rule is already an error.
    if BATCH in mentioned_axes(tables) or not any(table.closed for table in tables):
        return ()
    used = {axis for table in tables for rule in table.table for axis in rule.mesh_axes}
    unused = [axis for axis in dict.fromkeys(fsdp_axes(layout)) if axis not in used]
    return tuple([axis for axis in unused if mesh.sizes.get(axis, 1) > 1])


def forgotten_text(what: str, forgotten: tuple[str, ...]) -> str:
    """Return the warning about arrays whose batch has no rule; `what` names the arrays."""
    mesh_axes = axes_text(forgotten)
    return (
        f"`{BATCH}` has no rule except `...: None`, which replicates {what} over the mesh "
        f"{'axis' if len(forgotten) == 1 else 'axes'} `{mesh_axes}`, over which `FSDP` shards the "
        f"parameters. A batch that is sharded over `{mesh_axes}` is gathered, and each device "
        "repeats the work. "
        f"Add `{BATCH!r}: {entry(forgotten)!r}` to the rules, or `{BATCH!r}: None` if you intend "
        "replication"
    )


def activation_spec(
    layout: Layout, axes: Axes, value: AnyArray, mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, list[Problem], Sequence[str]]:
    """Return the result of `array_spec`, which also warns if the activation's batch has no rule.

    The spec is cached, since a model constrains equal activations many times.
    """
    parts = layout.parts if isinstance(layout, Composition) else (layout,)
    # Other layouts may hold arrays, which the cache would keep alive, or be unhashable.
    if {AxisRules, FSDP}.issuperset(map(type, parts)):
        spec, is_fine, warnings = _cached_spec(layout, axes, value.shape, mesh)
        if is_fine:
            return spec, [], warnings
    return _activation_spec(layout, activation(axes, value), mesh)


@lru_cache(maxsize=4096)
def _cached_spec(
    layout: Layout, axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, bool, tuple[str, ...]]:
    """Return the spec of an activation, whether it has no problems, and the warnings."""
    # No layout uses an activation's dtype.
    leaf = activation(axes, jax.ShapeDtypeStruct(shape, np.float32))
    spec, problems, warnings = _activation_spec(layout, leaf, mesh)
    return spec, not problems, tuple(warnings)


def _activation_spec(
    layout: Layout, leaf: Leaf, mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, list[Problem], list[str]]:
    view = local_view(mesh, [layout.own_mesh])
    spec, problems, warnings = array_spec(layout, leaf, view)
    forgotten = () if problems else forgotten_axes(layout, leaf.axes, view)
    if forgotten:
        # The text names no activation, so Python shows it once for each line of the user's program.
        warnings.append(f"constrain: {forgotten_text('activations', forgotten)}")
    return spec, problems, warnings
