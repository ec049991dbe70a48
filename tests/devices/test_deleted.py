"""Arrays that are deleted ─► an error with their paths."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

import functree as ft
from functree.devices.placement import is_deleted, refuse_deleted
from tests.lib.checks import raises
from tests.lib.meshes import MESH
from tests.lib.trees import x


def gone() -> jax.Array:
    array = jnp.ones((2, 3))
    array.delete()
    return array


def test_what_is_deleted() -> None:
    assert is_deleted(gone())
    for other in (jnp.ones(2), np.ones(2), x(2), 3, None):
        assert not is_deleted(other)
    traced: list[bool] = []
    jax.jit(lambda array: traced.append(is_deleted(array)))(jnp.ones(2))
    assert traced == [False]


ALIVE, GONE = jnp.ones((2, 3)), gone()


@pytest.mark.parametrize(
    ("given", "entries"),
    [
        ({"ts.w": GONE, "ts.b": GONE, "m.v": GONE, "m.u": ALIVE}, ["ts", "m.v"]),
        # One array has a path of its own, which says more.
        ({"ts.w": GONE, "x": ALIVE}, ["ts.w"]),
        ({"ts.w": GONE, "ts.b": x(2), "ts.c": GONE}, ["ts.w", "ts.c"]),
        ({"a": GONE, "b": GONE}, ["a", "b"]),
        ({"0.w": GONE, "0.b": GONE, "1": ALIVE}, ["0"]),
    ],
)
def test_an_argument_of_which_all_are_deleted_is_one_entry(
    given: dict[str, Any], entries: list[str]
) -> None:
    paths = [ft.Path.parse(path) for path in given]
    error = refuse_deleted("step", paths, list(given.values()))
    assert [str(problem.path) for problem in error.problems] == entries
    number = "1 argument is" if len(entries) == 1 else "2 arguments are"
    assert str(error).startswith(f"step: {number} deleted\n\n")


def test_the_text() -> None:
    paths = [ft.Path(("ts", "w")), ft.Path(("ts", "b")), ft.Path(("m", "v")), ft.Path(("m", "u"))]
    assert str(refuse_deleted("step", paths, [GONE, GONE, GONE, ALIVE])) == (
        "step: 2 arguments are deleted\n\n"
        "  ts   2 arrays\n      are all deleted\n\n"
        "  m.v   f32[2, 3]\n      is deleted\n\n"
        "Try: if an array was donated, use the result of the call that donated it, or donate a copy (`ft.copy`) instead"
    )


def test_the_record_of_a_whole_argument() -> None:
    paths = [ft.Path(("ts", i)) for i in range(122)]
    (problem,) = refuse_deleted("step", paths, [GONE] * 122).problems
    assert problem[:4] == (ft.Path(("ts",)), None, "122 arrays", "are all deleted")


# The doors

RULES = ft.AxisRules({"embed": None, "hidden": "model"})


class Dense(eqx.Module):
    weight: Float[jax.Array, "embed hidden"]
    bias: Float[jax.Array, "hidden"]


def dense(placed: bool = True) -> Dense:
    layer = Dense(jnp.ones((2, 4)), jnp.ones(4))
    return ft.shard(layer, RULES, MESH) if placed else layer


def dead(placed: bool) -> Dense:
    layer = dense(placed)
    layer.bias.delete()
    return layer


def total(layer: Dense) -> jax.Array:
    return layer.weight.sum() + layer.bias.sum()


def same(m: Dense) -> Dense:
    return m


def applied(m: Any, x: Any) -> jax.Array:
    return sum(leaf.sum() for leaf in jax.tree.leaves((m, x)))


def average(ts: ft.TrainState) -> Any:
    return ts.opt_state.average


BATCH = ft.shard(jnp.ones(4), P(), MESH)
TX = optax.sgd(0.1)
EMA = ft.with_ema(TX, 0.9)
STATE = ft.TrainState.create(dense(), EMA)

EXPORTED = ft.export(ft.jit(lambda x: x + 1), jnp.ones(4))


# What reads the values of a layer: the name in its error, the path of the bias there, and the call.
DOORS: dict[str, tuple[str, str, Callable[[Dense], Any]]] = {
    "shard": ("shard", "bias", lambda m: ft.shard(m, RULES, MESH)),
    "shard an array": ("shard", "(the root)", lambda m: ft.shard(m.bias, P("model"), MESH)),
    "shard a batch": ("shard", "b", lambda m: ft.shard({"b": m.bias}, RULES, MESH, axes="hidden")),
    "constrain": ("constrain", "bias", lambda m: ft.constrain(m, ft.StateSharding({...: P()}))),
    "copy": ("copy", "bias", ft.copy),
    "grad": ("grad", "layer.bias", ft.grad(total)),
    "another argument of grad": ("grad", "x.bias", lambda m: ft.grad(applied)(jnp.ones(()), m)),
    "accumulate": ("applied", "m.bias", lambda m: ft.accumulate(applied, 2)(m, BATCH)),
    "jit": ("total", "layer.bias", ft.jit(total)),
    "jit, lowered": ("total", "layer.bias", lambda m: ft.jit(total).lower(m)),
    "init": ("same", "m.bias", lambda m: ft.init(same, RULES, MESH)(m)),
    "init_optimizer": ("init", "params.bias", lambda m: ft.init_optimizer(TX, m, RULES, MESH)),
    "shard_map": ("same", "m.bias", lambda m: ft.shard_map(same, mesh=MESH, rules=RULES)(m)),
    "TrainState": ("TrainState.create", "model.bias", lambda m: ft.TrainState.create(m, TX)),
    "apply_gradients": ("apply_gradients", "grads.bias", lambda m: ft.apply_gradients(STATE, m)),
    "an optimizer's state": (
        "apply_gradients",
        "ts.opt_state.average.bias",
        lambda m: ft.apply_gradients(eqx.tree_at(average, STATE, m), dense()),
    ),
    "with_ema": ("with_ema", "bias", EMA.init),
    "export": ("total", "layer.bias", lambda m: ft.export(ft.jit(total), m)),
    "an exported function": ("<lambda>", "x", lambda m: EXPORTED.call(m.bias)),
    "averaged": (
        "averaged",
        "bias",
        lambda m: ft.averaged(eqx.tree_at(average, STATE, m)),
    ),
    "assert_same_as_unsharded": (
        "assert_same_as_unsharded",
        "0.bias",
        lambda m: ft.testing.assert_same_as_unsharded(total, (m,), (RULES,), MESH),
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_reads_values_refuses(door: str):
    name, path, call = DOORS[door]
    with raises(f"{name}: 1 argument is deleted\n\n  {path}", "f32[4]\n      is deleted", "Try:"):
        call(dead(placed=True))


@pytest.mark.parametrize("door", ["shard", "jit", "with_ema"])
def test_on_one_device(door: str):
    name, path, call = DOORS[door]
    with raises(f"{name}: 1 argument is deleted\n\n  {path}"):
        call(dead(placed=False))


def test_an_argument_of_a_later_call_on_one_device():
    """It is not looked for before the call, which would take time each time."""
    f, layer = ft.jit(total), dense(placed=False)
    f(layer)
    layer.bias.delete()
    with raises("total: 1 argument is deleted\n\n  layer.bias   f32[4]\n      is deleted"):
        f(layer)


# What looks at the tree only.
TAKEN: dict[str, Callable[[Dense], Any]] = {
    "plan": lambda m: ft.plan(m, RULES, MESH),
    "plan_optimizer": lambda m: ft.plan_optimizer(TX, m, RULES, MESH),
    "tree_axes": ft.tree_axes,
    "abstract": lambda m: ft.abstract(same, RULES, MESH)(m),
    "pack": ft.pack,
    "select": lambda m: ft.select(m).at(lambda m: m.bias).get(),
}


@pytest.mark.parametrize("door", TAKEN)
def test_what_reads_no_values_takes_it(door: str):
    TAKEN[door](dead(placed=True))


def test_the_remedies():
    """What the call returned, and a copy that was donated instead."""
    step = ft.jit(lambda m: jax.tree.map(lambda x: 2 * x, m), donate="m")
    first = dense()
    second = step(first)
    with raises("shard: 2 arguments are deleted"):
        ft.shard(first, RULES, MESH)
    assert ft.shard(second, RULES, MESH) is not None
    step(ft.copy(second))
    assert float(total(second)) == 24.0
