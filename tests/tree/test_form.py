"""Generated functions from trees to arrays and back: laws for trees of all kinds, with `jax.tree`
as the oracle."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
import functree.tree.skeleton.kinds as form_module
from functree.tree.arrays import is_array
from functree.tree.skeleton.kinds import LARGE, Form, form_of
from functree.tree.skeleton.skeleton import Skeleton
from tests.lib.structures import CHANGED, TREES, Method, Pair, X, arrays_of, described, same_objects


def forms(tree: Any) -> Iterator[Form]:
    """The form of a tree, generated without forms of its parts and with them."""
    for large in (LARGE, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form_module, "LARGE", large)
            yield form_of(tree)


def takes(one: Form, tree: Any) -> bool:
    """Whether a form takes a tree. Otherwise it says why not, by something that can be hashed."""
    found = one.take(tree)
    assert type(found) is list or (type(found) is tuple and hash(found) is not None)
    return type(found) is list


@given(TREES)
def test_taken_apart_as_by_jax(tree: Any):
    for one in forms(tree):
        assert same_objects(one.take(tree), arrays_of(tree)) and one.size == len(arrays_of(tree))


@given(TREES, st.booleans())
def test_put_together_again(tree: Any, parts: bool):
    one = list(forms(tree))[parts]
    arrays = one.take(tree)
    built = one.build(arrays)
    flat, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    again, treedef_again = jax.tree.flatten(built, is_leaf=lambda x: x is None)
    assert treedef_again == treedef
    assert all(x is y or x == y for x, y in zip(flat, again, strict=True))
    assert type(built) is type(tree)
    assert Skeleton.of(built) == Skeleton.of(tree) and same_objects(one.take(built), arrays)


@given(TREES)
def test_the_arrays_alone_make_no_difference(tree: Any):
    other = jax.tree.map(lambda x: jnp.zeros(5) if is_array(x) else x, tree)
    assert Skeleton.of(other) == Skeleton.of(tree) and hash(Skeleton.of(other)) == hash(
        Skeleton.of(tree)
    )
    for one in forms(tree):
        assert same_objects(one.take(other), arrays_of(other)) and one.fits(other)


@given(TREES, TREES)
def test_equal_skeletons_are_equal_structures(one: Any, other: Any):
    same = described(one) == described(other)
    assert (Skeleton.of(one) == Skeleton.of(other)) == same
    for form in forms(one):
        assert form.fits(other) == same
        # What stands in an array's place is the caller's business.
        assert takes(form, other) or not same


@pytest.mark.parametrize("what", CHANGED)
def test_another_form_is_not_taken(what: str):
    one, other = CHANGED[what]
    for tree, wrong in ((one, other), (other, one)):
        assert not any(form.fits(wrong) for form in forms(tree))
        assert Skeleton.of(tree) != Skeleton.of(wrong)
        assert all(same_objects(form.take(tree), arrays_of(tree)) for form in forms(tree))


def test_a_packed_tree_with_another_number_of_arrays():
    packed = ft.pack([X, X])
    form = form_of(packed)
    assert same_objects(form.take(packed), [X, X])
    for arrays in ((X,), (X, X, X), ()):
        assert not takes(form, type(packed)(arrays, packed.static))


def test_a_module_that_lacks_a_field_or_has_more():
    wrapped = eqx.filter_jit(lambda x: x)
    for tree in (wrapped, Method(X).get, eqx.nn.Lambda(wrapped)):
        form = form_of(tree)
        assert same_objects(form.take(tree), arrays_of(tree))
        assert jax.tree.structure(form.build(form.take(tree))) == jax.tree.structure(tree)
    more = Pair(X, X)
    object.__setattr__(more, "extra", X)
    assert form_of(Pair(X, X)).fits(Pair(X, X)) and not form_of(Pair(X, X)).fits(more)
    partial = object.__new__(Pair)
    object.__setattr__(partial, "first", X)
    assert same_objects(form_of(partial).take(partial), [X])
    assert not takes(form_of(Pair(X, X)), partial)


def test_a_named_tuple_that_is_registered_in_another_order():
    class Reversed(NamedTuple):
        x: Any
        y: Any

    jax.tree_util.register_pytree_node(
        Reversed, lambda p: ((p.y, p.x), None), lambda _, c: Reversed(c[1], c[0])
    )
    other = jnp.zeros(3)
    form = form_of(Reversed(X, other))
    assert same_objects(form.take(Reversed(X, other)), [other, X])
    built = form.build([other, X])
    assert type(built) is Reversed and same_objects(built, (X, other))


def block(seed: int, size: int = LARGE) -> list[Pair]:
    """A part of a tree that is large enough for a form of its own."""
    return [Pair(jnp.full(2, seed + i), None, name="block") for i in range(size)]


def test_forms_are_forgotten_with_those_who_use_them():
    one = form_of([block(0), block(1)])
    assert form_of([block(2), block(3)]) is one
    part = weakref.ref(form_of(block(5)))
    file = one.take.__code__.co_filename
    gc.collect()
    assert part() is not None, "it belongs to the whole"
    del one
    gc.collect()
    assert part() is None and form_of([block(0), block(1)]).take.__code__.co_filename != file


def test_no_array_is_kept():
    array = jnp.ones(3)
    one, kept = form_of([block(0), {"a": array}]), weakref.ref(array)
    del array
    gc.collect()
    assert kept() is None and one.size == LARGE + 1


def test_a_node_that_makes_its_children_anew():
    """Their identity is not that of what the code was written from."""

    @jax.tree_util.register_pytree_node_class
    class Fresh:
        def __init__(self, children: Any):
            self.children = tuple(children)

        def tree_flatten(self) -> Any:
            return (list(self.children), list(self.children)), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Any:
            return cls(children[0])

    tree = [Fresh(jnp.full(2, i) for i in range(LARGE)) for _ in range(3)]
    one = form_of(tree)
    assert same_objects(one.take(tree), arrays_of(tree))
    assert same_objects(arrays_of(one.build(one.take(tree))), arrays_of(tree))
