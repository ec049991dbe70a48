"""`Leaf` describes one array of a tree for filters, layouts and messages."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import Problem
from functree.labels.annotations.hints import ArrayForm
from functree.tree.arrays import array_text
from functree.tree.axes import Axes
from functree.tree.paths import Key, Path


class FollowedLeaf(NamedTuple):
    """A leaf whose decision also applies to its follower, such as a moment of a parameter.

    Attributes:
        path: the path of the followed leaf. It is None if the follower, such as an optimizer's step
            count, depends on no parameter. Such a follower is replicated.
        dims: for each dimension of the follower, the index of the matching dimension of the
            followed leaf; None for a dimension that only the follower has.
        known: whether it is known how the follower's shape depends on the shapes of parameters.
        batched: whether the follower's training state was made under `vmap`, which adds a dimension
            to each leaf.
    """

    path: Path | None
    dims: tuple[int | None, ...]
    known: bool = True
    batched: bool = False

    def has_all_of(self, ndim: int) -> bool:
        """Return whether the follower has exactly the `ndim` dimensions of the followed leaf."""
        return self.dims == tuple(range(ndim))


class Root(NamedTuple):
    """A name above a leaf that a pattern may begin with.

    Attributes:
        what: the description of the name in messages, such as "the argument `x`".
        path: the path of the leaf, beginning with this name.
    """

    what: str
    path: Path


class Leaf(NamedTuple):
    """An array of a tree, with its labels for filters and layouts.

    Attributes:
        path: the path from the root of the tree.
        value: the array, which may be traced or abstract.
        axes: the names of its dimensions.
        annotated: whether its axes are named, for example by an annotation or by `ft.names`.
        unnamed: for each dimension, its token in the annotation if the token is not a name;
            otherwise an empty string. The tuple is empty if all dimensions are named.
        spec: the `PartitionSpec` in its annotation, or None.
        misfit: the reason why its axes cannot be determined, and the remedy; None if they can.
        forms: the alternatives of its annotation that fit its rank.
        within: the classes of the nodes above it, outermost first.
        seen: the path that filters match. For a layout's filters, it begins at the root of the tree
            that the layout is for; in a training state, at the root of the model. It is None if
            there is no such path. In that case, only `...` and patterns that begin with one of
            `roots` match the leaf.
        roots: the names above the leaf that patterns may begin with.
        stacked: the number of leading dimensions that belong to stacks of layers.
        buffer: whether the array is marked as not trained.
        follows: the leaf whose decision applies to this leaf; None if layouts apply to it.
    """

    path: Path
    value: Any
    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: tuple[str, str] | None = None
    forms: tuple[ArrayForm, ...] = ()
    within: tuple[type, ...] = ()
    seen: Path | None = None
    roots: tuple[Root, ...] = ()
    stacked: int = 0
    buffer: bool = False
    follows: FollowedLeaf | None = None

    def named(self, name: tuple[Key, ...]) -> Path | None:
        """Return the path of the leaf, beginning with a name above the leaf.

        Args:
            name: the name, as a path of one key.

        Returns:
            The path, or None if no pattern may begin with this name.
        """
        for root in self.roots:
            if root.path[:1] == name:
                return root.path
        return None

    @property
    def kind(self) -> Hashable:
        """The properties that decisions depend on, besides the values of `Layout.asks`."""
        return (
            self.axes,
            self.value.shape,
            self.stacked,
            self.annotated,
            self.unnamed,
            self.spec,
            self.misfit,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape

    @property
    def text(self) -> str:
        """The leaf as messages show it: `f32[512, 128]   "embed hidden"`."""
        text = array_text(self.value)
        if any(self.axes):
            text += f'   "{self.axes}"'
        return text

    def is_below(self, classes: type | tuple[type, ...]) -> bool:
        """Return whether the leaf is below an instance of a class, or of one of several classes."""
        return any(issubclass(cls, classes) for cls in self.within)

    def dimension(self, dim: int) -> str:
        """Return a dimension as messages show it: its axis, or its index if it has no name."""
        # An array whose annotation does not fit may have more dimensions than axes.
        name = self.axes[dim] if dim < len(self.axes) else None
        return f'"{name}"' if name else f"dimension {dim}"

    def problem(self, why: str, remedy: str) -> Problem:
        """Make a `Problem` about this leaf."""
        return Problem(self.path, tuple(self.shape), self.text, why, remedy)


def meeting(leaves: Iterable[Leaf]) -> list[Problem]:
    """Return one problem for each leaf whose path another leaf already has.

    Leaves share a path if a class gives two of its children the same key.
    """
    first_at: dict[Path, Leaf] = {}
    problems: list[Problem] = []
    for leaf in leaves:
        if first_at.setdefault(leaf.path, leaf) is not leaf:
            problems.append(
                leaf.problem(
                    "is the path of several arrays: a class gives two of its children the same key",
                    "give each child a different key in the class's `tree_flatten_with_keys`",
                )
            )
    return problems


# The Python modules that define the classes of plain containers.
_CONTAINERS = ("builtins", "collections")


def is_in_module(leaf: Leaf) -> bool:
    """Return whether a leaf of a call is in a module, not only in plain containers."""
    # The first class is the call itself, a named tuple.
    return any(cls.__module__ not in _CONTAINERS for cls in leaf.within[1:])


def is_bare(leaf: Leaf) -> bool:
    """Return whether a leaf is itself an argument of a call with one layout for all arguments."""
    return leaf.seen is None and leaf.follows is None


def array_problem(path: Path, value: Any, why: str, remedy: str) -> Problem:
    """Make a `Problem` about an array for which there is no `Leaf`."""
    return Problem(path, tuple(value.shape), array_text(value), why, remedy)
