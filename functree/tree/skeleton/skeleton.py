"""A tree ─► its `Skeleton`: the tree without its arrays, with their paths."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import jax
from jax.tree_util import GetAttrKey, tree_flatten

from functree.errors import FunctreeTypeError, Problem, count
from functree.tree.arrays import AnyArray, Tree, TreeDef, is_array
from functree.tree.nodes import walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.form import Form, form_of
from functree.tree.skeleton.kinds import ARRAY, STATIC
from functree.tree.skeleton.own_copy import own_copy
from functree.tree.skeleton.static_value import StaticValue, is_hashable


class Skeleton:
    """A tree without its arrays. It is hashable, and equal to the skeletons of trees that differ
    only in their arrays.

    Static values are compared with their types, so `1`, `True` and `1.0` are different. A skeleton
    holds no array.

    Attributes:
        treedef: JAX's treedef of the tree.
        indices: the indices of the arrays among all leaves, in JAX's order.
        others: (index, value) of the leaves that are not arrays.
    """

    def __init__(
        self, treedef: TreeDef, indices: Sequence[int], others: Sequence[tuple[int, object]]
    ):
        self.treedef: TreeDef = treedef
        self.indices: tuple[int, ...] = tuple(indices)
        self.others: tuple[tuple[int, object], ...] = tuple(others)
        self._changeable: bool = False
        self._was_built: bool = False
        self._form: Form | None = None

    @classmethod
    def of(cls, tree: Tree) -> "Skeleton":
        """The skeleton of a tree, whose arrays may be traced or abstract."""
        return cls.apart(tree)[0]

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
        itself.

        Otherwise they are found in a sample, in which other objects are in the place of the arrays.
        The constructors of some classes do not accept these.

        From here on the skeleton has copies of the static data that can be changed in place, so
        that it stays what it is.
        """
        contents = vars(self)["_contents"] = _Contents.of(tree)
        if contents.changeable:
            self.treedef, self._changeable = own_copy(self.treedef), True
        return self

    # From values to a tree

    def build(self, arrays: Sequence[AnyArray]) -> Tree:
        """A new tree with these arrays, in JAX's order; it shares nothing that can be changed with
        other trees.

        The second call generates a function, which is far faster and takes the place of this one.
        Most results are built once for each compilation, or in every step of a loop.
        """
        tree = self.fresh(arrays)
        if self._was_built:
            self._form = form_of(tree)  # kept, so that others find it
            vars(self)["build"] = self._form.build
        self._was_built = True
        return tree

    def fill(self, values: Iterable[object]) -> Tree:
        """The tree with a value for each array."""
        return self._unflatten(values, dict(self.others))

    def fresh(self, values: Iterable[object]) -> Tree:
        """The same, but the tree shares nothing that can be changed with other trees."""
        return self._unflatten(values, {index: own_copy(value) for index, value in self.others})

    def spread(self, values: Iterable[object]) -> Tree:
        """A tree with a value for each array, and None in the place of other leaves."""
        return self._unflatten(values, {})

    def _unflatten(self, values: Iterable[object], others: dict[int, object]) -> Tree:
        leaves = list(map(others.get, range(self.treedef.num_leaves)))
        for index, value in zip(self.indices, values, strict=True):
            leaves[index] = value
        treedef = self.treedef
        if self._changeable:
            treedef = own_copy(treedef)
        return treedef.unflatten(leaves)

    # Paths and static values

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path of each array."""
        return self._contents.paths

    @cached_property
    def keys(self) -> tuple[object, ...]:
        """A JAX key for each array, with the text of the whole path as its name."""
        return tuple(GetAttrKey(str(path)) for path in self.paths)

    @property
    def statics(self) -> Iterator[tuple[Keys, object]]:
        """All static values with their paths: leaves that are not arrays, and static data of
        nodes."""
        return zip(self._contents.keys, self._contents.values, strict=True)

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

    @cached_property
    def _contents(self) -> "_Contents":
        return _Contents.of(self._sample)

    @cached_property
    def _sample(self) -> Tree:
        """A tree with this skeleton, from which the code is written."""
        # Different objects, because the kind of a named tuple is found by comparing children by
        # identity.
        return self.fill(jax.ShapeDtypeStruct((), "float32") for _ in self.indices)

    def __reduce__(self) -> tuple[object, ...]:
        # By a tree: JAX cannot pickle the treedef of a tree with modules. Generated functions
        # cannot be pickled either; they are generated again where they are needed.
        return Skeleton.of, (self._sample,)

    def __copy__(self) -> "Skeleton":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Skeleton":
        return self  # it is immutable

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if (
            not isinstance(other, Skeleton)
            or self._hash != other._hash
            or self.indices != other.indices
        ):
            return False
        return self._compared == other._compared

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _compared(self) -> StaticValue:
        return StaticValue((self.treedef, self.others))

    @cached_property
    def _hash(self) -> int:
        others = tuple(StaticValue(value) for _, value in self.others)
        return hash((StaticValue(self.treedef), self.indices, others))

    def __repr__(self) -> str:
        return f"<Skeleton: {count(len(self), 'array')}, {count(len(self.others), 'other leaf')}>"


class _Contents(NamedTuple):
    """What a tree has besides its arrays.

    Attributes:
        paths: the path of each array.
        keys: the path of each static value.
        values: the static values; copies of those that can be changed in place.
        changeable: whether static data of a node is such a value.
    """

    paths: tuple[Path, ...]
    keys: tuple[Keys, ...]
    values: tuple[object, ...]
    changeable: bool

    @classmethod
    def of(cls, tree: Tree) -> "_Contents":
        """The contents of a tree, from one walk."""
        paths: list[Path] = []
        # Two lists: a model has thousands of static values, and a pair for each of them is one more
        # object for Python's garbage collector, which runs the more often the more objects a trace
        # makes.
        keys: list[Keys] = []
        values: list[object] = []
        changeable = False
        for path, node, kind in walk(tree, in_model=True):
            if kind is ARRAY:
                paths.append(Path(path))
            for below, value in kind.statics(node):
                keys.append((*path, *below))
                # A leaf that can be changed stays what it is: it is an error, or of a result.
                if kind is not STATIC:
                    kept = own_copy(value)
                    changeable = changeable or kept is not value
                    value = kept
                values.append(value)
        return cls(tuple(paths), tuple(keys), tuple(values), changeable)


def _unhashable(path: Path, value: object) -> Problem:
    why = "is neither an array nor hashable, so it can be neither traced nor static"
    return Problem(path, None, type(value).__name__, why, "make it an array, or something hashable")
