"""Labelled leaves and the layouts of a tree ─► a decision for each, and all that is wrong."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.devices.meshes import MeshView
from functree.labels.leaf import FollowedLeaf, Leaf
from functree.labels.leaves import read
from functree.layout.decide import Decisions, decide, decide_parts, follow
from functree.layout.decision import Decision, Dimension, whole
from functree.layout.layout import Part, as_layout, as_partial, broadcast
from tests.lib.meshes import SIZES
from tests.lib.trees import leaf, x

P = PartitionSpec
VIEW = MeshView(SIZES)


class Model(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


def decided(tree: Any, layout: Any, partial: bool = False, **options: Any) -> Decisions:
    parts = broadcast(layout, tree)
    return decide_parts(read(tree), as_partial(parts) if partial else parts, VIEW, **options)


def specs(found: Decisions) -> dict[str, Any]:
    pairs = zip(found.leaves, found.decisions, strict=True)
    return {str(one.path): decision.spec for one, decision in pairs}


def whys(found: Decisions) -> list[str]:
    return [f"{problem.path}: {problem.why}" for problem in found.problems]


# Leaves that follow others


def following(path: Any, dims: Sequence[int | None], ndim: int, known: bool = True) -> Leaf:
    one = leaf(" ".join("_" * ndim), *[4] * ndim)
    where = None if path is None else ft.Path((path,))
    return one._replace(path=ft.Path("m"), follows=FollowedLeaf(where, tuple(dims), known))


PARAMETER = Decision(
    (Dimension(("data",)), Dimension(), Dimension(("model", "stage"))), memory_kind="pinned_host"
)
FOLLOWERS: dict[str, tuple[Leaf, P, str]] = {
    "as it": (following("w", (0, 1, 2), 3), P("data", None, ("model", "stage")), "as w"),
    "its first": (following("w", (0,), 1), P("data"), "as w, its dimensions 0"),
    "two of it": (
        following("w", (0, 2), 2),
        P("data", ("model", "stage")),
        "as w, its dimensions 0, 2",
    ),
    "behind others": (
        following("w", (None, 0, 1, 2), 4),
        P(None, "data", None, ("model", "stage")),
        "as w, its dimensions unsharded, 0, 1, 2",
    ),
    "a number of it": (following("w", (), 0), P(), "one number for w"),
    "nothing of it": (
        following("w", (None, None), 2),
        P(None, None),
        "does not depend on the parameters",
    ),
    "nothing": (following(None, (None,), 1), P(None), "does not depend on the parameters"),
}


@pytest.mark.parametrize("case", FOLLOWERS)
def test_they_take_the_decision_about_another(case: str) -> None:
    one, spec, reason = FOLLOWERS[case]
    (found,) = follow([one], {ft.Path("w"): PARAMETER})
    assert found.spec == spec and found.reason == reason and not found.faults
    takes = reason.startswith("as w")
    assert found.memory_kind == ("pinned_host" if takes else None)
    for dimension in found.dimensions:
        source = None if dimension.source is None else str(dimension.source)
        assert source == ("the spec of w" if dimension.mesh_axes else None)


def test_each_takes_its_own() -> None:
    """All at once, in which equal ones are decided once: they differ in what they follow, in the
    dimensions, or in their number."""
    other = Decision((Dimension(("model",)), Dimension(), Dimension()))
    leaves = [one for one, _, _ in FOLLOWERS.values()]
    leaves += [following("v", (0, 1, 2), 3), following(None, (), 1), following(None, (), 2)]
    known = {ft.Path("w"): PARAMETER, ft.Path("v"): other}
    together = follow([*leaves, *leaves], known)
    assert together == [follow([one], known)[0] for one in [*leaves, *leaves]]
    assert len(together[-1].dimensions) == 2 and len(together[-2].dimensions) == 1
    assert together[0] is together[len(leaves)]


def test_what_cannot_be_determined_is_a_fault() -> None:
    (found,) = follow([following("w", (0, 1), 2, known=False)], {ft.Path("w"): PARAMETER})
    ((why, remedy),) = found.faults
    assert why == (
        "depends on the shapes of the parameters in a way that cannot be determined, so it cannot "
        "get the spec of a parameter"
    )
    assert remedy == (
        "give a layout for such leaves: `otherwise=P()` replicates them; in a TrainState, by a "
        "pattern: `StateSharding({'opt_state.**': P(), ...: layout})`"
    )
    assert found.spec == P(None, None)


def test_if_no_layout_was_given_for_it_none_was_for_them() -> None:
    unspecified = whole(leaf("a b", 2, 2))._replace(specified=False)
    (found,) = follow([following("w", (0, 1), 2)], {ft.Path("w"): unspecified})
    assert not found.specified


TX = optax.adam(1.0)
TS = ft.TrainState.create(Model(jnp.ones((4, 8)), jnp.ones(8)), TX)
RULES = ft.AxisRules({"embed": "data", "hidden": "model"})


def test_the_optimizer_follows_the_model() -> None:
    found = decided({"runs": [TS]}, RULES)
    assert not found.problems
    by_path = specs(found)
    for moments in ("mu", "nu"):
        assert by_path[f"runs.0.opt_state.0.{moments}.w"] == P("data", "model")
        assert by_path[f"runs.0.opt_state.0.{moments}.b"] == P("model")
    assert list(by_path) == [str(one.path) for one in read({"runs": [TS]}).leaves]


def test_the_optimizer_follows_unless_a_filter_names_its_field() -> None:
    layout = ft.StateSharding({"opt_state.*.mu.**": P(), ...: RULES})
    by_path = specs(decided({"runs": [TS]}, layout))
    assert by_path["runs.0.opt_state.0.mu.w"] == P(None, None)
    assert by_path["runs.0.opt_state.0.nu.w"] == P("data", "model")
    assert by_path["runs.0.opt_state.0.count"] == P()


def test_a_training_state_of_which_each_part_has_a_layout() -> None:
    """Then nothing follows the model: each layout is about its own part."""
    layout = ft.TrainState(
        step=P(),
        model=RULES,
        opt_state=lambda path, array: P("model") if array.ndim == 2 else P(),
        state=None,
        key=None,
        tx=TS.tx,
        wrt=TS.wrt,
    )  # fmt: skip
    by_path = specs(decided(TS, layout))
    assert by_path["opt_state.0.mu.w"] == by_path["opt_state.0.nu.w"] == P("model", None)
    assert by_path["opt_state.0.mu.b"] == P(None) and by_path["model.w"] == P("data", "model")


def test_training_states_in_several_parts() -> None:
    """Patterns begin in the part of their layout."""
    tree = {"one": [TS], "two": TS}
    layout = {
        "one": ft.StateSharding({"0.model.w": P("data"), "**.b": P(), "0.opt_state.*.mu.w": P()}),
        "two": ft.StateSharding({"w": P(None, "model"), ...: P()}),
    }
    by_path = specs(decided(tree, layout, partial=True))
    assert by_path["one.0.opt_state.0.nu.w"] == P("data", None)
    assert by_path["one.0.opt_state.0.mu.w"] == P(None, None)
    assert by_path["two.opt_state.0.mu.w"] == P(None, "model")


# What is wrong


def test_an_array_without_a_layout() -> None:
    tree = {"a": x(4), "b": x(4)}
    found = decided(tree, {"a": P(), "b": None})
    assert whys(found) == ["b: no layout was given for this array (`None`)"]
    assert found.problems[0].remedy == "write `P()` to replicate it"
    assert not found.decisions[1].specified
    assert whys(decided(tree, {"a": P(), "b": None}, allow_unspecified=True)) == []


def test_filters_that_decide_about_nothing() -> None:
    tree = {"a": x(4), "b": [x(4)], "c": x(4)}
    dead = ft.StateSharding({"nothing": P(), ...: P()})
    (problem,) = decided(tree, {"a": P(), "b": dead, "c": P()}).problems
    assert problem.path is None and problem.why == "matches no leaf"
    assert problem.what == "filter 'nothing', for `b`"
    (problem,) = decided(tree, {"a": dead, "b": dead, "c": P()}).problems
    assert problem.what == "filter 'nothing'"
    (problem,) = decided(tree, dead).problems
    assert problem.what == "filter 'nothing'"
    assert not decided(tree, {"a": P(), "b": dead, "c": P()}, partial=True).problems
    with pytest.warns(ft.FunctreeWarning, match="filter 'nothing' matches no leaf"):
        warned = ft.StateSharding({"nothing": P(), ...: P()}, unused="warn")
        assert not decided(tree, warned).problems


def test_a_rule_is_unused_if_no_part_has_its_axis() -> None:
    rules = ft.AxisRules({"embed": "data", "hidden": "model", "heads": None})
    tree = [Model(x(4, 8), x(8)), {"v": x(2)}]
    assert list(decided(tree, [rules, P()]).unused) == ["heads"]
    two = ft.AxisRules({"hidden": None, "seq": None})
    assert list(decided([tree[0], tree[0]], [rules, two]).unused) == ["heads", "seq"]


# One array at two paths


ARRAY = np.ones((4, 8), np.float32)
WHY = "b: is the same array as `a`, and is laid out P('data', None) here and P(None, None) there"


def test_one_array_with_two_specs() -> None:
    found = decided({"a": ARRAY, "b": ARRAY}, {"a": P(), "b": P("data")})
    assert whys(found) == [WHY]
    assert found.problems[0].remedy == "give both paths one spec, or make two arrays"
    again = decided({"a": ARRAY, "b": ARRAY.copy()}, {"a": P(), "b": P("data")})
    assert not again.problems


def test_one_array_in_two_kinds_of_memory() -> None:
    tree = {"a": ARRAY, "b": ARRAY}
    found = decided(tree, {"a": ft.on_host(P("data")), "b": P("data")})
    assert whys(found) == [
        "b: is the same array as `a`, and is laid out P('data', None) here and "
        "P('data', None) in pinned_host there"
    ]


def test_one_array_with_one_spec() -> None:
    tree = {"a": ARRAY, "b": ARRAY}
    assert not decided(tree, {"a": P("data"), "b": P("data", None)}).problems
    assert not decided(tree, {"a": None, "b": P("data")}, allow_unspecified=True).problems
    assert not decided(tree, {"a": P("data"), "b": None}, allow_unspecified=True).problems


def test_abstract_arrays_are_the_same_if_somebody_says_so() -> None:
    one = x(4, 8)
    tree, layout = {"a": one, "b": one}, {"a": P(), "b": P("data")}
    assert not decided(tree, layout).problems
    assert not decided(tree, layout, same=[0, 1]).problems
    assert whys(decided(tree, layout, same=[7, 7])) == [WHY]
    several = {"a": x(4, 8), "b": x(4, 8)}
    assert whys(decided(several, layout, same=[0, 0])) == [WHY]
    concrete = {"a": ARRAY, "b": ARRAY}
    assert not decided(concrete, layout, same=[0, 1]).problems


def test_one_layout_decides_about_all() -> None:
    leaves = read([jnp.ones((4, 8)), x(2)]).leaves
    found = decide(Part(as_layout(P("data")), ft.Path()), leaves, VIEW)
    assert [one.spec for one in found] == [P("data", None), P("data")]


def test_an_argument_that_is_one_array_has_another_layout() -> None:
    """Also beside an array of the same shape that has a path which filters see."""
    part = Part(as_layout(P("data")), ft.Path(), for_arrays=as_layout(P()))
    weight, array = leaf("_", 8)._replace(seen=ft.Path("w")), leaf("_", 8)._replace(seen=None)
    first, second = decide(part, [weight, array], VIEW)
    assert (first.spec, second.spec) == (P("data"), P(None))
    first, second = decide(part, [array, weight], VIEW)
    assert (first.spec, second.spec) == (P(None), P("data"))


def test_leaves_that_are_alike_share_a_decision() -> None:
    tree = [x(4, 8), x(4, 8), x(8, 4), x(4, 8)]
    layout = ft.StateSharding({"3": P("model"), ...: P("data")})
    first, second, third, other = decided(tree, layout).decisions
    assert first is second and third is not first
    assert other.spec == P("model", None)
