"""`StateSharding` maps filters to layouts.

Ordered filters with layouts ─► a layout in which the first filter that matches a leaf decides.
"""

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from functree.devices.meshes import MeshView
from functree.errors import Problem, RuleError, listed
from functree.labels.filters import (
    Everything,
    Filter,
    FilterLike,
    FirstMatch,
    as_filter,
    first_name,
    meant,
    names,
    patterns,
)
from functree.labels.leaves import Leaf
from functree.layout.decision import Decision, Fault, reasons_text, undecided, whole
from functree.layout.layout import (
    Composition,
    Layout,
    LayoutLike,
    Modifier,
    NoLayout,
    as_layout,
    is_layout,
    pairs_text,
    walk,
    written_pairs,
)
from functree.layout.rules import AxisRules
from functree.tree.nodes import leaves_of, where_text
from functree.tree.paths import Key, Path

Unused = Literal["error", "warn", "ignore"]


@dataclass(frozen=True, init=False, repr=False)
class StateSharding(Layout):
    """A layout that maps filters to layouts. The first filter that matches a leaf decides.

    Filters match one path of each leaf. The path begins at the root of the tree, of the subtree at
    an entry of a prefix tree, or of an argument. In an `ft.TrainState`, filters match the path
    within the model. A glob may begin with an argument's name, a field of an `ft.TrainState`, or a
    key above a state. The glob then matches paths that begin there.

    Args:
        rules: `{filter: layout, ..., ...: P()}`, or pairs. `...` matches everything and must be
            last.
        unused: how to report a filter that matches no leaf, or only leaves that earlier filters
            match: `"error"`, `"warn"` or `"ignore"`. A final `...` may match nothing.

    Raises:
        RuleError: if `...` is not last.
        RuleError: if the rules contain an invalid filter or layout.
        RuleError: if `unused` is invalid.

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

    filters: tuple[Any, ...] = field(compare=False)  # as the user wrote them, like the layouts
    layouts: tuple[Any, ...] = field(compare=False)
    unused: Unused
    _filters: tuple[Filter, ...]
    _layouts: tuple[Layout, ...]
    _choose: FirstMatch = field(compare=False)
    # The filters that may name something above a leaf, each with its index.
    _naming: tuple[tuple[int, Filter], ...] = field(compare=False)
    # Decisions identify this layout, and the layouts that `for_arrays` makes from it, by this key.
    _key: object = field(compare=False)

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
                f'StateSharding: unused={unused!r} is invalid: write "error", "warn" or "ignore"'
            )
        written = tuple([item for item, _ in pairs])
        layouts = tuple([layout for _, layout in pairs])
        for item, after in pairwise(written):
            if item is ...:
                raise RuleError(
                    f"`...` must be the last filter, since {after!r} after it would match "
                    "nothing: move `...` to the end"
                )
        filters = tuple(map(as_filter, written))
        vars(self).update(
            filters=written,
            layouts=layouts,
            unused=unused,
            _filters=filters,
            _key=object(),
            # A pattern that begins with a wildcard names nothing above a leaf.
            _naming=tuple(
                (i, item) for i, item in enumerate(filters) if any(map(first_name, patterns(item)))
            ),
            _choose=FirstMatch(filters),
            _layouts=tuple(map(as_layout, layouts)),
        )

    @classmethod
    def from_specs(cls, tree: Any) -> "StateSharding":
        """Make the layout that gives each leaf the spec at its path in a tree of specs.

        Raises:
            RuleError: if a leaf of the tree is not a spec.
            RuleError: if a key of a dict has no Python literal, such as an Enum member.
        """
        # `None` is not a leaf: in a tree of specs, it stands for values that are not arrays.
        leaves = leaves_of(tree, lambda x: x is not None and is_layout(x))
        pairs: list[tuple[FilterLike, LayoutLike]] = []
        for path, value in leaves:
            if not is_layout(value):
                raise RuleError(
                    f"from_specs: {value!r} at {where_text(path)} is not a PartitionSpec: write "
                    "`P(...)`, or `P()` to replicate the leaf"
                )
            # A single spec has an empty path, which is not a glob.
            pairs.append((str(path) if path else ..., value))
        return cls(pairs)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The layouts, under the name that Flax uses."""
        return self.layouts

    @property
    def inner(self) -> tuple[Layout, ...]:
        return self._layouts

    @property
    def rules(self) -> Layout | None:
        """The rules of a final `...`, since no other filter can match an activation."""
        if not self.filters or self.filters[-1] is not ...:
            return None
        return self._layouts[-1].rules

    def asks(self, leaf: Leaf) -> Hashable:
        choice = self._choose(leaf)
        if choice is None:
            return None
        return choice, self._layouts[choice].asks(leaf)

    def claims(self, leaf: Leaf) -> bool:
        """Return whether a leaf's filter, or an earlier one, names a key above the leaf.

        In `{~ft.glob("opt_state.**"): rules, ...: P()}`, the first filter names `opt_state`, so the
        layout claims the leaves below `opt_state`, and the second filter decides. If no filter
        names such a key, the chosen layout's own `claims` decides.
        """
        choice = self._choose(leaf)
        if choice is None:
            return False
        if any(i <= choice and names(item, leaf) for i, item in self._naming):
            return True
        return self._layouts[choice].claims(leaf)

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        choice = self._choose(leaf)
        if choice is None:
            return (so_far or whole(leaf)).wrong(self._unmatched())
        decision = self._layouts[choice].decide(leaf, so_far, mesh)
        # The chosen layout's reasons become one reason, which begins with the filter.
        kept = so_far or whole(leaf)
        reason = reasons_text(decision.reasons[len(kept.reasons) :])
        reason = f"{_written(self.filters[choice])}: {reason}"
        inner = decision.choices[len(kept.choices) :]
        return decision._replace(
            reasons=(*kept.reasons, (reason,)),
            choices=(*kept.choices, *inner, (self._key, choice)),
        )

    def reached(self, decisions: Collection[Decision]) -> Iterator[Layout]:
        yield self
        for choice in sorted(used_filters(self, decisions)):
            yield from self._layouts[choice].reached(decisions)

    def _unmatched(self) -> Fault:
        """Return the fault of a leaf that no filter matches."""
        why = "no filter matches this leaf, since there are no filters"
        if self.filters:
            filters = listed(list(map(_written, self.filters)), 8)
            why = f"no filter matches this leaf; the filters are {filters}"
        return why, "add a filter for this leaf, or `...: P()` as the last filter"

    def __repr__(self) -> str:
        texts = zip(map(_written, self.filters), map(repr, self._layouts), strict=True)
        table = pairs_text(list(texts))
        if self.unused == "error":
            return f"StateSharding({table})"
        return f"StateSharding({table}, unused={self.unused!r})"


UNUSED = 'correct the {}, remove it, or write `unused="ignore"`'
TWO_READINGS = (
    r"to match paths in the model, write a regular expression: `ft.regex(r'^{}(\.|$)')`, "
    "or rename one of these keys"
)


def _written(item: Any) -> str:
    """Return the text of a filter, as a user may write it."""
    return repr(item) if isinstance(item, str) else repr(as_filter(item))


def has_filters(layout: Layout) -> bool:
    """Return whether a layout has filters, which may match no leaf."""
    return any(isinstance(part, StateSharding) for part in walk(layout))


def _with_last(layout: StateSharding, last: Layout) -> StateSharding:
    """Return a copy in which a final `...` chooses the layout `last`."""
    filters, layouts = layout.filters, layout._layouts
    if filters and filters[-1] is ...:
        filters, layouts = filters[:-1], layouts[:-1]
    changed = StateSharding(zip((*filters, ...), (*layouts, last), strict=True))
    vars(changed).update(_key=layout._key)
    return changed


def used_filters(layout: StateSharding, decisions: Iterable[Decision]) -> set[int]:
    """Return the indices of the filters that chose layouts in the decisions."""
    used: set[int] = set()
    for decision in decisions:
        for key, number in decision.choices:
            # `for_arrays` may have added a final `...`, which the user did not write.
            if key is layout._key and number < len(layout.filters):
                used.add(number)
    return used


def unused_filters(
    layout: StateSharding,
    used: Collection[int],
    leaves: Sequence[Leaf],
    elsewhere: Callable[[Filter], bool],
) -> Iterator[Problem]:
    """Yield the problems of filters, and of patterns in them, that match nothing.

    Args:
        layout: the layout.
        used: the indices of the filters that chose a layout.
        leaves: all leaves of the layout.
        elsewhere: a function that returns whether a pattern is for other trees, since it names
            an argument, or a field of a training state, that these leaves do not have.
    """
    # A tree without arrays, such as the state of `optax.sgd`, does not test the filters.
    if layout.unused == "ignore" or not leaves:
        return
    for i, item in enumerate(layout._filters):
        if i in used:
            yield from _unused_parts(layout, i, leaves, elsewhere)
        elif isinstance(item, Everything) and i == len(layout._filters) - 1:
            continue
        # A filter without patterns is not specific to another tree.
        elif not any(patterns(item)) or not all(map(elsewhere, patterns(item))):
            yield _unused_problem(layout, i, leaves)


def _unused_parts(
    layout: StateSharding, index: int, leaves: Sequence[Leaf], elsewhere: Callable[[Filter], bool]
) -> Iterator[Problem]:
    """Yield the problems of patterns that match no leaf, within a filter that combines several.

    Without this check, a misspelled pattern would go unnoticed: after `~` it matches everything,
    and after `|` it adds nothing.
    """
    item = layout._filters[index]
    for part in patterns(item):
        if part is item or any(map(part, leaves)) or elsewhere(part):
            continue
        what = f"filter {_written(layout.filters[index])}"
        why = f"{part!r} matches no leaf{meant(part, leaves)}"
        yield Problem(None, None, what, why, UNUSED.format("pattern"))


def _unused_problem(layout: StateSharding, index: int, leaves: Sequence[Leaf]) -> Problem:
    """Return the problem of a filter that chose a layout for no leaf."""
    what = f"filter {_written(layout.filters[index])}"
    item, earlier = layout._filters[index], FirstMatch(layout._filters[:index])
    matches = FirstMatch([item])
    # This is the first leaf that the filter matches. An earlier filter also matches it.
    hidden = next((leaf for leaf in leaves if matches(leaf) is not None), None)
    if hidden is None:
        # It would not help to suggest a pattern for leaves that earlier filters match.
        left = [leaf for leaf in leaves if earlier(leaf) is None]
        why = f"matches no leaf{meant(item, left)}"
        return Problem(None, None, what, why, UNUSED.format("filter"))
    first = layout.filters[layout._choose(hidden) or 0]
    by = f"{_written(first)} matches `{hidden.path}`"
    why = f"is never used, since earlier filters match all leaves that it matches: {by}"
    return Problem(
        None,
        None,
        what,
        why,
        "remove the filter, or move it before the earlier filters if it should apply to these "
        "leaves",
    )


def two_readings(layout: StateSharding, leaves: Sequence[Leaf]) -> Iterator[Problem]:
    """Yield the problems of patterns that begin with an ambiguous name.

    Such a name is, for example, a field of both the model and the training state.
    """
    meanings: dict[tuple[Key, ...], dict[str, None]] = {}
    for leaf in leaves:
        for root in leaf.roots:
            meanings.setdefault(root.path[:1], {})[root.what] = None
    for leaf in leaves:
        first = (leaf.seen or ())[:1]
        if first in meanings and leaf.named(first) != leaf.seen:
            meanings[first][f"`{Path(first)}` at the root of the model"] = None
    for item, written in zip(layout._filters, layout.filters, strict=True):
        for pattern in patterns(item):
            name = first_name(pattern)
            readings = meanings.get(name, {})
            if len(readings) > 1:
                what = f"filter {_written(written)}"
                why = f"{pattern!r} begins with an ambiguous name: {' and '.join(readings)}"
                yield Problem(None, None, what, why, TWO_READINGS.format(name))


def for_arrays(layout: Layout) -> Layout:
    """Return the part of a call's shared layout that applies to an argument that is one array.

    Patterns that name the argument apply. Otherwise, `AxisRules` and the array's annotation apply.
    Specs and `FSDP` do not apply, since they are for parameters.
    """
    match layout:
        case StateSharding():
            return _with_last(layout, layout.rules or AnnotationAlone())
        case Composition():
            parts = [
                part for part in map(for_arrays, layout.parts) if not isinstance(part, NoLayout)
            ]
            return Composition(tuple(parts)) if parts else AnnotationAlone()
    return layout.rules or AnnotationAlone()


class AnnotationAlone(NoLayout):
    """A missing layout that still applies the `PartitionSpec` in an array's annotation."""

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        return undecided(leaf)._replace(specified=leaf.spec is not None)


def with_tables(layout: Layout, change: Callable[[AxisRules], AxisRules]) -> Layout:
    """Return a copy of a layout in which each table of rules is changed."""
    match layout:
        case AxisRules():
            return change(layout)
        case Composition():
            return Composition(tuple([with_tables(part, change) for part in layout.parts]))
        case Modifier():
            return replace(layout, layout=with_tables(layout.layout, change))
        case StateSharding():
            layouts = [with_tables(inner, change) for inner in layout.inner]
            pairs = zip(layout.filters, layouts, strict=True)
            return StateSharding(pairs, unused=layout.unused)
    return layout
