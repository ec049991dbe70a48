"""The axes of a leaf or an activation ─► mesh axes, by an ordered table of rules: `AxisRules`."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from functree.argument_checks import SHAPE, check, is_name
from functree.devices.meshes import MeshLike, MeshView, mesh_view
from functree.devices.specs import axes_text, entry
from functree.errors import Problem, RuleError, ShardingError
from functree.labels.annotations.given_names import invalid_names
from functree.labels.leaf import Leaf
from functree.layout.decision import (
    Decision,
    Fault,
    Named,
    Source,
    absent,
    conflict,
    leaf_problems,
    missing_axes,
    near_misses,
    undecided,
)
from functree.layout.fsdp import FSDP, fsdp_axes, misspelt_axes
from functree.layout.layout import Composition, Layout, pairs_text, walk, written_pairs
from functree.tree.arrays import AnyArray
from functree.tree.axes import Axes, Names, dict_text, is_axis_name
from functree.tree.paths import Path


class Rule(NamedTuple):
    """An axis, and the mesh axes that shard it; `()` for unsharded."""

    name: str
    mesh_axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}→{axes_text(self.mesh_axes)}"


@dataclass(frozen=True, init=False, repr=False)
class AxisRules(Layout):
    """A layout by an ordered table of axes and mesh axes. It uses the algorithm of Flax Linen.

    The rules are tried in their order. A mesh axis shards at most one dimension of an array. An
    axis is sharded by its first rule whose mesh axes are not used yet, so later rules for the same
    axis are its fallbacks. One table is for parameters and activations.

    Args:
        rules: `{axis: mesh axis, tuple of mesh axes, or None}`; or pairs, in which an axis may have
            several rules. `None` leaves the axis unsharded; a layout after `|` may still shard it.
            A last `...: None` leaves all other axes unsharded.
        names: `{cls: ft.names(...)}`, axes for the leaves of classes without annotations.
        unnamed: `P()` leaves arrays without any axis names unsharded, as far as these rules go: an
            `FSDP` after `|` may shard them. By default they are an error.

    Raises:
        RuleError: an axis or a value is invalid, one rule has a mesh axis twice, or a rule can
            never apply.

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
        pairs = written_pairs(rules, "rules are a mapping or (name, mesh axes) pairs")
        vars(self).update(
            table=tuple(_rule(name, value) for name, value in pairs if name is not ...),
            closed=_closed(pairs),
            names=_checked_names({} if names is None else names),
            unnamed=_checked_unnamed(unnamed),
        )
        _check_reachable(self.table)

    @classmethod
    def identity(cls, mesh: MeshLike) -> "AxisRules":
        """Rules in which each mesh axis shards the axis of the same name."""
        names = mesh_view(mesh).sizes
        return cls(zip(names, names, strict=True))

    def on(self, mesh: MeshLike) -> "AxisRules":
        """The rules without those that name a mesh axis which the mesh does not have.

        An axis that has no rules then is left unsharded.
        """
        sizes = mesh_view(mesh).sizes
        kept = [rule for rule in self.table if sizes.keys() >= set(rule.mesh_axes)]
        # Without any rule the axis would be an error, or fall under `...: None`, where a misspelled
        # name is looked for.
        kept += [Rule(name, ()) for name in self.mentioned if name not in dict(kept)]
        return AxisRules(_pairs(kept, self.closed), dict(self.names), self.unnamed)

    def spec(
        self, axes: str | Axes, shape: Sequence[int] | None = None, mesh: MeshLike = None
    ) -> PartitionSpec:
        """The spec of an array with these axes, with one entry for each axis.

        Args:
            axes: the axes, as `Axes` or text.
            shape: the shape of the array; if it is given, the sizes are checked.
            mesh: a mesh, or a dict of sizes. Without it, mesh axes are not checked.

        Raises:
            ShardingError: no rule names an axis, the mesh axes of all its rules are used by other
                axes, or the mesh axes do not divide a size.
        """
        check("no spec for such a shape", shape=(shape, SHAPE.or_none()))
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
            return start  # a `PartitionSpec` in an annotation takes precedence over rules
        if leaf.misfit is not None:
            return start.wrong((leaf.misfit.why, leaf.misfit.remedy))
        # A scalar has no dimension that would need a name.
        if not leaf.annotated and leaf.shape:
            if self.unnamed == "error":
                return start.wrong(unannotated(leaf))
            return start.because("no axis names (unnamed=P())")
        return self._apply(leaf, start)

    def _apply(self, leaf: Leaf, start: Decision) -> Decision:
        """Linen's algorithm, for the dimensions that are still unsharded."""
        decision = start
        applied: dict[int, Rule] = {}  # the rule that applied to a dimension
        # By rules and then by dimensions: of two axes that compete for a mesh axis, the one with
        # the earlier rule gets it, wherever its dimension is.
        for rule in self.table:
            for dim, axis in enumerate(leaf.axes):
                if axis != rule.name or dim in applied:
                    continue
                # Another dimension uses the mesh axes. A mesh axis that already shards this very
                # dimension is no obstacle: it may agree with the rule.
                if not decision.used(but=dim).isdisjoint(rule.mesh_axes):
                    continue
                applied[dim] = rule
                if rule.mesh_axes:
                    decision = _split(leaf, decision, dim, rule)
        ruled = decision
        for dim, name in enumerate(leaf.axes):
            dimension = ruled.dimensions[dim]
            if name is None or dim in applied:
                dimension = dimension._replace(named=Named.DECIDED, blocked=None)
            elif name not in self.mentioned:
                named = Named.CLOSED if self.closed else Named.MISSING
                blocked = None if self.closed else dimension.blocked
                named = max(dimension.named, named)
                dimension = dimension._replace(named=named, blocked=blocked)
            elif self.closed or dimension.mesh_axes or dimension.named is Named.CLOSED:
                dimension = dimension._replace(named=Named.DECIDED, blocked=None)
            elif dimension.named is not Named.DECIDED:
                # None of its rules applied, and no layout before has left it unsharded on purpose.
                blocked = self._blocked(leaf, name, ruled)
                dimension = dimension._replace(named=Named.DECIDED, blocked=blocked)
            decision = decision.with_dimension(dim, dimension)
        parts = _reason(leaf, start, applied, self.closed)
        if not parts:
            return decision
        return decision.because(*parts)

    def _blocked(self, leaf: Leaf, name: str, decision: Decision) -> Fault:
        """The fault that the mesh axes of all rules for an axis are used by other dimensions."""
        # An axis without a `None` rule is never left unsharded silently.
        owner: dict[str, int] = {}  # the dimension that a mesh axis shards
        for dim, mesh_axes in enumerate(decision.mesh_axes):
            owner.update(dict.fromkeys(mesh_axes, dim))
        wanted: list[str] = []
        for rule in self.table:
            if rule.name == name:
                wanted += rule.mesh_axes
        # There is one: a rule whose mesh axes are all free would have applied.
        taken = next(axis for axis in wanted if axis in owner)
        why = f'"{name}" has no rule left: `{taken}` is used by {leaf.dimension(owner[taken])}, '
        why += f'and no rule lets "{name}" be unsharded'
        remedy = f'add `("{name}", None)` after its rules to leave it unsharded'
        return why, f"{remedy}, or a fallback to another mesh axis"

    @property
    def mentioned(self) -> Collection[str]:
        """The axes that the rules name, each once, in the order of the rules."""
        return dict(self.table).keys()  # a rule is a pair

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """The rules as a user writes them."""
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
    """A table with one rule for an axis, in the place of its first."""
    pairs = [(axis, mesh_axis) if name == axis else (name, value) for name, value in table.pairs]
    if axis not in table.mentioned:
        pairs.insert(0, (axis, mesh_axis))
    # Others for the same axis go, since a rule after `None` for it is refused.
    kept = [pair for i, pair in enumerate(pairs) if pair[0] not in dict(pairs[:i])]
    return AxisRules(kept, dict(table.names), table.unnamed)


def _split(leaf: Leaf, decision: Decision, dim: int, rule: Rule) -> Decision:
    """A decision with one dimension sharded by a rule."""
    have, source = decision.dimensions[dim].mesh_axes, Source(rule, is_rule=True)
    if have and have != rule.mesh_axes:
        return decision.wrong(conflict(dim, leaf, have, rule.mesh_axes, source))
    # Also if it is sharded so already: messages then name the rule.
    split = decision.dimensions[dim]._replace(mesh_axes=rule.mesh_axes, source=source)
    return decision.with_dimension(dim, split)


def unannotated(leaf: Leaf) -> tuple[str, str]:
    """Why rules cannot lay out a leaf without names, and what to do."""
    why, remedy = "has no axis names", 'annotate it (`Float[Array, "..."]`)'
    if leaf.unread is not None:
        reason, remedy = leaf.unread
        why += f": {reason}"
    # The class that has it, for which a user would write names.
    cls = next((cls for cls in reversed(leaf.within) if cls not in (list, tuple, dict)), None)
    names = "`names=`"
    if cls is not None and leaf.path and isinstance(leaf.path[-1], str):
        names = f'`names={{{cls.__name__}: ft.names({leaf.path[-1]}="...")}}`'
    return (
        f"{why}, and rules shard axes by name",
        f"{remedy}, give {names} to the rules, lay it out by a path filter, or leave it unsharded "
        "by these rules with `unnamed=P()`",
    )


def _pairs(rules: Iterable[Rule], closed: bool) -> list[tuple[Any, Any]]:
    """Rules as a user writes them; `closed` is whether they end with `...: None`."""
    pairs: list[tuple[Any, Any]] = [(name, entry(axes)) for name, axes in rules]
    if closed:
        pairs.append((..., None))
    return pairs


def _reason(
    leaf: Leaf, start: Decision, applied: Mapping[int, Rule], closed: bool
) -> tuple[object, ...]:
    """The parts of the reason for a decision: for each dimension the rule, or why there is none."""
    parts: list[object] = []
    for dim, name in enumerate(leaf.axes):
        if dim in applied:
            parts.append(applied[dim])
        elif name is not None and closed:
            parts.append(f"{name}→None (...)")
        # Only for the first layout: a later one would repeat it.
        elif dim < len(leaf.unnamed) and leaf.unnamed[dim] and not start.reasons:
            parts.append(f"`{leaf.unnamed[dim]}` unsharded: no name")
    if not parts and not start.reasons:
        parts.append("a scalar")
    return tuple(parts)


# Construction


def _rule(name: Any, value: Any) -> Rule:
    """One rule that a user wrote. Raises RuleError if it is invalid."""
    if not is_axis_name(name):
        raise RuleError(
            f"{name!r} is not an axis name: the left side of a rule is an identifier (not `_`), "
            "or `...`"
        )
    if value is not None and not isinstance(value, str | tuple | list):
        raise RuleError(
            f"rule {name}→{value!r}: the right side is a mesh axis, a tuple of them, or `None`"
        )
    if value is None:
        return Rule(name, ())
    mesh_axes = (value,) if isinstance(value, str) else tuple(value)
    # An empty tuple shards nothing, as `None` does, but looks like a forgotten name.
    if not mesh_axes or not all(map(is_name, mesh_axes)):
        raise RuleError(
            f"rule {name}→{value!r}: mesh axes are non-empty names; write `None` for unsharded"
        )
    rule = Rule(name, mesh_axes)
    for axis in mesh_axes:
        if mesh_axes.count(axis) > 1:
            raise RuleError(f"rule {rule}: mesh axis `{axis}` is named twice; name it once")
    return rule


def _closed(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether the rules end with `...: None`. Raises RuleError if a `...` is invalid."""
    closed = False
    for name, _ in pairs:
        if closed:
            raise RuleError("`...` may only be the last rule: a rule after it would never apply")
        # By `is`: a name that a user wrote may be anything, and compare in its own way.
        closed = name is ...
    # A mesh axis for all other axes would shard the first of them in each leaf.
    if closed and pairs[-1][1] is not None:
        raise RuleError(
            f"`...: {pairs[-1][1]!r}`: only `...: None` is possible; name the axis that is to be "
            "sharded"
        )
    return closed


def _check_reachable(rules: Sequence[Rule]) -> None:
    """Raise RuleError if a rule can never apply, because an earlier rule leaves its axis
    unsharded."""
    unsharded: set[str] = set()
    for rule in rules:
        if rule.name in unsharded:
            raise RuleError(f"rule {rule} can never apply: `({rule.name!r}, None)` is before it")
        if not rule.mesh_axes:
            unsharded.add(rule.name)


def _checked_unnamed(unnamed: Any) -> Any:
    """The argument `unnamed`. Raises RuleError if it is neither "error" nor `P()`."""
    if unnamed == "error" or (isinstance(unnamed, PartitionSpec) and not unnamed.partitions):
        return unnamed
    # Another spec would be for arrays of one rank, and shard a dimension that nobody has named.
    raise RuleError(f'AxisRules: unnamed={unnamed!r}: write `P()`, or "error"')


def _checked_names(names: Mapping[type, Names]) -> tuple[tuple[type, Names], ...]:
    """The pairs of a `names=`, in an order that does not depend on how it was written. Raises
    RuleError if it is invalid."""
    invalid = invalid_names(names)
    if invalid is not None:
        raise RuleError(invalid)
    return tuple(sorted(names.items(), key=lambda pair: (pair[0].__qualname__, pair[0].__module__)))


def mentioned_axes(layouts: Iterable[Layout]) -> Collection[str]:
    """The axes that the rules among some layouts name."""
    tables = [one for one in layouts if isinstance(one, AxisRules)]
    return list(dict.fromkeys(name for table in tables for name in table.mentioned))


def own_problems(layout: Layout, leaves: Sequence[Leaf], mesh: MeshView) -> Iterator[Problem]:
    """What is wrong with a layout itself: mesh axes that the mesh does not have, even if no leaf
    needs them, and names that no leaf has."""
    match layout:
        case AxisRules():
            for rule in layout.table:
                yield from missing_axes(f"rule {rule}", rule.mesh_axes, mesh, _MISSING)
        case FSDP():
            what = repr(layout)
            yield from missing_axes(what, layout.mesh_axes, mesh, "name an axis of the mesh")
            yield from misspelt_axes(layout, leaves)


_MISSING = (
    "name an axis of the mesh, or leave such rules out: `rules.on(mesh)`, before `| FSDP(...)`"
)


# Activations, which are in no tree


def array_spec(
    layout: Layout, axes: Axes, shape: Sequence[int], mesh: MeshView | None
) -> PartitionSpec:
    """The spec that a layout gives to an activation.

    Models constrain the same activations again and again while they are traced. What is decided
    depends on axes and shape alone, and is computed once for these.

    Args:
        layout: the layout.
        axes: the axes of the activation.
        shape: its shape.
        mesh: the mesh; None if mesh axes and sizes are not to be checked.

    Raises:
        ShardingError: the layout does not fit. `problems` has what is wrong; see `renamed`.
    """
    sizes = None if mesh is None else tuple(mesh.sizes.items())
    spec, problems = _decided(layout, axes, tuple(shape), sizes)
    if problems:
        raise ShardingError("an array cannot be laid out", problems)
    return spec


def renamed(problems: Iterable[Problem], **known: Any) -> list[Problem]:
    """The problems of an activation, of which `array_spec` knows only axes and shape, with other
    attributes."""
    # A problem without a path is one of a rule.
    return [one if one.path is None else one._replace(**known) for one in problems]


@lru_cache(maxsize=4096)
def _decided(
    layout: Layout,
    axes: Axes,
    shape: tuple[int, ...],
    sizes: tuple[tuple[str, int], ...] | None,
) -> tuple[PartitionSpec, list[Problem]]:
    """What is decided about an activation, and what is wrong with it and with the layout."""
    # No layout asks for the dtype of an activation.
    leaf = activation(axes, jax.ShapeDtypeStruct(shape, np.float32))
    heard = list(_heard(layout))
    mentioned = mentioned_axes(heard)
    # Rules alone are about activations: an `FSDP` would shard the largest dimension.
    decision = (layout.rules or layout).decide(leaf, None, MeshView(dict(sizes or ())))
    problems = near_misses([leaf], [decision], absent(mentioned, [leaf]))
    if sizes is None:
        # One that has all mesh axes, of size 1. Rules are not looked up in it.
        mesh = MeshView(dict.fromkeys(decision.used(), 1))
    else:
        mesh = MeshView(dict(sizes))
        for one in heard:
            problems += own_problems(one, [leaf], mesh)
    problems += leaf_problems(leaf, decision, mesh, mentioned)
    return decision.spec, problems


def _heard(layout: Layout) -> Iterator[Layout]:
    """The layouts in a layout that an activation is for: in a `StateSharding`, the last one."""
    yield layout
    inner = layout.inner if isinstance(layout, Composition) else layout.inner[-1:]
    for one in inner:
        yield from _heard(one)


def activation(axes: Axes, value: AnyArray) -> Leaf:
    """The leaf of an array that is in no tree."""
    return Leaf(Path(), value, axes, annotated=True)


def spec_of_axes(
    layout: Layout, axes: Axes, shape: Sequence[int] | None, mesh: MeshView | None
) -> PartitionSpec:
    """The spec that a layout gives to an array with these axes.

    Args:
        layout: the layout.
        axes: the axes of the array.
        shape: its shape; None if it is not known.
        mesh: the mesh; None if mesh axes are not to be checked.

    Raises:
        ShardingError: the array cannot be laid out.
    """
    if shape is not None and len(shape) != len(axes):
        have = f"the shape {tuple(shape)} has {len(shape)}"
        raise ShardingError(f'"{axes}" names {len(axes)} dimensions, and {have}')
    # Each number of parts divides zero, so sizes that are not known are not an error.
    sizes = (0,) * len(axes) if shape is None else shape
    try:
        return array_spec(layout, axes, sizes, mesh)
    except ShardingError as error:
        where = ""
        if mesh is not None:
            where = f" on mesh {mesh}"
        what, shape = f'"{axes}"', None if shape is None else tuple(shape)
        if shape is not None:
            what += f" of shape {shape}"
        # The array is made up: it has no path, and may have no shape.
        problems = renamed(error.problems, path=None, shape=shape, what=what)
        raise ShardingError(f'"{axes}" cannot be laid out{where}', problems) from None


BATCH = "batch"
"""The name that the layers of `ft.nn` give to the dimension of the examples.

Other names are not asked about: `jax.vmap` hides the dimension of the examples, and then the first
name of a constraint is that of a dimension which is rightly whole.
"""


def forgotten_axes(layout: Layout, axes: Axes, mesh: MeshView) -> tuple[str, ...]:
    """The mesh axes over which an array is whole because the rule for its batch was forgotten.

    `FSDP` shards the parameters over them, so the batch is nearly always sharded over them too; no
    rule maps anything to them; and the name `batch` is covered by `...: None` alone.

    Args:
        layout: the layout.
        axes: the axes of the array.
        mesh: the mesh: an axis of size 1 shards nothing.
    """
    if BATCH not in axes:
        return ()
    return tuple([axis for axis in _unused_by_rules(layout) if mesh.sizes.get(axis, 1) > 1])


@lru_cache(maxsize=256)
def _unused_by_rules(layout: Layout) -> tuple[str, ...]:
    """The mesh axes of all `FSDP` in a layout to which no rule maps an axis, if none is for the
    batch."""
    if layout.rules is None:
        return ()
    used: set[str] = set()
    tables = [one for one in walk(layout.rules) if isinstance(one, AxisRules)]
    # Without `...: None` a name without a rule is an error.
    if not any(table.closed for table in tables):
        return ()
    for table in tables:
        if BATCH in table.mentioned:
            return ()
        for rule in table.table:
            used.update(rule.mesh_axes)
    return tuple([axis for axis in dict.fromkeys(fsdp_axes(layout)) if axis not in used])


def forgotten_text(what: str, forgotten: tuple[str, ...]) -> str:
    """What to say of arrays that are whole for want of a rule: `what` names them."""
    mesh_axes = axes_text(forgotten)
    return (
        f"`{BATCH}` has no rule but `...: None`, so {what} is whole along the mesh axis "
        f"`{mesh_axes}`, over which `FSDP` shards the parameters: a batch that is sharded over it "
        f'is gathered, and each device does all the work. Add `"{BATCH}": '
        f'{_written(forgotten)}` to the rules, or `"{BATCH}": None` if this is meant'
    )


def _written(mesh_axes: tuple[str, ...]) -> str:
    """Mesh axes as they are written in a rule, with the quotes of a table in Python."""
    written = entry(mesh_axes)
    if isinstance(written, str):
        return f'"{written}"'
    return repr(written)
