"""A leaf and the decision about it ─► its spec, and all that is wrong with it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.devices.meshes import MeshView
from functree.labels.leaf import FollowedLeaf, Leaf
from functree.layout.decision import (
    Decision,
    Dimension,
    Named,
    Source,
    layout_problem,
    leaf_problems,
    local_shape,
    missing_axes,
    near_misses,
    refuse,
    whole,
)
from functree.layout.rules import spec_of_axes
from tests.lib.trees import leaf

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
        blocked=("a fault of b", "settle it"),
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
    closed = Dimension(named=Named.CLOSED)
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


# What is wrong with a parameter and with the moments of it is told once.


class Layer(eqx.Module):
    w: Float[Array, "embed hidden"]


class Net(eqx.Module):
    layers: list[Layer]
    head: Float[Array, "embed vocab"]


def train_state(moments: str = "float32") -> ft.TrainState[Net]:
    net = Net([Layer(jnp.ones((16, 64))) for _ in range(2)], jnp.ones((16, 61)))
    return ft.TrainState.create(net, optax.adam(1e-3, mu_dtype=moments))


def step(ts: Any) -> Any:
    return ts


ABSTRACT = ft.abstract(train_state)()
SIZES = {"data": 2, "model": 4}
VOCAB = ft.AxisRules({"embed": None, "hidden": "model", "vocab": "data"})
INDIVISIBLE = '"vocab" has size 61; rule vocab→data needs a multiple of data=2'


def ranking(layout: Any) -> str:
    whole = {"this": (layout,), "whole": (P(),)}
    text = str(ft.explore(step, (ABSTRACT,), meshes=[SIZES], layouts=whole))
    return " ".join(text.split())


def checked_later(layout: Any) -> ft.Plan:
    return ft.plan(ABSTRACT, layout, SIZES, check=False)


def printed(plan: ft.Plan) -> str:
    """What the text of a plan says below the table."""
    return " ".join(str(plan).partition("PROBLEM")[2].split())


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(ft.ShardingError) as caught:
        call()
    return str(caught.value)


# Every door through which a training state and a layout go, and how it begins the path of a leaf.
DOORS: dict[str, tuple[Callable[[Any], str], str]] = {
    "plan": (lambda rules: raised(lambda: ft.plan(ABSTRACT, rules, SIZES)), "model"),
    "the text of a plan": (lambda rules: printed(checked_later(rules)), "model"),
    "a plan from JSON": (
        lambda rules: printed(ft.Plan.from_json(checked_later(rules).to_json())),
        "model",
    ),
    "in_shardings": (
        lambda rules: raised(
            lambda: ft.jit(step, in_shardings=rules, mesh=ft.make_mesh(data=2, model=4)).lower(
                ABSTRACT
            )
        ),
        "ts.model",
    ),
    "out_shardings": (
        lambda rules: raised(
            lambda: ft.jit(step, out_shardings=rules, mesh=ft.make_mesh(data=2, model=4)).lower(
                ABSTRACT
            )
        ),
        "result.model",
    ),
    "rules": (
        lambda rules: raised(
            lambda: ft.jit(step, rules=rules, mesh=ft.make_mesh(data=2, model=4))(train_state())
        ),
        "ts.model",
    ),
    "init": (
        lambda rules: raised(ft.init(train_state, rules, ft.make_mesh(data=2, model=4))),
        "model",
    ),
    "shard": (
        lambda rules: raised(lambda: ft.shard(train_state(), rules, ft.make_mesh(data=2, model=4))),
        "model",
    ),
    "explore": (ranking, "ts.model"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_parameter_and_its_moments_are_one_problem(door: str) -> None:
    call, begin = DOORS[door]
    text = call(VOCAB)
    for told in (f"{begin}.head", INDIVISIBLE):
        assert text.count(told) == 1
    assert "opt_state" not in text


# Of layouts, the problem of each, and the arrays that it names.
FOLLOWED: dict[str, tuple[Any, str, str]] = {
    "a size": (VOCAB, INDIVISIBLE, 'model.head   f32[16, 61]   "embed vocab"'),
    "an axis of a spec": (
        ft.StateSharding({"layers.*.w": P(None, "modle"), ...: P()}),
        "P(None, 'modle') names `modle`, and the mesh (data=2, model=4) has no such axis; "
        "did you mean `model`?",
        'model.layers.0.w, model.layers.1.w   f32[16, 64]   "embed hidden"',
    ),
    "an axis twice": (
        ft.StateSharding({"head": P("data", "data"), ...: P()}, unused="ignore"),
        "P('data', 'data') uses mesh axis `data` twice, the second time for \"vocab\"",
        "model.head",
    ),
}


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", FOLLOWED)
def test_a_parameter_tells_what_is_wrong_with_its_moments(case: str, moments: str) -> None:
    layout, why, named = FOLLOWED[case]
    state = ft.abstract(lambda: train_state(moments))()
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(state, layout, SIZES)
    text = str(caught.value)
    assert named in text and text.count(why) == 1 and "opt_state" not in text
    assert not any("opt_state" in one.path for one in caught.value.problems if one.path)


def test_a_rule_for_a_missing_axis_is_one_problem_for_moments_too() -> None:
    text = raised(lambda: ft.plan(ABSTRACT, ft.AxisRules({"vocab": "modle", ...: None}), SIZES))
    assert "rule vocab→modle\n      the mesh (data=2, model=4) has no axis `modle`" in text
    assert "opt_state" not in text and "head" not in text


def test_a_parameter_that_is_placed_tells_the_problem_of_its_moments() -> None:
    mesh, state = ft.make_mesh(data=2, model=4), train_state()
    placed = eqx.tree_at(lambda ts: ts.model, state, ft.shard(state.model, P(), mesh))
    text = raised(lambda: ft.jit(step, rules=VOCAB, mesh=mesh)(placed))
    assert "ts.model.head   f32[16, 61]" in text and INDIVISIBLE in text
    # If the moments are placed too, nothing is wrong.
    ft.jit(step, rules=VOCAB, mesh=mesh)(ft.shard(state, P(), mesh))


def test_arrays_that_lie_otherwise_than_asked() -> None:
    mesh = ft.make_mesh(data=2, model=4)
    state = ft.shard(train_state(), P(), mesh)
    layout = ft.StateSharding({"layers.*.w": P("data"), ...: P()})
    text = raised(lambda: ft.jit(step, in_shardings=layout, mesh=mesh)(state))
    assert "ts.model.layers.0.w, ts.model.layers.1.w   f32[16, 64]" in text
    assert "opt_state" not in text


def test_arrays_of_which_nothing_is_said() -> None:
    """By rules, of which those about arrays that somebody has placed are not asked."""
    layout = ft.StateSharding({"head": None, ...: P()})
    mesh = ft.make_mesh(data=2, model=4)
    for text, begin in (
        (raised(lambda: ft.plan(ABSTRACT, layout, mesh)), ""),
        (raised(lambda: ft.jit(step, rules=layout, mesh=mesh)(train_state())), "ts."),
    ):
        assert f"  {begin}model.head   f32" in text and "opt_state" not in text
        assert "no layout was given for this array (`None`)" in text


def test_what_differs_is_told_of_each() -> None:
    """A moment with a layout of its own has a problem of its own."""
    layout = ft.StateSharding({"opt_state.*.mu.head": P("x"), "head": P("y"), ...: P()})
    text = raised(lambda: ft.plan(ABSTRACT, layout, SIZES))
    assert "opt_state.0.mu.head   f32" in text and "P('x') names `x`" in text
    assert "  model.head   f32" in text and "opt_state.0.nu.head" not in text
