"""One array with axis names, which is in no tree ─► its spec, or what is wrong."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec

import functree as ft
from functree.devices.meshes import MeshView
from functree.errors import ShardingError
from functree.layout.layout import Layout, as_layout
from functree.layout.rules import array_spec, spec_of_axes
from tests.lib.meshes import SIZES

P = PartitionSpec
VIEW = MeshView(SIZES)
RULES: Layout = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None, ...: None})


def spec(
    axes: str, *shape: int, layout: Layout = RULES, mesh: MeshView | None = VIEW
) -> PartitionSpec:
    return array_spec(layout, ft.Axes.parse(axes), shape, mesh)


SPECS: dict[str, tuple[str, tuple[int, ...], P]] = {
    "by rules": ("batch hidden", (4, 8), P("data", "model")),
    "unsharded": ("embed", (3,), P(None)),
    "without a name": ("batch _", (4, 3), P("data", None)),
    "by a last rule": ("batch seq", (2, 3), P("data", None)),
    "without dimensions": ("", (), P()),
}


@pytest.mark.parametrize("mesh", [VIEW, None], ids=["mesh", "no mesh"])
@pytest.mark.parametrize("case", SPECS)
def test_specs(case: str, mesh: MeshView | None) -> None:
    axes, shape, expected = SPECS[case]
    assert spec(axes, *shape, mesh=mesh) == expected
    assert spec_of_axes(RULES, ft.Axes.parse(axes), shape, mesh) == expected
    assert spec_of_axes(RULES, ft.Axes.parse(axes), None, mesh) == expected


def test_rules_of_a_filter_are_not_for_activations() -> None:
    elsewhere = ft.AxisRules({"embed": "nowhere"})
    layout = ft.StateSharding({"head.**": elsewhere, ...: RULES})
    assert spec("batch hidden", 4, 8, layout=layout) == P("data", "model")


# The axes, the shape, the layout ─► the reason, and whether a mesh is needed to find it.
NOWHERE: Layout = ft.AxisRules({"batch": "dta", "hidden": "model"})
ERRORS: dict[str, tuple[str, tuple[int, ...], Layout, str, bool]] = {
    "size": ("batch hidden", (4, 6), RULES, '"hidden" has size 6; rule hidden→model needs', True),
    "no such mesh axis": ("hidden", (8,), NOWHERE, "(data=2, model=4) has no axis `dta`", True),
    "no rule": ("batch x", (4, 8), ft.AxisRules({"batch": None}), "no rule names `x`", False),
    "near a rule": ("hiden", (8,), RULES, '"hiden" has no rule but `...: None`', False),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    axes, shape, layout, why, needs_mesh = ERRORS[case]
    array = ft.Axes.parse(axes), shape
    with pytest.raises(ShardingError, match="an array cannot be laid out") as caught:
        array_spec(layout, *array, VIEW)
    assert any(why in problem.why for problem in caught.value.problems)
    if needs_mesh:
        array_spec(layout, *array, None)
        return
    with pytest.raises(ShardingError) as caught:
        array_spec(layout, *array, None)
    assert len(caught.value.problems) == 1 and why in caught.value.problems[0].why


def test_what_it_depends_on() -> None:
    """Each beside the others, in turn and again: another mesh, shape, name or layout."""
    larger = MeshView({"data": 4, "model": 2})
    other: Layout = ft.AxisRules({"batch": "model", "hidden": None})
    for _ in range(2):
        assert spec("batch hidden", 6, 8) == P("data", "model")
        with pytest.raises(ShardingError, match="a multiple of data=4"):
            spec("batch hidden", 6, 8, mesh=larger)
        assert spec("batch hidden", 6, 8, mesh=None) == P("data", "model")
        with pytest.raises(ShardingError, match="a multiple of data=2"):
            spec("batch hidden", 3, 8)
        assert spec("hidden batch", 8, 6) == P("model", "data")
        assert spec("batch hidden", 4, 8, layout=other) == P("model", None)


def test_a_layout_that_is_not_about_activations() -> None:
    for layout in (P("data"), ft.FSDP("data"), ft.StateSharding({"**": RULES})):
        assert as_layout(layout).rules is None


def wrong(axes: str, shape: Any, mesh: Any = VIEW, layout: Layout = RULES) -> ShardingError:
    with pytest.raises(ShardingError) as caught:
        spec_of_axes(layout, ft.Axes.parse(axes), shape, mesh)
    return caught.value


def test_axes_and_a_shape_of_another_rank() -> None:
    for shape, text in (((4,), "(4,) has 1"), ((4, 8, 2), "(4, 8, 2) has 3"), ((), "() has 0")):
        error = wrong("batch hidden", shape)
        assert str(error) == f'"batch hidden" names 2 dimensions, and the shape {text}'


def test_what_is_wrong_with_axes() -> None:
    error = wrong("batch hidden", (4, 6))
    assert str(error).startswith('"batch hidden" cannot be laid out on mesh (data=2, model=4)')
    (problem,) = error.problems
    assert problem.path is None and problem.shape == (4, 6)
    assert problem.what == '"batch hidden" of shape (4, 6)'
    error = wrong("hiden", None, None)
    assert str(error).startswith('"hiden" cannot be laid out\n')
    (problem,) = error.problems
    assert problem.shape is None and problem.what == '"hiden"'


def test_a_problem_of_a_rule_is_not_one_of_the_array() -> None:
    (problem,) = wrong("hidden", (8,), layout=NOWHERE).problems
    assert problem.what == "rule batch→dta" and problem.shape is None
    assert "did you mean" in problem.why and "`data`" in problem.why
