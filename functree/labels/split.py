"""A tree ─► its skeleton and its arrays, in one part for each filter; and these ─► the tree."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from jax.tree_util import tree_flatten, tree_structure

from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    RuleError,
    count,
)
from functree.labels.filters.filter import Filter, FilterLike, as_filter, naming
from functree.labels.filters.first_match import FirstMatch
from functree.labels.leaves import Leaves, read
from functree.tree.nodes import leaves_of
from functree.tree.skeleton.skeleton import Skeleton

_T = TypeVar("_T")


def split(tree: _T, *filters: FilterLike) -> tuple[Skeleton, *tuple[_T, ...]]:
    """Split a tree into its static values and its arrays, with one part of the arrays for each
    filter.

    Args:
        tree: any tree.
        *filters: each array is in the part of the first filter that matches it. A last `...`
            matches all arrays that are left. Without filters there is one part with all arrays.

    Returns:
        `(static, *parts)`. `static` is hashable, equal by value and type, and does not depend on
            the filters. Each part has the structure of the tree, with None in the place of
            everything that is not in the part.

    Raises:
        RuleError: `...` is not the last filter, or an argument is not a filter.
        FunctreeError: no filter matches some arrays, or some static values cannot be hashed. The
            error lists them. Or a pattern or a class matches no array; a filter by a property, such
            as `ft.has_axis`, may match none.

    Examples:
        >>> layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> static, bias, rest = ft.split(layer, "bias", ...)
        >>> bias.weight is None, rest.bias is None
        (True, True)
        >>> bool(jax.tree.all(jax.tree.map(jnp.array_equal, ft.merge(static, bias, rest), layer)))
        True
    """
    written = filters or (...,)
    if any(f is ... for f in written[:-1]):
        raise RuleError("`...` may only be the last filter: a filter after it would match nothing")
    leaves = read(tree)
    static = leaves.skeleton
    static.check_hashable()
    wanted = [as_filter(f) for f in written]
    _check_named(wanted, leaves)
    chosen = FirstMatch(wanted)
    choices = [chosen(leaf) for leaf in leaves.leaves]
    lost = [leaf for leaf, choice in zip(leaves.leaves, choices, strict=True) if choice is None]
    if lost:
        problems = [
            leaf.problem("no filter matches it", "add a filter for it, or `...` last")
            for leaf in lost
        ]
        raise FunctreeValueError(f"no filter matches {count(len(lost), 'leaf')}", problems)
    # Each part has a place for each array, and None where the array is in another part.
    parts: list[list[Any]] = [[None] * len(choices) for _ in written]
    for place, (leaf, choice) in enumerate(zip(leaves.leaves, choices, strict=True)):
        if choice is not None:
            parts[choice][place] = leaf.value
    return (static, *map(static.spread, parts))


def _check_named(filters: Sequence[Filter], leaves: Leaves) -> None:
    """Raise for filters that match no array because of a pattern or a class. A property may be that
    of no array."""
    lost: list[Filter] = []
    for item in filters:
        if not any(map(item, leaves.leaves)):
            lost += [part for part in naming(item) if not any(map(part, leaves.leaves))]
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
        *parts: trees with the structure of the tree that was split. Each array is in exactly one of
            them.

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
    for place, path in enumerate(static.paths):
        found = [column[place] for column in columns if column[place] is not None]
        if len(found) == 1:
            values.append(found[0])
            continue
        why = f"is in {len(found)} parts" if found else "is in no part"
        problems.append(Problem(path, None, "", why, "give each array in exactly one part"))
    if problems:
        raise FunctreeValueError(f"{count(len(problems), 'leaf')} cannot be merged", problems)
    return static.fill(values)


def _arrays_of(static: Skeleton, part: Any, index: int) -> list[Any]:
    """The value of a part in the place of each array of the tree that was split; None if it has no
    value there."""
    flat, treedef = tree_flatten(part, is_leaf=_is_none)
    # A tree with a number for each array and None for all else, flattened as the part is. It shows
    # which leaves of the part are in the place of an array. The numbers begin with 1: they are only
    # compared with None.
    marks, whole = tree_flatten(static.spread(range(1, len(static) + 1)), is_leaf=_is_none)
    if treedef != whole:
        have = tree_structure(part).num_leaves
        raise FunctreeValueError(
            f"part {index} has another structure than the tree that was split: it is a {type(part).__name__} with "
            f"{count(have, 'leaf')}; a part has the structure of the tree, with None in the place of all other leaves"
        )
    stray = [
        i
        for i, (value, mark) in enumerate(zip(flat, marks, strict=True))
        if value is not None and mark is None
    ]
    if stray:
        raise _stray(part, index, stray)
    return [value for value, mark in zip(flat, marks, strict=True) if mark is not None]


def _stray(part: Any, index: int, places: Iterable[int]) -> FunctreeError:
    """The error for leaves of a part that are not in the place of an array."""
    paths = [path for path, _ in leaves_of(part, _is_none)]
    why = "is not in the place of an array of the tree that was split"
    problems = [Problem(paths[place], None, "", why, "write None there") for place in places]
    return FunctreeValueError(f"part {index} has {count(len(problems), 'leaf')} too many", problems)


def _is_none(x: Any) -> bool:
    return x is None
