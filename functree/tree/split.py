"""A tree ─► what is static and its arrays, in as many parts as there are filters; and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_structure

from functree.errors import FunctreeError, Problem, RuleError, count
from functree.tree.filters import as_filter
from functree.tree.first_match import FirstMatch
from functree.tree.leaves import read
from functree.tree.paths import Path


def _is_none(x: Any) -> bool:
    return x is None


@dataclass(frozen=True)
class Static:
    """All of a tree but its arrays: hashable, equal by value, with `1`, `True` and `1.0` apart.

    Attributes:
        treedef: of the tree, with every None as a leaf.
        paths: of the arrays.
        positions: of the arrays among the leaves.
        values: (position, type, value) of the other leaves.
    """

    treedef: Any
    paths: tuple[Path, ...]
    positions: tuple[int, ...]
    values: tuple[tuple[int, type, Any], ...]

    def __repr__(self) -> str:
        return f"<Static: {count(len(self.values), 'value')} around {count(len(self.positions), 'array')}>"


def split(tree: Any, *filters: Any) -> tuple[Any, ...]:
    """Take a tree apart: what is static, and its arrays in one part for each filter.

    Args:
        tree: any tree.
        *filters: in order, each array goes to the first that matches it; `...`, last, takes the rest. Without any,
            there is one part with all arrays.

    Returns:
        `(static, *parts)`. `static` is hashable, equal by value, and the same for all filters. Each part has the
        tree's structure, with None where its arrays are not.

    Raises:
        RuleError: `...` is not the last filter, or what is no filter.
        FunctreeError: arrays that no filter matches, or static leaves that cannot be hashed; lists them.

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
        raise RuleError("`...` may only be the last filter: what stands behind it would match nothing")
    leaves = read(tree)
    flat, treedef = tree_flatten(tree, is_leaf=_is_none)
    somewhere = [i for i, value in enumerate(flat) if value is not None]
    positions = tuple(somewhere[p] for p in leaves.positions)
    chosen = FirstMatch([as_filter(f) for f in written])
    choices = [chosen(leaf) for leaf in leaves.leaves]
    lost = [leaf for leaf, choice in zip(leaves.leaves, choices, strict=True) if choice is None]
    if lost:
        why, remedy = "no filter matches it", "add a filter for it, or `...` last"
        problems = [Problem(x.path, x.shape, x.text, why, remedy) for x in lost]
        raise FunctreeError(f"{count(len(lost), 'leaf')} in no part", problems)
    parts: list[list[Any]] = [[None] * len(flat) for _ in written]
    for position, choice in zip(positions, choices, strict=True):
        parts[choice or 0][position] = flat[position]
    paths = tuple(leaf.path for leaf in leaves.leaves)
    static = Static(treedef, paths, positions, _statics(tree, flat, set(positions)))
    return (static, *(treedef.unflatten(part) for part in parts))


def _statics(tree: Any, flat: Sequence[Any], arrays: set[int]) -> tuple[tuple[int, type, Any], ...]:
    values = tuple((i, type(x), x) for i, x in enumerate(flat) if x is not None and i not in arrays)
    try:
        hash(values)
    except TypeError:
        raise _unhashable(tree, values) from None
    return values


def _unhashable(tree: Any, values: Sequence[tuple[int, type, Any]]) -> FunctreeError:
    from_path = [path for path, _ in _with_paths(tree)]
    problems = []
    for i, kind, value in values:
        if not _hashable(value):
            why = "is neither an array nor hashable, so it can be neither traced nor static"
            problems.append(Problem(from_path[i], None, kind.__name__, why, "make it an array, or something hashable"))
    return FunctreeError(f"{count(len(problems), 'leaf')} cannot be static", problems)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _with_paths(tree: Any) -> list[tuple[Path, Any]]:
    return [(Path.of(keys), x) for keys, x in tree_flatten_with_path(tree, is_leaf=_is_none)[0]]


def merge(static: Static, *parts: Any) -> Any:
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
    if not isinstance(static, Static):
        raise FunctreeError(f"merge takes the `static` of a split first, not a {type(static).__name__}")
    flat: list[Any] = [None] * static.treedef.num_leaves
    for i, _, value in static.values:
        flat[i] = value
    columns = [_aligned(static, part, i) for i, part in enumerate(parts)]
    problems = []
    for path, position in zip(static.paths, static.positions, strict=True):
        found = [column[position] for column in columns if column[position] is not None]
        if len(found) == 1:
            flat[position] = found[0]
        else:
            why = f"is in {len(found)} parts" if found else "is in none of the parts"
            problems.append(Problem(path, None, "", why, "give each array in exactly one part"))
    if problems:
        raise FunctreeError(f"{count(len(problems), 'leaf')} cannot be merged", problems)
    return static.treedef.unflatten(flat)


def _aligned(static: Static, part: Any, index: int) -> list[Any]:
    flat, treedef = tree_flatten(part, is_leaf=_is_none)
    if treedef != static.treedef:
        have = tree_structure(part).num_leaves
        raise FunctreeError(
            f"part {index} is of another structure than the tree that was split: a {type(part).__name__} with "
            f"{count(have, 'leaf')}; parts keep the tree's structure, with None where an array is elsewhere"
        )
    arrays = set(static.positions)
    stray = [i for i, value in enumerate(flat) if value is not None and i not in arrays]
    if stray:
        paths = [path for path, _ in _with_paths(part)]
        why = "was not an array of the tree that was split"
        problems = [Problem(paths[i], None, "", why, "leave it out") for i in stray]
        raise FunctreeError(f"part {index} has {count(len(stray), 'leaf')} too many", problems)
    return flat
