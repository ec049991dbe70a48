"""Which meshes are tried with which layouts."""

from typing import Any

import pytest

import functree as ft
from functree.explorer.explore import candidates, named_mesh_axes

P = ft.P
RULES = ft.AxisRules({"batch": "data", "hidden": ("model", "data"), "embed": None})
NAMED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rules": (RULES, ("data", "model")),
    "FSDP": (ft.FSDP(("a", "b")), ("a", "b")),
    "a composition": (RULES | ft.FSDP("x"), ("data", "model", "x")),
    "a spec": (P(None, ("b", "a"), "b"), ("b", "a")),
    "filters": (ft.StateSharding({"**.w": P("x"), ...: RULES}), ("x", "data", "model")),
    "on the host": (ft.on_host(P("x")), ("x",)),
    "a tree": ((RULES, {"a": P("x"), "b": None}), ("data", "model", "x")),
    "a plan": (ft.plan({"w": [0]}, P(), {}, check=False) | P("x"), ("x",)),
    "a function": (lambda path, leaf: P("x"), ()),
    "no layout": ("data", ()),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_mesh_axes_that_a_layout_names(name: str) -> None:
    layout, axes = NAMED[name]
    assert named_mesh_axes(layout) == axes


def tried(meshes: Any, layouts: dict[str, Any]) -> list[Any]:
    found = candidates(meshes, layouts)
    return [(tuple(one.mesh.values()), one.layout_name) for one in found]


DATA, BOTH = P("data"), P("data", "model")


def test_a_number_of_devices_is_divided_among_the_mesh_axes() -> None:
    assert tried(8, {"both": BOTH}) == [
        ((8, 1), "both"),
        ((4, 2), "both"),
        ((2, 4), "both"),
        ((1, 8), "both"),
    ]
    # Along `model` all devices would do the same.
    assert tried([4], {"data": DATA, "both": BOTH}) == [
        ((4, 1), "data"),
        ((4, 1), "both"),
        ((2, 2), "both"),
        ((1, 4), "both"),
    ]
    assert len(tried(8, {"three": P("a", "b", "c")})) == 10


def test_a_dict_is_tried_with_every_layout_and_once() -> None:
    mesh = {"data": 2, "model": 4}
    wanted = [((2, 4), "data"), ((2, 4), "both")]
    assert tried(mesh, {"data": DATA, "both": BOTH}) == wanted
    assert tried([mesh, mesh], {"data": DATA, "both": BOTH}) == wanted
    assert tried([mesh, 8], {"both": BOTH})[0] == ((2, 4), "both")
    assert len(tried([mesh, 8], {"both": BOTH})) == 4
