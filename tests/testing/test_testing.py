"""`ft.testing`: each assertion passes, and fails in words that say what is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.testing import (
    assert_closed,
    assert_collectives,
    assert_layout,
    assert_no_recompile,
    assert_peak_memory,
    assert_same_as_unsharded,
)
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH, SIZES
from tests.lib.training import LAYOUTS, batch_spec, gradient, loss, make

GOLDEN = Path(__file__).parents[1] / "golden"
failing = pytest.raises(AssertionError)


# Golden layouts


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_the_transformer(name: str) -> None:
    plan = ft.plan(ft.abstract(make)(jax.random.key(0)), LAYOUTS[name], SIZES)
    assert_layout(plan, GOLDEN / f"transformer_{name.lower().replace('+', '_')}.txt")


def test_a_golden_layout_is_written_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"layers": [{"w": jnp.ones((8, 16))} for _ in range(3)], "head": jnp.ones((16, 4))}
    file = tmp_path / "layouts" / "tree.txt"
    before = ft.plan(tree, ft.P("model"), SIZES)
    monkeypatch.delenv("FUNCTREE_UPDATE_GOLDEN", raising=False)
    with raises(
        "the file ", "does not exist: create it with FUNCTREE_UPDATE_GOLDEN=1", error=AssertionError
    ):
        assert_layout(before, file)
    monkeypatch.setenv("FUNCTREE_UPDATE_GOLDEN", "1")
    assert_layout(before, str(file))
    monkeypatch.setenv("FUNCTREE_UPDATE_GOLDEN", "0")
    assert_layout(before, file)
    assert file.read_text() == (
        "mesh (data=2, model=4), 4 arrays, 448 B on each device\n\n"
        "head  f32[16, 4]  P('model', None)  64 B\n"
        "layers.{0-2}.w ×3  f32[8, 16]  P('model', None)  384 B\n"
    )
    after = ft.plan(tree, ft.StateSharding([("head", ft.P()), (..., ft.P("model"))]), SIZES)
    with failing as caught:
        assert_layout(after, file)
    for told in (
        "the layout differs from",
        "-head  f32[16, 4]  P('model', None)  64 B\n+head  f32[16, 4]  P(None, None)  256 B",
        "update the file with FUNCTREE_UPDATE_GOLDEN=1",
    ):
        assert told in str(caught.value)


# Budgets


def test_budgets_for_collectives() -> None:
    compiled = gradient("TP", None)[0]
    ledger = compiled.ledger()
    total = sum(ledger.totals().values())
    for one in (compiled, ledger):
        assert_collectives(one, allow={"all-reduce"}, at_most=total)
        assert_collectives(one, allow={("all-reduce", "model"), ("all-reduce", ("data",))})
        assert_collectives(
            one, at_most={"all-reduce": total, "all-gather": 0, ("all-reduce", "data"): 145156}
        )
    with failing as caught:
        assert_collectives(ledger, allow={("all-reduce", "model")})
    assert "the program has collectives that are not allowed\n  all-reduce over data, " in str(
        caught.value
    )
    assert "model.blocks.layer.mlp.gate" in str(caught.value) and "and 3 more" in str(caught.value)
    with failing as caught:
        assert_collectives(ledger, at_most=total - 1)
    assert str(caught.value).startswith(
        "the program moves 1.6 MiB, which is 1 B more than the budget of 1.6 MiB\n"
    )
    with failing as caught:
        assert_collectives(ledger, at_most={("all-reduce", "data"): 145155})
    assert str(caught.value).startswith(
        "all-reduce over data moves 141.8 KiB, which is 1 B more than the budget of 141.8 KiB\n"
    )
    with raises("allow='all-reduce'", "it must be a set of kinds, such as `{'all-reduce'}`"):
        assert_collectives(ledger, allow="all-reduce")  # pyright: ignore[reportArgumentType]
    with raises("('all-gather', 3): write mesh axes as strings, such as ('all-reduce', 'model')"):
        assert_collectives(ledger, allow=(("all-gather", 3),))  # pyright: ignore[reportArgumentType]
    for axes in ({"data"}, [["data"]], {}):
        with raises("write mesh axes as strings"):
            assert_collectives(ledger, allow=[("all-gather", axes)])  # pyright: ignore[reportArgumentType]
    with raises(
        "'all_gather' is not a kind of collective: use one of all-reduce, ",
        "did you mean `all-gather`?",
    ):
        assert_collectives(ledger, at_most={"all_gather": 0})
    for wrong in (("all-reduce", "data", "model"), ("all-reduce",), 3):
        with raises(" is not a kind of collective: use one of all-reduce, "):
            assert_collectives(ledger, at_most={wrong: 0})  # pyright: ignore[reportArgumentType]


def test_budgets_that_could_not_fail() -> None:
    ledger = gradient("TP", None)[0].ledger()
    with raises(
        "the program has no mesh axis `modell`; its mesh axes: data, model; did you mean `model`?"
    ):
        assert_collectives(ledger, at_most={("all-reduce", "modell"): 0})
    with raises("the program has no mesh axis `fsdp`; its mesh axes: data, model"):
        assert_collectives(ledger, allow={"all-gather", ("all-reduce", "fsdp")})
    both = gradient("FSDP", None)[0].ledger()
    for axes in (("data", "model"), ("model", "data")):  # in any order
        with failing:
            assert_collectives(both, at_most={("all-gather", axes): 0})

    def endless(w: Any, x: Any) -> Any:
        def body(x: Any) -> Any:
            return ft.constrain((x @ w) / 2, ft.P(None, "model"))

        return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, body, x)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 64), (16, 64)]]
    layouts = {
        "in_shardings": (ft.P("model"), ft.P(None, "model")),
        "out_shardings": ft.P(None, "model"),
        "mesh": MESH,
    }
    with failing as caught:
        assert_collectives(ft.ledger(endless, *shapes, **layouts), at_most=2**20)
    assert "the program cannot be compared with a budget:\n  the number of runs of " in str(
        caught.value
    )


def test_budgets_for_memory() -> None:
    compiled = gradient("TP", None)[0]
    peak = compiled.ledger().memory.peak
    assert_peak_memory(compiled, peak)
    with failing as caught:
        assert_peak_memory(compiled, peak - 1)
    assert str(caught.value).startswith(
        "the program needs 4.2 MiB on each device, which is 1 B more than the budget of 4.2 MiB\n  temporaries"
    )
    assert "model.blocks.layer.mlp.gate 24 KiB" in str(caught.value)


# Compilations


def test_no_recompilation() -> None:
    step = ft.jit(lambda w, x: w @ x)
    w, x, y = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((3, 5))
    step(w, x)
    with assert_no_recompile():
        step(w, x)
    with failing as caught, assert_no_recompile():
        step(w, y)
    assert (
        str(caught.value)
        == "1 compilation inside `assert_no_recompile()`\n  <lambda>: compilation 2: x: shape (3, 4) → (3, 5)"
    )
    other = jax.jit(lambda w: w + 41)
    with failing as caught, assert_no_recompile():
        other(w)
    assert (
        str(caught.value)
        == "1 compilation inside `assert_no_recompile()`\n  jit(<lambda>): compiled by JAX directly, not through functree"
    )
    with assert_no_recompile():  # the same program, which another wrapper has compiled
        ft.jit(step.__wrapped__)(w, x)
    with pytest.raises(ValueError, match="of the body"), assert_no_recompile():
        raise ValueError("of the body")
    with assert_no_recompile():
        pass


# State


def adam_step(model: Any, **options: Any) -> tuple[Any, Any]:
    state = ft.TrainState.create(model, optax.adamw(1e-3))

    @ft.jit(donate="state", **options)
    def step(state: ft.TrainState, x: Float[Array, "batch seq embed"]) -> Any:
        value, grads = ft.value_and_grad(lambda model: (model(x) ** 2).mean())(state.model)
        return ft.apply_gradients(state, grads), value

    return step, state


def test_a_training_step_is_closed() -> None:
    rules = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
    with jax.numpy_dtype_promotion("standard"):
        step, state = adam_step(ft.nn.MLP(8, 16, key=jax.random.key(0)))
        x = jnp.ones((4, 2, 8))
        assert_closed(step, (state, x))
        placed = ft.shard(state, rules, MESH)
        assert_closed(
            adam_step(ft.nn.MLP(8, 16, key=jax.random.key(0)), rules=rules)[0], (placed, x)
        )


def grown(state: Any) -> Any:
    return {**state, "more": state["w"]}


OPEN = {
    "dtype": (lambda s: {**s, "w": s["w"].astype("bfloat16")}, "state.w: dtype f32 → bf16"),
    "shape": (lambda s: {**s, "w": s["w"][:4]}, "state.w: shape (8, 4) → (4, 4)"),
    "structure": (grown, "state.more: structure nothing → an array"),
    "missing": (lambda s: {"w": s["w"]}, "state.n: structure an array → nothing"),
    "nothing": (lambda s: s["w"].sum(), "state: no part of the result has the state's paths"),
    "sharding": (
        lambda s: {**s, "w": ft.constrain(s["w"], ft.P(None, "model"))},
        "state.w: sharding P('model', None) on (data=2, model=4) → P(None, 'model') on (data=2, model=4)",
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_a_step_that_is_not_closed(name: str) -> None:
    fun, message = OPEN[name]

    def step(state: Any) -> Any:
        return fun(state)

    state = {
        "w": ft.shard(jnp.ones((8, 4)), ft.P("model"), MESH),
        "n": ft.shard(jnp.ones(()), ft.P(), MESH),
    }
    with failing as caught:
        assert_closed(ft.jit(step, mesh=MESH), (state,))
    assert str(caught.value).startswith(
        "the state is not closed: the next step would compile again\n"
    )
    assert f"  {message}" in str(caught.value)


def test_a_weak_type_is_not_closed() -> None:
    with failing as caught:
        assert_closed(lambda n: jnp.asarray(2.0), (jnp.ones((), jnp.float32),))
    assert "weak type False → True" in str(caught.value)


STATES: dict[str, Callable[[], Any]] = {
    "functions": lambda: eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
    "numbers": lambda: {"w": jnp.ones(3), "rate": 0.5, "name": "w"},
    "an array at the place of the loss": lambda: ("w", jnp.ones(3)),
    "nothing static": lambda: (jnp.ones(3), jnp.ones(2)),
}


@pytest.mark.parametrize("name", STATES)
def test_states_with_static_leaves_are_closed(name: str) -> None:
    def step(state: Any, x: Array) -> Any:
        return jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, state), x.sum()

    assert_closed(ft.jit(step, donate="state"), (STATES[name](), jnp.ones(3)))


def test_of_two_successors_the_first_is_the_state() -> None:
    def step(state: Any) -> Any:
        return state, jax.tree.map(lambda x: x.astype("bfloat16"), state)

    assert_closed(step, ({"w": jnp.ones(3), "n": jnp.ones(2)},))


def test_static_values_are_state_too() -> None:
    class Counter(eqx.Module):
        w: Array
        steps: int = eqx.field(static=True)

    with failing as caught:
        assert_closed(lambda c: Counter(c.w, c.steps + 1), (Counter(jnp.ones(3), 0),))
    assert "c.steps: static 0 → 1" in str(caught.value)
    with failing as caught:
        assert_closed(lambda s: {"w": s["w"], "n": s["n"] + 1}, ({"w": jnp.ones(3), "n": 0},))
    assert "s.n: static 0 → 1" in str(caught.value)


# Sharded and unsharded


# On Explicit axes optax' loss cannot take the logit of the label out of a sharded vocabulary.
CASES = [*((name, MESH) for name in LAYOUTS), ("FSDP", EXPLICIT)]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=["TP", "FSDP", "FSDP+TP", "FSDP, Explicit"])
def test_the_transformer_is_the_same(name: str, mesh: Any) -> None:
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 256)
    layouts = (LAYOUTS[name], batch_spec(name))
    with jax.default_matmul_precision("highest"):
        fun = ft.jit(
            lambda model, tokens: ft.value_and_grad(loss)(model, tokens),
            rules=LAYOUTS[name],
            mesh=mesh,
        )
        assert_same_as_unsharded(
            fun, (make(jax.random.key(0), layers=2), tokens), layouts, mesh, rtol=1e-4, atol=1e-5
        )


def test_what_differs_is_told() -> None:
    def wrong(model: Any, x: Any) -> Any:
        # On one device the sharding of the type is empty.
        sharded = bool(jax.typeof(x).sharding.mesh.shape)
        return {"a": x.sum(), "b": [x * (2 if sharded else 1)]}

    with failing as caught:
        assert_same_as_unsharded(wrong, ({}, jnp.arange(8.0)), (None, ft.P("data")), EXPLICIT)
    assert str(caught.value).startswith(
        "the sharded function returns a different result\n  b.0: differs by up to 7; its largest magnitude is 7\n"
        "the first operation whose values differ is `mul` at test_testing.py:"
    )


def test_nothing_to_compare() -> None:
    with failing as caught:
        assert_same_as_unsharded(jnp.sin, (jnp.ones(8),), ft.P(), MESH)
    assert "the layouts shard no argument over the mesh (data=2, model=4)" in str(caught.value)
    with raises("cannot be laid out", error=ft.ShardingError):
        assert_same_as_unsharded(lambda x: x, (jnp.ones(7),), ft.P("data"), MESH)
    with raises("pass the arguments as a tuple"):
        assert_same_as_unsharded(lambda x: x, {1: 2}, ft.P("data"), MESH)  # pyright: ignore[reportArgumentType]


def test_arguments_are_not_donated() -> None:
    x, key = jnp.ones(8), jax.random.key(3)
    step = ft.jit(lambda x, key: (x + 1, jax.random.split(key)), donate="x")
    assert_same_as_unsharded(step, (x, key), (ft.P("data"), None), MESH)
    assert not x.is_deleted() and np.asarray(x).sum() == 8
