"""A tree ─► its skeleton and its arrays, in one part for each filter; and these ─► the tree."""

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
    negated_patterns,
)
from functree.labels.leaves import Leaves, read
from functree.tree.arrays import AnyArray, Tree
from functree.tree.nodes import leaves_of
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import equal

_T = TypeVar("_T")


def split(tree: _T, *filters: FilterLike) -> tuple[Skeleton, *tuple[_T, ...]]:
    """Split a tree into its static values and its arrays, with one part of the arrays for each
    filter.

    Args:
        tree: any tree.
        *filters: each array is in the part of the first filter that matches it. A last `...`
            matches all arrays that are left. Without filters there is one part with all arrays.

    Returns:
        `(static, *parts)`. `static` is hashable, equal by value, and does not depend on the
            filters. Each part has the structure of the tree, with None for everything that is not
            in the part.

    Raises:
        RuleError: `...` is not the last filter, or an argument is not a filter.
        FunctreeError: no filter matches some arrays, or some static values cannot be hashed. The
            error lists them. Or a pattern or a class matches no array, or a pattern behind a `~`; a
            filter by a property, such as `ft.has_axis`, may match none.

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
        raise RuleError("`...` may only be the last filter: a filter after it would match nothing")
    leaves = read(tree)
    static = leaves.skeleton.learn(tree)
    static.check_hashable()
    wanted = list(map(as_filter, written))
    first_match = FirstMatch(wanted)
    _check_named(wanted, leaves)
    # Each part has an entry for each array: None where the array is in another part.
    parts: list[list[AnyArray | None]] = [[None] * len(static) for _ in written]
    problems: list[Problem] = []
    for i, leaf in enumerate(leaves.leaves):
        choice = first_match(leaf)
        if choice is None:
            remedy = "add a filter for it, or `...` last"
            problems.append(leaf.problem("no filter matches it", remedy))
        else:
            parts[choice][i] = leaf.value
    if problems:
        raise FunctreeValueError(f"no filter matches {count(len(problems), 'leaf')}", problems)
    return (static, *map(static.spread, parts))


def _check_named(filters: Sequence[Filter], leaves: Leaves) -> None:
    """Raise for filters that match no array because of a pattern or a class, or all arrays because
    of a pattern behind a `~`. A property may be that of no array."""
    lost: list[Filter] = []
    for item in filters:
        # Each part of a filter that matches nothing, and of others those that are left out in vain.
        nothing = not any(map(item, leaves.leaves))
        for part in naming(item) if nothing else negated_patterns(item):
            if not any(map(part, leaves.leaves)):
                lost.append(part)
    if lost:
        why, remedy = "does not match", "correct the filter, or leave it out"
        problems = [leaf.problem(why, remedy) for leaf in leaves.leaves]
        raise FunctreeValueError(
            f"split: {', '.join(map(repr, lost))} matches no array of the tree", problems
        )


def merge(static: Skeleton, *parts: _T) -> _T:
    """Merge the values that `ft.split` returned into a tree.

    Args:
        static: from `split`.
        *parts: trees with the structure of the tree that was split, with None for some of its
            leaves. Each array is in exactly one of them.

    Raises:
        FunctreeError: a part has another structure, or an array is in no part or in several. The
            error lists the arrays by path.

    Examples:
        >>> static, arrays = ft.split({"a": jnp.ones(2), "b": "text"})
        >>> ft.merge(static, arrays)["b"]
        'text'
    """
    if not isinstance(static, Skeleton):
        raise FunctreeTypeError(
            f"merge takes the `static` of a split first, not a {type(static).__name__}"
        )
    columns = [_arrays_of(static, part, index) for index, part in enumerate(parts)]
    values, problems = [], []
    for i, path in enumerate(static.paths):
        found = [column[i] for column in columns if column[i] is not None]
        if len(found) == 1:
            values.append(found[0])
            continue
        why = f"is in {len(found)} parts" if found else "is in no part"
        problems.append(Problem(path, None, "", why, "give each array in exactly one part"))
    if problems:
        raise FunctreeValueError(f"{count(len(problems), 'leaf')} cannot be merged", problems)
    return static.fill(values)


def _arrays_of(static: Skeleton, part: Tree, index: int) -> list[Tree]:
    """The value of a part for each array of the tree that was split; None where it has none."""
    places = static.spread(range(len(static)))
    expected, structure = tree_flatten(places, is_leaf=_is_none)
    if not equal(tree_structure(part, is_leaf=_is_none), structure):
        have = tree_structure(part).num_leaves
        raise FunctreeValueError(
            f"part {index} has another structure than the tree that was split: it is a "
            f"{type(part).__name__} with {count(have, 'leaf')}; a part has the structure of the "
            "tree, with None in the place of all other leaves"
        )
    values: list[Tree] = []
    problems: list[Problem] = []
    for place, (path, value) in zip(expected, leaves_of(part, _is_none), strict=True):
        if place is not None:
            values.append(value)
        elif value is not None:
            why = "is not in the place of an array of the tree that was split"
            problems.append(Problem(path, None, "", why, "write None there"))
    if problems:
        headline = f"part {index} has {count(len(problems), 'leaf')} too many"
        raise FunctreeValueError(headline, problems)
    return values


def _is_none(x: object) -> bool:
    return x is None
