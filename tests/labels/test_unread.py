"""Annotations of classes without keys, and of values of another structure."""

from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, register_pytree_node_class
from jaxtyping import Float, PyTree

import functree as ft
from tests.lib.checks import raises
from tests.lib.trees import hold

T = TypeVar("T")
RULES = ft.AxisRules({"embed": None, "hidden": "model"})
W, B = jnp.ones((8, 16)), jnp.ones(16)


def specs(tree: Any) -> list[P]:
    return [row.spec for row in ft.plan(tree, RULES, {"model": 4})]


@register_pytree_node_class
class Tied:
    """Registered without keys."""

    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden embed"]

    def __init__(self, w: Any, b: Any):
        self.w, self.b = w, b

    def tree_flatten(self) -> Any:
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        return cls(*children)


def test_a_class_that_is_registered_without_keys():
    with raises("0, 1   f32", "has no axis names, and rules shard axes by name"):
        specs(Tied(W, W))
    # Different objects are found in the attributes.
    assert specs(Tied(W, W + 1)) == [P(None, "model"), P("model", None)]


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden embed"]

    def __init__(self, w: Any, b: Any):
        self.w, self.b = w, b

    def tree_flatten_with_keys(self) -> Any:
        return ((GetAttrKey("w"), self.w * 1), (GetAttrKey("b"), self.b)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        return cls(*children)


def test_the_remedies_of_what_is_not_found():
    wanted = [P(None, "model"), P("model", None)]
    assert specs(Keyed(W, W)) == wanted
    # By the keys that JAX gives the children.
    given = {Tied: ft.names({"0": "embed hidden", "1": "hidden embed"})}
    rules = ft.AxisRules({"embed": None, "hidden": "model"}, names=given)
    assert [row.spec for row in ft.plan(Tied(W, W + 1), rules, {"model": 4})] == wanted


# Annotations and values of different structure


class Named(NamedTuple):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Box(eqx.Module, Generic[T]):
    value: T


HIDDEN, MATRIX = Float[Array, "hidden"], Float[Array, "embed hidden"]
LAYER = eqx.nn.Linear(8, 16, key=jax.random.key(0))

# Annotation, value ─► the path of the first leaf without names.
STRUCTURES: dict[str, tuple[Any, Any, str]] = {
    "a list for an array": (MATRIX, [W], "w.0"),
    "a layer for an array": (MATRIX, LAYER, "w.weight"),
    "an array for a list": (list[HIDDEN], B, "w"),
    "an array for a class": (Box[HIDDEN], B, "w"),
    "elements behind those of a tuple": (tuple[MATRIX, HIDDEN], (W, B + 1, B), "w.2"),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_annotation_and_value_of_different_structure(case: str):
    annotation, value, path = STRUCTURES[case]
    with raises(f"\n  {path}", "has no axis names, and rules shard axes by name"):
        specs(hold(annotation, value))


REMEDIES: dict[str, tuple[Any, Any, list[P]]] = {
    "PyTree": (PyTree[MATRIX], {"a": [W]}, [P(None, "model")]),
    "a named tuple": (Named, Named(W, B), [P(None, "model"), P("model")]),
    "all alike": (tuple[HIDDEN, ...], (B, B + 1, B + 2), [P("model")] * 3),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_the_remedies(case: str):
    annotation, value, wanted = REMEDIES[case]
    assert specs(hold(annotation, value)) == wanted
