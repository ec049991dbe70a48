"""A function in the place of a layout or a filter that raises: an error that says of which leaf, and
what such a function is."""

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
from tests.lib.checks import raises
from tests.lib.meshes import MESH

P = PartitionSpec
RULES = ft.AxisRules({"hidden": "model", "embed": None})
TX = optax.sgd(0.1)


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]


M = Layer(jnp.ones((4, 8)), jnp.ones(8))
PLACED = ft.shard(M, RULES, MESH)


def by_table(path: ft.Path, leaf: Any) -> Any:
    return {"up": P(None, "model")}[path[-1]]


def by_search(path: ft.Path, leaf: Any) -> Any:
    return next(spec for name, spec in {"bias": P()}.items() if name == path[-1])


def same(m: Layer) -> Layer:
    return m


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plan": lambda layout: ft.plan(M, layout, MESH),
    "plan, not checked": lambda layout: ft.plan(M, layout, MESH, check=False),
    "shard": lambda layout: ft.shard(M, layout, MESH),
    "init": lambda layout: ft.init(lambda: M, layout, MESH).plan(),
    "constrain": lambda layout: jax.jit(lambda m: ft.constrain(m, layout)).trace(PLACED),
    "a value of a filter": lambda layout: ft.plan(
        M, ft.StateSharding({"**": layout, ...: P()}), MESH
    ),
    "in a composition": lambda layout: ft.plan(M, RULES | layout, MESH),
    "on_host": lambda layout: ft.plan(M, ft.on_host(layout), MESH),
    "in_shardings": lambda layout: ft.jit(same, in_shardings=layout, mesh=MESH).trace(M),
    "out_shardings": lambda layout: ft.jit(same, out_shardings=layout, mesh=MESH).trace(M),
    "rules": lambda layout: ft.jit(same, rules=layout, mesh=MESH).trace(M),
    "in_specs": lambda layout: ft.shard_map(same, in_specs=layout, out_specs=P(), mesh=MESH).trace(
        M
    ),
    "plan_optimizer": lambda layout: ft.plan_optimizer(TX, M, layout, MESH),
    "TrainState": lambda layout: ft.TrainState.create(M, TX, layout=layout, mesh=MESH),
}
FUNCTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "gelu": (jax.nn.gelu, ("up   f32[4, 8]", "gelu raised TypeError: ")),
    "own": (by_table, ("bias   f32[8]", "by_table raised KeyError: 'bias'")),
    "next of nothing": (by_search, ("up   f32[4, 8]", "by_search raised StopIteration\n")),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("door", LAYOUTS)
def test_a_layout_function(door: str, function: str) -> None:
    layout, told = FUNCTIONS[function]
    what = "a layout function takes the path and the array of a leaf, and returns a `PartitionSpec`"
    with raises("failed", *told, what, error=ft.ShardingError) as error:
        LAYOUTS[door](layout)
    assert isinstance(error.value.__cause__, (TypeError, KeyError, StopIteration))


FILTERS: dict[str, Callable[[Any], Any]] = {
    "split": lambda chosen: ft.split(M, chosen, ...),
    "grad": lambda chosen: ft.grad(lambda m: m.up.sum(), wrt=chosen)(M),
    "StateSharding": lambda chosen: ft.plan(M, ft.StateSharding({chosen: P(), ...: P()}), MESH),
    "plan_optimizer": lambda chosen: ft.plan_optimizer(TX, M, RULES, MESH, wrt=chosen),
    "select": lambda chosen: ft.select(M).where(chosen),
}
BAD_FILTERS: dict[str, Any] = {
    "gelu": jax.nn.gelu,
    "no bool": lambda path, leaf: jnp.ones(3) > 0,
    "own": lambda path, leaf: {}[path],
    "next of nothing": lambda path, leaf: next(iter(())),
}


@pytest.mark.parametrize("function", BAD_FILTERS)
@pytest.mark.parametrize("door", FILTERS)
def test_a_filter_function(door: str, function: str) -> None:
    with raises("the filter function ", "failed", "raised ", "Try: a ", error=ft.RuleError):
        FILTERS[door](BAD_FILTERS[function])


class NotForThis(Exception):
    """An exception of the user's own."""


def test_an_exception_of_the_users_own_is_passed_on() -> None:
    def refusing(path: ft.Path, leaf: Any) -> Any:
        raise NotForThis(path)

    with pytest.raises(NotForThis, match="up"):
        ft.plan(M, refusing, MESH)
    with pytest.raises(NotForThis, match="up"):
        ft.split(M, refusing, ...)


def test_the_remedy() -> None:
    assert ft.plan(M, lambda path, leaf: P(), MESH)["up"].spec == P(None, None)


def test_a_function_is_asked_about_paths_in_the_model() -> None:
    asked: list[ft.Path] = []

    def is_up(path: ft.Path, leaf: Any) -> bool:
        asked.append(path)
        return path == ("up",)

    ts = jax.eval_shape(lambda: ft.TrainState.create(M, TX))
    ft.plan(ts, ft.StateSharding({is_up: P(), ...: RULES}), MESH)
    assert set(asked) == set(ft.plan(M, RULES, MESH)._by_path)
