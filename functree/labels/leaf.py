"""`Leaf`: one array of a tree, with all that filters, layouts and messages ask about it."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import Problem
from functree.tree.arrays import array_text, unheld
from functree.tree.axes import Axes
from functree.tree.paths import Key, Path


def unheld_problem(path: Path, value: Any) -> Problem:
    """The problem of a NumPy array that JAX cannot hold."""
    why, remedy = unheld(value) or ("", "")
    return Problem(path, tuple(value.shape), f"{value.dtype}{list(value.shape)}", why, remedy)


class FollowedLeaf(NamedTuple):
    """The leaf whose decision another leaf takes: the moment of a parameter is sharded as this is.

    Attributes:
        path: the path of that leaf; None for a leaf that depends on no parameter, such as the count
            of an optimizer's steps, and is replicated.
        dims: for each dimension, the index of that leaf's dimension that it is; None for a
            dimension of its own.
        known: False if the leaf depends on the shapes of parameters in a way that cannot be
            determined.
        batched: whether its training state was made under `vmap`, so that each leaf has a further
            dimension.
    """

    path: Path | None
    dims: tuple[int | None, ...]
    known: bool = True
    batched: bool = False

    def has_all_of(self, ndim: int) -> bool:
        """Whether a leaf has all dimensions of the other one, which has `ndim`, in their order."""
        return self.dims == tuple(range(ndim))


class Root(NamedTuple):
    """A name above a leaf with which a pattern may begin.

    Attributes:
        what: what has the name, in messages: an argument, a field of a training state, a key.
        path: the path of the leaf from this name on.
    """

    what: str
    path: Path


class Leaf(NamedTuple):
    """An array of a tree, with all that a filter or a layout may need to know about it.

    Attributes:
        path: from the root of the tree.
        value: the array; it may be traced or abstract.
        axes: the names of its dimensions.
        annotated: whether its axes are named, by an annotation or from outside.
        unnamed: for each dimension, the token of its annotation if that token is not a name, or an
            empty text. Empty if all dimensions are named.
        spec: the `PartitionSpec` in its annotation, or None.
        misfit: why its axes cannot be determined, or None.
        within: the classes of the nodes above it, outermost first.
        seen: the path that filters see. A layout's filters see the path from the root of the tree
            that the layout is for; in a training state, the path in the model. None if the leaf has
            no such path: only patterns that name it match it, and `...`.
        roots: the names above the leaf with which patterns may begin.
        stacked: the number of leading dimensions that belong to stacks of layers.
        buffer: whether it is marked as not trained.
        follows: the leaf whose decision it takes; None for a leaf that layouts decide about.
        unread: why an annotation does not name its axes although there is one, and the remedy; None
            if there is none.
    """

    path: Path
    value: Any
    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: Problem | None = None
    within: tuple[type, ...] = ()
    seen: Path | None = None
    roots: tuple[Root, ...] = ()
    stacked: int = 0
    buffer: bool = False
    follows: FollowedLeaf | None = None
    unread: tuple[str, str] | None = None

    def named(self, name: tuple[Key, ...]) -> Path | None:
        """The path of the leaf from a name above it on, which is given as a path of one key; None
        if no pattern may begin with this name."""
        for root in self.roots:
            if root.path[:1] == name:
                return root.path
        return None

    @property
    def kind(self) -> Hashable:
        """All that a layout may ask about a leaf, except for paths."""
        return (
            self.axes,
            self.value.shape,
            self.stacked,
            self.annotated,
            self.unnamed,
            self.spec,
            self.misfit,
            self.unread,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape

    @property
    def text(self) -> str:
        """The leaf in messages: `f32[512, 128]   "embed hidden"`."""
        text = array_text(self.value)
        if any(self.axes):
            text += f'   "{self.axes}"'
        return text

    def is_below(self, classes: type | tuple[type, ...]) -> bool:
        """Whether it is below an instance of a class, or of one of several classes."""
        return any(issubclass(cls, classes) for cls in self.within)

    def dimension(self, dim: int) -> str:
        """A dimension in messages: its axis, or its position if it has no name."""
        # An array whose annotation does not fit may have more dimensions than axes.
        name = self.axes[dim] if dim < len(self.axes) else None
        return f'"{name}"' if name else f"dimension {dim}"

    def problem(self, why: str, remedy: str) -> Problem:
        """A `Problem` of this leaf."""
        return Problem(self.path, tuple(self.shape), self.text, why, remedy)


def meeting(leaves: Iterable[Leaf]) -> list[Problem]:
    """The problems of leaves at one path, of which whoever knows leaves by path would take one for
    the other: a node whose class gives two children one key."""
    found: dict[Path, Leaf] = {}
    problems: list[Problem] = []
    for leaf in leaves:
        if found.setdefault(leaf.path, leaf) is not leaf:
            problems.append(
                leaf.problem(
                    "is the path of several arrays: a class gives two of its children one key",
                    "give each child a key of its own in the class's `tree_flatten_with_keys`",
                )
            )
    return problems


# The modules of the classes of plain containers.
_CONTAINERS = ("builtins", "collections")


def is_in_module(leaf: Leaf) -> bool:
    """Whether a leaf of a call is in a module, and not in plain containers only."""
    # The first class is that of the call itself, which is a named tuple.
    return any(cls.__module__ not in _CONTAINERS for cls in leaf.within[1:])


def is_bare(leaf: Leaf) -> bool:
    """Whether a leaf is itself an argument of a call, under a layout for all arguments."""
    return leaf.seen is None and leaf.follows is None


def array_problem(path: Path, value: Any, why: str, remedy: str) -> Problem:
    """A `Problem` of an array of which only the path is known."""
    return Problem(path, tuple(value.shape), array_text(value), why, remedy)
