"""Trees of all kinds of nodes: strategies for hypothesis, and changes of a structure."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import functree as ft
from functree.tree.arrays import is_array
from functree.tree.skeleton.static_value import StaticValue


class Pair(eqx.Module):
    first: Any
    second: Any
    name: Any = eqx.field(static=True, default="pair")


class Leafless(eqx.Module):
    size: Any = eqx.field(static=True, default=1)


class Method(eqx.Module):
    weight: Any

    def get(self) -> Any:
        return self.weight


class Point(NamedTuple):
    x: Any
    y: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["size"])
@dataclasses.dataclass
class Registered:
    weight: Any
    size: Any


@jax.tree_util.register_pytree_node_class
class Custom:
    def __init__(self, children: Any, note: Any):
        self.children, self.note = children, note

    def tree_flatten(self) -> Any:
        return self.children, self.note

    @classmethod
    def tree_unflatten(cls, note: Any, children: Any) -> Any:
        return cls(tuple(children), note)


ARRAYS = st.sampled_from(
    [
        lambda: jnp.ones(2),
        lambda: np.ones(3),
        lambda: np.float32(1),
        lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    ]
).map(lambda make: make())
STATICS = st.sampled_from([1, True, 1.0, 0.0, -0.0, "a", "b", jnp.sin, b"", ft.Axes("a")])
KEYS = st.sampled_from(["a", "b", "c d", "é", "'\"", ""])


def _nodes(inner: Any) -> Any:
    items = st.lists(inner, max_size=3)
    keyed = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        keyed,
        st.dictionaries(st.sampled_from([0, 1, 2]), inner, max_size=2),
        st.dictionaries(st.sampled_from([False, True]), inner, max_size=2),
        keyed.map(collections.OrderedDict),
        keyed.map(lambda d: collections.defaultdict(list, d)),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner, STATICS),
        st.builds(Leafless, STATICS),
        st.builds(Registered, inner, STATICS),
        st.builds(Custom, items.map(tuple), STATICS),
        inner.map(lambda x: jax.tree_util.Partial(jnp.sin, x, by=x)),
        inner.map(lambda x: eqx.Partial(jnp.cos, x)),
        inner.map(lambda x: Method(x).get),  # a bound method is a module to Equinox
        inner.map(ft.pack),
    )


TREES = st.recursive(st.one_of(ARRAYS, STATICS, st.none()), _nodes, max_leaves=12)


def arrays_of(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if is_array(x)]


def same_objects(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(x is y for x, y in zip(one, other, strict=True))


def described(tree: Any) -> tuple[Any, ...]:
    """JAX's structure of a tree, and its other leaves with their types: what a skeleton has to tell
    apart."""
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    return treedef, tuple(None if is_array(x) else StaticValue(x) for x in flat)


X = jnp.ones(2)
CHANGED: dict[str, tuple[Any, Any]] = {
    "static leaf": ([1, X], [2, X]),
    "type of a static leaf": ([1, X], [True, X]),
    "static field": (Pair(X, X, 1), Pair(X, X, 2)),
    "length": ([X, X], [X, X, X]),
    "shorter": ((X, X), (X,)),
    "empty": ([], [X]),
    "key": ({"a": X}, {"b": X}),
    "more keys": ({"a": X}, {"a": X, "b": X}),
    "fewer keys": ({"a": X, "b": X}, {"a": X}),
    "keys of other types": ({1: X}, {"a": X, "b": X}),
    "class": ([X], (X,)),
    "module": (Method(X), Pair(X, X)),
    "named tuple": (Point(X, X), (X, X)),
    "a subclass of dict": ({"a": X}, collections.OrderedDict(a=X)),
    "order": (collections.OrderedDict(a=X, b=X), collections.OrderedDict(b=X, a=X)),
    "registered": (Registered(X, 1), Registered(X, 2)),
    "default": (collections.defaultdict(list, a=X), collections.defaultdict(dict, a=X)),
    "none": ([None, X], [X, X]),
    "packed": (ft.pack([X, 1]), ft.pack([X, 2])),
    "packed, by type": (ft.pack(Pair(X, 1)), ft.pack(Pair(X, True))),
    "packed, or not": (ft.pack([X]), [X]),
    "nested": ({"a": [Pair(X, {"b": 1})]}, {"a": [Pair(X, {"b": 2})]}),
}
