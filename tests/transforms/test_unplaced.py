"""Without rules: an array that nobody has placed, beside arrays on several devices, is warned of."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
ONE = ft.make_mesh(data=1, model=1, devices=jax.devices()[:1])


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]


W: Any = np.ones((4, 64), np.float32)
X: Any = np.ones((64, 4), np.float32)
WHOLE = ft.shard(Layer(W), P(), MESH)
TYPED = ft.shard(Layer(W), P(), EXPLICIT)
PLACED = ft.shard(X, P("data"), MESH)


def fresh() -> Callable[..., Any]:
    """A function of its own, since wrappers of one function share its programs."""

    def apply(m: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w + 1, m), jax.tree.map(lambda a: a, x)

    return apply


def annotated(m: Layer, x: Float[Array, "batch embed"]) -> Any:
    return x @ m.up


def call(m: Any, x: Any, **options: Any) -> Callable[[], Any]:
    return lambda: ft.jit(fresh(), **options).trace(m, x)


WARNED: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy": (call(WHOLE, X), "`x` f32[64, 4]"),
    "not committed": (call(WHOLE, jnp.asarray(X)), "`x` f32[64, 4]"),
    "abstract": (call(WHOLE, jax.ShapeDtypeStruct((64, 4), jnp.float32)), "`x` f32[64, 4]"),
    "in a tree": (
        call(WHOLE, {"a": PLACED, "b": [X, X]}),
        "`x.b.0` f32[64, 4], `x.b.1` f32[64, 4]",
    ),
    "the model": (call(Layer(W), PLACED), "`m.up` f32[4, 64]"),
    "Explicit axes": (call(TYPED, X), "`x` f32[64, 4]"),
    "donated, with mesh=": (call(WHOLE, X, donate="m", mesh=MESH), "`x` f32[64, 4]"),
    "eager": (lambda: ft.jit(fresh())(WHOLE, X), "`x` f32[64, 4]"),
}


@pytest.mark.parametrize("case", WARNED)
def test_warned_of(case: str) -> None:
    run, told = WARNED[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    texts = [str(one.message) for one in caught if "uncommitted" in str(one.message)]
    assert texts == [
        "apply: every device repeats the work on uncommitted arrays, since other arguments span 8 "
        f"devices ({told}): place them with `ft.shard`, or pass `rules=` or `in_shardings=`"
    ]


SILENT: dict[str, Callable[[], Any]] = {
    "all placed": call(WHOLE, PLACED),
    "nothing placed": call(Layer(W), X),
    "one device": call(ft.shard(Layer(W), P(), ONE), X),
    "a scalar": call(WHOLE, np.float32(2)),
    "a raw key": call(WHOLE, jax.random.PRNGKey(0)),
    "typed keys": call(WHOLE, jax.random.split(jax.random.key(0), 200)),
    "fewer than 128 elements": call(WHOLE, np.ones(127)),
    "None in in_shardings": call(WHOLE, X, in_shardings=(P(), None), mesh=MESH),
    "in another trace": lambda: jax.jit(lambda m, x: ft.jit(fresh())(m, x)).trace(WHOLE, X),
    "a constant of another trace": lambda: jax.jit(lambda x: ft.jit(fresh())(WHOLE, x)).trace(X),
    # As the text says.
    "remedy: ft.shard": call(WHOLE, ft.shard(X, P("data"), MESH)),
    "remedy: in_shardings=": call(WHOLE, X, in_shardings={"x": P("data")}, mesh=MESH),
    "remedy: rules=": lambda: ft.jit(annotated, rules=RULES).trace(WHOLE, X),
}


@pytest.mark.parametrize("case", SILENT)
def test_not_warned_of(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SILENT[case]()


def test_each_array_for_itself() -> None:
    """Also beside an array of numpy that is replicated at no cost, or is warned of already."""
    f = ft.jit(lambda m, x, y, rate: (m, x, y, rate))
    f(WHOLE, PLACED, PLACED, np.float32(2))
    for x, y, told in (
        (PLACED, X, "`y` f32"),
        (X, PLACED, "`x` f32"),
        (X, X, "`x` f32.*`y` f32"),
    ):
        with pytest.warns(ft.FunctreeWarning, match=f"uncommitted.*{told}"):
            f(WHOLE, x, y, np.float32(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f(WHOLE, x, y, np.float32(3))


@pytest.mark.parametrize("whole", [WHOLE, TYPED], ids=["Auto", "Explicit"])
def test_rules_place_it_on_the_mesh_of_the_others(whole: Layer) -> None:
    def given(m: Layer, x: Float[Array, "batch embed"]) -> Any:
        return x

    run = ft.jit(given, rules=RULES)
    for x in (X, jnp.asarray(X)):
        placed = run(whole, x)
        assert placed.sharding.shard_shape(placed.shape) == (32, 4)
