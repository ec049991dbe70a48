"""Custom derivative rules run with the mesh and the rules of the function that they are in, whoever
differentiates."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

import functree as ft
from tests.lib.covering import selected_cells
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
RULES = ft.AxisRules({"rows": "data", "cols": "model"})
OTHERS = ft.AxisRules({"rows": None, "cols": None})  # of the caller, who differentiates
X = np.arange(32, dtype=np.float32).reshape(8, 4)
SEEN: list[tuple[str, PartitionSpec]] = []


def seen(rule: str, x: Array) -> Array:
    """The array, constrained in a rule by the rules that are ambient there."""
    SEEN.append((rule, ft.spec("rows cols")))
    return ft.constrain(x, "rows cols")


# Made anew for each test, since JAX remembers what it has traced.


def backward() -> Callable[[Array], Array]:
    @jax.custom_vjp
    def double(x: Array) -> Array:
        return x * 2

    double.defvjp(
        lambda x: (seen("fwd", x * 2), None), lambda _, cotangent: (seen("bwd", cotangent * 2),)
    )
    return double


def forward() -> Callable[[Array], Array]:
    @jax.custom_jvp
    def double(x: Array) -> Array:
        return x * 2

    @double.defjvp
    def _tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return seen("jvp", double(*primals)), seen("jvp", tangents[0] * 2)

    return double


FUNCTIONS: dict[str, Callable[[], Callable[[Array], Array]]] = {
    "custom_vjp": backward,
    "custom_jvp": forward,
}

# Where the function with the rule stands in the function that `ft.jit` has.
PLACES: dict[str, Callable[[Callable[[Array], Array], Array], Array]] = {
    "the body": lambda g, x: g(x),
    "scan": lambda g, x: jax.lax.scan(lambda x, _: (g(x), None), x, None, length=1)[0],
    "while": lambda g, x: jax.lax.fori_loop(0, 1, lambda _, x: g(x), x),
    "cond": lambda g, x: jax.lax.cond(jnp.bool_(True), g, lambda x: x, x),
    "remat": lambda g, x: jax.checkpoint(g)(x),
    "ft.jit": lambda g, x: ft.jit(g)(x),
    "twice": lambda g, x: g(x) / 2 + jax.jit(g)(x) / 2,
}

# How the caller differentiates: a function and an array ─► the gradient of its sum.
DIFFERENTIATE: dict[str, Callable[[Callable[[Array], Array], Array], Any]] = {
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "grad in ft.jit": lambda f, x: ft.jit(jax.grad(lambda x: f(x).sum()))(x),
    "vjp": lambda f, x: jax.vjp(f, x)[1](jnp.ones_like(x))[0],
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x[None])[0],
    "jvp": lambda f, x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "jacfwd": lambda f, x: jax.jacfwd(lambda t: f(x + t * jnp.ones_like(x)))(0.0),
}
FORWARD = {"jvp", "jacfwd"}
CELLS = [
    (function, place, how, mesh)
    for function, place, how, mesh in itertools.product(
        FUNCTIONS, PLACES, DIFFERENTIATE, ("Auto", "Explicit")
    )
    # JAX differentiates no `custom_vjp` forward, and no loop of unknown length backward.
    if not (function == "custom_vjp" and how in FORWARD)
    and not (place == "while" and how not in FORWARD)
]


@pytest.mark.parametrize(("function", "place", "how", "axes"), selected_cells(CELLS))
def test_rules_hold_where_the_caller_has_others(function: str, place: str, how: str, axes: str):
    mesh, double = {"Auto": MESH, "Explicit": EXPLICIT}[axes], FUNCTIONS[function]()

    def inner(x: Float[Array, "rows cols"]) -> Array:
        return PLACES[place](double, x)

    f = ft.jit(inner, rules=RULES, mesh=mesh)
    SEEN.clear()
    # On Explicit axes the types of the function and of its rule have to agree, and JAX needs an
    # ambient mesh to compute with the result.
    x = jnp.asarray(X) if axes == "Auto" else ft.shard(X, P("data", "model"), mesh)
    with ft.axis_rules(OTHERS), jax.set_mesh(mesh) if axes == "Explicit" else nullcontext():
        found = DIFFERENTIATE[how](f, x)
    assert np.array_equal(found, np.full_like(X, 2))
    assert {rule for rule, _ in SEEN} == ({"fwd", "bwd"} if function == "custom_vjp" else {"jvp"})
    assert {spec for _, spec in SEEN} == {P("data", "model")}
    # And the constraint in the rule has devices.
    if place == "the body" and how in ("grad", "vjp", "jvp"):
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)


def test_rules_hold_after_a_call_with_an_array_of_numpy():
    """Its type is that of a traced array, and the program of the eager call is another one."""
    for wrap in (
        lambda f: ft.jit(f, rules=RULES, mesh=MESH),
        lambda f: ft.shard_map(f, rules=RULES, mesh=MESH, axis_names={"data"}),
    ):
        f = wrap(_annotated(backward()))
        f(X)
        SEEN.clear()
        with ft.axis_rules(OTHERS):
            found = jax.grad(lambda x, f=f: f(x).sum())(X)
        assert np.array_equal(found, np.full_like(X, 2))
        # On the axis `data`, which is Manual in the `shard_map`, arrays are local.
        assert SEEN and {spec[1] for _, spec in SEEN} == {"model"}


def _annotated(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def inner(x: Float[Array, "rows cols"]) -> Float[Array, "rows cols"]:
        return f(x)

    return inner


def test_the_rule_of_a_rule():
    """A second derivative runs the rule of a function that a rule calls."""
    double = forward()
    f = ft.jit(lambda x: (double(x) ** 2).sum(), rules=RULES, mesh=MESH, in_shardings=P("data"))
    SEEN.clear()
    x = jnp.asarray(X)
    tangent = jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1]
    assert np.array_equal(tangent, np.full_like(X, 8))
    assert {spec for _, spec in SEEN} == {P("data", "model")}
