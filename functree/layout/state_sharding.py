"""Ordered filters and their layouts ─► `StateSharding`, in which the first filter that matches a leaf decides."""

from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType, UnionType
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import tree_flatten_with_path

from functree.errors import Problem, RuleError, warn
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
from functree.tree.filters.filter import Everything, Filter, FilterLike, as_filter, path_glob
from functree.tree.filters.first_match import FirstMatch
from functree.tree.leaf import Leaf
from functree.tree.paths import Path
from functree.values import Value

Unused = Literal["error", "warn", "ignore"]


class StateSharding(Value, Layout):
    """Filters and layouts in order. A leaf is laid out by the layout of the first filter that matches it.

    Args:
        rules: `{filter: layout, ..., ...: P()}`, or pairs. `...` matches everything and may only be last.
        unused: whether it is an error, a warning or ignored if a filter matches no leaf, or only leaves that earlier
            filters match. A last `...` may match nothing.

    Raises:
        RuleError: `...` is not last, or the rules contain something that is not a filter or not a layout.

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
            raise RuleError(f'StateSharding: unused={unused!r} is not one of "error", "warn", "ignore"')
        for i, (written, _) in enumerate(pairs):
            if written is ... and i < len(pairs) - 1:
                raise RuleError(f"`...` may only be the last filter: {pairs[i + 1][0]!r} after it would match nothing")
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
        """The layout that lays out each leaf by the spec at its path in a tree of specs."""
        # `None` is not a leaf here: in a tree of specs it is in the place of values that are not arrays.
        found, _ = tree_flatten_with_path(tree, is_leaf=lambda x: x is not None and is_layout(x))
        pairs: list[tuple[FilterLike, LayoutLike]] = []
        for keys, value in found:
            path = Path.of(keys)
            if not is_layout(value):
                raise RuleError(f"{path}: {value!r} is not a PartitionSpec")
            # A single spec has an empty path, which is not a glob.
            pairs.append((path_glob(path) if keys else ..., value))
        return cls(pairs)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The layouts, by the name that they have in Flax."""
        return self.layouts

    @property
    def given_names(self) -> Mapping[type, Names]:
        return merge_names(layout.given_names for layout in self._layouts)

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return next((layout.own_mesh for layout in self._layouts if layout.own_mesh is not None), None)

    @property
    def by_axes(self) -> Layout | None:
        """That of a last `...`: an array that is not in a tree matches no other filter."""
        return self._layouts[-1].by_axes if self.filters and self.filters[-1] is ... else None

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        groups = self._groups(leaves)
        decided: dict[int, Decision] = {}
        problems: list[Problem] = []
        unused: list[str] = []
        for choice, positions in groups.items():
            group = [leaves[p] for p in positions]
            earlier = None if before is None else [before[p] for p in positions]
            if choice is None:
                problems += map(self._unmatched, group)
                decided.update(zip(positions, earlier or map(whole, group), strict=True))
                continue
            found = self._layouts[choice].resolve(group, mesh, earlier)
            renamed = _renamed(found.decisions, earlier, _written(self.filters[choice]))
            decided.update(zip(positions, renamed, strict=True))
            problems += found.problems
            unused += found.unused
        problems += self._dead(leaves, groups)
        return Resolution([decided[p] for p in range(len(leaves))], tuple(problems), tuple(unused))

    def _groups(self, leaves: Sequence[Leaf]) -> dict[int | None, list[int]]:
        """The positions of the leaves that each filter decides about: a layout decides about all of its leaves at once.

        Leaves that no filter matches are at None.
        """
        groups: dict[int | None, list[int]] = {}
        for position, leaf in enumerate(leaves):
            groups.setdefault(self._chosen(leaf), []).append(position)
        return groups

    @property
    def tolerant(self) -> "StateSharding":
        """The same layout for a part of its tree, where filters may match nothing."""
        return _made(self._pairs, "ignore")

    @property
    def _pairs(self) -> tuple[tuple[Any, Any], ...]:
        return tuple(zip(self.filters, self.layouts, strict=True))

    def first(self, leaf: Leaf) -> int | None:
        """The index of the filter that decides about a leaf; None if no filter matches it."""
        return self._chosen(leaf)

    def _unmatched(self, leaf: Leaf) -> Problem:
        """The problem of a leaf that no filter matches."""
        listed = ", ".join(map(_written, self.filters[:8]))
        if len(self.filters) > 8:
            listed += " and others"
        why = "no filter matches it; " + (f"the filters are {listed}" if listed else "there are no filters")
        return leaf.problem(why, "add a filter for it, or `...: P()` as the last one")

    def _dead(self, leaves: Sequence[Leaf], groups: Mapping[int | None, Any]) -> list[Problem]:
        """The problems of filters that decide about no leaf."""
        # A tree without arrays, such as the state of `optax.sgd`, says nothing about the filters.
        if self.unused == "ignore" or not leaves:
            return []
        problems = []
        for i, item in enumerate(self._filters):
            last_resort = isinstance(item, Everything) and i == len(self._filters) - 1
            if i not in groups and not last_resort:
                problems.append(self._dead_problem(i, [leaf for leaf in leaves if item(leaf)]))
        if self.unused == "warn":
            for problem in problems:
                warn(f"{problem.what} {problem.why}")
            return []
        return problems

    def _dead_problem(self, index: int, hidden: Sequence[Leaf]) -> Problem:
        """The problem of a filter that decides about no leaf; `hidden` are the leaves that it matches."""
        what = f"filter {_written(self.filters[index])}"
        if not hidden:
            remedy = 'correct the filter, remove it, or write `unused="ignore"`'
            return Problem(None, None, what, "matches no leaf", remedy)
        first = self.filters[self._chosen(hidden[0]) or 0]
        by = f"`{hidden[0].path}` is matched by {_written(first)}"
        why = f"is never used: earlier filters match all of its leaves; {by}"
        return Problem(None, None, what, why, "write it before them, or remove it")

    def _parts(self) -> tuple[Any, ...]:
        return (self._filters, self._layouts, self.unused)

    def __repr__(self) -> str:
        pairs = [(_written(f), repr(layout)) for f, layout in zip(self.filters, self._layouts, strict=True)]
        if len(set(self.filters)) == len(self.filters):
            table = "{" + ", ".join(f"{f}: {layout}" for f, layout in pairs) + "}"
        else:  # a dict would keep only one of two equal filters
            table = "[" + ", ".join(f"({f}, {layout})" for f, layout in pairs) + "]"
        if self.unused == "error":
            return f"StateSharding({table})"
        return f"StateSharding({table}, unused={self.unused!r})"


def _renamed(found: Sequence[Decision], before: Sequence[Decision] | None, name: str) -> list[Decision]:
    """Decisions with the name of a filter in their reasons: before what its layout has added to the earlier reason."""
    # Many leaves share one decision object, and the plan computes sizes and text once for each object. So a decision is
    # renamed once for each object too, and not for each leaf.
    known: dict[tuple[int, int], Decision] = {}
    renamed: list[Decision] = []
    for i, decision in enumerate(found):
        earlier = "" if before is None else before[i].reason
        key = (id(decision), 0 if before is None else id(before[i]))
        if key not in known:
            added = decision.reason.removeprefix(earlier).lstrip(",; ")
            known[key] = decision._replace(reason=earlier).because(f"{name}: {added}")
        renamed.append(known[key])
    return renamed


def _made(pairs: Any, unused: Unused) -> StateSharding:
    """For pickle, which calls a function by position, and `unused` is by name only."""
    return StateSharding(pairs, unused=unused)


def _written(written: Any) -> str:
    """The text of a filter, as a user writes it."""
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
