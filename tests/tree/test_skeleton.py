"""A tree without its arrays: laws for trees of all kinds, with `jax.tree` as the oracle."""

import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import functree as ft
from functree.labels.leaves import read
from functree.tree.skeleton.skeleton import Skeleton, abstract_result
from tests.lib.checks import raises
from tests.lib.structures import (
    TREES,
    Method,
    Pair,
    Point,
    X,
    arrays_of,
    described,
)


def test_init_is_not_called_again():
    class Counted(eqx.Module):
        x: Any

        def __check_init__(self) -> None:
            calls.append(self.x)

    calls: list[Any] = []
    built = Skeleton.of(Counted(X)).build([jnp.zeros(3)])
    assert isinstance(built, Counted) and len(calls) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.x = 3


def test_statics_have_paths():
    tree = {"a": [Pair(X, 3, name="n")], "p": Point(X, "text"), "q": {1: X}}
    found = {str(ft.Path(keys)): value for keys, value in Skeleton.of(tree).learn(tree).statics}
    assert found == {"a.0.name": "n", "a.0.second": 3, "p.y": "text"}


class Raises:
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")


NAN, ARRAY = float("nan"), np.arange(3)
STATIC_DATA: dict[str, tuple[Any, Any, bool]] = {
    "types": (1, True, True),
    "values": (1, 2, False),
    "a dict with more": ({"a": [1]}, {"a": [1], "b": 2}, False),
    "nan": (float("nan"), float("nan"), False),
    "one nan": (NAN, NAN, True),
    "one array in a list": ([ARRAY], [ARRAY], True),
    "functions": (jnp.sin, jnp.cos, False),
}


@pytest.mark.filterwarnings("ignore:A .* array is being set as static")
@pytest.mark.parametrize(("one", "other", "equal"), STATIC_DATA.values(), ids=STATIC_DATA)
def test_static_data_is_compared_as_jax_compares_it(one: Any, other: Any, equal: bool):
    modules = Pair(X, X, one), Pair(X, X, other)
    treedefs = [jax.tree.structure(module) for module in modules]
    assert (treedefs[0] == treedefs[1]) is equal
    assert (Skeleton.of(modules[0]) == Skeleton.of(modules[1])) is equal
    # The function that is generated at the second call compares in the same way.
    f = ft.jit(lambda module: module.first)
    for module in modules * 3:
        f(module)
    assert len(f.compilations) == (1 if equal else 2)


@pytest.mark.filterwarnings("ignore:A .* array is being set as static")
@pytest.mark.parametrize("data", [lambda: np.arange(3), Raises], ids=["array", "raises"])
def test_static_data_that_cannot_be_compared(data: Any):
    f = ft.jit(lambda module: module.first)
    for times in (1, 2):  # by the skeletons, and by a generated function
        module = Pair(X, X, data())
        for _ in range(times):
            f(module)
        said = (
            "cannot be compared: its `==` raises ValueError: ",
            "give the class an `__eq__` that returns True or False, and a `__hash__`",
            "for an array, remove `static=True` from the field",
        )
        with raises(*said):
            f(Pair(X, X, data()))
        f = ft.jit(lambda module: module.second)


def test_what_cannot_be_hashed():
    tree = {"a": Pair(X, {1, 2}), "b": Pair(X, bytearray(), ["n"])}
    skeleton = Skeleton.of(tree).learn(tree)
    assert hash(skeleton) == hash(Skeleton.of(tree))
    with pytest.raises(ft.FunctreeError) as caught:
        skeleton.check_hashable()
    told = [(str(problem.path), problem.what) for problem in caught.value.problems]
    assert told == [("a.second", "set"), ("b.second", "bytearray")]
    # Static data of a node needs no hash.
    Skeleton.of({"a": Pair(X, (1, 2), ["n"])}).check_hashable()
    assert Skeleton.of([X, {1, 2}]) == Skeleton.of([X, {1, 2}]) != Skeleton.of([X, {1, 3}])


@given(TREES)
def test_the_paths_are_those_of_the_walk(tree: Any):
    assert Skeleton.of(tree).learn(tree).paths == tuple(leaf.path for leaf in read(tree).leaves)
    assert Skeleton.of(tree) == read(tree).skeleton


COPIED = {
    "module": Pair([jnp.ones(2), None], {"k": Method(jnp.ones(3))}, "static"),
    "stacked": ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0)),
    "packed": ft.pack(Pair(jnp.ones(2), (1, "text"))),
    "with state": ft.make_state([ft.nn.BatchNorm(4)]),
}


@pytest.mark.parametrize("case", COPIED)
def test_copied(case: str):
    tree = COPIED[case]
    static, arrays = ft.split(tree)
    for _ in range(2):
        static.build(arrays_of(tree))  # the generated function is no part of a copy
    for again in (copy.copy(static), copy.deepcopy(static)):
        assert again == static and hash(again) == hash(static) and again.paths == static.paths
        assert jax.tree.structure(ft.merge(again, arrays)) == jax.tree.structure(tree)
    packed = ft.pack(tree)
    assert copy.deepcopy(packed).static == packed.static


@given(TREES)
def test_filled_and_spread(tree: Any):
    skeleton, arrays = Skeleton.of(tree), arrays_of(tree)
    assert described(skeleton.fill(arrays)) == described(tree)
    spread = skeleton.spread(range(1, len(arrays) + 1))
    assert jax.tree.leaves(spread, is_leaf=lambda x: x is None).count(None) >= len(skeleton.others)
    assert [x for x in jax.tree.leaves(spread) if x is not None] == list(range(1, len(arrays) + 1))


# Classes that look at their arrays


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=[])
@dataclasses.dataclass
class Converts:
    a: Any

    def __post_init__(self) -> None:
        self.a = jnp.asarray(self.a)


class Batch(NamedTuple):
    """Its length and iteration are those of its arrays, as of a dataset."""

    a: Any
    b: Any

    def __len__(self) -> int:
        return self.a.shape[0]

    def __iter__(self) -> Any:
        return (Batch(a, b) for a, b in zip(self.a, self.b, strict=True))


PARTICULAR = {
    "converts": lambda: Converts(X),
    "batch": lambda: Batch(X, jnp.zeros(2)),
}


@pytest.mark.parametrize("case", PARTICULAR)
def test_classes_that_look_at_their_arrays(case: str):
    tree = PARTICULAR[case]()
    arrays = jax.tree.leaves(tree)

    def leaves(found: Any) -> list[Any]:
        assert type(found) is type(tree)
        return jax.tree.leaves(found)

    f = ft.jit(lambda tree: (tree, [2 * x for x in jax.tree.leaves(tree)]))
    for _ in range(2):
        same, doubled = f(tree)
        assert all(map(np.array_equal, leaves(same), arrays))
        assert all(np.array_equal(x, 2 * y) for x, y in zip(doubled, arrays, strict=True))
    assert len(f.compilations) == 1
    assert all(map(np.array_equal, leaves(ft.unpack(ft.pack(tree))), arrays))
    assert isinstance(f(ft.pack(tree))[0], ft.Packed)
    plan = ft.plan(tree, ft.P(), {"data": 2})
    assert [row.shape for row in plan] == [x.shape for x in arrays]
    gradient = ft.grad(lambda tree: sum(x.sum() for x in jax.tree.leaves(tree)))
    assert len(leaves(gradient(tree))) == len(arrays)


class Leafed(NamedTuple):
    child: Any
    other: Any


NESTED = {"a list": lambda tree: [tree], "a named tuple": lambda tree: Leafed(tree, None)}


@pytest.mark.parametrize("deep", [150, 1000, 5000])
@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
def test_deep_trees(nest: Any, deep: int):
    def nested(x: Any) -> Any:
        return functools.reduce(lambda tree, _: nest(tree), range(deep), x)

    calls = {
        "argument": lambda: ft.jit(lambda tree: tree)(nested(X)),
        "result": lambda: ft.jit(nested)(X),
        "packed": lambda: ft.pack(nested(X)),
    }
    for what, call in calls.items():
        try:
            (leaf,) = jax.tree.leaves(call())
        except ft.FunctreeError as error:
            assert deep > 150, what
            assert "cannot be flattened: it contains itself, or is nested too deeply" in str(error)
        else:
            assert np.array_equal(leaf, X)


# Results for abstract arrays


def test_an_abstract_result():
    def doubled(tree: Any) -> Any:
        return Pair(tree["a"] * 2, {"b": tree["b"]}, name=tree["text"])

    a, b = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((4,), "int8")
    found = abstract_result(doubled, {"a": a, "b": np.ones(4, np.int8), "text": "t"})
    assert (found.first, found.second, found.name) == (a, {"b": b}, "t")
