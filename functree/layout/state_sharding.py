"""Ordered filters ─► layouts: `StateSharding`, where the first filter that matches a leaf decides."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType, UnionType
from typing import Any, Literal

from jax.tree_util import tree_flatten_with_path

from functree.errors import Problem, RuleError
from functree.layout.decision import Decision, whole
from functree.layout.layout import (
    Layout,
    LayoutLike,
    Resolution,
    as_layout,
    is_layout,
    merge_names,
    written_pairs,
)
from functree.layout.meshes import MeshView
from functree.tree.axes import Names
from functree.tree.filters.filter import Everything, Filter, FilterLike, as_filter
from functree.tree.filters.first_match import FirstMatch
from functree.tree.leaf import Leaf
from functree.tree.paths import Path
from functree.values import Value

Unused = Literal["error", "warn", "ignore"]


class StateSharding(Value, Layout):
    """Filters and layouts in order; a leaf is laid out by the first whose filter matches it.

    Args:
        rules: `{filter: layout, ..., ...: P()}`, or pairs. `...` matches everything and may only be last.
        unused: what to do about a filter that matches nothing, or only what earlier ones take; a last `...` is exempt.

    Raises:
        RuleError: `...` not last, or what is not a filter or no layout.

    Examples:
        >>> layout = ft.StateSharding({"**.bias": ft.P(), ...: ft.P("model")})
        >>> layout
        StateSharding({'**.bias': P(), ...: P('model')})
        >>> ft.plan({"bias": jnp.ones(3), "weight": jnp.ones((4, 3))}, layout, {"model": 2}).specs
        {'bias': P(None,), 'weight': P('model', None)}
    """

    __slots__ = ("_chosen", "_filters", "_layouts", "filters", "layouts", "unused")
    filters: tuple[Any, ...]
    layouts: tuple[Any, ...]
    unused: Unused
    _filters: tuple[Filter, ...]
    _layouts: tuple[Layout, ...]
    _chosen: FirstMatch

    def __init__(
        self,
        rules: Mapping[FilterLike, LayoutLike] | Iterable[tuple[FilterLike, LayoutLike]],
        /,
        *,
        unused: Unused = "error",
    ):
        pairs = written_pairs(rules, "StateSharding takes a mapping or (filter, layout) pairs")
        if unused not in ("error", "warn", "ignore"):
            raise RuleError(f'StateSharding: unused={unused!r} is none of "error", "warn", "ignore"')
        for i, (written, _) in enumerate(pairs):
            if written is ... and i < len(pairs) - 1:
                raise RuleError(f"`...` may only be the last filter: {pairs[i + 1][0]!r} behind it would match nothing")
        filters = tuple(as_filter(written) for written, _ in pairs)
        self._set(
            filters=tuple(written for written, _ in pairs),
            layouts=tuple(layout for _, layout in pairs),
            unused=unused,
            _filters=filters,
            _layouts=tuple(as_layout(layout) for _, layout in pairs),
            _chosen=FirstMatch(filters),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._pairs, self.unused)  # the functions of `_chosen` cannot be pickled

    @classmethod
    def from_specs(cls, tree: Any) -> "StateSharding":
        """The layout that gives each leaf what stands at its path in a tree of specs with the model's structure."""
        found, _ = tree_flatten_with_path(tree, is_leaf=lambda x: x is not None and is_layout(x))
        for keys, value in found:
            if not is_layout(value):
                raise RuleError(f"{Path.of(keys)}: {value!r} is no PartitionSpec")
        return cls([(str(Path.of(keys)) if keys else ..., value) for keys, value in found])

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The layouts, under the name that Flax gives them."""
        return self.layouts

    @property
    def given_names(self) -> Mapping[type, Names]:
        return merge_names(layout.given_names for layout in self._layouts)

    @property
    def own_mesh(self) -> Any:
        return next((layout.own_mesh for layout in self._layouts if layout.own_mesh is not None), None)

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        choices = [self._chosen(leaf) for leaf in leaves]
        decisions: list[Any] = [None] * len(leaves) if before is None else list(before)
        problems: list[Problem] = []
        unused: list[str] = []
        groups: dict[int | None, list[int]] = {}
        for position, choice in enumerate(choices):
            groups.setdefault(choice, []).append(position)
        for choice, positions in groups.items():
            if choice is None:
                problems += [self._unmatched(leaves[p]) for p in positions]
                for p in positions if before is None else ():
                    decisions[p] = whole(leaves[p])
                continue
            group = [leaves[p] for p in positions]
            found = self._layouts[choice].resolve(group, mesh, before and [before[p] for p in positions])
            named = f"{_written(self.filters[choice])}: "
            # Layouts give many leaves one decision: it stays one, as that is most of the time of a large plan.
            renamed = {id(d): d._replace(reason=named + d.reason) for d in {id(d): d for d in found.decisions}.values()}
            for position, decision in zip(positions, found.decisions, strict=True):
                decisions[position] = renamed[id(decision)]
            problems += found.problems
            unused += found.unused
        problems += self._dead(leaves, groups)
        return Resolution(decisions, tuple(problems), tuple(unused))

    @property
    def tolerant(self) -> "StateSharding":
        """The same, for a part of the tree that it is for: filters may match nothing."""
        return _made(self._pairs, "ignore")

    @property
    def _pairs(self) -> tuple[tuple[Any, Any], ...]:
        return tuple(zip(self.filters, self.layouts, strict=True))

    def first(self, leaf: Leaf) -> int | None:
        """The index of the filter that decides for a leaf."""
        return self._chosen(leaf)

    def _unmatched(self, leaf: Leaf) -> Problem:
        listed = ", ".join(map(_written, self.filters[:8])) + (" and others" if len(self.filters) > 8 else "")
        why = f"no filter matches it; the filters are {listed}" if listed else "no filter matches it; there are none"
        return Problem(leaf.path, leaf.shape, leaf.text, why, "add a filter for it, or `...: P()` as the last one")

    def _dead(self, leaves: Sequence[Leaf], groups: Mapping[int | None, Any]) -> list[Problem]:
        """Filters that decide nothing, and why."""
        if self.unused == "ignore" or not leaves:
            return []
        dead = [
            (i, item)
            for i, item in enumerate(self._filters)
            if i not in groups and not (isinstance(item, Everything) and i == len(self._filters) - 1)
        ]
        problems = [self._dead_problem(i, [leaf for leaf in leaves if item(leaf)]) for i, item in dead]
        if self.unused == "warn":
            for problem in problems:
                warnings.warn(f"{problem.what} {problem.why}", stacklevel=2)
            return []
        return problems

    def _dead_problem(self, index: int, hidden: Sequence[Leaf]) -> Problem:
        what = f"filter {_written(self.filters[index])}"
        if not hidden:
            remedy = 'mend the filter, remove it, or write `unused="ignore"`'
            return Problem(None, None, what, "matches no leaf", remedy)
        first = self.filters[self._chosen(hidden[0]) or 0]
        why = f"decides nothing: earlier filters take all that it matches ({hidden[0].path} by {_written(first)})"
        return Problem(None, None, what, why, "put it before them, or remove it")

    def _parts(self) -> tuple[Any, ...]:
        return (self._filters, self._layouts, self.unused)

    def __repr__(self) -> str:
        pairs = [(_written(f), repr(layout)) for f, layout in zip(self.filters, self._layouts, strict=True)]
        if len(set(self.filters)) == len(self.filters):
            table = "{" + ", ".join(f"{f}: {layout}" for f, layout in pairs) + "}"
        else:  # a dict would keep one of two equal filters
            table = "[" + ", ".join(f"({f}, {layout})" for f, layout in pairs) + "]"
        return f"StateSharding({table}{'' if self.unused == 'error' else f', unused={self.unused!r}'})"


def _made(pairs: Any, unused: Unused) -> StateSharding:
    return StateSharding(pairs, unused=unused)


def _written(written: Any) -> str:
    """A filter as one writes it."""
    match written:
        case EllipsisType():
            return "..."
        case UnionType():
            return " | ".join(map(_written, written.__args__))
        case type():
            return written.__name__
        case Path():
            return repr(str(written))
        case str() | Filter():
            return repr(written)
    return repr(as_filter(written))
