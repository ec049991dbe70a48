"""A tree and its annotations ─► `Leaves`: one `Leaf` for each array, and the skeleton of the tree.

The one walk over a tree. Everything that asks for paths, axes, or the modules around a leaf asks here. A packed tree
is read as the tree that was packed; its skeleton is that of the packed one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey, tree_leaves, tree_map, tree_structure

from functree.errors import AxesError, FunctreeError, Problem, count
from functree.tree.annotations.classes import ClassHints, class_hints
from functree.tree.annotations.given_names import GivenNames, Giver, check_names, given_at, given_axes, unmatched
from functree.tree.annotations.hints import NO_ENV, NOTHING, Hint
from functree.tree.annotations.leaf_axes import Memory, leaf_axes
from functree.tree.arrays import is_array
from functree.tree.axes import Names
from functree.tree.interfaces import PackedTree, Stack, StateMapping
from functree.tree.leaf import Leaf
from functree.tree.paths import Path, plain_key
from functree.tree.skeleton.kinds import (
    ARRAY,
    DEFAULT_DICT,
    DICT,
    NONE,
    PACKED,
    SEQUENCE,
    STATE,
    STATIC,
    Kind,
    kind_of,
)
from functree.tree.skeleton.skeleton import Skeleton


@dataclass(frozen=True)
class Leaves:
    """The arrays of a tree, in JAX's order.

    Attributes:
        leaves: one record for each array.
        problems: names that were given to leaves which are not there.
        skeleton: the tree without its arrays.
    """

    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    skeleton: Skeleton


def read(tree: Any, names: Mapping[type, Names] | None = None) -> Leaves:
    """Read a tree: paths, axes, the modules around each leaf.

    Args:
        tree: arrays, numpy arrays or `jax.ShapeDtypeStruct`s, in modules and containers.
        names: axes for the leaves of foreign classes.

    Raises:
        AxesError: `names` that are no `{cls: ft.names(...)}`.
        FunctreeError: a dict whose keys have no order, a tree that contains itself: JAX cannot flatten them.
    """
    names = names or {}
    check_names(names)
    walk = _Walk(names)
    try:
        walk.visit(tree, (), NOTHING, _Context())
    except RecursionError:
        why = f"a {type(tree).__name__} that contains itself, or is nested too deeply, is no tree that can be read"
        raise FunctreeError(why) from None
    for node, path, given in walk.fields:
        if given.by_leaf and not given.by_module:
            walk.note_unmatched(node, path, (given,))
    skeleton = Skeleton(tree_structure(tree), walk.places, walk.others)
    return Leaves(tuple(walk.leaves), tuple(walk.problems), skeleton)


def tree_axes(tree: Any, names: Mapping[type, Names] | None = None) -> Any:
    """The axes of each array of a tree.

    Args:
        tree: arrays, numpy arrays or `jax.ShapeDtypeStruct`s, in modules and containers.
        names: `{cls: ft.names(...)}`, axes for the leaves of classes that have no annotations.

    Returns:
        A tree of `Axes` with the structure of the tree's arrays; None where other leaves stand.

    Raises:
        AxesError: a leaf whose rank fits no annotation, or several with different names; an annotation that cannot
            be resolved; a name for a field that is not there. Lists them all, by path.

    Examples:
        >>> class MLP(eqx.Module):
        ...     up: Float[Array, "embed hidden"]
        ...     down: Float[Array, "hidden embed"]
        >>> axes = ft.tree_axes(MLP(jnp.ones((2, 3)), jnp.ones((3, 2))))
        >>> axes.up, axes.down
        (Axes('embed', 'hidden'), Axes('hidden', 'embed'))
    """
    leaves = read(tree, names)
    problems = (*leaves.problems, *(leaf.misfit for leaf in leaves.leaves if leaf.misfit))
    if problems:
        raise AxesError(f"the axes of {count(len(problems), 'leaf')} cannot be told", problems)
    return leaves.skeleton.spread(leaf.axes for leaf in leaves.leaves)


class _Context(NamedTuple):
    """What holds for all leaves below a node.

    Attributes:
        within: the classes of the nodes above, outermost first.
        stack: the axes of the stacks above.
        given: the names that were given above.
        buffer: whether an annotation above says that it is not trained.
        pending: the names that the annotation of a field above gave. They begin at the first module below it, or stand
            for the field itself.
    """

    within: tuple[type, ...] = ()
    stack: tuple[str, ...] = ()
    given: tuple[GivenNames, ...] = ()
    buffer: bool = False
    pending: GivenNames | None = None


Keys = tuple[Any, ...]  # a path, before it is known whether anybody asks for it


class _Walk:
    """One reading of a tree. What depends on a class alone is looked up once in it."""

    def __init__(self, names: Mapping[type, Names]):
        self.names = names
        self.leaves: list[Leaf] = []
        self.places: list[int] = []  # of the arrays, among the leaves in JAX's order
        self.others: list[tuple[int, Any]] = []
        self.size = 0  # of the leaves so far
        self.problems: list[Problem] = []
        self.packed = False
        self.kinds: dict[type, Kind] = {}
        self.classes: dict[type, ClassHints] = {}
        self.memory: Memory = {}
        self.fields: list[tuple[Any, Keys, GivenNames]] = []  # whose annotation has `ft.names`

    def visit(self, node: Any, path: Keys, hint: Hint, context: _Context) -> None:
        """A node, what its annotation says, and what holds for all below it."""
        kind = self.kinds.get(type(node)) or self._kind(node)
        if hint is not NOTHING:
            hint, context = self._annotated(node, kind, path, hint, context)
        if kind is ARRAY:
            self._leaf(node, path, hint, context)
        elif kind is STATIC:
            self.others.append((self.size, node))
            self.size += 1
        elif kind is SEQUENCE:
            inside = _inside(context, type(node))
            for i, child in enumerate(node):
                self.visit(child, (*path, i), hint.child(i), inside)
        elif kind is DICT or kind is DEFAULT_DICT:
            inside, below = _inside(context, type(node)), hint.child(None)
            for key in _sorted_keys(node, path):
                self.visit(node[key], (*path, key), below, inside)
        elif kind is STATE:
            self._state(node, path, context)
        elif kind is PACKED:
            self._packed(node, path, hint, context)
        elif kind is not NONE:
            self._node(node, kind, path, hint, context)

    def _kind(self, node: Any) -> Kind:
        kind = kind_of(node)
        # A class of arrays or leaves says little: an array of objects is no array, and tracers differ.
        if kind is not STATIC and not isinstance(node, np.ndarray | np.generic | Tracer):
            self.kinds[type(node)] = kind
        return kind

    def _annotated(self, node: Any, kind: Kind, path: Keys, hint: Hint, context: _Context) -> tuple[Hint, _Context]:
        """What the annotation of a place says, and what holds from there on."""
        if hint.later:
            hint = hint.tried()
        if hint.buffer:
            context = context._replace(buffer=True)
        if hint.names is not None and kind is not NONE:
            given = GivenNames(hint.names, len(path), Giver.FIELD)
            self.fields.append((node, path, given))
            context = context._replace(pending=given)
        return hint, context

    def _leaf(self, value: Any, path: Keys, hint: Hint, context: _Context) -> None:
        self.places.append(self.size)
        self.size += 1
        within, stack, given, buffer, pending = context
        place = Path(path)
        if pending is not None:
            pending.by_leaf = True
            given = (*given, pending)
        outside = given_axes(place, given) if given else None
        axes, annotated, unnamed, spec, misfit = leaf_axes(self.memory, value, place, hint, outside, stack)
        self.leaves.append(Leaf(place, value, axes, within, (), len(stack), annotated, unnamed, spec, buffer, misfit))

    def _node(self, node: Any, kind: Kind, path: Keys, hint: Hint, context: _Context) -> None:
        """A module, a named tuple, or a node of another class that JAX knows."""
        cls = type(node)
        known = self.classes.get(cls)
        if known is None:
            known = self.classes[cls] = class_hints(cls)
        inside, opened = _inside(context, cls), ()
        if not isinstance(node, dict):
            opened = given_at(node, len(path), context.pending, self.names)
            stack = (*context.stack, *node.stack_axes()) if isinstance(node, Stack) else context.stack
            inside = _Context(inside.within, stack, context.given + opened, context.buffer)
        env = known.env(cls, hint) if hint.generics or hint.later else NO_ENV
        for key, child in kind.children(node):
            by_field = kind.by_field or type(key) is GetAttrKey
            name = key if kind.by_field else plain_key(key)
            below = known.fields.get(name, NOTHING) if by_field else hint.child(None)
            if env and below.open:
                below = below.bind(env)
            # `PyTree[X]` speaks of what a class says nothing of.
            if hint.below is not None and by_field and below.tried() is NOTHING:
                below = hint.child(None)
            self.visit(child, (*path, name), below, inside)
        if opened:
            self.note_unmatched(node, path, opened)

    def _packed(self, node: Any, path: Keys, hint: Hint, context: _Context) -> None:
        """A packed tree: the leaves of the tree, in the places of the packed one."""
        hint = next((args[0] for origin, args in hint.generics if origin is type(node) and args), hint)
        self.packed = True
        places, others, first = len(self.places), len(self.others), self.size
        self.visit(node.tree, path, hint, context)
        # Its leaves are in the same order, but what is static in the tree is none of them.
        flat = tree_leaves(node)
        self.places[places:] = [first + i for i, leaf in enumerate(flat) if is_array(leaf)]
        self.others[others:] = [(first + i, leaf) for i, leaf in enumerate(flat) if not is_array(leaf)]
        self.size = first + len(flat)

    def _state(self, node: StateMapping, path: Keys, context: _Context) -> None:
        """State, which tells of each of its children the path in the model, the axes, and how many are of stacks."""
        within = (*context.within, type(node))
        children = tree_leaves(node, is_leaf=lambda x: x is None)
        for (below, axes, stacked), child in zip(node.entries(), children, strict=True):
            if child is None:
                continue
            if is_array(child):
                self.places.append(self.size)
                place, annotated = Path((*path, *below)), any(axes) or not child.shape
                self.leaves.append(Leaf(place, child, axes, within, (), stacked, annotated))
            else:
                self.others.append((self.size, child))
            self.size += 1

    def note_unmatched(self, node: Any, path: Keys, given: tuple[GivenNames, ...]) -> None:
        """Note the names that a place gives, and that none of its leaves has."""
        self.problems += unmatched(_unpacked(node) if self.packed else node, path, given)


def _inside(context: _Context, cls: type) -> _Context:
    """The same, below a node of a class."""
    within, stack, given, buffer, pending = context
    return _Context((*within, cls), stack, given, buffer, pending)


def _unpacked(tree: Any) -> Any:
    """A tree with all that is packed in it as it was."""
    return tree_map(
        lambda x: _unpacked(x.tree) if isinstance(x, PackedTree) else x,
        tree,
        is_leaf=lambda x: isinstance(x, PackedTree),
    )


def _sorted_keys(node: Mapping[Any, Any], path: Keys) -> Iterable[Any]:
    """The keys of a dict in JAX's order."""
    try:
        return sorted(node)
    except TypeError as error:
        kinds = ", ".join(sorted({type(key).__name__ for key in node}))
        why = f"its keys ({kinds}) have no order, and JAX sorts those of a dict"
        problem = Problem(Path(path), None, "dict", why, "use keys of one type, or an `OrderedDict`")
        raise FunctreeError("a dict that is no tree", [problem]) from error
