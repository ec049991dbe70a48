"""`read` labels the arrays of a tree with their paths and axes.

A tree and its annotations ─► `Leaves`: one `Leaf` for each array, and the tree's skeleton.

The walk passes annotations from a node to its children. Code that needs only the nodes of a tree
uses `tree/nodes.py`. A packed tree is read like the tree that was packed, but its skeleton is still
packed.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves

from functree.argument_checks import check_tree
from functree.errors import (
    AxesError,
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    count,
)
from functree.labels.annotations.given_names import (
    OWN_STATE,
    GivenNames,
    equinox_names,
    given_at,
    given_axes,
    invalid_names,
    names_of_field,
    unmatched,
)
from functree.labels.annotations.hints import NOTHING, ArrayForm, Hint, field_hints, leaf_axes
from functree.tree.arrays import AnyArray, Tree, array_text, is_array, is_unheld_number, unheld
from functree.tree.axes import Axes, Names
from functree.tree.interfaces import Stack, StateMapping, TrainingState
from functree.tree.nodes import walk
from functree.tree.paths import Key, Keys, Path, first_beginning
from functree.tree.skeleton.kinds import (
    ARRAY,
    DEFAULT_DICT,
    DICT,
    NONE,
    PACKED,
    SEQUENCE,
    STATE,
    STATIC,
    Children,
    Kind,
    kind_of,
)
from functree.tree.skeleton.skeleton import Skeleton


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


# A tree


@dataclass(frozen=True)
class Leaves:
    """The arrays of a tree, in JAX's order.

    Attributes:
        leaves: one `Leaf` for each array.
        problems: one problem for each pattern in `ft.names` that matches no leaf.
        skeleton: the tree without its arrays.
        unused: the classes in `names` whose axes apply to no leaf of the tree.
        training: the outermost training states in the tree, by path.
    """

    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    skeleton: Skeleton
    unused: tuple[type, ...] = ()
    training: Mapping[Path, TrainingState] = field(default_factory=dict)

    @property
    def values(self) -> list[AnyArray]:
        """The arrays."""
        return [leaf.value for leaf in self.leaves]

    @property
    def paths(self) -> list[Path]:
        """The path of each array."""
        return [leaf.path for leaf in self.leaves]

    @property
    def tree(self) -> Tree:
        """The tree, filled with the arrays."""
        return self.skeleton.fill(self.values)


def read(
    tree: Tree,
    names: Mapping[type, Names] | None = None,
    hints: Mapping[Path, Hint] | None = None,
) -> Leaves:
    """Read the path, the axes and the surrounding modules of each array of a tree.

    Args:
        tree: JAX arrays, NumPy arrays or `jax.ShapeDtypeStruct`s, in modules and containers.
        names: axes for the leaves of classes without annotations: `{cls: ft.names(...)}`.
        hints: annotations of some parts of the tree, by path.

    Raises:
        FunctreeError: if the tree contains itself.
        FunctreeError: if the tree is nested too deeply.
        FunctreeError: if the keys of a dict cannot be sorted.
        FunctreeError: if JAX does not support a NumPy array of numbers. The error lists all such
            arrays.
    """
    walk = _Walk({**OWN_STATE, **(names or {})}, hints or {})
    try:
        walk.visit(tree, (), NOTHING, Context())
    except RecursionError:
        raise too_deep(tree) from None
    if walk.unheld:
        unheld = count(len(walk.unheld), "leaf")
        raise FunctreeTypeError(f"JAX does not support {unheld} of the tree", walk.unheld)
    # A field's names are checked here if arrays outside any module used them. Names that a module
    # used were checked at that module. Names that nothing used belong to a field without arrays.
    for node, path, given in walk.fields:
        if given.by_leaf and not given.by_module:
            walk.problems += unmatched(node, path, (given,))
    skeleton = Skeleton.of(tree, map(attrgetter("path"), walk.leaves))
    unused: list[type] = []
    for cls, given in walk.names.items():
        # `ft.equinox_names` names all layers, and no tree contains all of them.
        if cls not in walk.used and equinox_names.get(cls) != given:
            unused.append(cls)
    return Leaves(tuple(walk.leaves), tuple(walk.problems), skeleton, tuple(unused), walk.training)


def arrays_by_path(tree: Tree) -> dict[Path, AnyArray]:
    """Return the arrays of a tree by path, without their axes. Raise the same errors as `read`."""
    try:
        nodes = list(walk(tree, in_model=True))
    except (RecursionError, TypeError, ValueError):
        read(tree)  # raises an error with the path of the node that JAX cannot flatten
        raise
    if any(kind is STATIC and is_unheld_number(node) for _, node, kind in nodes):
        read(tree)  # raises an error with the paths of these leaves
    return {Path(path): node for path, node, kind in nodes if kind is ARRAY}


def tree_axes(tree: Tree, names: Mapping[type, Names] | None = None) -> Any:
    """Return the axes of each array of a tree.

    An error lists all leaves with a problem, by path.

    Args:
        tree: JAX arrays, NumPy arrays or `jax.ShapeDtypeStruct`s, in modules and containers.
        names: axes for the leaves of classes without annotations: `{cls: ft.names(...)}`.

    Returns:
        A tree of `Axes` with the structure of `tree`. Leaves that are not arrays become None.

    Raises:
        AxesError: if an annotation cannot be resolved.
        AxesError: if an annotation does not fit its leaf.
        AxesError: if several alternatives of an annotation fit its leaf.
        AxesError: if `ft.names` gives axes to a leaf that does not exist.
        AxesError: if `names` is not a mapping from classes to `ft.names(...)`.

    Examples:
        >>> class MLP(eqx.Module):
        ...     up: Float[Array, "embed hidden"]
        ...     down: Float[Array, "hidden embed"]
        >>> axes = ft.tree_axes(MLP(jnp.ones((2, 3)), jnp.ones((3, 2))))
        >>> axes.up, axes.down
        (Axes('embed', 'hidden'), Axes('hidden', 'embed'))
    """
    check_tree("tree_axes", tree)
    invalid = None if names is None else invalid_names(names)
    if invalid is not None:
        raise AxesError(invalid)
    leaves = read(tree, names)
    problems = list(leaves.problems)
    for leaf in leaves.leaves:
        if leaf.misfit is not None:
            problems.append(leaf.problem(*leaf.misfit))
    if problems:
        raise AxesError("the axes of the tree cannot be determined", problems)
    return leaves.skeleton.spread(leaf.axes for leaf in leaves.leaves)


def too_deep(tree: Tree) -> FunctreeError:
    """Return the error for a tree that exceeds Python's recursion limit."""
    return FunctreeValueError(
        f"a tree of type {type(tree).__name__} cannot be flattened: it contains itself, or is "
        "nested too deeply"
    )


# The walk


class Context(NamedTuple):
    """Facts that hold for all leaves below a node.

    Attributes:
        within: the classes of the nodes above, outermost first.
        stack: the axes of the stacks above.
        given: the names that nodes above give to the leaves.
        buffer: whether an annotation above marks the leaves as not trained.
        pending: the names in the annotation of a field above, until the walk reaches a module.
            Their patterns match paths from the first module below the field, or from the field if
            there is no module.
        below: the hint of leaves without an annotation of their own.
    """

    within: tuple[type, ...] = ()
    stack: tuple[str, ...] = ()
    given: tuple[GivenNames, ...] = ()
    buffer: bool = False
    pending: GivenNames | None = None
    below: Hint = NOTHING


def inside_of(context: Context, cls: type) -> Context:
    """Return the context below a node of a class."""
    # The constructor is several times faster than `_replace`.
    return Context((*context.within, cls), *context[1:])


def _in_module(node: Tree, context: Context, opened: tuple[GivenNames, ...]) -> Context:
    """Return the context below a module, with the module's stack and the names given there."""
    within, stack, given, buffer, _, below = context
    if isinstance(node, Stack):
        stack = (*stack, *node.stack_axes())
    for source in opened:
        stack = (*stack, *source.names.stack)
    return Context((*within, type(node)), stack, given + opened, buffer, None, below)


class _Walk:
    """One walk over a tree. It looks up the properties of each class only once."""

    def __init__(self, names: Mapping[type, Names], hints: Mapping[Path, Hint]):
        self.names = names
        self.hints: dict[Keys, Hint] = {**hints}
        self.leaves: list[Leaf] = []
        self.problems: list[Problem] = []
        self.unheld: list[Problem] = []  # arrays that JAX does not support
        self.kinds: dict[type, Kind] = {}
        # The layers of a model share annotations, shapes and dtypes, so the axes are computed once
        # for each combination.
        self.leaf_axes = cache(leaf_axes)
        self.used: set[type] = set()  # the classes in `names` whose axes apply to a leaf
        self.training: dict[Path, TrainingState] = {}
        # Fields whose annotation contains `ft.names`.
        self.fields: list[tuple[Tree, Keys, GivenNames]] = []

    def visit(self, node: Tree, path: Keys, hint: Hint, context: Context) -> None:
        """Visit a node.

        Args:
            node: the node, or a leaf.
            path: its path.
            hint: its annotation.
            context: the facts about all leaves below it.
        """
        kind = self.kinds.get(type(node)) or self._kind(node)
        if self.hints:
            hint = self.hints.get(path, hint)
        if hint is NOTHING:
            hint = context.below
        else:
            context = self._annotated(node, kind, path, hint, context)
        if kind is ARRAY:
            if not hint.forms and not hint.error:
                hint = context.below
            self._leaf(node, path, hint, context)
        elif kind is STATIC:
            fault = unheld(node)
            if fault is not None and is_unheld_number(node):
                self.unheld.append(array_problem(Path(path), node, *fault))
        elif kind is SEQUENCE or kind is DICT or kind is DEFAULT_DICT:
            inside = inside_of(context, type(node))
            for key, child in _children(node, kind, path):
                self.visit(
                    child, (*path, key), hint.child(key if kind is SEQUENCE else None), inside
                )
        elif kind is STATE:
            self._state(node, path, context)
        elif kind is PACKED:
            self.visit(node.tree, path, hint, context)
        elif kind is not NONE:
            self._node(node, kind, path, hint, context)

    def _kind(self, node: Tree) -> Kind:
        kind = kind_of(node)
        # The kind is cached only if the class determines it. NumPy arrays of floats are arrays, but
        # NumPy arrays of objects are static.
        if kind is not STATIC and not isinstance(node, np.ndarray | np.generic | Tracer):
            self.kinds[type(node)] = kind
        return kind

    def _annotated(
        self, node: Tree, kind: Kind, path: Keys, hint: Hint, context: Context
    ) -> Context:
        """Add the facts about the leaves below a node that its annotation states."""
        if ... in hint.parts:
            context = context._replace(below=hint.child(...))
        if hint.buffer:
            context = context._replace(buffer=True)
        if hint.names is not None and kind is not NONE:
            given = names_of_field(hint.names, len(path))
            self.fields.append((node, path, given))
            context = context._replace(pending=given)
        return context

    def _leaf(self, value: AnyArray, path: Keys, hint: Hint, context: Context) -> None:
        """Record an array."""
        within, stack, given, buffer, pending, _ = context
        place = Path(path)
        if pending is not None:
            pending.by_leaf = True
            given = (*given, pending)
            stack = (*stack, *pending.names.stack)
        outside = given_axes(place, given) if given else None
        axes = self.leaf_axes(value.shape, value.dtype, hint, outside, stack)
        self.leaves.append(Leaf(place, value, *axes, within, place, (), len(stack), buffer))

    def _node(self, node: Tree, kind: Kind, path: Keys, hint: Hint, context: Context) -> None:
        """Visit a module, a named tuple, or a node of another class registered with JAX."""
        cls, opened = type(node), ()
        if isinstance(node, TrainingState) and first_beginning(path, self.training) is None:
            self.training[Path(path)] = node
        # A subclass of dict, such as an OrderedDict, is a container. A field's names apply to the
        # modules in the container.
        if isinstance(node, dict):
            inside = inside_of(context, cls)
        else:
            opened = given_at(node, len(path), context.pending, self.names)
            inside = _in_module(node, context, opened)
        children, fields = kind.paths(node), field_hints(cls, hint)
        for keys, child in children:
            if kind.by_field or keys[-1] in fields.parts:
                below = fields.child(keys[-1])
            elif fields.parts:
                # The class is registered without keys.
                below = fields.child(_attribute_of(node, child))
                if below is NOTHING:
                    below = hint.child(None)
            else:
                below = hint.child(None)
            self.visit(child, (*path, *keys), below, inside)
        if opened:
            for given in opened:
                if given.cls is not None and (given.used or given.names.stack):
                    self.used.add(given.cls)
            self.problems += unmatched(node, path, opened)

    def _state(self, node: StateMapping, path: Keys, context: Context) -> None:
        """Visit state. Each child has an entry: its path in the model, its axes and its stacks."""
        within = (*context.within, type(node))
        # JAX flattens a state into one child for each entry. `split` replaces some children with
        # None.
        children = tree_leaves(node, is_leaf=lambda x: x is None)
        for entry, child in zip(node.entries(), children, strict=True):
            if not is_array(child):
                continue
            place = Path((*path, *entry.path))
            # The values of one layer of a stack lack the stack's leading dimensions.
            unstacked = min(max(len(entry.axes) - len(child.shape), 0), entry.stacked)
            declared, stacked = Axes(*entry.axes[unstacked:]), entry.stacked - unstacked
            axes = self.leaf_axes(child.shape, child.dtype, NOTHING, declared, ())
            if axes.misfit is None and declared and not any(declared):
                axes = axes._replace(annotated=False, unnamed=())
            self.leaves.append(Leaf(place, child, *axes, within, place, (), stacked))


def _attribute_of(node: Tree, child: Tree) -> str:
    """Return the name of the only attribute that holds a child, or an empty string."""
    names = [name for name, value in getattr(node, "__dict__", {}).items() if value is child]
    return names[0] if len(names) == 1 else ""


def _children(node: Tree, kind: Kind, path: Keys) -> Children:
    """Return the (key, child) pairs of a container.

    Raises:
        FunctreeError: if the keys of a dict cannot be sorted.
    """
    try:
        return kind.children(node)
    except TypeError as error:
        remedy = "use keys of one type, or an `OrderedDict`"
        problem = Problem(Path(path), None, "dict", f"JAX sorts its keys: {error}", remedy)
        raise FunctreeTypeError("a dict cannot be flattened", [problem]) from error
