"""A tree ─► its `Skeleton`: the tree without its arrays, and the ways from a tree to arrays and back."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.tree_util import GetAttrKey, tree_flatten

from functree.errors import FunctreeError, Problem, count
from functree.tree.arrays import is_array
from functree.tree.paths import Path
from functree.tree.skeleton.kinds import ARRAY, NONE, STATIC, BuildCode, TakeCode, kind_of
from functree.tree.skeleton.static_value import StaticValue, is_hashable


class Skeleton:
    """A tree without its arrays: hashable, and equal to that of another tree which differs in nothing but arrays.

    Static values are compared with their types, so `1`, `True` and `1.0` are three. Nothing in it holds an array.

    Attributes:
        treedef: JAX's structure of the tree.
        places: of the arrays, among the leaves in JAX's order.
        others: (place, value) of the leaves that are no arrays.
    """

    def __init__(self, treedef: Any, places: Sequence[int], others: Sequence[tuple[int, Any]]):
        self.treedef: Any = treedef
        self.places: tuple[int, ...] = tuple(places)
        self.others: tuple[tuple[int, Any], ...] = tuple(others)

    @classmethod
    def of(cls, tree: Any) -> "Skeleton":
        """The skeleton of a tree, whose arrays may be traced or abstract."""
        leaves, treedef = tree_flatten(tree)
        places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
        arrays = set(places)
        others = [(place, leaf) for place, leaf in enumerate(leaves) if place not in arrays]
        return cls(treedef, places, others)

    # From a tree to its arrays

    @cached_property
    def take(self) -> Callable[[Any], list[Any] | None]:
        """A function from a tree to its arrays, in JAX's order; from a tree of another skeleton, to None.

        It is generated, for wrappers that take many trees of one skeleton apart. It does not look at what stands in
        an array's place.
        """
        return self._code.take

    # From values to a tree

    @cached_property
    def build(self) -> Callable[[Sequence[Any]], Any]:
        """A function from arrays, in JAX's order, to the tree; generated as `take` is."""
        return self._code.build

    def fill(self, values: Iterable[Any]) -> Any:
        """The tree with a value for each array. For a single time: `build` is worth its code after a few."""
        return self._unflatten(values, dict(self.others))

    def spread(self, values: Iterable[Any]) -> Any:
        """A tree with a value for each array, and None where other leaves are."""
        return self._unflatten(values, {})

    def _unflatten(self, values: Iterable[Any], others: dict[int, Any]) -> Any:
        leaves = [others.get(place) for place in range(self.treedef.num_leaves)]
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return self.treedef.unflatten(leaves)

    # What it knows

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The path of each array."""
        return tuple(Path(keys) for keys in _array_paths(self._sample, ()))

    @cached_property
    def keys(self) -> tuple[Any, ...]:
        """JAX's key for each array, with the whole path as its name."""
        return tuple(GetAttrKey(str(path)) for path in self.paths)

    @cached_property
    def statics(self) -> tuple[tuple[Path, Any], ...]:
        """All that is static, by path: leaves that are no arrays, and static fields of modules."""
        return tuple((Path(keys), value) for keys, value in _statics(self._sample, ()))

    def check_hashable(self) -> None:
        """Raise FunctreeError for static values that cannot be hashed, by path."""
        lost = [(path, value) for path, value in self.statics if not is_hashable(value)]
        if lost:
            problems = [_unhashable(path, value) for path, value in lost]
            raise FunctreeError(f"{count(len(problems), 'leaf')} cannot be static", problems)

    def __len__(self) -> int:
        """How many arrays such a tree has."""
        return len(self.places)

    @cached_property
    def _sample(self) -> Any:
        """A tree of this skeleton, which the code is written from."""
        return self.fill([_SAMPLE_ARRAY] * len(self))

    @cached_property
    def _code(self) -> "_Functions":
        what = type(self._sample).__name__
        take = TakeCode()
        take.visit(self._sample, "tree")
        take.lines = ["try:", *(f"    {line}" for line in take.lines), f"    return [{', '.join(take.arrays)}]"]
        take.lines += ["except KeyError:", "    return None"]
        build = BuildCode()
        tree = build.visit(self._sample)
        arrays = "".join(f"a{i}, " for i in range(build.arrays))
        build.lines = [f"{arrays or '()'} = arrays", *build.lines, f"return {tree}"]
        return _Functions(take.function("take(tree)", what), build.function("build(arrays)", what))

    def __reduce__(self) -> tuple[Any, ...]:
        return Skeleton, (self.treedef, self.places, self.others)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Skeleton) or self._hash != other._hash or self.places != other.places:
            return False
        return self._compared == other._compared

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _compared(self) -> StaticValue:
        return StaticValue((self.treedef, self.others))

    @cached_property
    def _hash(self) -> int:
        others = tuple(StaticValue(value) for _, value in self.others if is_hashable(value))
        return hash((StaticValue(self.treedef), self.places, others))

    def __repr__(self) -> str:
        return f"<Skeleton: {count(len(self), 'array')}, {count(len(self.others), 'other leaf')}>"


class _Functions(NamedTuple):
    """The generated functions of a skeleton."""

    take: Callable[[Any], list[Any] | None]
    build: Callable[[Sequence[Any]], Any]


# Stands for each array where the code, the paths and the statics of a skeleton are read from a sample.
_SAMPLE_ARRAY = jax.ShapeDtypeStruct((), "float32")


def _array_paths(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    kind = kind_of(node)
    if kind is ARRAY:
        yield path
    elif kind is not NONE and kind is not STATIC:
        for keys, child in kind.paths(node):
            yield from _array_paths(child, (*path, *keys))


def _statics(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    kind = kind_of(node)
    for keys, value in kind.statics(node):
        yield (*path, *keys), value
    for keys, child in kind.paths(node):
        yield from _statics(child, (*path, *keys))


def _unhashable(path: Path, value: Any) -> Problem:
    why = "is neither an array nor hashable, so it can be neither traced nor static"
    return Problem(path, None, type(value).__name__, why, "make it an array, or something hashable")
