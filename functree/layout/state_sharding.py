"""Ordered filters and their layouts ─► `StateSharding`, in which the first filter that matches a
leaf decides."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import EllipsisType, UnionType
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from functree.devices.meshes import MeshView
from functree.errors import Problem, RuleError
from functree.labels.filters.filter import (
    Everything,
    Filter,
    FilterLike,
    as_filter,
    may_name,
    names_field,
    path_glob,
    patterns,
)
from functree.labels.filters.first_match import FirstMatch
from functree.labels.filters.near import meant
from functree.labels.leaf import Leaf
from functree.labels.training_state import MODEL, OPTIMIZER, STATE
from functree.layout.decision import Decision, Reason, whole
from functree.layout.layout import (
    DeadFilter,
    Layout,
    LayoutLike,
    Resolution,
    as_layout,
    first_own_mesh,
    is_layout,
    merge_names,
    pairs_text,
    written_pairs,
)
from functree.tree.axes import Names
from functree.tree.nodes import leaves_of
from functree.tree.paths import Path
from functree.values import Value

Unused = Literal["error", "warn", "ignore"]


class StateSharding(Value, Layout):
    """Filters and layouts in order. A leaf is laid out by the layout of the first filter that
    matches it.

    Args:
        rules: `{filter: layout, ..., ...: P()}`, or pairs. `...` matches everything and may only be
            last.
        unused: whether it is an error, a warning or ignored if a filter matches no leaf, or only
            leaves that earlier filters match. A last `...` may match nothing.

    Raises:
        RuleError: `...` is not last, or the rules contain something that is not a filter or not a
            layout.

    Examples:
        >>> layout = ft.StateSharding({"**.bias": ft.P(), ...: ft.P("model")})
        >>> layout
        StateSharding({'**.bias': P(), ...: P('model')})
        >>> ft.plan(
        ...     {"bias": jnp.ones(3), "weight": jnp.ones((4, 3))},
        ...     layout,
        ...     {"model": 2},
        ... ).specs
        {'bias': P(None,), 'weight': P('model', None)}
    """

    __slots__ = ("_chosen", "_filters", "_layouts", "_naming", "filters", "layouts", "unused")
    filters: tuple[Any, ...]
    layouts: tuple[Any, ...]
    unused: Unused
    _filters: tuple[Filter, ...]
    _layouts: tuple[Layout, ...]
    _chosen: FirstMatch
    _naming: dict[str, list[int]]  # for a field, the filters that may name it; filled when asked

    def __init__(
        self,
        rules: Mapping[FilterLike, LayoutLike] | Iterable[tuple[FilterLike, LayoutLike]],
        /,
        *,
        unused: Unused = "error",
    ):
        pairs = written_pairs(rules, "StateSharding takes a mapping or (filter, layout) pairs")
        if unused not in ("error", "warn", "ignore"):
            raise RuleError(
                f'StateSharding: unused={unused!r} is not one of "error", "warn", "ignore"'
            )
        written = tuple([one for one, _ in pairs])
        layouts = tuple([layout for _, layout in pairs])
        for one, after in pairwise(written):
            if one is ...:
                raise RuleError(
                    f"`...` may only be the last filter: {after!r} after it would match nothing"
                )
        filters = tuple(map(as_filter, written))
        self._set(
            filters=written,
            layouts=layouts,
            unused=unused,
            _filters=filters,
            _layouts=tuple(map(as_layout, layouts)),
            _chosen=FirstMatch(filters),
            _naming={},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = tuple(zip(self.filters, self.layouts, strict=True))
        return _made, (pairs, self.unused)  # the functions of `_chosen` cannot be pickled

    @classmethod
    def from_specs(cls, tree: Any) -> "StateSharding":
        """The layout that lays out each leaf by the spec at its path in a tree of specs."""
        # `None` is not a leaf here: in a tree of specs it is in the place of values that are not
        # arrays.
        found = leaves_of(tree, lambda x: x is not None and is_layout(x))
        pairs: list[tuple[FilterLike, LayoutLike]] = []
        for path, value in found:
            if not is_layout(value):
                raise RuleError(f"{path}: {value!r} is not a PartitionSpec")
            # A single spec has an empty path, which is not a glob.
            pairs.append((path_glob(path) if path else ..., value))
        return cls(pairs)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The layouts, by the name that they have in Flax."""
        return self.layouts

    @property
    def given_names(self) -> Mapping[type, Names]:
        return merge_names(self._layouts)

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return first_own_mesh(self._layouts)

    @property
    def for_activations(self) -> bool:
        """By the layout of a last `...`: an array that is not in a tree matches no other filter."""
        return bool(self.filters) and self.filters[-1] is ... and self._layouts[-1].for_activations

    @property
    def has_filters(self) -> bool:
        return True

    def unsharded(self, axis: str) -> "StateSharding":
        layouts = [layout.unsharded(axis) for layout in self._layouts]
        return _made(tuple(zip(self.filters, layouts, strict=True)), self.unused)

    def claims(self, leaf: Leaf) -> bool:
        """Whether one of the filters that are tried for a leaf names the field that it is in.

        `opt_state.**` does, and `**.bias` does not: it is meant for the model. In `{~ft.glob(
        "opt_state.**"): rules, ...: P()}` the first filter does, so the second decides.
        """
        field = leaf.patterned[-1][0]
        naming = self._naming.get(field)
        if naming is None:
            naming = [i for i, item in enumerate(self._filters) if may_name(item, field)]
            self._naming[field] = naming
        if not naming:
            return False
        decides = self._chosen(leaf)
        if decides is None:
            return False
        for i in naming:
            if i <= decides and names_field(self._filters[i], leaf):
                return True
        return False

    def resolve(
        self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None
    ) -> Resolution:
        groups = self._groups(leaves)
        decided: dict[int, Decision] = {}
        problems: list[Problem] = []
        unused: list[str] = []
        dead: list[DeadFilter] = []
        for choice, indices in groups.items():
            group = [leaves[i] for i in indices]
            earlier = None if before is None else [before[i] for i in indices]
            if choice is None:
                decisions = list(earlier or map(whole, group))
                problems += [self._unmatched(leaf) for leaf in group if not leaf.activation]
            else:
                found = self._layouts[choice].resolve(group, mesh, earlier)
                decisions = _chosen_by(_written(self.filters[choice]), found.decisions, earlier)
                problems += found.problems
                unused += found.unused
                dead += found.dead
            decided.update(zip(indices, decisions, strict=True))
        dead += self._dead(leaves, groups)
        in_order = [decided[i] for i in range(len(leaves))]
        return Resolution(in_order, tuple(problems), tuple(unused), tuple(dead))

    def _groups(self, leaves: Sequence[Leaf]) -> dict[int | None, list[int]]:
        """The indices of the leaves that each filter decides about: a layout decides about all of
        its leaves at once.

        Leaves that no filter matches are at None.
        """
        groups: dict[int | None, list[int]] = {}
        for i, leaf in enumerate(leaves):
            groups.setdefault(self._choice(leaf), []).append(i)
        return groups

    def _choice(self, leaf: Leaf) -> int | None:
        """The index of the filter that decides about a leaf; None if there is none."""
        if not leaf.activation:
            return self._chosen(leaf)
        # An array that is in no tree matches no other filter.
        if self.for_activations:
            return len(self.filters) - 1
        return None

    def _unmatched(self, leaf: Leaf) -> Problem:
        """The problem of a leaf that no filter matches."""
        why = "no filter matches it; there are no filters"
        if self.filters:
            listed = ", ".join(map(_written, self.filters[:8]))
            why = f"no filter matches it; the filters are {listed}"
        if len(self.filters) > 8:
            why += " and others"
        return leaf.problem(why, "add a filter for it, or `...: P()` as the last one")

    def _dead(self, leaves: Sequence[Leaf], groups: Mapping[int | None, Any]) -> list[DeadFilter]:
        """The filters that decide about no leaf."""
        # Filters are not written for activations, and never decide about one.
        own = [leaf for leaf in leaves if not leaf.activation]
        # A tree without arrays, such as the state of `optax.sgd`, says nothing about the filters.
        if self.unused == "ignore" or not own:
            return []
        dead: list[DeadFilter] = []
        for i, item in enumerate(self._filters):
            last_resort = isinstance(item, Everything) and i == len(self._filters) - 1
            if i not in groups and not last_resort:
                problem = self._dead_problem(i, own)
                dead.append(DeadFilter(problem, self.unused == "error", item))
            elif i in groups:
                dead += self._dead_parts(i, own)
        return dead

    def _dead_parts(self, index: int, leaves: Sequence[Leaf]) -> Iterator[DeadFilter]:
        """The patterns in a filter of several that match no leaf: behind a `~` a misspelled one
        would match everything, and in an `|` nothing, without a word."""
        item = self._filters[index]
        for part in patterns(item):
            if part is item or any(map(part, leaves)) or _is_for_other_trees(part, leaves):
                continue
            what = f"filter {_written(self.filters[index])}"
            why = f"{part!r} matches no leaf{meant(part, leaves)}"
            remedy = 'correct the pattern, remove it, or write `unused="ignore"`'
            problem = Problem(None, None, what, why, remedy)
            yield DeadFilter(problem, self.unused == "error", part)

    def _dead_problem(self, index: int, leaves: Sequence[Leaf]) -> Problem:
        """The problem of a filter that decides about none of some leaves."""
        what = f"filter {_written(self.filters[index])}"
        # The first leaf that it matches, which an earlier filter does too.
        hidden = next(filter(self._filters[index], leaves), None)
        if hidden is None:
            # A pattern for what earlier filters match would be of no use either.
            left = [leaf for leaf in leaves if not self._is_before(index, leaf)]
            why = f"matches no leaf{meant(self._filters[index], left)}"
            remedy = 'correct the filter, remove it, or write `unused="ignore"`'
            return Problem(None, None, what, why, remedy)
        first = self.filters[self._chosen(hidden) or 0]
        by = f"`{hidden.path}` is matched by {_written(first)}"
        why = f"is never used: earlier filters match all of its leaves; {by}"
        return Problem(None, None, what, why, "write it before them, or remove it")

    def _is_before(self, index: int, leaf: Leaf) -> bool:
        """Whether a filter before one of an index matches a leaf."""
        first = self._chosen(leaf)
        return first is not None and first < index

    def _parts(self) -> tuple[Any, ...]:
        return (self._filters, self._layouts, self.unused)

    def __repr__(self) -> str:
        texts = zip(map(_written, self.filters), map(repr, self._layouts), strict=True)
        table = pairs_text(list(texts))
        if self.unused == "error":
            return f"StateSharding({table})"
        return f"StateSharding({table}, unused={self.unused!r})"


def _is_for_other_trees(item: Filter, leaves: Sequence[Leaf]) -> bool:
    """Whether a pattern names a field of a training state, and no leaf is in such a field: one
    layout lays out a training state, and its model alone too."""
    fields = {MODEL, STATE, OPTIMIZER}
    if not any(may_name(item, field) for field in fields):
        return False
    return fields.isdisjoint(key for leaf in leaves for key in leaf.path)


def _chosen_by(
    name: str, found: Sequence[Decision], before: Sequence[Decision] | None
) -> list[Decision]:
    """Decisions with the name of a filter at the reasons that its layout has added."""
    # Many leaves share one decision object, and the plan computes sizes and text once for each
    # object. So a decision is changed once for each object too, and not for each leaf.
    known: dict[tuple[int, int], Decision] = {}
    changed: list[Decision] = []
    starts: Sequence[Decision | None] = before or [None] * len(found)
    for decision, start in zip(found, starts, strict=True):
        key = (id(decision), id(start))
        if key not in known:
            kept = start.reasons if start is not None else ()
            added = decision.reasons[len(kept) :]
            known[key] = decision._replace(reasons=(*kept, Reason(added, name)))
        changed.append(known[key])
    return changed


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
