"""Axis names ─► mesh axes by an ordered table: `AxisRules`."""

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
from functree.layout.layout import Layout, Resolution, written_pairs
from functree.layout.meshes import MeshLike, MeshView, mesh_view
from functree.layout.specs import axes_text, entry
from functree.layout.validation import RULE, missing_axes, spec_of_axes
from functree.tree.axes import Axes, Names
from functree.tree.leaf import Leaf
from functree.values import Value

Rule = tuple[str, tuple[str, ...]]  # an axis name, and the mesh axes that it goes to; () for whole


class AxisRules(Value, Layout):
    """An ordered table of axis names and mesh axes, by Linen's algorithm.

    The rules are tried in their order; a mesh axis splits at most one dimension of an array; the first rule for a
    name whose mesh axes are free wins, later ones for the same name are its fallbacks. So one table serves parameters
    and activations.

    Args:
        rules: `{name: mesh axis, tuple of mesh axes, or None}`, or pairs, where a name may come again. `None` is whole,
            as far as these rules go. `...: None`, last, closes every name that is left.
        names: `{cls: ft.names(...)}`, axes for the leaves of classes without annotations.

    Raises:
        RuleError: a name or a value that means nothing, a mesh axis twice in one rule, a rule that can never apply.

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
            names=tuple(_checked_names({} if names is None else names)),
        )
        _check_reachable(self.rules)

    @classmethod
    def identity(cls, mesh: MeshLike) -> "AxisRules":
        """Each mesh axis' name for itself."""
        return cls({name: name for name in mesh_view(mesh).sizes})

    def on(self, mesh: MeshLike) -> "AxisRules":
        """These rules without those that name a mesh axis which the mesh lacks; a name left without rules is whole."""
        sizes = mesh_view(mesh).sizes
        kept = [(name, axes) for name, axes in self.rules if all(axis in sizes for axis in axes)]
        named = {name for name, _ in kept}
        lost = dict.fromkeys(name for name, _ in self.rules if name not in named)
        return AxisRules([*kept_pairs(kept), *((n, None) for n in lost), *self._closing()], dict(self.names))

    def spec(self, axes: str | Axes, shape: Sequence[int] | None = None, mesh: MeshLike = None) -> PartitionSpec:
        """The spec of an array with these axes, one entry for each.

        Args:
            axes: the names, as `Axes` or text.
            shape: the sizes, to be checked against the mesh.
            mesh: a mesh, or a dict of sizes; without one, mesh axes are not checked.

        Raises:
            ShardingError: a name that no rule mentions or whose mesh axes are taken; a size that does not divide.
        """
        return spec_of_axes(self, Axes.of(axes), shape, mesh_view(mesh) if mesh is not None else None)

    @property
    def given_names(self) -> Mapping[type, Names]:
        return dict(self.names)

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        present = {name for axes in {leaf.axes for leaf in leaves} for name in axes}
        unused = tuple(dict.fromkeys(name for name, _ in self.rules if name not in present))
        decisions = decide_each(leaves, before, _alike, self._decide)
        return Resolution(decisions, self._missing(mesh), unused)

    def _decide(self, leaf: Leaf, before: Decision | None) -> Decision:
        start = undecided(leaf) if before is None else before
        if leaf.spec is not None:
            return start  # the physical spec of an annotation wins over rules
        if leaf.misfit is not None:
            return start.wrong(unreadable(leaf))
        if not leaf.annotated and leaf.shape:
            why, remedy = UNANNOTATED
            return start.wrong((why, remedy + optimizer_remedy(leaf)))
        return self._apply(leaf, start)

    def _apply(self, leaf: Leaf, start: Decision) -> Decision:
        """Linen's algorithm, over what is still whole."""
        decision = start
        reasons: dict[int, str] = {}
        for name, mesh_axes in self.rules:
            for dim, axis in enumerate(leaf.axes):
                if axis != name or dim in reasons or not decision.used(but=dim).isdisjoint(mesh_axes):
                    continue
                reasons[dim] = rule_text(name, mesh_axes)
                if mesh_axes:
                    decision = _split(leaf, decision, dim, mesh_axes, RULE + reasons[dim])
        applied = decision
        named = applied.each(lambda dim, dimension: self._settled(leaf, dim, dimension, dim in reasons, applied))
        return named._replace(reason=_reason(leaf, start, reasons, self.closed))

    def _settled(self, leaf: Leaf, dim: int, dimension: Dimension, ruled: bool, decision: Decision) -> Dimension:
        """A dimension with what the rules say of its name: a name that they do not mention is a fault, for now."""
        name = leaf.axes[dim]
        if dimension.settled or ruled or name is None:
            return dimension._replace(settled=True, fault=None, closed=dimension.closed and name not in self.mentioned)
        if self.closed:
            return dimension._replace(settled=True, fault=None, closed=name not in self.mentioned)
        if name not in self.mentioned:
            # A layout in front may be about the name; then its own words say what is wrong.
            return dimension._replace(fault=dimension.fault or self._unmentioned(name))
        return dimension._replace(fault=None if dimension.mesh_axes else self._blocked(leaf, name, decision))

    def _blocked(self, leaf: Leaf, name: str, decision: Decision) -> Fault:
        owner = {axis: dim for dim, axes in enumerate(decision.mesh_axes) for axis in axes}
        taken = next(axis for n, axes in self.rules if n == name for axis in axes if axis in owner)
        why = f'"{name}" has no rule left: `{taken}` is taken by {leaf.dimension(owner[taken])}, '
        why += "and no rule says that it may stay whole"
        return why, f'add `("{name}", None)` behind its rules to let it stay whole, or a fallback on another mesh axis'

    def _unmentioned(self, name: str) -> Fault:
        near = near_name(name, self.mentioned)
        hint = f"; did you mean it by the rule `{near}`?" if near else did_you_mean(name, self.mentioned)
        return f"no rule names `{name}`{hint}", f'add a rule for "{name}", or `"{name}": None` to leave it unsharded'

    @property
    def mentioned(self) -> frozenset[str]:
        """The axis names that the rules are about."""
        return frozenset(name for name, _ in self.rules)

    def _missing(self, mesh: MeshView) -> tuple[Problem, ...]:
        remedy = "name an axis of the mesh, or drop such rules on purpose with `rules.on(mesh)`"
        return tuple(
            problem
            for name, axes in self.rules
            for problem in missing_axes(RULE + rule_text(name, axes), axes, mesh, remedy)
        )

    def _closing(self) -> list[tuple[Any, None]]:
        return [(..., None)] if self.closed else []

    def _pairs(self) -> list[tuple[Any, Any]]:
        return [*kept_pairs(self.rules), *self._closing()]

    def _parts(self) -> tuple[Any, ...]:
        return (self.rules, self.closed, frozenset(self.names))

    def __repr__(self) -> str:
        pairs = [("..." if name is ... else repr(name), repr(value)) for name, value in self._pairs()]
        if len({name for name, _ in self.rules}) == len(self.rules):
            table = "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"
        else:
            table = "[" + ", ".join(f"({name}, {value})" for name, value in pairs) + "]"
        names = ", ".join(f"{cls.__name__}: {given!r}" for cls, given in self.names)
        return f"AxisRules({table}{f', names={{{names}}}' if names else ''})"


def _alike(leaf: Leaf) -> tuple[Any, ...]:
    """All of a leaf that rules decide by."""
    return (leaf.axes, leaf.annotated, leaf.unnamed, leaf.spec, leaf.misfit)


def _split(leaf: Leaf, decision: Decision, dim: int, mesh_axes: tuple[str, ...], source: str) -> Decision:
    """A decision with one dimension split by a rule."""
    have = decision.dimensions[dim].mesh_axes
    if have and have != mesh_axes:
        return decision.wrong(conflict(dim, leaf, have, mesh_axes, source))
    split = decision.dimensions[dim]._replace(mesh_axes=mesh_axes, source=source)
    return decision.each(lambda i, dimension: split if i == dim else dimension)


UNANNOTATED = (
    "has no axis names, and rules place axes by name",
    'annotate the field (`Float[Array, "..."]`), give `names=` to the rules, or lay it out by a path filter',
)


def rule_text(name: str, mesh_axes: Sequence[str]) -> str:
    """`hidden→model`."""
    return f"{name}→{axes_text(mesh_axes)}"


def kept_pairs(rules: Iterable[Rule]) -> list[tuple[Any, Any]]:
    """Rules as one writes them."""
    return [(name, entry(axes)) for name, axes in rules]


def _reason(leaf: Leaf, start: Decision, reasons: Mapping[int, str], closed: bool) -> str:
    parts = [start.reason] if start.reason else []
    for dim, name in enumerate(leaf.axes):
        if dim in reasons:
            parts.append(reasons[dim])
        elif name is not None and closed:
            parts.append(f"{name}→None (...)")
        elif dim < len(leaf.unnamed) and leaf.unnamed[dim] and not start.reason:
            parts.append(f"`{leaf.unnamed[dim]}` whole: no name")
    return ", ".join(parts) or "a scalar"


# Construction


def _rule(name: Any, value: Any) -> Rule:
    if not isinstance(name, str) or not name.isidentifier():
        raise RuleError(f"{name!r} is not an axis name: the left side of a rule is an identifier, or `...`")
    if value is not None and not isinstance(value, str | tuple | list):
        raise RuleError(f"rule {name}→{value!r}: the right side is a mesh axis, a tuple of them, or `None`")
    mesh_axes = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if value is not None and (not mesh_axes or not all(isinstance(a, str) and a for a in mesh_axes)):
        raise RuleError(f"rule {name}→{value!r}: mesh axes are non-empty names; write `None` for whole")
    twice = next((a for a in mesh_axes if mesh_axes.count(a) > 1), None)
    if twice is not None:
        raise RuleError(f"rule {rule_text(name, mesh_axes)}: mesh axis `{twice}` stands twice; name it once")
    return name, mesh_axes


def _closed(pairs: Sequence[tuple[Any, Any]]) -> bool:
    places = [i for i, (name, _) in enumerate(pairs) if isinstance(name, EllipsisType)]
    if not places:
        return False
    if places != [len(pairs) - 1]:
        raise RuleError("`...` may only be the last rule: what stands behind it would never apply")
    if pairs[-1][1] is not None:
        raise RuleError(f"`...: {pairs[-1][1]!r}`: only `...: None` is possible; a mesh axis goes to a name")
    return True


def _check_reachable(rules: Sequence[Rule]) -> None:
    whole: set[str] = set()
    for name, mesh_axes in rules:
        if name in whole:
            raise RuleError(f"rule {rule_text(name, mesh_axes)} can never apply: `({name!r}, None)` stands before it")
        if not mesh_axes:
            whole.add(name)


def _checked_names(names: Mapping[type, Names]) -> Iterable[tuple[type, Names]]:
    if not isinstance(names, Mapping):
        raise RuleError(f"`names=` maps classes to `ft.names(...)`; {names!r} is no mapping")
    for cls, given in names.items():
        if not isinstance(cls, type) or not isinstance(given, Names):
            raise RuleError(f"`names=` maps classes to `ft.names(...)`, not {cls!r} to {given!r}")
        yield cls, given
