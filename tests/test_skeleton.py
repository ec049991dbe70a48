"""Skeletons, and the code that is written for them: laws for trees of all kinds, with `jax.tree` as the oracle."""

import collections
import copy
import dataclasses
import enum
import functools
import pickle
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.scipy.spatial.transform import Rotation

import functree as ft
from functree.calls.call_groups import CallGroups
from functree.tree.arrays import is_array
from functree.tree.leaves import read
from functree.tree.skeleton.skeleton import Skeleton
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
    [lambda: jnp.ones(2), lambda: np.ones(3), lambda: np.float32(1), lambda: jax.ShapeDtypeStruct((2,), jnp.float32)]
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
    """JAX's structure of a tree, and its other leaves with their types: what a skeleton has to tell apart."""
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    return StaticValue(treedef), tuple(None if is_array(x) else StaticValue(x) for x in flat)


@given(TREES)
def test_taken_apart_as_by_jax(tree: Any):
    skeleton = Skeleton.of(tree)
    found = skeleton.take(tree)
    assert found is not None and same_objects(found, arrays_of(tree))
    assert len(skeleton) == len(found)


@given(TREES)
def test_put_together_again(tree: Any):
    skeleton = Skeleton.of(tree)
    arrays = skeleton.take(tree)
    built = skeleton.build(arrays)
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    again, treedef_again = jax.tree.flatten(built, is_leaf=lambda x: x is None)
    assert treedef_again == treedef
    assert all(x is y or x == y for x, y in zip(flat, again, strict=True))
    assert type(built) is type(tree)
    assert Skeleton.of(built) == skeleton and same_objects(skeleton.take(built), arrays)


@given(TREES)
def test_the_arrays_alone_make_no_difference(tree: Any):
    other = jax.tree.map(lambda x: jnp.zeros(5) if is_array(x) else x, tree)
    skeleton = Skeleton.of(tree)
    assert Skeleton.of(other) == skeleton and hash(Skeleton.of(other)) == hash(skeleton)
    assert same_objects(skeleton.take(other), arrays_of(other))


@given(TREES, TREES)
def test_equal_skeletons_are_equal_structures(one: Any, other: Any):
    same = described(one) == described(other)
    assert (Skeleton.of(one) == Skeleton.of(other)) == same
    found = Skeleton.of(one).take(other)
    # What stands in an array's place is the caller's business.
    assert (found is not None and all(map(is_array, found))) == same


@given(TREES, st.data())
def test_one_thing_changed(tree: Any, data: st.DataObject):
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    places = [i for i, x in enumerate(flat) if not is_array(x)]
    if not places:
        return
    i = data.draw(st.sampled_from(places))
    flat[i] = data.draw(st.sampled_from(["new", 7, None if flat[i] is not None else "new"]))
    changed = treedef.unflatten(flat)
    assert Skeleton.of(tree).take(changed) is None
    assert Skeleton.of(changed) != Skeleton.of(tree)


X = jnp.ones(2)
CHANGED: dict[str, tuple[Any, Any]] = {
    "static leaf": ([1, X], [2, X]),
    "type of a static leaf": ([1, X], [True, X]),
    "static field": (Pair(X, X, 1), Pair(X, X, 2)),
    "type of a static field": (Pair(X, X, 1), Pair(X, X, 1.0)),
    "length": ([X, X], [X, X, X]),
    "shorter": ((X, X), (X,)),
    "empty": ([], [X]),
    "key": ({"a": X}, {"b": X}),
    "more keys": ({"a": X}, {"a": X, "b": X}),
    "fewer keys": ({"a": X, "b": X}, {"a": X}),
    "type of a key": ({1: X}, {True: X}),
    "keys of other types": ({1: X}, {"a": X, "b": X}),
    "class": ([X], (X,)),
    "module": (Method(X), Pair(X, X)),
    "named tuple": (Point(X, X), (X, X)),
    "a subclass of dict": ({"a": X}, collections.OrderedDict(a=X)),
    "order": (collections.OrderedDict(a=X, b=X), collections.OrderedDict(b=X, a=X)),
    "registered": (Registered(X, 1), Registered(X, True)),
    "default": (collections.defaultdict(list, a=X), collections.defaultdict(dict, a=X)),
    "none": ([None, X], [X, X]),
    "packed": (ft.pack([X, 1]), ft.pack([X, 2])),
    "packed, by type": (ft.pack(Pair(X, 1, 1)), ft.pack(Pair(X, 1, True))),
    "packed, or not": (ft.pack([X]), [X]),
    "nested": ({"a": [Pair(X, {"b": 1})]}, {"a": [Pair(X, {"b": 2})]}),
}


@pytest.mark.parametrize("what", CHANGED)
def test_another_form_is_not_taken(what: str):
    one, other = CHANGED[what]
    for tree, wrong in ((one, other), (other, one)):
        found = Skeleton.of(tree).take(wrong)
        assert found is None or not all(map(is_array, found))
        assert Skeleton.of(tree) != Skeleton.of(wrong)
        assert same_objects(Skeleton.of(tree).take(tree), arrays_of(tree))


def test_in_an_arrays_place_anything_is_taken():
    take = Skeleton.of([X, {"a": X}]).take
    assert take([1, {"a": "text"}]) == [1, "text"]
    assert take([None, {"a": [X]}]) is not None


def test_a_module_that_holds_more_than_another():
    taken = Skeleton.of(Pair(X, X)).take
    more = Pair(X, X)
    object.__setattr__(more, "extra", X)
    assert taken(Pair(X, X)) is not None and taken(more) is None


def test_a_packed_tree_with_another_number_of_arrays():
    packed = ft.pack([X, X])
    taken = Skeleton.of(packed).take
    assert same_objects(taken(packed), [X, X])
    for arrays in ((X,), (X, X, X), ()):
        assert taken(type(packed)(arrays, packed.static)) is None


def test_a_module_that_lacks_a_field_or_has_more():
    wrapped = eqx.filter_jit(lambda x: x)
    for tree in (wrapped, Method(X).get, eqx.nn.Lambda(wrapped)):
        skeleton = Skeleton.of(tree)
        assert same_objects(skeleton.take(tree), arrays_of(tree))
        assert jax.tree.structure(skeleton.build(skeleton.take(tree))) == jax.tree.structure(tree)
    partial = object.__new__(Pair)
    object.__setattr__(partial, "first", X)
    assert same_objects(Skeleton.of(partial).take(partial), [X])
    assert Skeleton.of(Pair(X, X)).take(partial) is None


def test_a_named_tuple_that_is_registered_in_another_order():
    class Reversed(NamedTuple):
        x: Any
        y: Any

    jax.tree_util.register_pytree_node(Reversed, lambda p: ((p.y, p.x), None), lambda _, c: Reversed(c[1], c[0]))
    other = jnp.zeros(3)
    skeleton = Skeleton.of(Reversed(X, other))
    assert same_objects(skeleton.take(Reversed(X, other)), [other, X])
    built = skeleton.build([other, X])
    assert type(built) is Reversed and same_objects(built, (X, other))


def test_init_is_not_called_again():
    calls = []

    class Counted(eqx.Module):
        x: Any

        def __init__(self, x: Any):
            calls.append(x)
            self.x = x

        def __check_init__(self) -> None:
            calls.append("check")

    tree = Counted(X)
    built = Skeleton.of(tree).build([jnp.zeros(3)])
    assert isinstance(built, Counted) and len(calls) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.x = 3


def test_statics_have_paths():
    tree = {"a": [Pair(X, 3, name="n")], "p": Point(X, "text"), "q": {1: X}}
    found = {str(path): value for path, value in Skeleton.of(tree).statics}
    assert found == {"a.0.name": "n", "a.0.second": 3, "p.y": "text"}


def test_skeletons_are_values():
    assert {Skeleton.of(Pair(X, 1)): 1}[Skeleton.of(Pair(np.ones(3), 1))] == 1
    assert Skeleton.of(X) == Skeleton.of(np.ones(3)) != Skeleton.of(None)
    configurations = [Pair(X, X, name) for name in (1, True, 1.0, -0.0, 0.0, "a", ("a", 1), ("a", True))]
    assert len(set(map(Skeleton.of, configurations))) == len({hash(Skeleton.of(c)) for c in configurations}) == 8


def test_what_cannot_be_hashed():
    skeleton = Skeleton.of({"a": Pair(X, {1, 2}), "b": Pair(X, X, ["n"])})
    assert hash(skeleton) == hash(Skeleton.of({"a": Pair(X, {1, 2}), "b": Pair(X, X, ["n"])}))
    with pytest.raises(ft.FunctreeError) as caught:
        skeleton.check_hashable()
    assert [(str(p.path), p.what) for p in caught.value.problems] == [("a.second", "set"), ("b.name", "list")]
    Skeleton.of({"a": Pair(X, (1, 2))}).check_hashable()
    assert Skeleton.of([X, {1, 2}]) == Skeleton.of([X, {1, 2}]) != Skeleton.of([X, {1, 3}])


@given(TREES)
def test_the_paths_are_those_of_the_walk(tree: Any):
    assert Skeleton.of(tree).paths == tuple(leaf.path for leaf in read(tree).leaves)
    assert Skeleton.of(tree) == read(tree).skeleton


COPIED = {
    "module": Pair([jnp.ones(2), None], {"k": Method(jnp.ones(3))}, "static"),
    "of Equinox": eqx.nn.GRUCell(2, 3, key=jax.random.key(0)),
    "of functree": ft.nn.MLP(4, 8, key=jax.random.key(0)),
    "stacked": ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0)),
    "packed": ft.pack(Pair(jnp.ones(2), (1, "text"))),
    "with state": ft.make_state([ft.nn.BatchNorm(4)]),
    "registered": Registered(jnp.ones(2), 3),
    "containers": [Point(jnp.ones(1), 1), collections.OrderedDict(b=jnp.ones(1), a=2), {"d": None}],
    "an array": jnp.ones(2),
    "nothing": None,
}


@pytest.mark.parametrize("case", COPIED)
def test_pickled_and_copied(case: str):
    tree = COPIED[case]
    static, arrays = ft.split(tree)
    _ = static.build, static.take  # generated functions are no part of a copy
    for again in (pickle.loads(pickle.dumps(static)), copy.copy(static), copy.deepcopy(static)):
        assert again == static and hash(again) == hash(static) and again.paths == static.paths
        assert jax.tree.structure(ft.merge(again, arrays)) == jax.tree.structure(tree)
    packed = ft.pack(tree)
    assert pickle.loads(pickle.dumps(packed)).static == copy.deepcopy(packed).static == packed.static


@given(TREES)
def test_filled_and_spread(tree: Any):
    skeleton, arrays = Skeleton.of(tree), arrays_of(tree)
    assert described(skeleton.fill(arrays)) == described(tree)
    spread = skeleton.spread(range(1, len(arrays) + 1))
    assert jax.tree.leaves(spread, is_leaf=lambda x: x is None).count(None) >= len(skeleton.others)
    assert [x for x in jax.tree.leaves(spread) if x is not None] == list(range(1, len(arrays) + 1))


def test_what_is_no_tree():
    with pytest.raises(ft.FunctreeError, match="keys of one type"):
        CallGroups().find({"a": X, 1: X})
    loop: list[Any] = [X]
    loop.append(loop)
    with pytest.raises(ft.FunctreeError, match="contains itself"):
        CallGroups().find(loop)


def test_the_code_has_a_file_and_lines():
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("asked")

        __hash__ = object.__hash__

    take = Skeleton.of(Pair(X, Odd(), name="n")).take
    with pytest.raises(RuntimeError) as caught:
        take(Pair(X, Odd(), name="n"))
    (entry,) = [entry for entry in caught.traceback if "functree: take Pair" in str(entry.path)]
    assert "return None" in str(entry.statement) and take.__code__.co_filename.startswith("<functree: take Pair ")


def test_a_large_tree():
    tree = [Pair(X, {"a": [X] * 3}, name=i) for i in range(300)]
    skeleton = Skeleton.of(tree)
    assert same_objects(skeleton.take(tree), arrays_of(tree))
    assert jax.tree.structure(skeleton.build(skeleton.take(tree))) == jax.tree.structure(tree)
    deep: Any = X
    for _ in range(60):
        deep = Pair([deep], None)
    assert same_objects(Skeleton.of(deep).take(deep), [X])


def test_canary_equinox_keeps_fields_in_the_module_s_dict():
    """`functree.tree.skeleton.kinds` reads and writes them there."""
    contents = eqx.Module.__dict__["__dict__"].__get__
    module = Pair(X, 1)
    assert contents(module) == {"first": X, "second": 1, "name": "pair"}
    new = object.__new__(Pair)
    contents(new).update(first=X, second=2, name="other")
    assert (new.first, new.second, new.name) == (X, 2, "other")
    assert jax.tree.structure(new) == jax.tree.structure(Pair(X, 2, "other"))
    assert isinstance(Method(X).get, eqx.Module) and arrays_of(Method(X).get) == [X], "a bound method is a module"


# Classes that look at their arrays


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=[])
@dataclasses.dataclass
class Converts:
    a: Any

    def __post_init__(self) -> None:
        self.a = jnp.asarray(self.a)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=[])
@dataclasses.dataclass
class Checks:
    a: Any

    def __post_init__(self) -> None:
        assert self.a.ndim == 1 and self.a.dtype == jnp.float32


@jax.tree_util.register_pytree_node_class
class Compares:
    def __init__(self, a: Any, b: Any):
        if a.shape != b.shape:
            raise ValueError("two shapes")
        self.a, self.b = a, b

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Compares":
        return cls(*children)


class Fields(NamedTuple):
    a: Any
    b: Any


class Casts(Fields):
    def __new__(cls, a: Any, b: Any) -> "Casts":
        return super().__new__(cls, jnp.asarray(a), jnp.asarray(b))


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
    "checks": lambda: Checks(X),
    "compares": lambda: Compares(X, jnp.zeros(2)),
    "casts": lambda: Casts(X, jnp.zeros(3)),
    "batch": lambda: Batch(X, jnp.zeros(2)),
    "of JAX": lambda: Rotation.from_quat(jnp.array([0.0, 0.0, 0.0, 1.0])),
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
        assert jax.tree.all(jax.tree.map(np.array_equal, leaves(same), arrays))
        assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, 2 * y), doubled, arrays))
    assert len(f.compilations) == 1
    assert leaves(ft.unpack(ft.pack(tree))) == arrays or same_objects(leaves(ft.unpack(ft.pack(tree))), arrays)
    assert isinstance(f(ft.pack(tree))[0], ft.Packed)
    plan = ft.plan(tree, ft.P(), {"data": 2})
    assert [row.shape for row in plan] == [x.shape for x in arrays]
    assert len(leaves(ft.grad(lambda tree: sum(x.sum() for x in jax.tree.leaves(tree)))(tree))) == len(arrays)


NESTED = [lambda tree: (tree,), lambda tree: [tree], lambda tree: {"a": tree}, lambda tree: Leafed(tree, None)]


class Leafed(NamedTuple):
    child: Any
    other: Any


@pytest.mark.parametrize("deep", [150, 250, 1000, 5000])
@pytest.mark.parametrize("nest", NESTED, ids=["tuples", "lists", "dicts", "named tuples"])
def test_deep_trees(nest: Any, deep: int):
    tree = functools.reduce(lambda tree, _: nest(tree), range(deep), X)
    calls = {
        "argument": lambda: ft.jit(lambda tree: tree)(tree),
        "result": lambda: ft.jit(lambda x: functools.reduce(lambda tree, _: nest(tree), range(deep), x))(X),
        "packed": lambda: ft.pack(tree),
    }
    for what, call in calls.items():
        try:
            found = call()
        except ft.FunctreeError as error:
            assert deep > 150, what
            assert "contains itself, or is nested too deeply, cannot be read as a tree" in str(error)
        else:
            (leaf,) = jax.tree.leaves(found)
            assert np.array_equal(leaf, X)


def test_keys_that_are_texts_of_another_class():
    class Name(enum.StrEnum):
        A = "a"

    f = ft.jit(lambda tree: [type(key).__name__ for key in tree])
    assert [f({"a": X}), f({Name.A: X}), f({"a": X})] == [["str"], ["Name"], ["str"]]
