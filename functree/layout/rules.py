"""Axis names ─► mesh axes by an ordered table: `AxisRules`."""

from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

from jax.sharding import PartitionSpec

from functree.errors import Problem, RuleError, did_you_mean, near_name
from functree.layout.checks import lacking, spec_of_axes
from functree.layout.layouts import (
    Decision,
    Layout,
    Resolution,
    conflict,
    dim_text,
    misread,
    optimizer_remedy,
    undecided,
    written_pairs,
)
from functree.layout.meshes import MeshView, mesh_view
from functree.layout.specs import axes_text, entry
from functree.tree.axes import Axes, Names
from functree.tree.leaf import Leaf

Rule = tuple[str, tuple[str, ...]]  # an axis name, and the mesh axes that it goes to; () for whole


class AxisRules(Layout):
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
        object.__setattr__(self, "rules", tuple(_rule(name, value) for name, value in pairs if name is not ...))
        object.__setattr__(self, "closed", _closed(pairs))
        object.__setattr__(self, "names", tuple(_checked_names({} if names is None else names)))
        _check_reachable(self.rules)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("AxisRules are immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return AxisRules, (self._pairs(), dict(self.names))

    @classmethod
    def identity(cls, mesh: Any) -> "AxisRules":
        """Each mesh axis' name for itself."""
        return cls({name: name for name in mesh_view(mesh).sizes})

    def on(self, mesh: Any) -> "AxisRules":
        """These rules without those that name a mesh axis which the mesh lacks; a name left without rules is whole."""
        sizes = mesh_view(mesh).sizes
        kept = [(name, axes) for name, axes in self.rules if all(axis in sizes for axis in axes)]
        named = {name for name, _ in kept}
        lost = dict.fromkeys(name for name, _ in self.rules if name not in named)
        return AxisRules([*kept_pairs(kept), *((n, None) for n in lost), *self._closing()], dict(self.names))

    def spec(self, axes: str | Axes, shape: Sequence[int] | None = None, mesh: Any = None) -> PartitionSpec:
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
        known: dict[Any, Decision] = {}
        decisions = []
        for i, leaf in enumerate(leaves):
            start = before[i] if before is not None else None
            key = (leaf.axes, leaf.annotated, leaf.unnamed, leaf.spec, leaf.problem, start)
            if key not in known:
                known[key] = self._decide(leaf, start)
            decisions.append(known[key])
        present = {name for leaf in leaves for name in leaf.axes}
        unused = tuple(dict.fromkeys(name for name, _ in self.rules if name not in present))
        return Resolution(decisions, self._lacking(mesh), unused)

    def _decide(self, leaf: Leaf, before: Decision | None) -> Decision:
        start = before if before is not None else undecided(leaf)
        if leaf.spec is not None:
            return start  # the physical spec of an annotation wins over rules
        if leaf.problem is not None:
            return start._replace(problems=(*start.problems, misread(leaf, leaf.problem)))
        if not leaf.annotated and leaf.shape:
            return start._replace(problems=(*start.problems, (UNANNOTATED[0], UNANNOTATED[1] + optimizer_remedy(leaf))))
        return self._apply(leaf, start)

    def _apply(self, leaf: Leaf, start: Decision) -> Decision:
        """Linen's algorithm, over what is still whole."""
        entries, rules, problems = list(start.entries), list(start.rules), list(start.problems)
        reasons: dict[int, str] = {}
        for name, mesh_axes in self.rules:
            for dim, axis in enumerate(leaf.axes):
                if axis != name or dim in reasons:
                    continue
                text = rule_text(name, mesh_axes)
                taken = {a for d, e in enumerate(entries) for a in e if d != dim}
                if not taken.isdisjoint(mesh_axes):
                    continue
                reasons[dim] = text
                if mesh_axes and entries[dim] and entries[dim] != mesh_axes:
                    problems.append(conflict(dim, leaf, entries[dim], mesh_axes, f"rule {text}"))
                elif mesh_axes:
                    entries[dim], rules[dim] = mesh_axes, f"rule {text}"
        unsettled = tuple(dim for dim in start.unsettled if dim not in reasons)
        fell = (*start.fell, *unsettled) if self.closed else start.fell
        unsettled = () if self.closed else unsettled
        return start._replace(
            entries=tuple(entries),
            rules=tuple(rules),
            reason=_reason(leaf, start, reasons, self.closed),
            pending=self._pending(leaf, start, entries, unsettled),
            problems=tuple(problems),
            unsettled=unsettled,
            fell=tuple(dim for dim in fell if leaf.axes[dim] not in self.mentioned),
        )

    def _pending(
        self, leaf: Leaf, start: Decision, entries: Sequence[Sequence[str]], unsettled: Sequence[int]
    ) -> tuple[tuple[int, str, str], ...]:
        """Why each unsettled dimension is so. A name that an earlier layout is about is not unmentioned here."""
        earlier = {dim: pending for dim, *pending in start.pending}
        found = []
        for dim in unsettled:
            name = leaf.axes[dim] or ""
            if name in self.mentioned:
                found += [] if entries[dim] else [(dim, *self._blocked(leaf, name, entries))]
            else:
                found.append((dim, *(earlier.get(dim) or self._unmentioned(name))))
        return tuple(found)

    def _blocked(self, leaf: Leaf, name: str, entries: Sequence[Sequence[str]]) -> tuple[str, str]:
        owner = {axis: d for d, e in enumerate(entries) for axis in e}
        taken = next(axis for n, axes in self.rules if n == name for axis in axes if axis in owner)
        why = f'"{name}" has no rule left: `{taken}` is taken by {dim_text(leaf, owner[taken])}'
        why += ", and nothing says it may stay whole"
        return why, f'add `("{name}", None)` behind its rules to let it stay whole, or a fallback on another mesh axis'

    def _unmentioned(self, name: str) -> tuple[str, str]:
        near = near_name(name, self.mentioned)
        hint = f"; did you mean it by the rule `{near}`?" if near else did_you_mean(name, self.mentioned)
        return f"no rule names `{name}`{hint}", f'add a rule for "{name}", or `"{name}": None` to leave it unsharded'

    @property
    def mentioned(self) -> frozenset[str]:
        """The axis names that the rules are about."""
        return frozenset(name for name, _ in self.rules)

    def _lacking(self, mesh: MeshView) -> tuple[Problem, ...]:
        remedy = "name an axis of the mesh, or drop such rules on purpose with `rules.on(mesh)`"
        return tuple(
            problem
            for name, axes in self.rules
            for problem in lacking(f"rule {rule_text(name, axes)}", axes, mesh, remedy)
        )

    def _closing(self) -> list[tuple[Any, None]]:
        return [(..., None)] if self.closed else []

    def _pairs(self) -> list[tuple[Any, Any]]:
        return [*kept_pairs(self.rules), *self._closing()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisRules) and self._key == other._key

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.rules, self.closed, frozenset(self.names))

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        pairs = [("..." if name is ... else repr(name), repr(value)) for name, value in self._pairs()]
        if len({name for name, _ in self.rules}) == len(self.rules):
            table = "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"
        else:
            table = "[" + ", ".join(f"({name}, {value})" for name, value in pairs) + "]"
        names = ", ".join(f"{cls.__name__}: {given!r}" for cls, given in self.names)
        return f"AxisRules({table}{f', names={{{names}}}' if names else ''})"


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
