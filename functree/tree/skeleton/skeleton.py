"""A `Skeleton` is a tree without its arrays, and holds their paths."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.tree_util import GetAttrKey, tree_flatten

from functree.errors import (
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
    """A tree without its arrays: hashable, and equal for trees that differ only in their arrays.

    Leaves are compared by type and value, so `1`, `True` and `1.0` are different leaves. Static
    data of nodes is compared with `==`, as in JAX. A skeleton does not detect in-place changes to
    static data, and it holds no arrays.

    `learn` finds the paths and the static values, which do not exist before. A tree is never built
    to find them, because some node classes accept only their original children.

    Attributes:
        treedef: JAX's treedef of the tree.
        indices: the indices of the arrays among all leaves, in JAX's order.
        others: the (index, value) pairs of the leaves that are not arrays.
        paths: the path of each array.
    """

    paths: tuple[Path, ...]
    _statics: tuple[list[Keys], list[object]]

    def __init__(
        self,
        treedef: TreeDef,
        indices: Sequence[int],
        others: Sequence[tuple[int, object]],
    ):
        self.treedef: TreeDef = treedef
        self.indices: tuple[int, ...] = tuple(indices)
        self.others: tuple[tuple[int, object], ...] = tuple(others)
        self._was_built: bool = False
        self._form: Form | None = None

    @classmethod
    def of(cls, tree: Tree, paths: Iterable[Path] | None = None) -> "Skeleton":
        """Return the skeleton of a tree, whose arrays may be traced or abstract.

        Args:
            tree: the tree.
            paths: the paths of the arrays, if they are known.
        """
        skeleton, _ = cls.apart(tree)
        if paths is not None:
            skeleton.paths = tuple(paths)
        return skeleton

    @classmethod
    def apart(cls, tree: Tree) -> tuple["Skeleton", list[AnyArray]]:
        """Separate a tree into its skeleton and its arrays, in JAX's order."""
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
        """Find the paths and static values in a tree with this skeleton, and return `self`."""
        paths: list[Path] = []
        # Two lists instead of pairs: a model has thousands of static values, and Python's garbage
        # collector runs more often when a trace makes more objects.
        keys: list[Keys] = []
        values: list[object] = []
        for path, node, kind in walk(tree, in_model=True):
            if kind is ARRAY:
                paths.append(Path(path))
            for below, value in kind.statics(node):
                keys.append((*path, *below))
                values.append(value)
        self.paths, self._statics = tuple(paths), (keys, values)
        return self

    # From values to a tree

    def build(self, arrays: Sequence[AnyArray]) -> Tree:
        """Build a tree with these arrays, in JAX's order.

        The second call generates a far faster function, which replaces this method. Most results
        are built either once per compilation, or in every step of a loop.
        """
        tree = self.fill(arrays)
        if self._was_built:
            self._form = form_of(tree)  # kept alive, so that other trees can use it
            vars(self)["build"] = self._form.build
        self._was_built = True
        return tree

    def fill(self, values: Iterable[object]) -> Tree:
        """Build the tree with a value for each array."""
        return self._unflatten(values, dict(self.others))

    def spread(self, values: Iterable[object]) -> Tree:
        """Build the tree with a value for each array, and None for other leaves."""
        return self._unflatten(values, {})

    def _unflatten(self, values: Iterable[object], others: dict[int, object]) -> Tree:
        leaves = list(map(others.get, range(self.treedef.num_leaves)))
        for index, value in zip(self.indices, values, strict=True):
            leaves[index] = value
        return self.treedef.unflatten(leaves)

    # Paths and static values

    @cached_property
    def keys(self) -> tuple[object, ...]:
        """A JAX key for each array. The key's name is the text of the array's whole path."""
        return tuple(GetAttrKey(str(path)) for path in self.paths)

    @property
    def statics(self) -> Iterator[tuple[Keys, object]]:
        """All static values with paths: leaves that are not arrays, and static data of nodes."""
        return zip(*self._statics, strict=True)

    def check_hashable(self) -> None:
        """Check that all leaves that are not arrays can be hashed.

        Static data of nodes needs no hash: it is compared with `==`, as in JAX.

        Raises:
            FunctreeError: if leaves cannot be hashed. The error lists them by path.
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
        """Return the number of arrays."""
        return len(self.indices)

    def __copy__(self) -> "Skeleton":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Skeleton":
        return self  # it is immutable

    def __reduce__(self) -> Any:
        # Equinox compares some objects in its treedefs by identity, and pickle copies them. The
        # treedef would therefore unpickle, and then fail in use.
        raise FunctreeTypeError(
            "static data from `ft.split` or `ft.pack` cannot be pickled, because treedefs of "
            "Equinox modules do not survive pickling: pickle the tree itself"
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
    remedy = "make the leaf an array or a hashable value"
    return Problem(path, None, type(value).__name__, why, remedy)


def abstract_result(fn: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Run `jax.eval_shape` on trees whose leaves need not be arrays."""
    skeleton, arrays = Skeleton.apart(tree)
    results: list[Skeleton] = []

    def run(*arrays: AnyArray) -> list[AnyArray]:
        result, values = Skeleton.apart(fn(skeleton.fill(arrays)))
        results.append(result)
        return values

    abstract = jax.eval_shape(run, *arrays)
    return results[0].fill(abstract)
