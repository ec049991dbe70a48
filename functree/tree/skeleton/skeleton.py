"""A tree ─► its `Skeleton`: the tree without its arrays, with their paths."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from jax.tree_util import GetAttrKey, tree_flatten

from functree.errors import (
    USERS_ERRORS,
    FunctreeError,
    FunctreeTypeError,
    Problem,
    count,
    error_text,
)
from functree.tree.arrays import AnyArray, Tree, TreeDef, is_array
from functree.tree.nodes import walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.form import Form, form_of
from functree.tree.skeleton.kinds import ARRAY, STATIC
from functree.tree.skeleton.own_copy import own_copy
from functree.tree.skeleton.static_value import StaticValue, is_hashable, static_hash
from functree.tree.skeleton.treedefs import Refusal, StoredNode, build_each, first_leaf_depth


class Skeleton:
    """A tree without its arrays. It is hashable, and equal to the skeletons of trees that differ
    only in their arrays.

    Static values are compared with their types, so `1`, `True` and `1.0` are different. A skeleton
    holds no array.

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
        self._contents: _Contents | None = None
        self._changeable: bool = False
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
        itself.

        From here on the skeleton has copies of the static data that can be changed in place, so
        that it stays what it is.
        """
        contents = self._contents = _Contents.of(tree)
        self._paths = contents.paths
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

    def spread_plain(self, values: Iterable[object]) -> tuple[Tree, Sequence[Problem]]:
        """The same, with a dict in the place of each node whose class refuses its values.

        The leaves have the same paths.

        Returns:
            The tree, and a problem for each of these nodes.
        """
        refusals: list[Refusal] = []

        def otherwise(refusal: Refusal, children: Sequence[Tree]) -> Tree:
            refusals.append(refusal)
            return OrderedDict(zip(self._keys_of(refusal), children, strict=True))

        leaves = self._leaves(values, {})
        tree = build_each(self.treedef, leaves, otherwise)
        return tree, [self._refused(refusal, leaves) for refusal in refusals]

    def _keys_of(self, refusal: Refusal) -> Iterator[Hashable]:
        """The key of each child of a node; a number for one without arrays."""
        first = refusal.leaves.start
        for i, child in enumerate(refusal.treedef.children()):
            last = first + child.num_leaves
            if child.num_leaves == 0 or first not in self.indices:
                yield i
            else:
                path = self.paths[self.indices.index(first)]
                yield path[len(path) - first_leaf_depth(child) - 1]
            first = last

    def _refused(self, refusal: Refusal, leaves: Sequence[object]) -> Problem:
        """The problem of a node whose class refuses its values."""
        own = [i for i, index in enumerate(self.indices) if index in refusal.leaves]
        path = None
        if own and self._paths is not None:
            # The path of the node is not known, but that of its first array is.
            path = self._paths[own[0]]
        values = [leaves[self.indices[i]] for i in own]
        name = refusal.treedef.node_data()[0].__name__
        kinds = " and ".join(sorted({type(value).__name__ for value in values}))
        why = f"its class {name} cannot be unflattened with {kinds}: {error_text(refusal.error)}"
        remedy = "take any value where it is unflattened, as JAX asks, and check in the constructor"
        if any(value is None for value in values):
            remedy += "; or choose all arrays of the node, or none"
        return Problem(path, None, name, why, remedy)

    def _unflatten(self, values: Iterable[object], others: dict[int, object]) -> Tree:
        """A tree with these values.

        A node whose class refuses to be built with None for all of its leaves is None itself.

        Raises:
            FunctreeError: the class of a node refuses its values. The error lists the nodes.
        """
        leaves = self._leaves(values, others)
        try:
            return self._structure().unflatten(leaves)
        except USERS_ERRORS as error:
            tree, refusals = self._by_node(leaves)
            if not refusals:
                return tree
            problems = [self._refused(refusal, leaves) for refusal in refusals]
            headline = f"{count(len(problems), 'node')} cannot be built with these values"
            raise FunctreeTypeError(headline, problems) from error

    def _by_node(self, leaves: Sequence[object]) -> tuple[Tree, Sequence[Refusal]]:
        """The tree with None in the place of the nodes that cannot be built, and those of these
        that have values."""
        refusals: list[Refusal] = []

        def otherwise(refusal: Refusal, children: Sequence[Tree]) -> Tree:
            if any(leaves[index] is not None for index in refusal.leaves):
                refusals.append(refusal)
            return None

        return build_each(self.treedef, leaves, otherwise), refusals

    def _leaves(self, values: Iterable[object], others: dict[int, object]) -> list[object]:
        """A value for each leaf of the tree."""
        leaves = list(map(others.get, range(self.treedef.num_leaves)))
        for index, value in zip(self.indices, values, strict=True):
            leaves[index] = value
        return leaves

    def _structure(self) -> TreeDef:
        """The treedef, for one more tree."""
        return own_copy(self.treedef) if self._changeable else self.treedef

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
        contents = self._contents
        if contents is None:
            raise FunctreeError("the skeleton of a tree that was not read has no static values")
        return zip(contents.keys, contents.values, strict=True)

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

    def __reduce__(self) -> tuple[object, ...]:
        # Generated functions cannot be pickled. They are generated again where they are needed.
        known = self.indices, self.others, self._paths, self._contents
        return _restored, (StoredNode.of(self.treedef), *known)

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
        others = [static_hash(value) for _, value in self.others]
        return hash((static_hash(self.treedef), self.indices, *others))

    def __repr__(self) -> str:
        return f"<Skeleton: {count(len(self), 'array')}, {count(len(self.others), 'other leaf')}>"


def _restored(
    stored: StoredNode,
    indices: Sequence[int],
    others: Sequence[tuple[int, object]],
    paths: Sequence[Path] | None,
    contents: "_Contents | None",
) -> Skeleton:
    """A skeleton that was pickled."""
    skeleton = Skeleton(stored.treedef(), indices, others, paths)
    skeleton._contents = contents
    skeleton._changeable = contents is not None and contents.changeable
    return skeleton


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
