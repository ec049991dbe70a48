"""At every door that takes a layout, a filter without an effect is an error, and so is `None`."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]


class Other(eqx.Module):
    key: Float[Array, "embed"]


def layer() -> Layer:
    return Layer(jnp.ones((4, 8)), jnp.ones(8))


X: Any = np.ones((8, 4), np.float32)
TX = optax.adam(0.1)
PLACED, PLACED_X = ft.shard(layer(), RULES, MESH), ft.shard(X, P("data"), MESH)


def apply(m: Layer, x: Float[Array, "batch embed"]) -> Float[Array, "batch hidden"]:
    return x @ m.up * m.bias.mean()


def same(m: Layer) -> Layer:
    return m


def traced_grad(layout: Any) -> Any:
    grad = ft.grad(lambda m, x: apply(m, x).sum(), layout=layout)
    return jax.jit(grad).trace(PLACED, PLACED_X)


def mapped(fun: Any, *args: Any, **options: Any) -> Any:
    return ft.shard_map(fun, mesh=MESH, **options).trace(*args)


DOORS: dict[str, Callable[[Any], Any]] = {
    "plan": lambda layout: ft.plan(layer(), layout, MESH),
    "shard": lambda layout: ft.shard(layer(), layout, MESH),
    "init": lambda layout: ft.init(layer, layout, MESH).plan(),
    "abstract": lambda layout: ft.abstract(layer, layout, MESH)(),
    "constrain": lambda layout: jax.jit(lambda m: ft.constrain(m, layout)).trace(PLACED),
    "grad": traced_grad,
    "plan_optimizer": lambda layout: ft.plan_optimizer(TX, layer(), layout, MESH),
    "TrainState": lambda layout: ft.TrainState.create(layer(), TX, layout=layout, mesh=MESH),
    "in_shardings": lambda layout: ft.jit(apply, in_shardings={"m": layout}, mesh=MESH).trace(
        layer(), X
    ),
    "out_shardings": lambda layout: ft.jit(same, out_shardings=layout, mesh=MESH).trace(layer()),
    "rules of jit": lambda layout: ft.jit(apply, mesh=MESH, rules=layout).trace(layer(), X),
    "rules of jit, placed": lambda layout: ft.jit(apply, rules=layout).trace(PLACED, PLACED_X),
    "rules of jit, no mesh": lambda layout: ft.jit(apply, rules=layout).trace(layer(), X),
    "rules of jit, called": lambda layout: ft.jit(apply, mesh=MESH, rules=layout)(layer(), X),
    "in_specs": lambda layout: mapped(
        apply, layer(), X, in_specs=(layout, P("data")), out_specs=P("data", "model")
    ),
    "out_specs": lambda layout: mapped(same, layer(), in_specs=RULES, out_specs=layout),
    "rules of shard_map": lambda layout: mapped(apply, layer(), X, rules=layout),
    "rules of shard_map, one entry": lambda layout: mapped(
        apply, layer(), X, rules=layout, in_specs={"x": P("data")}
    ),
}
# What each is refused for; None for one that is right.
LAYOUTS: dict[str, tuple[Any, tuple[str, ...] | None]] = {
    "right": ({"**.bias": P("model")}, None),
    "right class": ({Layer: RULES}, None),
    "right axis": ({ft.has_axis("embed"): RULES}, None),
    "typo": ({"**.bais": P()}, ("filter '**.bais'", "matches no leaf", "correct the filter")),
    "expression": ({re.compile("bais"): P()}, ("filter re.compile('bais')", "matches no leaf")),
    "callable": ({lambda path, leaf: leaf.ndim == 9: P()}, ("<lambda>", "matches no leaf")),
    "class": ({Other: P()}, ("filter Other", "matches no leaf")),
    "axis": ({ft.has_axis("embd"): P()}, ("filter has_axis('embd')", "matches no leaf")),
    "inner": ({Layer: ft.StateSharding({"**.bais": P(), ...: RULES})}, ("filter '**.bais'",)),
    "composed": ({"**.bais": P()}, ("filter '**.bais'", "matches no leaf")),
    "hidden": (
        {"**": RULES, "**.bias": P()},
        ("filter '**.bias'", "earlier filters match all of its leaves", "write it before them"),
    ),
    "None": (
        {"**.bias": None},
        ("bias   f32[", "no layout was given for this array (`None`)", "write `P()`"),
    ),
}
# Where `None` has another meaning: it leaves the array as it is, to the compiler, or to the mesh
# that there is not; and an array that was placed stays where it is.
NONE_MEANS = ("in_shardings", "out_shardings", "rules of jit, placed", "rules of jit, no mesh")


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("door", DOORS)
def test_a_filter_without_effect(door: str, case: str) -> None:
    rules, refused = LAYOUTS[case]
    layout: Any = ft.StateSharding({**rules, ...: RULES})
    if case == "composed":
        layout = layout | ft.FSDP("data")
    if refused is None or (case == "None" and door in NONE_MEANS):
        DOORS[door](layout)
        return
    with raises(*refused, error=ft.ShardingError):
        DOORS[door](layout)


REMEDIES = {
    "corrected": ft.StateSharding({"**.bias": P("model"), ...: RULES}),
    "removed": ft.StateSharding({...: RULES}),
    "ignored": ft.StateSharding({"**.bais": P("model"), ...: RULES}, unused="ignore"),
    "before them": ft.StateSharding({"**.bias": P("model"), "**": RULES, ...: RULES}),
    "P() for None": ft.StateSharding({"**.bias": P(), ...: RULES}),
}


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("door", ["rules of jit", "rules of shard_map", "plan"])
def test_the_remedies_work(door: str, remedy: str) -> None:
    DOORS[door](REMEDIES[remedy])


def test_what_may_be_a_warning() -> None:
    layout = ft.StateSharding({"**.bais": P(), ...: RULES}, unused="warn")
    f = ft.jit(apply, mesh=MESH, rules=layout)
    with pytest.warns(ft.FunctreeWarning, match=r"filter '\*\*\.bais' matches no leaf"):
        f.trace(PLACED, PLACED_X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f.trace(PLACED, PLACED_X)


# Over all arguments together, and only where there is a model


def two(m: Layer, other: Other) -> Any:
    return m.bias.sum() + other.key.sum()


ACROSS = {
    "one for each": ft.StateSharding({Layer: RULES, Other: P(), ...: RULES}),
    "by path": ft.StateSharding({"**.bias": P("model"), "**.key": P(), ...: RULES}),
    "for a training state": ft.StateSharding(
        {"opt_state.**": P(), "step": P(), "state.**": P(), "model.up": RULES, ...: RULES}
    ),
}


@pytest.mark.parametrize("case", ACROSS)
def test_over_all_arguments_together(case: str) -> None:
    other = Other(jnp.ones(4))
    ft.jit(two, mesh=MESH, rules=ACROSS[case]).trace(layer(), other)
    ft.shard_map(two, mesh=MESH, rules=ACROSS[case], out_specs=P(), check_vma=False).trace(
        layer(), other
    )


@pytest.mark.parametrize("filters", ["opt_state.*.mv.**", "**.bais", "model.upp"])
def test_with_a_training_state_its_filters_count(filters: str) -> None:
    layout = ft.StateSharding({filters: P(), ...: RULES})
    ts = jax.eval_shape(lambda: ft.TrainState.create(layer(), TX))
    with raises(f"filter '{filters}'", "matches no leaf", error=ft.ShardingError):
        ft.jit(lambda ts: ts.step, mesh=MESH, rules=layout).trace(ts)


def test_the_name_of_a_field_below_is_no_excuse() -> None:
    layout = ft.StateSharding({"**.key.weight": P(), ...: RULES})
    with raises("filter '**.key.weight'", "matches no leaf", error=ft.ShardingError):
        ft.jit(apply, mesh=MESH, rules=layout).trace(layer(), X)


def test_a_call_without_a_module_says_nothing() -> None:
    layout = ft.StateSharding({"**.bias": P(), Layer: P(), ...: RULES})

    def double(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return x + x

    ft.jit(double, mesh=MESH, rules=layout).trace(X)
    ft.shard_map(double, mesh=MESH, rules=layout).trace(X)


def test_ambient_rules_check_nothing_by_themselves() -> None:
    with ft.axis_rules(ft.StateSharding({"**.bais": P(), ...: RULES})):
        ft.jit(apply, mesh=MESH).trace(layer(), X)


# The layout of what an optimizer's state has beside the parameters' own

OTHERWISE: dict[str, tuple[Any, str]] = {
    "typo": ({"**.mv": P(), ...: P()}, "filter '**.mv'"),
    "hidden": ({"**": P(), "0.mu": P()}, "earlier filters match all of its leaves"),
    "class": ({Other: P(), ...: P()}, "filter Other"),
    "None": ({"**": None}, "no layout was given for this array (`None`)"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_otherwise(case: str) -> None:
    rules, why = OTHERWISE[case]
    with raises(why, error=ft.ShardingError):
        ft.plan_optimizer(
            optax.flatten(TX), layer(), RULES, MESH, otherwise=ft.StateSharding(rules)
        )
