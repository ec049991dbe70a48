"""The leaves of training states ─► what they follow, and the paths that filters see."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.labels.leaf import FollowedLeaf, Leaf
from functree.labels.leaves import read
from functree.labels.training_state import Scope, label_paths
from tests.lib.trees import x


class Model(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]
    count: ft.StateRef


def model() -> Model:
    return Model(jnp.ones((4, 8)), jnp.ones(8), ft.StateRef(jnp.ones(3), "three"))


class WithMore(ft.TrainState[Any]):
    """A training state with a field that functree does not know."""

    best: Float[Array, "embed hidden"]


def made(**options: Any) -> ft.TrainState[Any]:
    return ft.TrainState.create(model(), optax.adam(1.0), key=jax.random.key(0), **options)


def labelled(tree: Any) -> dict[str, Leaf]:
    leaves = read(tree)
    return {str(leaf.path): leaf for leaf in label_paths(leaves.leaves, leaves.training, Scope())}


W, B = ((0, 1), (0,))  # their dimensions

# What each leaf of a training state follows: the path of a parameter, and its dimensions.
FOLLOWED: dict[str, tuple[str | None, tuple[int | None, ...]]] = {
    "step": (None, ()),
    "key": (None, ()),
    "opt_state.0.count": (None, ()),
    "opt_state.0.mu.w": ("model.w", W),
    "opt_state.0.mu.b": ("model.b", B),
    "opt_state.0.nu.w": ("model.w", W),
    "opt_state.0.nu.b": ("model.b", B),
}
# Layouts decide about these.
FREE = {"model.w", "model.b", "state.count"}


@pytest.mark.parametrize("prefix", ["", "runs.0."])
def test_what_they_follow(prefix: str) -> None:
    ts = made()
    found = labelled({"runs": [ts]} if prefix else ts)
    assert found.keys() == {prefix + path for path in {*FOLLOWED, *FREE}}
    for path in FREE:
        assert found[prefix + path].follows is None
    for path, (followed, dims) in FOLLOWED.items():
        parameter = None if followed is None else ft.Path.parse(prefix + followed)
        assert found[prefix + path].follows == FollowedLeaf(parameter, dims)
    moment = found[f"{prefix}opt_state.0.mu.w"]
    assert str(moment.axes) == "embed hidden" and moment.annotated


def test_of_several_states_that_were_made_under_vmap() -> None:
    found = labelled(eqx.filter_vmap(lambda _: made())(jnp.arange(3)))
    for path in FOLLOWED:
        follows = found[path].follows
        assert follows is not None and follows.batched


def test_a_field_of_a_subclass_follows_nothing() -> None:
    ts = made()
    fields = (ts.step, ts.model, ts.opt_state, ts.state, ts.key, ts.tx, ts.wrt)
    best = labelled(WithMore(*fields, best=jnp.ones((4, 8))))["best"]
    assert (best.follows, str(best.axes), best.seen) == (None, "embed hidden", ("best",))


# Where a leaf is ─► the path that filters see, and the names with which patterns may begin.
SEEN: dict[str, tuple[str | None, list[str]]] = {
    "model.w": ("w", ["runs", "0", "model"]),
    "state.count": ("count", ["runs", "0", "state"]),
    "opt_state.0.mu.w": ("w", ["runs", "0", "opt_state"]),
    "opt_state.0.count": (None, ["runs", "0", "opt_state"]),
    "step": (None, ["runs", "0", "step"]),
    "key": (None, ["runs", "0", "key"]),
}


def names(leaf: Leaf) -> list[str]:
    """The names with which patterns may begin. Each path from a name on ends in the leaf."""
    assert all(leaf.path[-len(root.path) :] == root.path for root in leaf.roots)
    return [str(root.path[0]) for root in leaf.roots]


@pytest.mark.parametrize("path", SEEN)
def test_the_path_that_filters_see(path: str) -> None:
    leaf = labelled({"runs": [made()]})[f"runs.0.{path}"]
    seen, above = SEEN[path]
    assert leaf.seen == (None if seen is None else ft.Path.parse(seen))
    assert names(leaf) == above


def test_the_names_of_arguments() -> None:
    leaves = read({"net": {"w": x(4, 8)}, "x": x(4)}).leaves
    scope = Scope(1, argument=0, arguments=("net", "x"))
    net, array = label_paths(leaves, {}, scope)
    assert net.seen == ("w",) and names(net) == ["net"]
    assert array.seen == () and names(array) == ["x"]
    net, array = label_paths(leaves, {}, scope._replace(shared=True))
    assert net.seen == ("w",) and array.seen is None and names(array) == ["x"]


def test_the_optimizer_is_asked_for_what_it_updates_alone() -> None:
    """What it makes of the others may be something else, or an error."""
    asked: list[Any] = []

    def init(params: Any) -> Any:
        asked.append(params)
        return {"sums": jax.tree.map(lambda p: jnp.zeros(p.shape[:1]), params)}

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    ts = ft.TrainState.create(model(), tx, wrt="w")
    found = labelled(ts)
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
            found = [labelled(one)[f"opt_state.{path}"].follows for path in state]
            parameters = [follows and follows.path for follows in found]
            assert parameters == [None, ("model", "w"), ("model", "b")]
