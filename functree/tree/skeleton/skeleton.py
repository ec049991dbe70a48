"""A tree ─► its `Skeleton`: the tree without its arrays, and functions from a tree to its arrays and back."""

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
    """A tree without its arrays. It is hashable, and equal to the skeletons of trees that differ only in their arrays.

    Static values are compared with their types, so `1`, `True` and `1.0` are different. A skeleton holds no array.

    Attributes:
        treedef: JAX's treedef of the tree.
        places: the indices of the arrays among all leaves, in JAX's order.
        others: (index, value) of the leaves that are not arrays.
    """

    def __init__(self, treedef: Any, places: Sequence[int], others: Sequence[tuple[int, Any]]):
        self.treedef: Any = treedef
        self.places: tuple[int, ...] = tuple(places)
        self.others: tuple[tuple[int, Any], ...] = tuple(others)

    @classmethod
    def of(cls, tree: Any) -> "Skeleton":
        """The skeleton of a tree, whose arrays may be traced or abstract."""
        return cls.apart(tree)[0]

    @classmethod
    def apart(cls, tree: Any) -> tuple["Skeleton", list[Any]]:
        """The skeleton of a tree, and its arrays in JAX's order."""
        leaves, treedef = tree_flatten(tree)
        places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
        arrays = set(places)
        others = [(place, leaf) for place, leaf in enumerate(leaves) if place not in arrays]
        return cls(treedef, places, others), [leaves[place] for place in places]

    def learn(self, tree: Any, functions: bool = False) -> "Skeleton":
        """Find the paths and static values in a tree with this skeleton. Returns the skeleton itself.

        Otherwise they are found in a sample, in which other objects are in the place of the arrays. The constructors of
        some classes do not accept these.

        Args:
            tree: a tree with this skeleton. Nothing of its arrays is kept.
            functions: whether to generate `take` and `build` from it too.
        """
        found: dict[str, Any] = {"paths": _paths(tree), "statics": _static_values(tree)}
        if functions:
            found["_code"] = _functions(tree)
        vars(self).update(found)
        return self

    # From a tree to its arrays

    @cached_property
    def take(self) -> Callable[[Any], list[Any] | None]:
        """A function from a tree to its arrays, in JAX's order. For a tree with another skeleton it returns None.

        The function is generated, for wrappers that flatten many trees with one skeleton. It does not check that the
        values in the place of arrays are arrays.
        """
        return self._code.take

    # From values to a tree

    @cached_property
    def build(self) -> Callable[[Sequence[Any]], Any]:
        """A function from arrays, in JAX's order, to the tree. It is generated, like `take`."""
        return self._code.build

    def fill(self, values: Iterable[Any]) -> Any:
        """The tree with a value for each array. If this is needed more than a few times, `build` is faster."""
        return self._unflatten(values, dict(self.others))

    def spread(self, values: Iterable[Any]) -> Any:
        """A tree with a value for each array, and None in the place of other leaves."""
        return self._unflatten(values, {})

    def _unflatten(self, values: Iterable[Any], others: dict[int, Any]) -> Any:
        leaves = [others.get(place) for place in range(self.treedef.num_leaves)]
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return self.treedef.unflatten(leaves)

    # Paths and static values

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The path of each array."""
        return _paths(self._sample)

    @cached_property
    def keys(self) -> tuple[Any, ...]:
        """A JAX key for each array, with the text of the whole path as its name."""
        return tuple(GetAttrKey(str(path)) for path in self.paths)

    @cached_property
    def statics(self) -> tuple[tuple[Path, Any], ...]:
        """All static values with their paths: leaves that are not arrays, and static data of nodes."""
        return _static_values(self._sample)

    def check_hashable(self) -> None:
        """Raise FunctreeError if static values cannot be hashed. The error lists them by path."""
        lost = [(path, value) for path, value in self.statics if not is_hashable(value)]
        if lost:
            problems = [_unhashable(path, value) for path, value in lost]
            raise FunctreeError(f"{count(len(problems), 'leaf')} cannot be static", problems)

    def __len__(self) -> int:
        """The number of arrays."""
        return len(self.places)

    @cached_property
    def _sample(self) -> Any:
        """A tree with this skeleton, from which the code is written."""
        # Different objects, because the kind of a named tuple is found by comparing children by identity.
        return self.fill(jax.ShapeDtypeStruct((), "float32") for _ in self.places)

    @cached_property
    def _code(self) -> "_Functions":
        """The generated functions. They are generated when they are first needed, since many skeletons need none."""
        return _functions(self._sample)

    def __reduce__(self) -> tuple[Any, ...]:
        # By a tree: JAX cannot pickle the treedef of a tree with modules. Generated functions cannot be pickled either;
        # they are generated again where they are needed.
        return Skeleton.of, (self._sample,)

    def __copy__(self) -> "Skeleton":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Skeleton":
        return self  # it is immutable

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
        # A skeleton has a hash even if some of its values have none, so that it can be compared and printed in errors.
        others = tuple(StaticValue(value) for _, value in self.others if is_hashable(value))
        return hash((StaticValue(self.treedef), self.places, others))

    def __repr__(self) -> str:
        return f"<Skeleton: {count(len(self), 'array')}, {count(len(self.others), 'other leaf')}>"


class _Functions(NamedTuple):
    """The generated functions of a skeleton."""

    take: Callable[[Any], list[Any] | None]
    build: Callable[[Sequence[Any]], Any]


def _functions(sample: Any) -> _Functions:
    """The functions for trees with the skeleton of a sample."""
    what = type(sample).__name__
    take = TakeCode()
    take.visit(sample, "tree")
    # A module without one of its fields, or a dict with other keys, raises KeyError: it has another structure.
    take.lines = ["try:", *(f"    {line}" for line in take.lines), f"    return [{', '.join(take.arrays)}]"]
    take.lines += ["except KeyError:", "    return None"]
    build = BuildCode()
    tree = build.visit(sample)
    arrays = "".join(f"a{i}, " for i in range(build.arrays))
    build.lines = [f"{arrays or '()'} = arrays", *build.lines, f"return {tree}"]
    return _Functions(take.function("take(tree)", what), build.function("build(arrays)", what))


def _paths(tree: Any) -> tuple[Path, ...]:
    """The path of each array of a tree."""
    return tuple(Path(keys) for keys in _array_paths(tree, ()))


def _static_values(tree: Any) -> tuple[tuple[Path, Any], ...]:
    """All static values of a tree with their paths."""
    return tuple((Path(keys), value) for keys, value in _statics(tree, ()))


def _array_paths(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The path of each array below a node."""
    kind = kind_of(node)
    if kind is ARRAY:
        yield path
    elif kind is not NONE and kind is not STATIC:
        for keys, child in kind.paths(node):
            yield from _array_paths(child, (*path, *keys))


def _statics(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The path and value of each static value below a node."""
    kind = kind_of(node)
    for keys, value in kind.statics(node):
        yield (*path, *keys), value
    for keys, child in kind.paths(node):
        yield from _statics(child, (*path, *keys))


def _unhashable(path: Path, value: Any) -> Problem:
    why = "is neither an array nor hashable, so it can be neither traced nor static"
    return Problem(path, None, type(value).__name__, why, "make it an array, or something hashable")
