"""A leaf and the decision about it ─► its spec, and all that is wrong with it."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec
from trees import leaf

import functree as ft
from functree.devices.meshes import MeshView
from functree.labels.leaf import FollowedLeaf, Leaf
from functree.layout.bare_array_spec import spec_of_axes
from functree.layout.decision import Decision, Dimension, Source, whole
from functree.layout.validation import (
    layout_problem,
    leaf_problems,
    local_shape,
    missing_axes,
    near_misses,
    refuse,
)

P = PartitionSpec
MESH = MeshView({"data": 2, "model": 4})


def whys(leaf: Leaf, decision: Decision) -> list[str]:
    return [problem.why for problem in leaf_problems(leaf, decision, MESH)]


def test_the_spec_has_every_dimension() -> None:
    decision = Decision((Dimension(("data",)), Dimension(), Dimension(("model", "stage"))))
    assert decision.spec == P("data", None, ("model", "stage"))
    assert whole(leaf("")).spec == P()


def test_the_local_shape() -> None:
    assert local_shape((8, 8, 3), (("data",), ("data", "model"), ()), MESH) == (4, 1, 3)
    assert local_shape((7,), (("data",),), MESH) == (
        4,
    )  # the larger part, of a plan that is refused
    assert local_shape((8,), (("nowhere",),), MESH) == (8,)


def test_nothing_is_wrong_with_what_is_whole() -> None:
    assert whys(leaf("a", 3), whole(leaf("a", 3))) == []


def test_everything_wrong_with_one_leaf() -> None:
    one = leaf("a b", 3, 6)
    first = Dimension(("data",), Source("a→data", is_rule=True))
    second = Dimension(
        ("data", "nowhere"),
        Source("P('data')"),
        settled=False,
        fault=("a fault of b", "settle it"),
    )
    decision = Decision((first, second), faults=(("a fault", "mend it"),))
    assert whys(one, decision) == [
        "a fault",
        "a fault of b",
        '"a" has size 3; rule a→data needs a multiple of data=2',
        "P('data') names `nowhere`, and the mesh (data=2, model=4) has no such axis",
        "P('data') uses mesh axis `data` twice, the second time for \"b\"",
    ]
    assert all(
        (p.path, p.shape, p.what) == (("w",), (3, 6), one.text)
        for p in leaf_problems(one, decision, MESH)
    )


def test_what_a_mesh_lacks_is_told_once_by_the_rule() -> None:
    (problem,) = missing_axes("rule a→modle", ("data", "modle"), MESH, "mend it")
    assert problem.what == "rule a→modle" and problem.path is None and problem.remedy == "mend it"
    assert problem.why == "the mesh (data=2, model=4) has no axis `modle`; did you mean `model`?"
    one = leaf("a", 8)
    assert whys(one, Decision((Dimension(("modle",), Source("a→modle", True)),))) == []


def test_near_misses_are_of_what_fell_through() -> None:
    one, other = leaf("hiden embed", 8, 8), leaf("hiden", 8)
    closed = Dimension(closed=True)
    decisions = [Decision((closed, closed)), whole(other)]
    (problem,) = near_misses([one, other], decisions, ["hidden", "batch"])
    assert problem.path == ("w",) and "of rule `hidden`" in problem.why
    assert near_misses([one, other], decisions, []) == []


def test_the_spec_of_axes_alone() -> None:
    rules = ft.AxisRules({"a": "data", "b": "nowhere"})
    assert spec_of_axes(rules, ft.Axes("a", "b"), None, None) == P("data", "nowhere")  # any mesh
    assert spec_of_axes(rules.on(MESH.sizes), ft.Axes("a", "b"), (2, 3), MESH) == P("data", None)
    with pytest.raises(ft.ShardingError) as caught:
        spec_of_axes(rules, ft.Axes("a", "c"), (3, 3), MESH)
    text = str(caught.value)
    assert text.startswith('"a c" cannot be laid out on mesh (data=2, model=4)\n')
    assert all(said in text for said in ("no axis `nowhere`", "has size 3;", "no rule names `c`"))
    assert '\n  "a c" of shape (3, 3)\n' in text and "f32" not in text and "(the array)" not in text
    with pytest.raises(ft.ShardingError) as caught:
        spec_of_axes(rules, ft.Axes("a", "c"), None, None)
    assert '\n  "a c"\n      no rule names `c`' in str(caught.value) and "0" not in str(
        caught.value
    )
    assert caught.value.problems[0][:2] == (None, None)


def test_one_error_for_a_tree() -> None:
    at = [ft.Problem(ft.Path((key,)), (2,), "f32[2]", "is wrong", "") for key in "aab"]
    assert str(refuse(at, MESH)).startswith(
        "2 leaves cannot be laid out on mesh (data=2, model=4)\n"
    )
    assert str(refuse(at[:1], MESH)).startswith("1 leaf cannot")
    layout = [ft.Problem(None, None, "filter 'x'", "matches no leaf", "")]
    assert str(refuse(layout, MESH)).startswith(
        "the layout does not fit the tree on mesh (data=2, model=4)\n"
    )
    assert refuse(at, MESH).problems == tuple(at)


class ScaleState(tuple[Any, ...]):
    """As optax has them."""

    __module__ = "optax._src.transform"


class Mine(tuple[Any, ...]):
    __module__ = "optaxlike.transform"


class Module:
    __module__ = "optax.modules"


@pytest.mark.parametrize(("within", "inside"), [
    ((), False), ((list, dict), False), ((ScaleState,), True), ((dict, ScaleState, list), True), ((Mine,), False),
    ((Module,), False), ((tuple,), False),
], ids=str)  # fmt: skip
def test_in_an_optimizer_s_state_there_is_another_way(within: Any, inside: bool) -> None:
    inner = leaf("a b", 4, 8)._replace(within=within)
    more = "; for an optimizer's state use `ft.plan_optimizer`" if inside else ""
    assert layout_problem(inner, ("why", "mend it")).remedy == "mend it" + more
    # A leaf that follows a parameter was taken care of.
    followed = inner._replace(follows=FollowedLeaf(ft.Path("w"), (0, 1)))
    assert layout_problem(followed, ("why", "mend it")).remedy == "mend it"
