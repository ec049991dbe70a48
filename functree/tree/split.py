"""A tree ─► its skeleton and its arrays, in as many parts as there are filters; and back."""

from collections.abc import Iterable
from typing import Any

from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_structure

from functree.errors import FunctreeError, Problem, RuleError, count
from functree.tree.filters.filter import as_filter
from functree.tree.filters.first_match import FirstMatch
from functree.tree.leaves import read
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


def split(tree: Any, *filters: Any) -> tuple[Any, ...]:
    """Take a tree apart: what is static, and its arrays in one part for each filter.

    Args:
        tree: any tree.
        *filters: in order, each array goes to the first that matches it; `...`, last, takes the rest. Without any,
            there is one part with all arrays.

    Returns:
        `(static, *parts)`. `static` is hashable, equal by value and type, and the same for all filters. Each part has
        the tree's structure, with None where its arrays are not.

    Raises:
        RuleError: `...` is not the last filter, or something is no filter.
        FunctreeError: arrays that no filter matches, or static values that cannot be hashed; lists them.

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
        raise RuleError("`...` may only be the last filter: a filter behind it would match nothing")
    leaves = read(tree)
    static = leaves.skeleton
    static.check_hashable()
    chosen = FirstMatch([as_filter(f) for f in written])
    choices = [chosen(leaf) for leaf in leaves.leaves]
    lost = [leaf for leaf, choice in zip(leaves.leaves, choices, strict=True) if choice is None]
    if lost:
        problems = [leaf.problem("no filter matches it", "add a filter for it, or `...` last") for leaf in lost]
        raise FunctreeError(f"{count(len(lost), 'leaf')} in no part", problems)
    pairs = list(zip(leaves.leaves, choices, strict=True))
    parts = [[leaf.value if choice == number else None for leaf, choice in pairs] for number in range(len(written))]
    return (static, *map(static.spread, parts))


def merge(static: Skeleton, *parts: Any) -> Any:
    """Put a tree together again from what `ft.split` gave.

    Args:
        static: from `split`.
        *parts: trees of the split tree's structure, each array in exactly one.

    Raises:
        FunctreeError: a part of another structure; an array that is in no part or in several. Lists them by path.

    Examples:
        >>> static, arrays = ft.split({"a": jnp.ones(2), "b": "text"})
        >>> ft.merge(static, arrays)["b"]
        'text'
    """
    if not isinstance(static, Skeleton):
        raise FunctreeError(f"merge takes the `static` of a split first, not a {type(static).__name__}")
    columns = [_arrays_of(static, part, index) for index, part in enumerate(parts)]
    values, problems = [], []
    for place, path in enumerate(static.paths):
        found = [column[place] for column in columns if column[place] is not None]
        if len(found) == 1:
            values.append(found[0])
            continue
        why = f"is in {len(found)} parts" if found else "is in none of the parts"
        problems.append(Problem(path, None, "", why, "give each array in exactly one part"))
    if problems:
        raise FunctreeError(f"{count(len(problems), 'leaf')} cannot be merged", problems)
    return static.fill(values)


def _arrays_of(static: Skeleton, part: Any, index: int) -> list[Any]:
    """What a part has in the place of each array of the tree that was split; None where it has nothing."""
    flat, treedef = tree_flatten(part, is_leaf=_is_none)
    # A tree of marks, in which None is a leaf, as it is in a part: which leaves are arrays' can be read from it.
    marks, whole = tree_flatten(static.spread(range(1, len(static) + 1)), is_leaf=_is_none)
    if treedef != whole:
        have = tree_structure(part).num_leaves
        raise FunctreeError(
            f"part {index} is of another structure than the tree that was split: a {type(part).__name__} with "
            f"{count(have, 'leaf')}; parts keep the tree's structure, with None where an array is elsewhere"
        )
    stray = [i for i, (value, mark) in enumerate(zip(flat, marks, strict=True)) if value is not None and mark is None]
    if stray:
        raise _stray(part, index, stray)
    return [value for value, mark in zip(flat, marks, strict=True) if mark is not None]


def _stray(part: Any, index: int, places: Iterable[int]) -> FunctreeError:
    paths = [Path.of(keys) for keys, _ in tree_flatten_with_path(part, is_leaf=_is_none)[0]]
    why = "was not an array of the tree that was split"
    problems = [Problem(paths[place], None, "", why, "leave it out") for place in places]
    return FunctreeError(f"part {index} has {count(len(problems), 'leaf')} too many", problems)


def _is_none(x: Any) -> bool:
    return x is None
