"""The leaves of training states ─► what they follow, and the paths that filters see."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.labels.leaves import FollowedLeaf, Leaf, read
from functree.labels.training_state import Scope, label_paths


class Model(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]
    count: ft.StateRef


def model() -> Model:
    return Model(jnp.ones((4, 8)), jnp.ones(8), ft.StateRef(jnp.ones(3), "three"))


def made() -> ft.TrainState[Any]:
    return ft.TrainState.create(model(), optax.adam(1.0), key=jax.random.key(0))


def labeled(tree: Any) -> dict[str, Leaf]:
    leaves = read(tree)
    return {str(leaf.path): leaf for leaf in label_paths(leaves.leaves, leaves.training, Scope())}


@pytest.mark.parametrize("pattern", ["count", "state.count", "runs.0.state.**"])
def test_state_has_the_paths_of_the_model(pattern: str) -> None:
    layout = ft.StateSharding({pattern: ft.P("data"), ...: ft.P()})
    plan = ft.plan({"runs": [made()]}, layout, {"data": 3})
    assert [str(row.path) for row in plan if "data" in row.spec] == ["runs.0.state.count"]


def test_the_optimizer_is_asked_for_what_it_updates_alone() -> None:
    """What it makes of the others may be something else, or an error."""
    asked: list[Any] = []

    def init(params: Any) -> Any:
        asked.append(params)
        return {"sums": jax.tree.map(lambda p: jnp.zeros(p.shape[:1]), params)}

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    ts = ft.TrainState.create(model(), tx, wrt="w")
    found = labeled(ts)
    assert asked and all(params.b is None for params in asked)
    assert "opt_state.sums.b" not in found
    assert found["opt_state.sums.w"].follows == FollowedLeaf(ft.Path(("model", "w")), (0,))


def test_an_optimizer_state_in_another_form() -> None:
    """As somebody has changed it: not what its `tx.init` makes of the same model."""
    ts = made()
    adam = ts.opt_state[0]
    other = {"a": adam.mu, "b": adam.nu, "c": adam.count}
    changed = eqx.tree_at(lambda ts: ts.opt_state, ts, other)
    for _ in range(2):  # the second time, both are remembered
        for one, state in ((ts, ["0.count", "0.mu.w", "0.nu.b"]), (changed, ["c", "a.w", "b.b"])):
            found = [labeled(one)[f"opt_state.{path}"].follows for path in state]
            parameters = [follows and follows.path for follows in found]
            assert parameters == [None, ("model", "w"), ("model", "b")]
