"""A tree ─► its `Skeleton`: the tree without its arrays, with their paths."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import jax
from jax.tree_util import GetAttrKey, tree_flatten

from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    Problem,
    count,
)
from functree.tree.arrays import AnyArray, Tree, TreeDef, is_array
from functree.tree.nodes import walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.kinds import ARRAY, Form, form_of
from functree.tree.skeleton.static_value import StaticValue, equal, is_hashable


class Skeleton:
    """A tree without its arrays. It is hashable, and equal to the skeletons of trees that differ
    only in their arrays.

    Leaves are compared with their types, so `1`, `True` and `1.0` are different leaves. Static data
    of nodes is compared as JAX compares it, by `==`, and a change of it in place goes unseen. A
    skeleton holds no array.

    Attributes:
        treedef: JAX's treedef of the tree.
        indices: the indices of the arrays among all leaves, in JAX's order.
        others: (index, value) of the leaves that are not arrays.

    Its paths and static values are known after `learn`; the paths also if they were given to it.
    They are never found out by building a tree: the classes of some nodes take only what they had.
    """

    def __init__(
        self,
        treedef: TreeDef,
        indices: Sequence[int],
        others: Sequence[tuple[int, object]],
        paths: Iterable[Path] | None = None,
    ):
        self.treedef: TreeDef = treedef
        self.indices: tuple[int, ...] = tuple(indices)
        self.others: tuple[tuple[int, object], ...] = tuple(others)
        self._paths: tuple[Path, ...] | None = None if paths is None else tuple(paths)
        self._statics: tuple[list[Keys], list[object]] | None = None
        self._was_built: bool = False
        self._form: Form | None = None

    @classmethod
    def of(cls, tree: Tree, paths: Iterable[Path] | None = None) -> "Skeleton":
        """The skeleton of a tree, whose arrays may be traced or abstract; with the paths of these,
        if they are known."""
        skeleton, _ = cls.apart(tree)
        return cls(skeleton.treedef, skeleton.indices, skeleton.others, paths)

    @classmethod
    def apart(cls, tree: Tree) -> tuple["Skeleton", list[AnyArray]]:
        """The skeleton of a tree, and its arrays in JAX's order."""
        leaves, treedef = tree_flatten(tree)
        indices: list[int] = []
        arrays: list[AnyArray] = []
        others: list[tuple[int, object]] = []
        for index, leaf in enumerate(leaves):
            if is_array(leaf):
                indices.append(index)
                arrays.append(leaf)
            else:
                others.append((index, leaf))
        return cls(treedef, indices, others), arrays

    def learn(self, tree: Tree) -> "Skeleton":
        """Find the paths and static values in a tree with this skeleton. Returns the skeleton
        itself."""
        paths: list[Path] = []
        # Two lists: a model has thousands of static values, and a pair for each of them is one more
        # object for Python's garbage collector, which runs the more often the more objects a trace
        # makes.
        keys: list[Keys] = []
        values: list[object] = []
        for path, node, kind in walk(tree, in_model=True):
            if kind is ARRAY:
                paths.append(Path(path))
            for below, value in kind.statics(node):
                keys.append((*path, *below))
                values.append(value)
        self._paths, self._statics = tuple(paths), (keys, values)
        return self

    # From values to a tree

    def build(self, arrays: Sequence[AnyArray]) -> Tree:
        """A new tree with these arrays, in JAX's order.

        The second call generates a function, which is far faster and takes the place of this one.
        Most results are built once for each compilation, or in every step of a loop.
        """
        tree = self.fill(arrays)
        if self._was_built:
            self._form = form_of(tree)  # kept, so that others find it
            vars(self)["build"] = self._form.build
        self._was_built = True
        return tree

    def fill(self, values: Iterable[object]) -> Tree:
        """The tree with a value for each array."""
        return self._unflatten(values, dict(self.others))

    def spread(self, values: Iterable[object]) -> Tree:
        """A tree with a value for each array, and None in the place of other leaves."""
        return self._unflatten(values, {})

    def _unflatten(self, values: Iterable[object], others: dict[int, object]) -> Tree:
        leaves = list(map(others.get, range(self.treedef.num_leaves)))
        for index, value in zip(self.indices, values, strict=True):
            leaves[index] = value
        return self.treedef.unflatten(leaves)

    # Paths and static values

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path of each array."""
        if self._paths is None:
            raise FunctreeError("the skeleton of a tree that was not read has no paths")
        return self._paths

    @cached_property
    def keys(self) -> tuple[object, ...]:
        """A JAX key for each array, with the text of the whole path as its name."""
        return tuple(GetAttrKey(str(path)) for path in self.paths)

    @property
    def statics(self) -> Iterator[tuple[Keys, object]]:
        """All static values with their paths: leaves that are not arrays, and static data of
        nodes."""
        if self._statics is None:
            raise FunctreeError("the skeleton of a tree that was not read has no static values")
        return zip(*self._statics, strict=True)

    def check_hashable(self) -> None:
        """Raise FunctreeError if leaves that are not arrays cannot be hashed. The error lists them
        by path.

        Static data of nodes needs no hash: it is compared by `==`, as JAX does.
        """
        wrong = {id(leaf) for _, leaf in self.others if not is_hashable(leaf)}
        if not wrong:
            return
        problems: list[Problem] = []
        for keys, value in self.statics:
            if id(value) in wrong:
                problems.append(_unhashable(Path(keys), value))
        raise FunctreeTypeError(f"{count(len(problems), 'leaf')} cannot be static", problems)

    def __len__(self) -> int:
        """The number of arrays."""
        return len(self.indices)

    def __copy__(self) -> "Skeleton":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Skeleton":
        return self  # it is immutable

    def __reduce__(self) -> Any:
        # Equinox compares some objects in its treedefs by identity, and pickle copies them: the
        # treedef would be unpickled, and fail where it is used.
        raise FunctreeTypeError(
            "static data of a tree (of `ft.split` or `ft.pack`) cannot be pickled, because JAX's "
            "treedefs of Equinox modules cannot: pickle the tree itself"
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if (
            not isinstance(other, Skeleton)
            or self._hash != other._hash
            or self.indices != other.indices
        ):
            return False
        return equal(self.treedef, other.treedef) and self._leaves == other._leaves

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _leaves(self) -> list[StaticValue]:
        return [StaticValue(value) for _, value in self.others]

    @cached_property
    def _hash(self) -> int:
        return hash((self.treedef, self.indices, *self._leaves))

    def __repr__(self) -> str:
        return f"<Skeleton: {count(len(self), 'array')}, {count(len(self.others), 'other leaf')}>"


def _unhashable(path: Path, value: object) -> Problem:
    why = "is neither an array nor hashable, so it can be neither traced nor static"
    return Problem(path, None, type(value).__name__, why, "make it an array, or something hashable")


T = TypeVar("T")


def abstract_result(fn: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`jax.eval_shape` for trees whose leaves need not be arrays."""
    skeleton, arrays = read_abstract(lambda tree: Skeleton.apart(fn(tree)), tree)
    return skeleton.fill(arrays)


def read_abstract(
    fn: Callable[[Tree], tuple[T, Sequence[AnyArray]]], tree: Tree
) -> tuple[T, list[jax.ShapeDtypeStruct]]:
    """What a function returns beside the arrays that it returns, and these, abstract.

    So a tree that was made in the trace can be read there, with its traced arrays: it is not built
    once more with abstract ones, which the class of a node may refuse. What is returned beside the
    arrays must not be used for others that it may have.
    """
    skeleton, arrays = Skeleton.apart(tree)
    beside: list[T] = []

    def run(*arrays: AnyArray) -> list[AnyArray]:
        found, values = fn(skeleton.fill(arrays))
        beside.append(found)
        return list(values)

    abstract = jax.eval_shape(run, *arrays)
    return beside[0], abstract
