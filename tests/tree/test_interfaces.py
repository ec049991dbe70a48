"""What classes tell the walk over a tree."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import pytest

import functree as ft
from functree.tree.interfaces import Entry, HoldsState, PackedTree, Stack, StateMapping, own_names
from tests.lib.trees import Leafy, linear


class Named(eqx.Module):
    w: Any
    axes: str = eqx.field(static=True)

    def __axis_names__(self) -> Any:
        return ft.names(w=self.axes)


class Inherits(Named):
    pass


class ByField(eqx.Module):
    """A field of that name is no method of the class."""

    __axis_names__: Any


@pytest.mark.parametrize(("node", "names"), [
    (Named(None, "a b"), ft.names(w="a b")),
    (Inherits(None, "c"), ft.names(w="c")),
    (ByField(lambda: ft.names(w="a")), None),
    (Leafy(1, 2), None),
    (linear(), None),
    ([], None),
    (3, None),
], ids=["named", "inherited", "a field", "module", "equinox", "list", "leaf"])  # fmt: skip
def test_the_names_that_a_module_gives_itself(node: Any, names: Any):
    assert own_names(node) == names


X = jnp.ones((2, 3))


def state() -> Any:
    return ft.make_state({"norm": ft.nn.BatchNorm(3)})[1]


KNOWN: dict[str, tuple[Callable[[], Any], type]] = {
    "stacked": (lambda: ft.Stacked({"w": X}), Stack),
    "packed": (lambda: ft.pack({"w": X}), PackedTree),
    "state": (state, StateMapping),
    "a state holds state": (state, HoldsState),
}


@pytest.mark.parametrize("case", KNOWN)
def test_functree_s_own_classes_make_themselves_known(case: str):
    make, base = KNOWN[case]
    assert isinstance(make(), base)
    others = {Stack, PackedTree, StateMapping} - set(type(make()).__mro__)
    assert len(others) == 2, "and are of one kind each"


def test_what_they_tell():
    assert ft.Stacked({"w": X}, axis="depth").stack_axes() == ("depth",)
    tree = {"w": X, "n": 3}
    assert ft.pack(tree).tree == tree
    entries = state().entries()
    assert entries and all(
        isinstance(entry, Entry) and entry.path[0] == "norm" for entry in entries
    )
    assert [entry.path for entry in entries] == list(state())
