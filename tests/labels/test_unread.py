"""Annotations that say nothing about the arrays that they are of: found all the same, or said."""

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar

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


class Plain(Registered):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Reversed(Registered):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]
    children = ("b", "w")


class Alike(Registered):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "embed hidden"]


class Slotted(Registered):
    __slots__ = ("b", "w")
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Lazy(Registered):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]

    @property
    def size(self) -> int:
        raise RuntimeError("not known yet")


Lazy.__annotations__["size"] = Float[Array, ""]


class Several(Registered):
    w: list[Float[Array, "embed hidden"]]
    b: dict[str, Plain] | None


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
    "a class": (Plain(W, B), [P(None, "model"), P("model")]),
    "in another order": (Reversed(W, B), [P("model"), P(None, "model")]),
    "tied and alike": (Alike(W, W), [P(None, "model")] * 2),
    "slots": (Slotted(W, B), [P(None, "model"), P("model")]),
    "a dataclass": (Data(W, B), [P(None, "model"), P("model")]),
    "a property that raises": (Lazy(W, B), [P(None, "model"), P("model")]),
    "containers": (Several([W, W], {"x": Plain(W, B)}), [P(None, "model")] * 3 + [P("model")]),
    "None": (Several([W], None), [P(None, "model")]),
    "generic": (OfField(Boxed(W, None)), [P(None, "model")]),
    "in a stack of their own": ([Plain(W, B)], [P(None, "model"), P("model")]),
    "abstract": (ft.abstract(lambda: Data(W, B))(), [P(None, "model"), P("model")]),
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
    name = type(tree).__name__
    for fragment in paths:
        with raises(
            fragment,
            f"has no axis names: its class {name} is registered with JAX without keys that name its fields, so it is "
            "not known which annotation belongs to which child, and rules shard axes by name",
            "Try: register it with keys (`jax.tree_util.register_pytree_with_keys_class`, with `GetAttrKey` and the name "
            "of the field), give `names=` to the rules, lay it out by a path filter, or leave it unsharded by these rules with `unnamed=P()`",
        ):
            specs(tree)
    # As before, these have no names for those who do not ask by name.
    assert not any(map(any, jax.tree.leaves(ft.tree_axes(tree))))


def test_the_warning_of_what_rules_replicate():
    """One for each reason: other arrays that nobody has placed have another remedy."""
    mesh = ft.make_mesh(data=2, model=4)
    step = ft.jit(lambda tied, other, bare: (tied, other, bare), rules=RULES, mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.lower(Tied(W, W), OfArray([W]), (W, W))
    told = [str(warning.message) for warning in caught]
    assert len(told) == 3
    for text, fragments in zip(
        told,
        [
            ("`tied.0`", "`tied.1`", "(its class Tied is registered with JAX", ": register it with keys ("),
            ("`other.p.0`", "(its annotation `Float", "it is a list)", ": write `PyTree[Float"),
            ("`bare.0`", "`bare.1`", "have no axis names and nobody", ": annotate them, "),
        ],
        strict=True,
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


def test_registered_with_keys():
    assert specs(Keyed(W, W)) == [P(None, "model"), P("model", None)]


def test_the_other_remedies_of_what_is_not_found():
    """`names=`, by the keys that JAX gives the children, and a path filter."""
    wanted = [P(None, "model"), P("model", None)]
    given = {Tied: ft.names({"0": "embed hidden", "1": "hidden embed"})}
    rules = ft.AxisRules({"embed": None, "hidden": "model"}, names=given)
    filters = ft.StateSharding({"0": P(None, "model"), "1": P("model")})
    for layout in (rules, filters):
        plan = ft.plan(Tied(W, W + 1), layout, {"model": 4})
        assert [row.spec for row in plan] == wanted


class Typed(TypedDict):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Named(NamedTuple):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Box(eqx.Module, Generic[T]):
    value: T


class OfTyped(eqx.Module):
    p: Typed | None


class OfArray(eqx.Module):
    p: Float[Array, "embed hidden"]


class OfList(eqx.Module):
    p: list[Float[Array, "hidden"]]


class OfNested(eqx.Module):
    p: dict[str, Float[Array, "hidden"]]


class OfBox(eqx.Module):
    p: Box[Float[Array, "hidden"]]


class OfTree(eqx.Module):
    p: PyTree[Float[Array, "embed hidden"]]


class OfNamed(eqx.Module):
    p: Named


class OfDict(eqx.Module):
    p: dict[str, Float[Array, "embed hidden"] | Float[Array, "hidden"]]


class OfTuple(eqx.Module):
    p: tuple[Float[Array, "embed hidden"], Float[Array, "hidden"]]


class OfMany(eqx.Module):
    p: tuple[Float[Array, "hidden"], ...]


class OfLayer(eqx.Module):
    p: Annotated[eqx.nn.Linear, ft.names(weight="hidden embed", bias="hidden")]


def layer() -> eqx.nn.Linear:
    return eqx.nn.Linear(8, 16, key=jax.random.key(0))


ARRAY = '`Float[Array, "embed hidden"]` is for an array, but it is a '
STRUCTURES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a TypedDict": (
        lambda: OfTyped({"w": W, "b": B}),
        ["p.w", "`Typed` is a TypedDict, and the annotations in it are not read", 'write `dict[str, Float[Array, "..."]]`'],
    ),
    "a list for an array": (lambda: OfArray([W]), ["p.0", ARRAY + "list", 'write `PyTree[Float[Array, "embed hidden"]]`']),
    "a dict for an array": (lambda: OfArray({"a": [W]}), ["p.a.0", ARRAY + "dict", "write `PyTree["]),
    "an ordered dict": (lambda: OfArray(collections.OrderedDict(a=W)), ["p.a", ARRAY + "OrderedDict", "write `PyTree["]),
    "a layer for an array": (
        lambda: OfArray(layer()), ["p.weight", ARRAY + "Linear", "write `Annotated[Linear, ft.names(...)]`"],
    ),
    "an array for a list": (lambda: OfList(B), ["p", "is for a container, but it is an array", 'write `Float[Array, "..."]` there']),
    "a list in a dict": (lambda: OfNested({"a": [B]}), ["p.a.0", "is for an array, but it is a list"]),
    "elements behind those of a tuple": (
        lambda: OfTuple((W, B + 1, B)), ["p.2", "is for 2 elements, but there are 3", "annotate each element, or all alike: `tuple[X, ...]`"],
    ),
    "an array for a class": (lambda: OfBox(B), ["p", "is for a Box, but it is an array"]),
    "a list for a class": (lambda: OfBox([B]), ["p.0", "is for a Box, but it is a list"]),
}  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURES)
def test_annotation_and_value_of_different_structure(case: str):
    make, (path, *fragments) = STRUCTURES[case]
    with raises(f"\n  {path}", "has no axis names: its annotation ", *fragments):
        specs(make())


REMEDIES: dict[str, tuple[Callable[[], Any], list[P]]] = {
    "PyTree": (lambda: OfTree({"a": [W]}), [P(None, "model")]),
    "a named tuple": (lambda: OfNamed(Named(W, B)), [P(None, "model"), P("model")]),
    "a dict": (lambda: OfDict({"w": W, "b": B}), [P("model"), P(None, "model")]),
    "names": (lambda: OfLayer(layer()), [P("model", None), P("model")]),
    "an array": (lambda: OfArray(W), [P(None, "model")]),
    "all alike": (lambda: OfMany((B, B + 1, B + 2)), [P("model")] * 3),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_the_remedies(case: str):
    make, wanted = REMEDIES[case]
    assert specs(make()) == wanted


def test_what_is_annotated_by_its_own_class_needs_no_reason():
    with raises("has no axis names, and rules shard axes by name", "annotate it"):
        specs(OfArray(Box(Bare(W))))


class Bare(eqx.Module):
    weight: Array
    bias: Float[Array, "hidden"] | None = None
