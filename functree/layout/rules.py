"""The axes of a leaf ─► mesh axes, by an ordered table of rules: `AxisRules`."""

from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

from jax.sharding import PartitionSpec

from functree.errors import Problem, RuleError, did_you_mean, near_name
from functree.layout.decision import (
    Decision,
    Dimension,
    Fault,
    conflict,
    decide_each,
    optimizer_remedy,
    undecided,
    unreadable,
)
from functree.layout.layout import Composition, Layout, Resolution, written_pairs
from functree.layout.meshes import MeshLike, MeshView, mesh_view
from functree.layout.specs import axes_text, entry
from functree.layout.validation import RULE, missing_axes, spec_of_axes
from functree.parameters import SHAPE, check
from functree.tree.annotations.given_names import invalid_names
from functree.tree.axes import Axes, Names, is_axis_name
from functree.tree.leaf import Leaf
from functree.values import Value

Rule = tuple[str, tuple[str, ...]]  # an axis, and the mesh axes that shard it; () for unsharded


class AxisRules(Value, Layout):
    """A layout by an ordered table of axes and mesh axes. It uses the algorithm of Flax Linen.

    The rules are tried in their order. A mesh axis shards at most one dimension of an array. An axis is sharded by its
    first rule whose mesh axes are not used yet, so later rules for the same axis are its fallbacks. One table is for
    parameters and activations.

    Args:
        rules: `{axis: mesh axis, tuple of mesh axes, or None}`; or pairs, in which an axis may have several rules.
            `None` leaves the axis unsharded; a layout after `|` may still shard it. A last `...: None` leaves all other
            axes unsharded.
        names: `{cls: ft.names(...)}`, axes for the leaves of classes without annotations.

    Raises:
        RuleError: an axis or a value is invalid, one rule has a mesh axis twice, or a rule can never apply.

    Examples:
        >>> rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
        >>> rules.spec(ft.Axes("embed", "hidden"))
        P(None, 'model')
        >>> rules
        AxisRules({'batch': 'data', 'hidden': 'model', 'embed': None})
    """

    __slots__ = ("rules", "closed", "names")
    rules: tuple[Rule, ...]
    closed: bool
    names: tuple[tuple[type, Names], ...]

    def __init__(self, rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]], names: Mapping[type, Names] | None = None):
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
        return cls({name: name for name in mesh_view(mesh).sizes})

    def on(self, mesh: MeshLike) -> "AxisRules":
        """The rules without those that name a mesh axis which the mesh does not have.

        An axis that has no rules then is left unsharded.
        """
        sizes = mesh_view(mesh).sizes
        kept = [(name, axes) for name, axes in self.rules if all(axis in sizes for axis in axes)]
        named = {name for name, _ in kept}
        lost = dict.fromkeys(name for name, _ in self.rules if name not in named)
        return AxisRules([*kept_pairs(kept), *((n, None) for n in lost), *self._closing()], dict(self.names))

    def spec(self, axes: str | Axes, shape: Sequence[int] | None = None, mesh: MeshLike = None) -> PartitionSpec:
        """The spec of an array with these axes, with one entry for each axis.

        Args:
            axes: the axes, as `Axes` or text.
            shape: the shape of the array; if it is given, the sizes are checked.
            mesh: a mesh, or a dict of sizes. Without it, mesh axes are not checked.

        Raises:
            ShardingError: no rule names an axis, the mesh axes of all its rules are used by other axes, or the mesh
                axes do not divide a size.
        """
        check("no spec for such a shape", shape=(shape, SHAPE.or_none()))
        return spec_of_axes(self, Axes.of(axes), shape, mesh_view(mesh) if mesh is not None else None)

    @property
    def given_names(self) -> Mapping[type, Names]:
        return dict(self.names)

    @property
    def by_axes(self) -> "AxisRules":
        return self

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        present = {name for axes in {leaf.axes for leaf in leaves} for name in axes}
        unused = tuple(dict.fromkeys(name for name, _ in self.rules if name not in present))
        decisions = decide_each(leaves, before, _alike, self._decide)
        return Resolution(decisions, self._missing(mesh), unused)

    def _decide(self, leaf: Leaf, before: Decision | None) -> Decision:
        start = undecided(leaf) if before is None else before
        if leaf.spec is not None:
            return start  # a `PartitionSpec` in an annotation takes precedence over rules
        if leaf.misfit is not None:
            return start.wrong(unreadable(leaf, leaf.misfit))
        if not leaf.annotated and leaf.shape:
            why, remedy = UNANNOTATED
            return start.wrong((why, remedy + optimizer_remedy(leaf)))
        return self._apply(leaf, start)

    def _apply(self, leaf: Leaf, start: Decision) -> Decision:
        """Linen's algorithm, for the dimensions that are still unsharded."""
        decision = start
        reasons: dict[int, str] = {}  # the rule that applied to a dimension
        # By rules and then by dimensions: of two axes that compete for a mesh axis, the one with the earlier rule gets
        # it, wherever its dimension is.
        for name, mesh_axes in self.rules:
            for dim, axis in enumerate(leaf.axes):
                # An earlier rule applied, or another dimension uses the mesh axes. A mesh axis that already shards
                # this very dimension is no obstacle: it may agree with the rule.
                if axis != name or dim in reasons or not decision.used(but=dim).isdisjoint(mesh_axes):
                    continue
                reasons[dim] = rule_text(name, mesh_axes)
                if mesh_axes:
                    decision = _split(leaf, decision, dim, mesh_axes, RULE + reasons[dim])
        applied = decision
        named = applied.each(lambda dim, dimension: self._settled(leaf, dim, dimension, dim in reasons, applied))
        return named._replace(reason=_reason(leaf, start, reasons, self.closed))

    def _settled(self, leaf: Leaf, dim: int, dimension: Dimension, ruled: bool, decision: Decision) -> Dimension:
        """A dimension after the rules were tried. An axis that no rule names is a fault, until a later layout names it.

        Args:
            leaf: the leaf.
            dim: the index of the dimension.
            dimension: what is decided about it.
            ruled: whether a rule applied to it.
            decision: what is decided about the leaf.
        """
        name = leaf.axes[dim]
        mentioned = name in self.mentioned
        if dimension.settled or ruled or name is None:
            return dimension._replace(settled=True, fault=None, closed=dimension.closed and not mentioned)
        if self.closed:
            return dimension._replace(settled=True, fault=None, closed=not mentioned)
        if not mentioned:
            # Rules before these may name the axis, and may have found a fault (all mesh axes are used). That fault
            # says more than "no rule names it".
            return dimension._replace(fault=dimension.fault or self._unmentioned(name))
        if dimension.mesh_axes:
            return dimension._replace(fault=None)
        return dimension._replace(fault=self._blocked(leaf, name, decision))

    def _blocked(self, leaf: Leaf, name: str, decision: Decision) -> Fault:
        """The fault that the mesh axes of all rules for an axis are used by other dimensions."""
        # An axis without a `None` rule is never left unsharded silently.
        owner = {axis: dim for dim, axes in enumerate(decision.mesh_axes) for axis in axes}
        taken = next(axis for n, axes in self.rules if n == name for axis in axes if axis in owner)
        why = f'"{name}" has no rule left: `{taken}` is used by {leaf.dimension(owner[taken])}, '
        why += f'and no rule lets "{name}" be unsharded'
        return why, f'add `("{name}", None)` after its rules to leave it unsharded, or a fallback to another mesh axis'

    def _unmentioned(self, name: str) -> Fault:
        """The fault that no rule names an axis."""
        near = near_name(name, self.mentioned)
        if near is not None:
            # So similar that it is a typo, and it may be in the rule as well as in the annotation.
            hint = f"; did you mean the rule for `{near}`?"
        else:
            hint = did_you_mean(name, self.mentioned)
        return f"no rule names `{name}`{hint}", f'add a rule for "{name}", or `"{name}": None` to leave it unsharded'

    @property
    def mentioned(self) -> frozenset[str]:
        """The axes that the rules name."""
        return frozenset(name for name, _ in self.rules)

    def _missing(self, mesh: MeshView) -> tuple[Problem, ...]:
        """The problems of rules that name mesh axes which the mesh does not have, even if no leaf has their axis."""
        remedy = "name an axis of the mesh, or leave such rules out with `rules.on(mesh)`"
        problems: list[Problem] = []
        for name, axes in self.rules:
            problems += missing_axes(RULE + rule_text(name, axes), axes, mesh, remedy)
        return tuple(problems)

    def _closing(self) -> list[tuple[Any, None]]:
        return [(..., None)] if self.closed else []

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """The rules as a user writes them."""
        return [*kept_pairs(self.rules), *self._closing()]

    def _parts(self) -> tuple[Any, ...]:
        return (self.rules, self.closed, frozenset(self.names))

    def __repr__(self) -> str:
        pairs = [("..." if name is ... else repr(name), repr(value)) for name, value in self.pairs]
        # A dict would keep only the last of several rules for one axis.
        if len({name for name, _ in self.rules}) == len(self.rules):
            table = "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"
        else:
            table = "[" + ", ".join(f"({name}, {value})" for name, value in pairs) + "]"
        if self.names:
            names = ", ".join(f"{cls.__name__}: {given!r}" for cls, given in self.names)
            return f"AxisRules({table}, names={{{names}}})"
        return f"AxisRules({table})"


def _alike(leaf: Leaf) -> tuple[Any, ...]:
    """Everything that the decision of rules about a leaf depends on. Sizes are checked later, for each leaf."""
    return (leaf.axes, leaf.annotated, leaf.unnamed, leaf.spec, leaf.misfit)


def _split(leaf: Leaf, decision: Decision, dim: int, mesh_axes: tuple[str, ...], source: str) -> Decision:
    """A decision with one dimension sharded by a rule."""
    have = decision.dimensions[dim].mesh_axes
    if have and have != mesh_axes:
        return decision.wrong(conflict(dim, leaf, have, mesh_axes, source))
    split = decision.dimensions[dim]._replace(mesh_axes=mesh_axes, source=source)
    return decision.each(lambda i, dimension: split if i == dim else dimension)


UNANNOTATED = (
    "has no axis names, and rules shard axes by name",
    'annotate the field (`Float[Array, "..."]`), give `names=` to the rules, or lay it out by a path filter',
)


def rule_text(name: str, mesh_axes: Sequence[str]) -> str:
    """The text of a rule: `hidden→model`."""
    return f"{name}→{axes_text(mesh_axes)}"


def unsharded(layout: Layout, axis: str) -> Layout:
    """`AxisRules`, or their composition, with an axis left unsharded.

    Examples:
        >>> from functree.layout.rules import unsharded
        >>> unsharded(ft.AxisRules({"batch": "data", "seq": "model"}), "seq")
        AxisRules({'seq': None, 'batch': 'data'})
    """
    if isinstance(layout, Composition):
        return Composition(tuple(unsharded(part, axis) for part in layout.parts))
    if not isinstance(layout, AxisRules):
        return layout
    pairs = [(name, mesh_axes) for name, mesh_axes in layout.pairs if name != axis]
    return AxisRules([(axis, None), *pairs], dict(layout.names))


def kept_pairs(rules: Iterable[Rule]) -> list[tuple[Any, Any]]:
    """Rules as pairs, as a user writes them."""
    return [(name, entry(axes)) for name, axes in rules]


def _reason(leaf: Leaf, start: Decision, reasons: Mapping[int, str], closed: bool) -> str:
    """The reason for a decision: the rule for each dimension, after the reasons of earlier layouts."""
    parts = [start.reason] if start.reason else []
    for dim, name in enumerate(leaf.axes):
        if dim in reasons:
            parts.append(reasons[dim])
        elif name is not None and closed:
            parts.append(f"{name}→None (...)")
        elif dim < len(leaf.unnamed) and leaf.unnamed[dim] and not start.reason:
            parts.append(f"`{leaf.unnamed[dim]}` unsharded: no name")
    return ", ".join(parts) or "a scalar"


# Construction


def _rule(name: Any, value: Any) -> Rule:
    """One rule that a user wrote. Raises RuleError if it is invalid."""
    if not is_axis_name(name):
        raise RuleError(f"{name!r} is not an axis name: the left side of a rule is an identifier (not `_`), or `...`")
    if value is not None and not isinstance(value, str | tuple | list):
        raise RuleError(f"rule {name}→{value!r}: the right side is a mesh axis, a tuple of them, or `None`")
    if value is None:
        return name, ()
    mesh_axes = (value,) if isinstance(value, str) else tuple(value)
    if not mesh_axes or not all(isinstance(a, str) and a for a in mesh_axes):
        raise RuleError(f"rule {name}→{value!r}: mesh axes are non-empty names; write `None` for unsharded")
    twice = next((a for a in mesh_axes if mesh_axes.count(a) > 1), None)
    if twice is not None:
        raise RuleError(f"rule {rule_text(name, mesh_axes)}: mesh axis `{twice}` is named twice; name it once")
    return name, mesh_axes


def _closed(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether the rules end with `...: None`. Raises RuleError if a `...` is invalid."""
    places = [i for i, (name, _) in enumerate(pairs) if isinstance(name, EllipsisType)]
    if not places:
        return False
    if places != [len(pairs) - 1]:
        raise RuleError("`...` may only be the last rule: a rule after it would never apply")
    if pairs[-1][1] is not None:
        raise RuleError(f"`...: {pairs[-1][1]!r}`: only `...: None` is possible; name the axis that is to be sharded")
    return True


def _check_reachable(rules: Sequence[Rule]) -> None:
    """Raise RuleError if a rule can never apply, because an earlier rule leaves its axis unsharded."""
    unsharded: set[str] = set()
    for name, mesh_axes in rules:
        if name in unsharded:
            raise RuleError(f"rule {rule_text(name, mesh_axes)} can never apply: `({name!r}, None)` is before it")
        if not mesh_axes:
            unsharded.add(name)


def _checked_names(names: Mapping[type, Names]) -> tuple[tuple[type, Names], ...]:
    """The pairs of a `names=`. Raises RuleError if it is invalid."""
    invalid = invalid_names(names)
    if invalid is not None:
        raise RuleError(invalid)
    return tuple(names.items())
