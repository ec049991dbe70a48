"""`FSDP`: which dimension it takes, what it leaves alone, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import functree as ft
from tests.lib.checks import refused
from tests.lib.meshes import SIZES
from tests.lib.trees import module

P = PartitionSpec
ALL = ft.FSDP("data", min_size=0)


def row(layout: Any, *shape: int, sizes: dict[str, int] = SIZES) -> ft.Row:
    return ft.plan(jax.ShapeDtypeStruct(shape, jnp.float32), layout, sizes)[()]


def test_several_mesh_axes() -> None:
    assert row(ft.FSDP(("data", "model"), min_size=0), 12, 8).spec == P(None, ("data", "model"))
    assert row(ft.FSDP(["data"], min_size=0), 12, 8).spec == P("data", None)
    assert ft.FSDP("data") == ft.FSDP(("data",)) != "data"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_the_choice_beside_an_oracle(shape: list[int], parts: int) -> None:
    fitting = [(-size, dim) for dim, size in enumerate(shape) if size % parts == 0]
    layout = ft.FSDP("data", min_size=0, otherwise=P())
    expected = [None] * len(shape)
    if fitting:
        expected[min(fitting)[1]] = "data"  # type: ignore[call-overload]
    assert row(layout, *shape, sizes={"data": parts}).spec == P(*expected)


def test_min_size_counts_elements() -> None:
    layout = ft.FSDP("data", min_size=32)
    assert row(layout, 4, 8).spec == P(None, "data")
    small = row(layout, 31)
    assert small.spec == P(None) and small.reason == "FSDP: fewer than 32 elements"
    assert ft.FSDP("data").min_size == 2**18
    assert row(ft.FSDP("data"), 2**9, 2**9).spec == P("data", None)
    assert row(ft.FSDP("data"), 2**9, 2**9 - 1).spec == P(None, None)


def test_the_reasons() -> None:
    assert row(ALL, 4, 8).reason == "FSDP: dimension 1 is the largest dimension it can shard"
    assert row(ALL).reason == "FSDP: no dimension it can shard"
    used, taken = row(P("data") | ALL, 4, 8), row(P("model") | ALL, 4)
    assert used.reason == "P('data') as given; FSDP: already sharded over data"
    assert taken.reason == "P('model') as given; FSDP: no dimension it can shard"
    assert (used.spec, taken.spec) == (P("data", None), P("model"))
    several = row(P("data") | ft.FSDP(("model", "data"), min_size=0), 4, 8)
    assert several.reason.endswith("FSDP: already sharded over (model, data)")


def test_otherwise() -> None:
    found = row(ft.FSDP("data", min_size=0, otherwise=P()), 3, 5)
    assert found.spec == P(None, None)
    assert found.reason == "FSDP: no dimension it can shard, hence `otherwise=P()`"
    assert row(ft.FSDP("model", min_size=0, otherwise=P("data")), 6, 5).spec == P("data", None)
    assert row(ft.FSDP("model", min_size=0, otherwise=P("data")), 8, 5).spec == P("model", None)
    assert row(ft.FSDP("data"), 3, 5).spec == P(None, None)  # too small to be asked for


def spec(layout: ft.Layout, *shape: int) -> P:
    """The spec of a leaf `embed hidden`."""
    return ft.plan(module("embed hidden", *shape), layout, SIZES)["w"].spec


def test_only_the_named_axes() -> None:
    assert spec(ft.FSDP("data", min_size=0, axes=("embed",)), 4, 8) == P("data", None)
    other = ft.FSDP("data", min_size=0, axes="seq")
    assert spec(other, 4, 8) == P(None, None)
    assert row(other, 4, 8).reason == "FSDP: no dimension it can shard"


def test_the_axes_of_fsdp_are_mentioned() -> None:
    """They need no rule, sharded or not."""
    rules = ft.AxisRules({"hidden": "model"})
    shards = ft.FSDP("data", min_size=0, axes="embed")
    assert spec(rules | shards, 4, 8) == P("data", "model")
    assert spec(ft.FSDP("data", axes="embed") | rules, 4, 8) == P(None, "model")


BLOCKED = {"embed": "model", "hidden": "model"}
# A layout after the rules, or before them, and the spec of `embed hidden`; None for an error.
AFTER_BLOCKED: dict[str, tuple[ft.Layout, P | None]] = {
    "shards it": (ft.FSDP("data", min_size=0, axes="hidden"), P("model", "data")),
    "does not mention it": (ft.FSDP("data", min_size=0), None),
    "too small": (ft.FSDP("data", axes="hidden"), None),
    "its mesh axis is used": (ft.FSDP("model", min_size=0, axes="hidden"), None),
    "shards another": (ft.FSDP("data", min_size=0, axes="hidden embed"), P("model", "data")),
    "rules shard it": (ft.AxisRules({"hidden": "data"}), P("model", "data")),
    "rules close all": (ft.AxisRules({...: None}), P("model", None)),
    "rules that are blocked": (ft.AxisRules({"hidden": "model"}), None),
}


@pytest.mark.parametrize("case", AFTER_BLOCKED)
def test_a_blocked_name_is_not_excused_by_its_mention(case: str) -> None:
    then, wanted = AFTER_BLOCKED[case]
    layout = ft.AxisRules(BLOCKED) | then
    if wanted is not None:
        assert spec(layout, 4, 8) == wanted
        return
    assert 'no rule for "hidden" applies' in refused(module("embed hidden", 4, 8), layout)
    # The remedy, to the letter.
    closed = ft.AxisRules([*BLOCKED.items(), ("hidden", None)]) | then
    assert spec(closed, 4, 8)[0] == "model"


def test_an_indivisible_size_does_not_excuse_a_blocked_name() -> None:
    fsdp = ft.FSDP("data", min_size=0, axes="hidden", otherwise=P())
    tree = module("embed hidden", 4, 7)
    assert 'no rule for "hidden" applies' in refused(tree, ft.AxisRules(BLOCKED) | fsdp)
    assert spec(ft.AxisRules({"embed": "model"}) | fsdp, 4, 7) == P("model", None)


def test_a_blocked_name_after_its_mention() -> None:
    layout = ft.FSDP("data", axes="hidden") | ft.AxisRules(BLOCKED)
    assert 'no rule for "hidden" applies' in refused(module("embed hidden", 4, 8), layout)
    closed = ft.AxisRules({...: None}) | ft.AxisRules(BLOCKED)
    assert spec(closed, 4, 8) == P("model", None)
    shards = ft.FSDP("data", min_size=0, axes="hidden") | ft.AxisRules({"embed": "model"})
    assert spec(shards, 4, 8) == P("model", "data")


def test_never_the_axis_of_a_stack() -> None:
    """Nor beside leaves of the same axes and shape that are in no stack."""
    tree = {
        "stack": ft.Stacked(module("embed hidden", 64, 6, 4), axis="layers"),
        "alike": module("layers embed hidden", 64, 6, 4),
    }
    plan = ft.plan(tree, ALL, SIZES)
    assert plan["stack.layer.w"].axes == plan["alike.w"].axes
    assert plan["stack.layer.w"].spec == P(None, "data", None)
    assert plan["alike.w"].spec == P("data", None, None)


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"axis": 3}, "FSDP: axis=3 is invalid: write a mesh axis, or several different mesh axes"),
    "empty": ({"axis": ""}, "write a mesh axis"),
    "twice": ({"axis": ("data", "data")}, "several different mesh axes"),
    "negative": (
        {"axis": "data", "min_size": -1},
        "min_size=-1 is not a number of elements: pass a non-negative integer",
    ),
    "otherwise": ({"axis": "data", "otherwise": "data"}, "otherwise='data' is not a PartitionSpec: write `P()`"),
    "axes with a comma": ({"axis": "data", "axes": "embed,hidden"}, "axes='embed,hidden' is not a list of axis names"),
    "axes without a name": ({"axis": "data", "axes": ("a", "_")}, "as in `('embed', 'hidden')` or `'embed hidden'`"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_at_construction(case: str) -> None:
    arguments, said = NONSENSE[case]
    with pytest.raises(ft.RuleError) as caught:
        ft.FSDP(**arguments)
    assert said in str(caught.value)


def test_an_axis_that_only_other_models_have() -> None:
    """Only a name that is like one of this model is refused."""
    assert spec(ft.FSDP("data", axes=("embed", "vocab"), min_size=0), 4, 8) == P("data", None)
