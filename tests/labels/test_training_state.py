"""The leaves of training states ─► what they follow, and the paths that patterns match them with."""

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
from functree.labels.training_state import label_training_states
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
    return {str(leaf.path): leaf for leaf in label_training_states(leaves.leaves, leaves.training)}


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


@pytest.mark.parametrize("prefix", ["", "runs.0.", "a.b.c."])
def test_what_they_follow(prefix: str) -> None:
    ts = made()
    tree = {"": ts, "runs.0.": {"runs": [ts]}, "a.b.c.": {"a": {"b": {"c": ts}}}}[prefix]
    found = labelled(tree)
    assert found.keys() == {prefix + path for path in {*FOLLOWED, *FREE}}
    for path in FREE:
        assert found[prefix + path].follows is None
    for path, (followed, dims) in FOLLOWED.items():
        leaf = found[prefix + path]
        assert leaf.follows is not None and leaf.follows.known
        assert leaf.follows.dims == dims
        assert leaf.follows.path == (None if followed is None else ft.Path.parse(prefix + followed))
        assert str(leaf.path) == prefix + path
    assert str(found[f"{prefix}opt_state.0.mu.w"].axes) == "embed hidden"
    assert found[f"{prefix}opt_state.0.mu.w"].annotated


def test_each_of_several_follows_its_own_model() -> None:
    found = labelled({"one": made(), "w": x(4, 8), "two": made()})
    for name in ("one", "two"):
        follows = found[f"{name}.opt_state.0.mu.w"].follows
        assert follows is not None and str(follows.path) == f"{name}.model.w"
    assert found["w"].follows is None and found["w"].patterned == (ft.Path(("w",)),)


def test_a_field_of_a_subclass_follows_nothing() -> None:
    ts = made()
    more = WithMore(
        ts.step, ts.model, ts.opt_state, ts.state, ts.key, ts.tx, ts.wrt, best=jnp.ones((4, 8))
    )
    found = labelled(more)
    assert found["best"].follows is None and str(found["best"].axes) == "embed hidden"
    assert found["best"].patterned == (ft.Path(("best",)),)


# Where a leaf is ─► the paths that patterns are matched with.
ALIASES: dict[str, list[str]] = {
    "model.w": ["runs.0.model.w", "w", "model.w"],
    "state.count": ["runs.0.state.count", "count", "state.count"],
    "opt_state.0.mu.w": ["runs.0.opt_state.0.mu.w", "opt_state.0.mu.w"],
    "opt_state.0.count": ["runs.0.opt_state.0.count", "opt_state.0.count"],
    "step": ["runs.0.step", "step"],
    "key": ["runs.0.key", "key"],
}


@pytest.mark.parametrize("path", ALIASES)
def test_the_paths_for_patterns(path: str) -> None:
    """From the root, from the model, and last from the training state: a filter may name the field
    that begins it."""
    found = labelled({"runs": [made()]})[f"runs.0.{path}"]
    assert list(map(str, found.patterned)) == ALIASES[path]


def test_the_paths_for_patterns_of_a_training_state_alone() -> None:
    found = labelled(made())
    assert list(map(str, found["model.w"].patterned)) == ["model.w", "w"]
    assert list(map(str, found["opt_state.0.mu.w"].patterned)) == ["opt_state.0.mu.w"]


def test_the_paths_for_patterns_begin_in_the_part_of_a_layout() -> None:
    leaves = read({"runs": [made()]})
    below = [leaf._replace(aliases=(ft.Path(leaf.path[1:]),)) for leaf in leaves.leaves]
    found = {
        str(leaf.path): list(map(str, leaf.patterned))
        for leaf in label_training_states(below, leaves.training)
    }
    assert found["runs.0.model.w"] == ["0.model.w", "w", "model.w"]
    assert found["runs.0.opt_state.0.mu.w"] == ["0.opt_state.0.mu.w", "opt_state.0.mu.w"]
    assert found["runs.0.step"] == ["0.step", "step"]


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
    changed = eqx.tree_at(
        lambda ts: ts.opt_state, ts, {"a": adam.mu, "b": adam.nu, "c": adam.count}
    )
    for _ in range(2):
        for one, expected in (
            (ts, ["0.count", "0.mu.w", "0.mu.b", "0.nu.w", "0.nu.b"]),
            (changed, ["a.w", "a.b", "b.w", "b.b", "c"]),
        ):
            found = labelled(one)
            states = [path.removeprefix("opt_state.") for path in found if "opt_state" in path]
            assert states == expected
            for path in expected:
                follows = found[f"opt_state.{path}"].follows
                name = path.split(".")[-1]
                parameter = ft.Path(("model", name)) if name in ("w", "b") else None
                assert follows is not None and follows.path == parameter


def test_without_training_states_they_are_as_they_were() -> None:
    leaves = read([x(2), {"step": x(3)}])
    assert label_training_states(leaves.leaves, leaves.training) is leaves.leaves
