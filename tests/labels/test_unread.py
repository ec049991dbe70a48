"""Annotations that say nothing about the arrays that they are of: found all the same, or said."""

import dataclasses
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

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


class Registered:
    """Base of classes whose attributes are children; registered without keys."""

    children: tuple[str, ...] = ("w", "b")

    def __init__(self, w: Any, b: Any):
        self.w, self.b = w, b

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register_pytree_node_class(cls)

    def tree_flatten(self) -> Any:
        return tuple(getattr(self, name) for name in self.children), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        node = object.__new__(cls)
        for name, child in zip(cls.children, children, strict=True):
            setattr(node, name, child)
        return node


class Reversed(Registered):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]
    children = ("b", "w")

    @property
    def size(self) -> int:
        raise RuntimeError("not known yet")


Reversed.__annotations__["size"] = Float[Array, ""]


class Boxed(Registered, Generic[T]):
    w: T
    b: Float[Array, "hidden"] | None


class OfField(eqx.Module):
    box: Boxed[Float[Array, "embed hidden"]]


# A dataclass as `jax_dataclasses` registers it.
@dataclasses.dataclass
class Data:
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]
    size: int = 3


jax.tree_util.register_pytree_node(
    Data,
    lambda data: ((data.w, data.b), data.size),
    lambda size, children: Data(*children, size),
)

BY_IDENTITY: dict[str, tuple[Any, list[P]]] = {
    # It has an annotated property that raises, too.
    "in another order": (Reversed(W, B), [P("model"), P(None, "model")]),
    "a dataclass": (Data(W, B), [P(None, "model"), P("model")]),
    "generic": (OfField(Boxed(W, None)), [P(None, "model")]),
}


@pytest.mark.parametrize("case", BY_IDENTITY)
def test_fields_are_found_by_identity(case: str):
    tree, wanted = BY_IDENTITY[case]
    assert specs(tree) == wanted


class Computed(Registered):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]

    def tree_flatten(self) -> Any:
        return (self.w * 1, {"b": self.b}), None


class Tied(Registered):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden embed"]


@pytest.mark.parametrize(
    ("tree", "paths"),
    [(Computed(W, B), ["0   f32[8, 16]", "1.b   f32[16]"]), (Tied(W, W), ["0, 1   f32"])],
)
def test_what_is_not_found(tree: Any, paths: list[str]):
    said = (
        f"has no axis names: its class {type(tree).__name__} is registered with JAX without keys "
        "that name its fields, so its annotations cannot be matched to its children",
        "Try: register it with keys (`jax.tree_util.register_pytree_with_keys_class`, with a "
        "`GetAttrKey` for each field)",
    )
    for path in paths:
        with raises(path, *said):
            specs(tree)
    # These have no names for those who do not ask by name.
    assert not any(map(any, jax.tree.leaves(ft.tree_axes(tree))))


def test_the_warning_of_what_rules_replicate():
    """One for each reason: other arrays that nobody has placed have another remedy."""
    mesh = ft.make_mesh(data=2, model=4)
    step = ft.jit(lambda tied, other, bare: (tied, other, bare), rules=RULES, mesh=mesh)
    with pytest.warns(ft.FunctreeWarning) as caught:
        step.lower(Tied(W, W), hold(Float[Array, "embed hidden"], [W]), (W, W))
    tied, other, bare = [str(warning.message) for warning in caught]
    for text, *fragments in (
        (tied, "`tied.0`", "`tied.1`", "(its class Tied is registered with JAX", ": register it with keys ("),
        (other, "`other.w.0`", "(its annotation `Float", "the annotated value has type list)", ": write `PyTree[Float"),
        (bare, "`bare.0`", "`bare.1`", "are uncommitted and have no axis names, so they are replicated", ": annotate them, "),
    ):  # fmt: skip
        assert all(fragment in text for fragment in fragments), text


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """As the remedy says."""

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


class Typed(TypedDict):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Named(NamedTuple):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Box(eqx.Module, Generic[T]):
    value: T


class Bare(eqx.Module):
    weight: Array
    bias: Float[Array, "hidden"] | None = None


HIDDEN, MATRIX = Float[Array, "hidden"], Float[Array, "embed hidden"]
LAYER = eqx.nn.Linear(8, 16, key=jax.random.key(0))
FOR_ARRAY = '`Float[Array, "embed hidden"]` is for an array, but the annotated value has type '
TREE = 'write `PyTree[Float[Array, "embed hidden"]]`'

# Annotation, value ─► the path of the first leaf, why it has no names, and the remedy.
STRUCTURES: dict[str, tuple[Any, Any, list[str]]] = {
    "a TypedDict": (
        Typed | None,
        {"w": W, "b": B},
        ["w.w", "`Typed` is a TypedDict, whose own annotations are not read", 'use `dict[str, Float[Array, "<axes>"]]`'],
    ),
    "a list for an array": (MATRIX, [W], ["w.0", FOR_ARRAY + "list", TREE]),
    "a layer for an array": (MATRIX, LAYER, ["w.weight", FOR_ARRAY + "Linear", "write `Annotated[Linear, ft.names(...)]`"]),
    "an array for a list": (list[HIDDEN], B, ["w", "is for a container, but the annotated value is an array", 'write `Float[Array, "<axes>"]` instead']),
    "an array for a class": (Box[HIDDEN], B, ["w", "is for an instance of Box, but the annotated value is an array"]),
    "elements behind those of a tuple": (
        tuple[MATRIX, HIDDEN],
        (W, B + 1, B),
        ["w.2", "is for 2 elements, but the value has 3", "annotate each element, or all of them with `tuple[X, ...]`"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURES)
def test_annotation_and_value_of_different_structure(case: str):
    annotation, value, (path, *fragments) = STRUCTURES[case]
    with raises(f"\n  {path}", "has no axis names: its annotation ", *fragments):
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


def test_what_is_annotated_by_its_own_class_needs_no_reason():
    with raises("has no axis names, and rules shard axes by name", "annotate the array"):
        specs(hold(MATRIX, Box(Bare(W))))
