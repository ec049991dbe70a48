"""The axes of a leaf ─► mesh axes, by an ordered table of rules: `AxisRules`."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.argument_checks import SHAPE, check, is_name
from functree.devices.meshes import MeshLike, MeshView, mesh_view
from functree.devices.specs import axes_text, entry
from functree.errors import Problem, RuleError, did_you_mean, near_name
from functree.labels.annotations.given_names import invalid_names
from functree.labels.leaf import Leaf
from functree.layout.bare_array_spec import spec_of_axes
from functree.layout.decision import (
    Decision,
    Dimension,
    Fault,
    Reason,
    Source,
    conflict,
    decide_each,
    undecided,
)
from functree.layout.layout import Layout, Resolution, pairs_text, written_pairs
from functree.layout.validation import absent, missing_axes
from functree.tree.axes import Axes, Names, is_axis_name
from functree.values import Value, dict_text


class Rule(NamedTuple):
    """An axis, and the mesh axes that shard it; `()` for unsharded."""

    name: str
    mesh_axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}→{axes_text(self.mesh_axes)}"


class AxisRules(Value, Layout):
    """A layout by an ordered table of axes and mesh axes. It uses the algorithm of Flax Linen.

    The rules are tried in their order. A mesh axis shards at most one dimension of an array. An
    axis is sharded by its first rule whose mesh axes are not used yet, so later rules for the same
    axis are its fallbacks. One table is for parameters and activations.

    Args:
        rules: `{axis: mesh axis, tuple of mesh axes, or None}`; or pairs, in which an axis may have
            several rules. `None` leaves the axis unsharded; a layout after `|` may still shard it.
            A last `...: None` leaves all other axes unsharded.
        names: `{cls: ft.names(...)}`, axes for the leaves of classes without annotations.

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

    __slots__ = ("rules", "closed", "names")
    rules: tuple[Rule, ...]
    closed: bool
    names: tuple[tuple[type, Names], ...]

    def __init__(
        self,
        rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        names: Mapping[type, Names] | None = None,
    ):
        pairs = written_pairs(rules, "rules are a mapping or (name, mesh axes) pairs")
        self._set(
            rules=tuple(_rule(name, value) for name, value in pairs if name is not ...),
            closed=_closed(pairs),
            names=_checked_names({} if names is None else names),
        )
        _check_reachable(self.rules)

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
        kept = [rule for rule in self.rules if sizes.keys() >= set(rule.mesh_axes)]
        named = dict(kept)
        for name in self.mentioned:
            # Without any rule the axis would be an error, or fall under `...: None`, where a
            # misspelled name is looked for.
            if name not in named:
                kept.append(Rule(name, ()))
        return AxisRules([*kept_pairs(kept), *self._closing()], dict(self.names))

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
    def for_activations(self) -> bool:
        return True

    def unsharded(self, axis: str) -> "AxisRules":
        # Its other rules go, since a rule after `None` for the same axis is refused.
        pairs = [(name, mesh_axes) for name, mesh_axes in self.pairs if name != axis]
        return AxisRules([(axis, None), *pairs], dict(self.names))

    def resolve(
        self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None
    ) -> Resolution:
        decisions = decide_each(leaves, before, _alike, self._decide)
        unused = absent(self.mentioned, leaves)
        return Resolution(decisions, self._missing(mesh), tuple(unused))

    def _decide(self, leaf: Leaf, before: Decision | None) -> Decision:
        start = (before or undecided(leaf))._replace(specified=True)
        if leaf.spec is not None:
            return start  # a `PartitionSpec` in an annotation takes precedence over rules
        if leaf.misfit is not None:
            return start.wrong((leaf.misfit.why, leaf.misfit.remedy))
        # A scalar has no dimension that would need a name.
        if not leaf.annotated and leaf.shape:
            return start.wrong(unannotated(leaf))
        return self._apply(leaf, start)

    def _apply(self, leaf: Leaf, start: Decision) -> Decision:
        """Linen's algorithm, for the dimensions that are still unsharded."""
        decision = start
        applied: dict[int, Rule] = {}  # the rule that applied to a dimension
        # By rules and then by dimensions: of two axes that compete for a mesh axis, the one with
        # the earlier rule gets it, wherever its dimension is.
        for rule in self.rules:
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
        named = ruled.each(
            lambda dim, dimension: self._settled(leaf, dim, dimension, dim in applied, ruled)
        )
        parts = _reason(leaf, start, applied, self.closed)
        if not parts:
            return named
        return named._replace(reasons=(*start.reasons, Reason(parts)))

    def _settled(
        self, leaf: Leaf, dim: int, dimension: Dimension, ruled: bool, decision: Decision
    ) -> Dimension:
        """A dimension after the rules were tried. An axis that no rule names is a fault, until a
        later layout names it.

        Args:
            leaf: the leaf.
            dim: the index of the dimension.
            dimension: what is decided about it.
            ruled: whether a rule applied to it.
            decision: what is decided about the leaf.
        """
        name = leaf.axes[dim]
        mentioned = name in self.mentioned
        done = dimension.settled and dimension.fault is None
        if done or ruled or name is None:
            # An earlier table may have closed the dimension. A rule of this one opens it again.
            closed = dimension.closed and not mentioned
            return dimension._replace(settled=True, fault=None, closed=closed)
        if self.closed:
            return dimension._replace(settled=True, fault=None, closed=not mentioned)
        if not mentioned:
            # Rules before these may name the axis, and may have found a fault (all mesh axes are
            # used). That fault says more than "no rule names it".
            if dimension.excused or dimension.fault is not None:
                return dimension
            return dimension._replace(fault=self._unmentioned(name))
        # No rule of this table applied, but an earlier layout has sharded the dimension.
        if dimension.mesh_axes:
            return dimension._replace(fault=None)
        # Settled, since this table mentions it: a later one need not, and cannot excuse it by that.
        return dimension._replace(settled=True, fault=self._blocked(leaf, name, decision))

    def _blocked(self, leaf: Leaf, name: str, decision: Decision) -> Fault:
        """The fault that the mesh axes of all rules for an axis are used by other dimensions."""
        # An axis without a `None` rule is never left unsharded silently.
        owner: dict[str, int] = {}  # the dimension that a mesh axis shards
        for dim, mesh_axes in enumerate(decision.mesh_axes):
            owner.update(dict.fromkeys(mesh_axes, dim))
        wanted: list[str] = []
        for rule in self.rules:
            if rule.name == name:
                wanted += rule.mesh_axes
        # There is one: a rule whose mesh axes are all free would have applied.
        taken = next(axis for axis in wanted if axis in owner)
        why = f'"{name}" has no rule left: `{taken}` is used by {leaf.dimension(owner[taken])}, '
        why += f'and no rule lets "{name}" be unsharded'
        remedy = f'add `("{name}", None)` after its rules to leave it unsharded'
        return why, f"{remedy}, or a fallback to another mesh axis"

    def _unmentioned(self, name: str) -> Fault:
        """The fault that no rule names an axis."""
        near = near_name(name, self.mentioned)
        if near is not None:
            # So similar that it is a typo, and it may be in the rule as well as in the annotation.
            hint = f"; did you mean the rule for `{near}`?"
        else:
            hint = did_you_mean(name, self.mentioned)
        return (
            f"no rule names `{name}`{hint}",
            f'add a rule for "{name}", or `"{name}": None` to leave it unsharded',
        )

    @property
    def mentioned(self) -> Collection[str]:
        """The axes that the rules name, each once, in the order of the rules."""
        return dict(self.rules).keys()  # a rule is a pair

    def _missing(self, mesh: MeshView) -> tuple[Problem, ...]:
        """The problems of rules that name mesh axes which the mesh does not have, even if no leaf
        has their axis."""
        remedy = (
            "name an axis of the mesh, or leave such rules out: `rules.on(mesh)`, before "
            "`| FSDP(...)`"
        )
        problems: list[Problem] = []
        for rule in self.rules:
            problems += missing_axes(f"rule {rule}", rule.mesh_axes, mesh, remedy)
        return tuple(problems)

    def _closing(self) -> list[tuple[Any, None]]:
        """The rule `...: None` as a pair, if the rules end with it."""
        if self.closed:
            return [(..., None)]
        return []

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """The rules as a user writes them."""
        return [*kept_pairs(self.rules), *self._closing()]

    def _parts(self) -> tuple[object, ...]:
        # The order of `names` says nothing: no class is in it twice.
        return (self.rules, self.closed, frozenset(self.names))

    def __repr__(self) -> str:
        texts = [(repr(name), repr(entry(mesh_axes))) for name, mesh_axes in self.rules]
        if self.closed:
            texts.append(("...", "None"))
        table = pairs_text(texts)
        if not self.names:
            return f"AxisRules({table})"
        names = [(cls.__name__, repr(given)) for cls, given in self.names]
        return f"AxisRules({table}, names={dict_text(names)})"


def _alike(leaf: Leaf) -> Hashable:
    """Everything that the decision of rules about a leaf depends on."""
    # Not its shape: sizes are checked later, for each leaf. So all layers of one kind are alike.
    return (leaf.axes, leaf.annotated, leaf.unnamed, leaf.spec, leaf.misfit, leaf.unread)


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
    return (
        f"{why}, and rules shard axes by name",
        f"{remedy}, give `names=` to the rules, or lay it out by a path filter",
    )


def kept_pairs(rules: Iterable[Rule]) -> list[tuple[Any, Any]]:
    """Rules as pairs, as a user writes them."""
    return [(name, entry(axes)) for name, axes in rules]


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


def _checked_names(names: Mapping[type, Names]) -> tuple[tuple[type, Names], ...]:
    """The pairs of a `names=`. Raises RuleError if it is invalid."""
    invalid = invalid_names(names)
    if invalid is not None:
        raise RuleError(invalid)
    return tuple(names.items())
