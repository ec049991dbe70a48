"""`split` separates a tree into static data and parts, one per filter; `merge` joins them again."""

from collections.abc import Sequence
from typing import TypeVar

from jax.tree_util import tree_flatten, tree_structure

from functree.errors import (
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    RuleError,
    count,
)
from functree.labels.filters import (
    Filter,
    FilterLike,
    FirstMatch,
    as_filter,
    naming,
    patterns,
)
from functree.labels.leaves import Leaves, read
from functree.tree.arrays import AnyArray, Tree
from functree.tree.nodes import leaves_of
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import equal

_T = TypeVar("_T")


def split(tree: _T, *filters: FilterLike) -> tuple[Skeleton, *tuple[_T, ...]]:
    """Split a tree into its static values, and one part of its arrays for each filter.

    Args:
        tree: any tree.
        *filters: the filters of the parts. Each array belongs to the first filter that matches it.
            `...` as the last filter matches all remaining arrays. Without filters, there is one
            part with all arrays.

    Returns:
        `(static, *parts)`. `static` is hashable, compares by value, and does not depend on the
            filters. Each part has the structure of the tree, with None for all other leaves.

    Raises:
        RuleError: if `...` is not the last filter.
        RuleError: if an argument is not a filter.
        FunctreeError: if some arrays match no filter. The error lists these arrays.
        FunctreeError: if some static values cannot be hashed. The error lists these values.
        FunctreeError: if a pattern matches no array.
        FunctreeError: if a filter with classes matches no array. A filter by a property, such as
            `ft.has_axis`, may match no array.

    Examples:
        >>> layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> static, bias, rest = ft.split(layer, "bias", ...)
        >>> bias.weight is None, rest.bias is None
        (True, True)
        >>> bool(
        ...     jax.tree.all(
        ...         jax.tree.map(
        ...             jnp.array_equal, ft.merge(static, bias, rest), layer
        ...         )
        ...     )
        ... )
        True
    """
    written = filters or (...,)
    if any(f is ... for f in written[:-1]):
        raise RuleError("split: `...` matches all remaining arrays: write it as the last filter")
    leaves = read(tree)
    static = leaves.skeleton.learn(tree)
    static.check_hashable()
    checked = list(map(as_filter, written))
    first_match = FirstMatch(checked)
    _check_named(checked, leaves)
    # Each part has an entry for each array, which is None if the array is in a different part.
    parts: list[list[AnyArray | None]] = [[None] * len(static) for _ in written]
    problems: list[Problem] = []
    for i, leaf in enumerate(leaves.leaves):
        choice = first_match(leaf)
        if choice is None:
            remedy = "add a filter for this leaf, or `...` as the last filter"
            problems.append(leaf.problem("no filter matches it", remedy))
        else:
            parts[choice][i] = leaf.value
    if problems:
        headline = f"split: no filter matches {count(len(problems), 'leaf')}"
        raise FunctreeValueError(headline, problems)
    return (static, *map(static.spread, parts))


def _check_named(filters: Sequence[Filter], leaves: Leaves) -> None:
    """Check that patterns and classes match arrays. A property may match none.

    Raises:
        FunctreeError: if a pattern matches no array, or if a filter matches none because of a
            class.
    """
    unmatched: list[Filter] = []
    for item in filters:
        # A class in a filter that matches an array may match nothing, as in `~ft.under(Frozen)`.
        nothing = not any(map(item, leaves.leaves))
        for part in naming(item) if nothing else patterns(item):
            if not any(map(part, leaves.leaves)):
                unmatched.append(part)
    if unmatched:
        why, remedy = "does not match", "correct the filter or remove it"
        problems = [leaf.problem(why, remedy) for leaf in leaves.leaves]
        verb = "matches" if len(unmatched) == 1 else "match"
        raise FunctreeValueError(
            f"split: {', '.join(map(repr, unmatched))} {verb} no array of the tree", problems
        )


def merge(static: Skeleton, *parts: _T) -> _T:
    """Merge the results of `ft.split` into a tree.

    Args:
        static: the first result of `split`.
        *parts: trees with the structure of the tree that was split, and None for some of its
            leaves. Each array must be in exactly one part.

    Raises:
        FunctreeError: if `static` is not a result of `split`.
        FunctreeError: if a part has a different structure.
        FunctreeError: if an array is in no part or in several. The error lists such arrays by path.
        FunctreeError: if a part has leaves where the tree has no array. The error lists these
            leaves.

    Examples:
        >>> static, arrays = ft.split({"a": jnp.ones(2), "b": "text"})
        >>> ft.merge(static, arrays)["b"]
        'text'
    """
    if not isinstance(static, Skeleton):
        raise FunctreeTypeError(
            f"merge: `static` has type {type(static).__name__}: pass the first result of `ft.split`"
        )
    # Leaves that are not arrays become None.
    places, structure = tree_flatten(static.spread(range(len(static))), is_leaf=_is_none)
    arrays: list[list[Tree]] = [[] for _ in static.paths]
    problems: list[Problem] = []
    for index, part in enumerate(parts):
        if not equal(tree_structure(part, is_leaf=_is_none), structure):
            have = tree_structure(part).num_leaves
            raise FunctreeValueError(
                f"merge: part {index}, of type {type(part).__name__} with {count(have, 'leaf')}, "
                "does not have the structure of the tree that was split: keep the structure, with "
                "None for leaves that are not in this part"
            )
        for place, (path, value) in zip(places, leaves_of(part, _is_none), strict=True):
            if value is None:
                continue
            if place is not None:
                arrays[place].append(value)
                continue
            why = "is not the path of an array in the tree that was split"
            problems.append(Problem(path, None, "", why, "replace the leaf with None"))
    for path, values in zip(static.paths, arrays, strict=True):
        if len(values) != 1:
            why = f"is in {count(len(values), 'part')}"
            problems.append(Problem(path, None, "", why, "pass each array in exactly one part"))
    if problems:
        raise FunctreeValueError(
            f"merge: {count(len(problems), 'leaf')} cannot be merged", problems
        )
    return static.fill(value for (value,) in arrays)


def _is_none(x: object) -> bool:
    return x is None
