"""Nodes of every kind that trees are made of, trees of them for hypothesis to draw, and when two
are the same."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from hypothesis import strategies as st
from jax import Array
from jaxtyping import Float

from functree.labels.leaves import Leaf
from functree.tree.axes import Axes
from functree.tree.nodes import children
from functree.tree.paths import Path

# Leaves of several shapes and dtypes.
ARRAYS = [
    np.zeros((2, 3), np.float32),
    np.int32(4),
    np.ones(2, np.int8),
    np.ones((2, 2), np.float32),
]


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


class Leafy(eqx.Module):
    """A module without annotations of its axes, and with a static field."""

    w: Any
    kept: Any
    static: Any = eqx.field(static=True, default="s")


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A node that does not say what its children are called."""

    def __init__(self, *children: Any):
        self.children = children

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Keyless":
        return cls(*children)


class MLP(eqx.Module):
    """Two weights whose axes are annotated, and two leaves that are no arrays."""

    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    activation: Callable[[Array], Array] = jax.nn.relu
    name: str = "mlp"

    def __call__(self, x: Array) -> Array:
        return self.activation(x @ self.up) @ self.down


def mlp(embed: int = 6, hidden: int = 8) -> MLP:
    """An MLP with random weights."""
    up, down = jax.random.normal(jax.random.key(0), (2, embed, hidden))
    return MLP(up, down.T)


class BareMLP(eqx.Module):
    """Arrays alone, so that JAX's own transforms take it too."""

    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __call__(self, x: Array) -> Array:
        return jax.nn.relu(x @ self.up) @ self.down


def x(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    """An array of this shape that is nowhere."""
    return jax.ShapeDtypeStruct(shape, dtype)


def leaf(axes: str, *shape: int) -> Leaf:
    """The leaf `w` of a tree, with an annotation that gives it these axes."""
    return Leaf(Path(("w",)), x(*shape), Axes.parse(axes), annotated=True)


def module(axes: str, *shape: int) -> Any:
    """A module with one abstract array `w` of these axes; by default each has the size 8."""
    body = {"__annotations__": {"w": Float[Array, axes]}, "__module__": __name__}
    return type("One", (eqx.Module,), body)(x(*shape or (8,) * len(axes.split())))


def linear(use_bias: bool = True) -> eqx.nn.Linear:
    """A layer of Equinox: a module whose class knows nothing of axes."""
    return eqx.nn.Linear(2, 3, use_bias=use_bias, key=jax.random.key(0))


def hold(annotation: Any, value: Any, module: str = __name__) -> Any:
    """A module with one field `w` of this annotation, whose quoted names are those of `module`; the
    value is not checked."""
    names = {"__annotations__": {"w": annotation}, "__module__": module}
    node = object.__new__(type("Holder", (eqx.Module,), names))
    object.__setattr__(node, "w", value)
    return node


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nodes of every kind with `inner` for children, as `st.recursive` wants them."""
    keys = st.text(max_size=3)
    lists = st.lists(inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=2).map(lambda d: defaultdict(list, d)),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Leafy, inner, inner),
        lists.map(lambda children: Keyless(*children)),
    )


def is_none(value: Any) -> bool:
    """For `is_leaf`: `None` is a leaf too."""
    return value is None


def flat(tree: Any) -> tuple[list[Any], Any]:
    """As `jax.tree.flatten`, with `None` for a leaf."""
    return jax.tree.flatten(tree, is_leaf=is_none)


def same(one: Any, other: Any) -> bool:
    """The same structure, and the same objects for leaves."""
    (a, first), (b, second) = flat(one), flat(other)
    return first == second and len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def nodes(tree: Any, path: Path = Path()) -> list[tuple[Path, Any]]:  # noqa: B008 (it is immutable)
    """Each node of a tree with its path, the outer ones first, leaves and `None` among them."""
    return [(path, tree)] + [
        each for key, child in children(tree) or () for each in nodes(child, path / key)
    ]
