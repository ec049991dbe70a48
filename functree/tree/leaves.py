"""A tree and its annotations ─► `Leaves`: one `Leaf` for each array, and the way back to a tree.

The one walk over a tree. Everything that asks for paths, axes, or the modules around a leaf asks here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, default_registry, tree_structure

from functree.errors import AxesError, Problem, count
from functree.tree.annotations import NOTHING, Hint, class_hints
from functree.tree.axes import Axes, Names
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
    """
    walk = _Walk(names or {})
    walk.visit(tree, NOTHING, (), (), (), (), False, None)
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

    Example:
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
        self.kinds: dict[type, str] = {}
        self.hints: dict[type, Mapping[str, Hint]] = {}
        self.reading = Reading()

    def visit(
        self,
        node: Any,
        hint: Hint,
        path: tuple[Any, ...],
        within: tuple[type, ...],
        stack: tuple[str, ...],
        scopes: tuple[Scope, ...],
        buffer: bool,
        pending: tuple[Names, int] | None,
    ) -> None:
        """A node, what its annotation says, and what holds for all below it.

        `pending` are the names that the annotation of a field above gave, and the length of that field's path: they
        begin at the first module, or stand for the field itself.
        """
        cls = type(node)
        kind = self.kinds.get(cls) or self._kind(node, cls)
        if hint is not NOTHING:
            buffer = buffer or hint.buffer
            if hint.names is not None:
                pending = (hint.names, len(path))
        if kind == "array":
            self._leaf(node, hint, path, within, stack, scopes, buffer, pending)
        elif kind == "leaf":
            self.size += 1
        elif kind == "sequence":
            inside = (*within, cls)
            for i, child in enumerate(node):
                self.visit(child, hint.child(i), (*path, i), inside, stack, scopes, buffer, pending)
        elif kind == "named tuple":
            children = [(GetAttrKey(name), child) for name, child in zip(node._fields, node, strict=True)]
            self._node(node, children, hint, path, within, stack, scopes, buffer, pending)
        else:
            one_level = default_registry.flatten_one_level_with_keys(node)
            self._node(node, one_level[0] if one_level else (), hint, path, within, stack, scopes, buffer, pending)

    def _kind(self, node: Any, cls: type) -> str:
        if cls is list or cls is tuple:
            kind = "sequence"
        elif is_array(node):
            kind = "array"
        elif default_registry.flatten_one_level(node) is None:
            return "leaf"  # not remembered: an array of another dtype may have the same class
        else:
            kind = "named tuple" if isinstance(node, tuple) and hasattr(cls, "_fields") else "node"
        if not isinstance(node, np.ndarray | np.generic | jax.core.Tracer):
            self.kinds[cls] = kind
        return kind

    def _node(self, node, children, hint, path, within, stack, scopes, buffer, pending) -> None:
        cls = type(node)
        hints = self.hints.get(cls)
        if hints is None:
            hints = self.hints[cls] = class_hints(cls)
        inside = (*within, cls)
        is_module = not isinstance(node, dict)
        opened: tuple[Scope, ...] = ()
        if is_module:
            opened = open_scopes(node, len(path), pending, self.names)
            scopes, pending = scopes + opened, None
            if hasattr(cls, "__stack_axes__"):
                stack = stack + tuple(node.__stack_axes__())
        args = hint.arguments(cls) if hint.generics or hint.later else ()
        env = dict(zip(getattr(cls, "__parameters__", ()), args, strict=False)) if args else {}
        for key, child in children:
            field_hint = hints.get(key.name, NOTHING) if type(key) is GetAttrKey else hint.child(None)
            if field_hint.open:
                field_hint = field_hint.bind(env)
            if hint.below is not None and type(key) is GetAttrKey:
                field_hint = field_hint if field_hint is not NOTHING else hint.child(None)
            self.visit(child, field_hint, (*path, plain_key(key)), inside, stack, scopes, buffer, pending)
        if opened:
            self.problems += unmatched(node, path, opened)

    def _leaf(self, value, hint, path, within, stack, scopes, buffer, pending) -> None:
        self.positions.append(self.size)
        self.size += 1
        path = Path(path)
        if pending is not None:
            scopes = (*scopes, *open_scopes(value, pending[1], pending, {}))
        given = scoped_axes(path, scopes) if scopes else None
        axes, annotated, unnamed, spec, problem = read_hint(self.reading, value, path, hint, given, stack)
        self.leaves.append(
            Leaf(path, value, axes, within, (), len(stack), annotated, unnamed, spec, buffer, problem)
        )
