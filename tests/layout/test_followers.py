"""What an optimizer keeps for a parameter is laid out as the parameter, and what is wrong with both is told once."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.meshes import MESH, SIZES

P = PartitionSpec


# How it is laid out


def keeping_all_kinds(params: Any) -> Any:
    """A state with all that an optimizer may keep for a parameter."""
    return {
        "like": params,
        "first": jax.tree.map(lambda x: jnp.zeros(x.shape[:1]), params),
        "outer": jax.tree.map(lambda x: jnp.zeros((x.shape[0], x.shape[2])), params),
        "several": jax.tree.map(lambda x: jnp.zeros((3, *x.shape)), params),
        "number": jax.tree.map(lambda x: jnp.zeros(()), params),
        "count": jnp.zeros(()),
        "numbers": jnp.zeros(3),
    }


# By the layout P("data", None, ("model", "stage")) on the host.
FOLLOWERS: dict[str, tuple[P, str]] = {
    "like.w": (P("data", None, ("model", "stage")), "follows w"),
    "first.w": (P("data"), "follows w, with dimension 0"),
    "outer.w": (P("data", ("model", "stage")), "follows w, with dimensions 0, 2"),
    "several.w": (
        P(None, "data", None, ("model", "stage")),
        "follows w, with dimensions unsharded, 0, 1, 2",
    ),
    "number.w": (P(), "one number for w"),
    "count": (P(), "does not depend on the parameters' shapes"),
    "numbers": (P(None), "does not depend on the parameters' shapes"),
}


def test_the_dimensions_of_a_parameter() -> None:
    tx = optax.GradientTransformation(keeping_all_kinds, optax.identity().update)
    layout = ft.on_host(P("data", None, ("model", "stage")))
    plan = ft.plan_optimizer(tx, {"w": jnp.ones((2, 6, 8))}, layout, {**SIZES, "stage": 2})
    assert {str(row.path): (row.spec, row.reason) for row in plan} == FOLLOWERS
    for row in plan:
        assert row.memory_kind == ("pinned_host" if row.reason.startswith("follows w") else None)
        # Only one with the same dimensions is told as the parameters are.
        assert (row.follows == ft.Path("w")) == (row.reason == "follows w")


class Layer(eqx.Module):
    w: Float[Array, "embed hidden"]


class Net(eqx.Module):
    layers: list[Layer]
    head: Float[Array, "embed vocab"]


def train_state(moments: str = "float32") -> ft.TrainState[Net]:
    net = Net([Layer(jnp.ones((16, 64))) for _ in range(2)], jnp.ones((16, 61)))
    return ft.TrainState.create(net, optax.adam(1e-3, mu_dtype=moments))


ABSTRACT = ft.abstract(train_state)()


def specs(tree: Any, layout: Any) -> dict[str, Any]:
    return {str(row.path): row.spec for row in ft.plan(tree, layout, SIZES)}


def test_a_training_state_of_which_each_part_has_a_layout() -> None:
    """Then nothing follows the model: each layout is about its own part."""
    layout = ft.TrainState(
        step=P(),
        model=ft.AxisRules({"embed": "data", "hidden": "model", "vocab": None}),
        opt_state=lambda path, array: P("model") if array.ndim == 2 else P(),
        state=None,
        key=None,
        tx=ABSTRACT.tx,
        wrt=ABSTRACT.wrt,
    )
    found = specs(ABSTRACT, layout)
    assert found["opt_state.0.mu.head"] == found["opt_state.0.nu.head"] == P("model", None)
    assert found["opt_state.0.count"] == P() and found["model.head"] == P("data", None)


def test_filters_for_the_model_alone() -> None:
    """No filter matches a count, and it follows nothing."""
    found = specs(ABSTRACT, ft.StateSharding({"head": P("data"), "layers.**": P()}))
    assert found["opt_state.0.mu.head"] == P("data", None) and found["opt_state.0.count"] == P()


def test_a_later_filter_does_not_name_what_an_earlier_one_matches() -> None:
    filters = {"head": P("data"), "opt_state.**": P(), ...: P()}
    plan = ft.plan(ABSTRACT, ft.StateSharding(filters), SIZES)
    assert plan["opt_state.0.mu.head"].follows == ft.Path(("model", "head"))
    assert plan["opt_state.0.mu.layers.0.w"].follows is None


# What is wrong


def step(ts: Any) -> Any:
    return ts


VOCAB = ft.AxisRules({"embed": None, "hidden": "model", "vocab": "data"})
INDIVISIBLE = '"vocab" has size 61; rule vocab→data needs a multiple of data=2'
AXIS = "P(None, 'modle') names `modle`, but the mesh (data=2, model=4) has no such axis; did you mean `model`?"

# A layout ─► each problem: the path, and what is wrong.
WRONG: dict[str, tuple[Any, list[str]]] = {
    "a size": (VOCAB, [f"model.head: {INDIVISIBLE}"]),
    "an axis of a spec": (
        ft.StateSharding({"layers.*.w": P(None, "modle"), ...: P()}),
        [f"model.layers.0.w: {AXIS}", f"model.layers.1.w: {AXIS}"],
    ),
    "an axis of a rule": (
        ft.AxisRules({"vocab": "modle", ...: None}),
        ["None: the mesh (data=2, model=4) has no axis `modle`; did you mean `model`?"],
    ),
    "no layout": (
        ft.StateSharding({"model.head": None, ...: P()}),
        [
            f"{path}head: no layout was given for this array (`None`)"
            for path in ("model.", "opt_state.0.mu.", "opt_state.0.nu.")
        ],
    ),
    "a layout of its own": (
        ft.StateSharding({"opt_state.*.mu.head": P("x"), "head": P("y"), ...: P()}),
        [
            "model.head: P('y') names `y`, but the mesh (data=2, model=4) has no such axis",
            "opt_state.0.mu.head: P('x') names `x`, but the mesh (data=2, model=4) has no such axis",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_parameter_tells_what_is_wrong_with_its_moments(case: str) -> None:
    """Whatever the dtypes of the two moments are."""
    layout, told = WRONG[case]
    state = ft.abstract(lambda: train_state("bfloat16"))()
    plan = ft.plan(state, layout, SIZES, check=False)
    assert [f"{problem.path}: {problem.why}" for problem in plan.problems] == told
    assert not any("plan_optimizer" in problem.remedy for problem in plan.problems)
    has_none = plan["opt_state.0.mu.head"].spec is None  # as its parameter
    assert has_none == (case == "no layout")


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(ft.ShardingError) as caught:
        call()
    return str(caught.value)


def test_a_parameter_and_its_moments_are_one_problem() -> None:
    """In texts, too. `tests/layout/test_doors.py` has the doors that raise."""
    plan = ft.plan(ABSTRACT, VOCAB, SIZES, check=False)
    result = raised(lambda: ft.jit(step, out_shardings=VOCAB, mesh=MESH).lower(ABSTRACT))
    layouts = {"this": (VOCAB,), "whole": (P(),)}
    ranking = ft.explore(step, (ABSTRACT,), meshes=[SIZES], layouts=layouts)
    for text, path in (
        (str(plan).partition("PROBLEM")[2], "model.head"),
        (result, "result.model.head"),
        (str(ranking), "ts.model.head"),
    ):
        text = " ".join(text.split())
        assert text.count(path) == text.count(INDIVISIBLE) == 1 and "opt_state" not in text


def test_a_parameter_that_is_placed_tells_the_problem_of_its_moments() -> None:
    state = train_state()
    placed = eqx.tree_at(lambda ts: ts.model, state, ft.shard(state.model, P(), MESH))
    text = raised(lambda: ft.jit(step, rules=VOCAB, mesh=MESH)(placed))
    assert "ts.model.head   f32[16, 61]" in text and INDIVISIBLE in text
    # If the moments are placed too, nothing is wrong.
    state = ft.shard(state, P(), MESH)
    ft.jit(step, rules=VOCAB, mesh=MESH)(state)
    # What is sharded in another way than asked is told once, too.
    layout = ft.StateSharding({"layers.*.w": P("data"), ...: P()})
    text = raised(lambda: ft.jit(step, in_shardings=layout, mesh=MESH)(state))
    assert "ts.model.layers.0.w, ts.model.layers.1.w   f32[16, 64]" in text
    assert "opt_state" not in text
