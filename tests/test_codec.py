"""Forms, and the code that is written for them: laws for trees of all kinds, with `jax.tree` as the oracle."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.tree.codec import Form, builder, form_of, taker
from functree.tree.exact import Exact
from functree.tree.leaves import is_array


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
    """JAX's structure of a tree, and its other leaves with their types: what a form has to tell apart."""
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    return Exact(treedef), tuple(None if is_array(x) else Exact(x) for x in flat)


@given(TREES)
def test_taken_apart_as_by_jax(tree: Any):
    form = form_of(tree)
    found = taker(form)(tree)
    assert found is not None and same_objects(found, arrays_of(tree))
    assert form.arrays == len(found)


@given(TREES)
def test_put_together_again(tree: Any):
    form = form_of(tree)
    arrays = taker(form)(tree)
    built = builder(form)(arrays)
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    again, treedef_again = jax.tree.flatten(built, is_leaf=lambda x: x is None)
    assert treedef_again == treedef
    assert all(x is y or x == y for x, y in zip(flat, again, strict=True))
    assert type(built) is type(tree)
    assert form_of(built) == form and same_objects(taker(form)(built), arrays)


@given(TREES)
def test_the_arrays_alone_make_no_difference(tree: Any):
    other = jax.tree.map(lambda x: jnp.zeros(5) if is_array(x) else x, tree)
    form = form_of(tree)
    assert form_of(other) == form and hash(form_of(other)) == hash(form)
    assert same_objects(taker(form)(other), arrays_of(other))


@given(TREES, TREES)
def test_equal_forms_are_equal_structures(one: Any, other: Any):
    same = described(one) == described(other)
    assert (form_of(one) == form_of(other)) == same
    found = taker(form_of(one))(other)
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
    assert taker(form_of(tree))(changed) is None
    assert form_of(changed) != form_of(tree)


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
        found = taker(form_of(tree))(wrong)
        assert found is None or not all(map(is_array, found))
        assert form_of(tree) != form_of(wrong)
        assert same_objects(taker(form_of(tree))(tree), arrays_of(tree))


def test_in_an_arrays_place_anything_is_taken():
    take = taker(form_of([X, {"a": X}]))
    assert take([1, {"a": "text"}]) == [1, "text"]
    assert take([None, {"a": [X]}]) is not None


def test_a_module_that_lacks_a_field_or_has_more():
    wrapped = eqx.filter_jit(lambda x: x)
    for tree in (wrapped, Method(X).get, eqx.nn.Lambda(wrapped)):
        form = form_of(tree)
        assert same_objects(taker(form)(tree), arrays_of(tree))
        assert jax.tree.structure(builder(form)(taker(form)(tree))) == jax.tree.structure(tree)
    partial = object.__new__(Pair)
    object.__setattr__(partial, "first", X)
    assert same_objects(taker(form_of(partial))(partial), [X])
    assert taker(form_of(Pair(X, X)))(partial) is None


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
    built = builder(form_of(tree))([jnp.zeros(3)])
    assert isinstance(built, Counted) and len(calls) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.x = 3


def test_statics_have_paths():
    tree = {"a": [Pair(X, 3, name="n")], "p": Point(X, "text"), "q": {1: X}}
    found = {str(path): static.value for path, static in form_of(tree).statics()}
    assert found == {"a.0.name": "n", "a.0.second": 3, "p.y": "text"}


def test_forms_are_values():
    assert form_of(X) == Form("array") and form_of(None) == Form("none")
    assert {form_of(Pair(X, 1)): 1}[form_of(Pair(np.ones(3), 1))] == 1
    with pytest.raises(TypeError):
        hash(form_of([X, {1, 2}]))


def test_what_is_no_tree():
    with pytest.raises(ft.FunctreeError, match="keys of one type"):
        form_of({"a": X, 1: X})
    loop: list[Any] = [X]
    loop.append(loop)
    with pytest.raises(ft.FunctreeError):
        form_of(loop)


def test_a_large_tree():
    tree = [Pair(X, {"a": [X] * 3}, name=i) for i in range(300)]
    form = form_of(tree)
    assert same_objects(taker(form)(tree), arrays_of(tree))
    assert jax.tree.structure(builder(form)(taker(form)(tree))) == jax.tree.structure(tree)
    deep: Any = X
    for _ in range(60):
        deep = Pair([deep], None)
    assert same_objects(taker(form_of(deep))(deep), [X])


def test_canary_equinox_keeps_fields_in_the_module_s_dict():
    """`functree.tree.codec` reads and writes them there."""
    contents = eqx.Module.__dict__["__dict__"].__get__
    module = Pair(X, 1)
    assert contents(module) == {"first": X, "second": 1, "name": "pair"}
    new = object.__new__(Pair)
    contents(new).update(first=X, second=2, name="other")
    assert (new.first, new.second, new.name) == (X, 2, "other")
    assert jax.tree.structure(new) == jax.tree.structure(Pair(X, 2, "other"))
    assert isinstance(Method(X).get, eqx.Module) and arrays_of(Method(X).get) == [X], "a bound method is a module"
