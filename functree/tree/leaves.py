"""A tree and its annotations ─► `Leaves`: one `Leaf` for each array, and the way back to a tree.

The one walk over a tree. Everything that asks for paths, axes, or the modules around a leaf asks here. A packed tree
is read as the tree that was packed; the way back leads to a packed one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey, default_registry, tree_leaves, tree_map, tree_structure

from functree.errors import AxesError, FunctreeError, Problem, count
from functree.tree.annotations import NOTHING, Hint
from functree.tree.axes import Names
from functree.tree.classes import ClassHints, class_hints
from functree.tree.leaf import Leaf
from functree.tree.naming import Scope, open_scopes, scoped_axes, unmatched
from functree.tree.paths import Path, plain_key
from functree.tree.reading import Reading, read_hint


@dataclass(frozen=True)
class Leaves:
    """The arrays of a tree, in JAX's order.

    Attributes:
        leaves: one record for each array.
        problems: names that were given to leaves which are not there.
    """

    leaves: tuple[Leaf, ...]
    problems: tuple[Problem, ...]
    treedef: Any
    positions: tuple[int, ...]  # of the arrays among all leaves
    size: int  # of all leaves

    def tree(self, values: Iterable[Any]) -> Any:
        """A tree with a value for each array, and None where other leaves stand."""
        flat: list[Any] = [None] * self.size
        for position, value in zip(self.positions, values, strict=True):
            flat[position] = value
        return self.treedef.unflatten(flat)

    def fill(self, flat: Sequence[Any], values: Iterable[Any]) -> Any:
        """The tree whose other leaves are those of `flat`."""
        flat = list(flat)
        for position, value in zip(self.positions, values, strict=True):
            flat[position] = value
        return self.treedef.unflatten(flat)


def is_array(value: Any) -> bool:
    """JAX and numpy arrays and numpy scalars, traced and abstract ones too; not Python numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind not in "OUSMm" and not value.dtype.names
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def read(tree: Any, names: Mapping[type, Names] | None = None) -> Leaves:
    """Read a tree: paths, axes, the modules around each leaf.

    Args:
        tree: arrays, numpy arrays or `jax.ShapeDtypeStruct`s, in modules and containers.
        names: axes for the leaves of foreign classes.

    Raises:
        AxesError: `names` that are no `{cls: ft.names(...)}`.
        FunctreeError: a dict whose keys have no order, a tree that contains itself: JAX cannot flatten them.
    """
    for cls, given in (names or {}).items():
        if not isinstance(cls, type) or not isinstance(given, Names):
            raise AxesError(f"`names=` maps classes to `ft.names(...)`, not {cls!r} to {given!r}")
    walk = _Walk(names or {})
    try:
        walk.visit(tree, NOTHING, (), (), (), (), False, None)
    except RecursionError:
        why = f"a {type(tree).__name__} that contains itself, or is nested too deeply, is no tree that can be read"
        raise FunctreeError(why) from None
    for node, path, scope in walk.fields:
        if scope.by_leaf and not scope.by_module:
            walk.unmatched(node, path, (scope,))
    return Leaves(tuple(walk.leaves), tuple(walk.problems), tree_structure(tree), tuple(walk.positions), walk.size)


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
    problems = (*leaves.problems, *(leaf.problem for leaf in leaves.leaves if leaf.problem))
    if problems:
        raise AxesError(f"the axes of {count(len(problems), 'leaf')} cannot be told", problems)
    return leaves.tree(leaf.axes for leaf in leaves.leaves)


class _Walk:
    """One reading of a tree. What depends on a class alone is looked up once in it."""

    def __init__(self, names: Mapping[type, Names]):
        self.names = names
        self.leaves: list[Leaf] = []
        self.positions: list[int] = []
        self.problems: list[Problem] = []
        self.size = 0
        self.packed = False
        self.kinds: dict[type, str] = {type(None): "none"}  # no leaf, and no place for names
        self.classes: dict[type, ClassHints] = {}
        self.reading = Reading()
        self.fields: list[tuple[Any, tuple[Any, ...], Scope]] = []  # whose annotation has `ft.names`

    def visit(
        self,
        node: Any,
        hint: Hint,
        path: tuple[Any, ...],
        within: tuple[type, ...],
        stack: tuple[str, ...],
        scopes: tuple[Scope, ...],
        buffer: bool,
        pending: Scope | None,
    ) -> None:
        """A node, what its annotation says, and what holds for all below it.

        `pending` are the names that the annotation of a field above gave: they begin at the first module, or stand
        for the field itself.
        """
        cls = type(node)
        kind = self.kinds.get(cls) or self._kind(node, cls)
        if hint is not NOTHING:
            if hint.later:
                hint = hint.tried()
            buffer = buffer or hint.buffer
            if hint.names is not None and kind != "none":
                pending = Scope(hint.names, len(path), 0)
                self.fields.append((node, path, pending))
        if kind == "array":
            self._leaf(node, hint, path, within, stack, scopes, buffer, pending)
        elif kind == "leaf":
            self.size += 1
        elif kind == "sequence":
            inside = (*within, cls)
            for i, child in enumerate(node):
                self.visit(child, hint.child(i), (*path, i), inside, stack, scopes, buffer, pending)
        elif kind == "dict":
            inside, child_hint = (*within, cls), hint.child(None)
            for key in _sorted_keys(node, path):
                self.visit(node[key], child_hint, (*path, key), inside, stack, scopes, buffer, pending)
        elif kind == "state":
            self._state(node, path, (*within, cls))
        elif kind == "packed":
            self._packed(node, hint, path, within, stack, scopes, buffer, pending)
        elif kind == "named tuple":
            children = [(GetAttrKey(name), child) for name, child in zip(node._fields, node, strict=True)]
            self._node(node, children, hint, path, within, stack, scopes, buffer, pending)
        elif kind != "none":
            one_level = default_registry.flatten_one_level_with_keys(node)
            self._node(node, one_level[0] if one_level else (), hint, path, within, stack, scopes, buffer, pending)

    def _kind(self, node: Any, cls: type) -> str:
        if cls is list or cls is tuple:
            kind = "sequence"
        elif cls is dict or cls is defaultdict:
            kind = "dict"
        elif is_array(node):
            kind = "array"
        elif _is_packed(node):
            kind = "packed"
        elif hasattr(cls, "__leaf_entries__"):
            kind = "state"
        elif default_registry.flatten_one_level(node) is None:
            return "leaf"  # not remembered: an array of another dtype may have the same class
        else:
            kind = "named tuple" if isinstance(node, tuple) and hasattr(cls, "_fields") else "node"
        if not isinstance(node, np.ndarray | np.generic | Tracer):
            self.kinds[cls] = kind
        return kind

    def _node(
        self,
        node: Any,
        children: Iterable[tuple[Any, Any]],
        hint: Hint,
        path: tuple[Any, ...],
        within: tuple[type, ...],
        stack: tuple[str, ...],
        scopes: tuple[Scope, ...],
        buffer: bool,
        pending: Scope | None,
    ) -> None:
        cls = type(node)
        known = self.classes.get(cls)
        if known is None:
            known = self.classes[cls] = class_hints(cls)
        inside = (*within, cls)
        opened: tuple[Scope, ...] = ()
        if not isinstance(node, dict):
            opened = open_scopes(node, len(path), pending, self.names)
            scopes, pending = scopes + opened, None
            if hasattr(cls, "__stack_axes__"):
                stack = stack + tuple(node.__stack_axes__())
        env = known.env(cls, hint) if hint.generics or hint.later else {}
        for key, child in children:
            by_name = type(key) is GetAttrKey
            name = key.name if by_name else plain_key(key)
            child_hint = known.fields.get(name, NOTHING) if by_name else hint.child(None)
            if env and child_hint.open:
                child_hint = child_hint.bind(env)
            if hint.below is not None and by_name and child_hint.tried() is NOTHING:
                child_hint = hint.child(None)
            self.visit(child, child_hint, (*path, name), inside, stack, scopes, buffer, pending)
        if opened:
            self.unmatched(node, path, opened)

    def _packed(
        self,
        node: Any,
        hint: Hint,
        path: tuple[Any, ...],
        within: tuple[type, ...],
        stack: tuple[str, ...],
        scopes: tuple[Scope, ...],
        buffer: bool,
        pending: Scope | None,
    ) -> None:
        hint = next((args[0] for origin, args in hint.generics if origin is type(node) and args), hint)
        self.packed = True
        known, first = len(self.positions), self.size
        self.visit(node.__unpacked__(), hint, path, within, stack, scopes, buffer, pending)
        # Its leaves are in the same order, but the static ones of the tree are none of them.
        flat = tree_leaves(node)
        self.positions[known:] = [first + i for i, leaf in enumerate(flat) if is_array(leaf)]
        self.size = first + len(flat)

    def _state(self, node: Any, path: tuple[Any, ...], within: tuple[type, ...]) -> None:
        """A node that tells of each of its children the path in a model, the axes, and how many are those of stacks."""
        for (below, axes, stacked), child in zip(
            node.__leaf_entries__(), tree_leaves(node, is_leaf=_is_none), strict=True
        ):
            if child is None:
                continue
            place = Path((*path, *below))
            self.size += 1
            if is_array(child):
                self.positions.append(self.size - 1)
                self.leaves.append(Leaf(place, child, axes, within, (), stacked, any(axes) or not child.shape))

    def unmatched(self, node: Any, path: tuple[Any, ...], scopes: tuple[Scope, ...]) -> None:
        """Note the names of a place's scopes that none of its leaves has."""
        self.problems += unmatched(_unpacked(node) if self.packed else node, path, scopes)

    def _leaf(
        self,
        value: Any,
        hint: Hint,
        path: tuple[Any, ...],
        within: tuple[type, ...],
        stack: tuple[str, ...],
        scopes: tuple[Scope, ...],
        buffer: bool,
        pending: Scope | None,
    ) -> None:
        self.positions.append(self.size)
        self.size += 1
        place = Path(path)
        if pending is not None:
            pending.by_leaf = True
            scopes = (*scopes, pending)
        given = scoped_axes(place, scopes) if scopes else None
        axes, annotated, unnamed, spec, problem = read_hint(self.reading, value, place, hint, given, stack)
        self.leaves.append(Leaf(place, value, axes, within, (), len(stack), annotated, unnamed, spec, buffer, problem))


def _is_none(node: Any) -> bool:
    return node is None


def _is_packed(node: Any) -> bool:
    return hasattr(type(node), "__unpacked__")


def _unpacked(tree: Any) -> Any:
    """A tree with all that is packed in it as it was."""
    return tree_map(lambda x: _unpacked(x.__unpacked__()) if _is_packed(x) else x, tree, is_leaf=_is_packed)


def _sorted_keys(node: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Any]:
    """The keys of a dict in JAX's order."""
    try:
        return sorted(node)
    except TypeError as error:
        kinds = ", ".join(sorted({type(key).__name__ for key in node}))
        why = f"its keys ({kinds}) have no order, and JAX sorts those of a dict"
        problem = Problem(Path(path), None, "dict", why, "use keys of one type, or an `OrderedDict`")
        raise FunctreeError("a dict that is no tree", [problem]) from error
