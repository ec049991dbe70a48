"""`typed`: what is checked, in whose words, and that it costs a compiled program nothing."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.transforms.typed import typed
from tests.lib import checks
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
raises = partial(checks.raises, error=ft.AxesError)
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
X, UP = jnp.ones((4, 6)), jnp.ones((6, 8))


def up(
    x: Float[Array, "batch embed"], w: Float[Array, "embed hidden"], *, times: int = 1
) -> Float[Array, "batch hidden"]:
    """Doc."""
    return (x @ w) * times


def test_it_is_the_function():
    f = typed(up)
    np.testing.assert_array_equal(f(X, w=UP, times=2), up(X, UP, times=2))
    assert (f.__name__, f.__doc__, inspect.signature(f)) == ("up", "Doc.", inspect.signature(up))
    assert typed()(up)(X, UP).shape == (4, 8)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_mismatch_is_told_in_our_words(wrap: Callable[[Any], Any]):
    for _ in range(2):  # also of a trace that has failed before
        with pytest.raises(
            ft.AxesError,
            match=r'(?s)^up: 1 array does not match its annotation.*w   f32\[5, 8\].*"embed" has size 5 here, and 6 in `x`',
        ):
            wrap(typed(up))(X, jnp.ones((5, 8)))


def test_given_axes_are_told_by_their_names():
    @ft.typed
    def f(y: Float[Array, "batch"], x: Annotated[Array, ft.Axes("batch", None, "embed")]) -> None:
        pass

    with raises('x   f32[2, 1, 5]   "batch _ embed"', '"batch" has size 2 here, and 3 in `y`'):
        f(jnp.ones(3), jnp.ones((2, 1, 5)))


def test_sizes_with_leading_zeros():
    @ft.typed
    def f(x: Float[Array, "08 n=007"]) -> None:
        pass

    f(jnp.ones((8, 7)))
    with raises('"n=007" requires size 7, but the size is 6'):
        f(jnp.ones((8, 6)))


def test_the_result_is_in_the_same_scope():
    @typed
    def f(x: Float[Array, "batch embed"]) -> tuple[Float[Array, "batch"], str]:
        return x[0], "text"

    with raises("f: ", "result.0   f32[6]", '"batch" has size 6 here, and 4 in `x`'):
        f(X)


def test_beartype_checks_the_rest():
    with raises("up: ", "times", "'two'", "annotated type `int`", error=TypeError):
        typed(up)(X, UP, times="two")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"missing . required positional argument"):
        typed(up)()  # type: ignore[call-arg]
    with raises("result_of: ", "result", "'three'", error=TypeError):
        typed(result_of)("three")


def result_of(x: Any) -> int:
    return x


def test_calls_inside_calls_have_scopes_of_their_own():
    @typed
    def inner(x: Float[Array, "embed batch"]) -> Float[Array, "batch"]:
        return x[0]

    @typed
    def outer(x: Float[Array, "batch embed"]) -> Float[Array, "batch"]:
        return inner(x.T)

    assert outer(X).shape == (4,)
    with pytest.raises(ft.AxesError):
        typed(up)(X, X)
    assert outer(X).shape == (4,)


def test_nothing_is_added_to_the_program():
    rules, args = ft.axis_rules(RULES), (X, UP)
    with jax.set_mesh(EXPLICIT), rules:
        placed = jax.device_put(args[0], P("data", None)), jax.device_put(args[1], P(None, "model"))
        plain, checked = (str(jax.make_jaxpr(f)(*placed)) for f in (up, typed(up)))
    assert plain == checked


# Under Explicit axes types are compared with the rules


def placed(x: Array, spec: P, mesh: Any = EXPLICIT) -> Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def test_types_that_are_not_as_the_rules_say():
    def whole(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return jax.sharding.reshard(x, P())

    told = (
        "up: the ambient rules require other specs of 1 array",
        "w   f32[6, 8]",
        "has the spec P(None, None), but",
    )
    asked = "the rules require P(None, 'model')", "constrain=True"
    with ft.axis_rules(RULES), jax.set_mesh(EXPLICIT):
        with raises(*told, *asked, error=ft.ShardingError):
            jax.jit(typed(up))(placed(X, P("data")), placed(UP, P()))
        with raises("result   f32[4, 6]", "require P('data', None)", error=ft.ShardingError):
            jax.jit(typed(whole))(placed(X, P("data")))


def test_without_rules_or_under_auto_axes_types_are_not_asked():
    with jax.set_mesh(EXPLICIT):
        jax.jit(typed(up))(placed(X, P("data")), placed(UP, P()))
    with ft.axis_rules(RULES):
        typed(up)(X, UP)
        with jax.set_mesh(MESH):
            jax.jit(typed(up))(placed(X, P("data"), MESH), placed(UP, P(), MESH))


# constrain=True


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_constrain(mesh: Any):
    seen = []

    @typed(constrain=True)
    def f(
        x: Float[Array, "batch embed"],
        pair: tuple[Float[Array, "embed hidden"], str],
        y: Annotated[Array, P("model")],
    ) -> Float[Array, "batch hidden"]:
        seen.append(jax.typeof(x).sharding.spec)
        return x @ pair[0]

    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        out = jax.jit(lambda x, w, y: f(x, (w, "text"), y))(X, UP, jnp.ones(4))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    np.testing.assert_array_equal(out, X @ UP)
    assert seen == [P("data", None) if mesh is EXPLICIT else P(None, None)]


def test_constrain_without_a_mesh_does_nothing():
    assert typed(up, constrain=True)(X, UP).shape == (4, 8)


def test_defaults_are_not_checked():
    @ft.typed
    def f(
        x: Float[Array, "n"], scale: float = 1, mask: Float[Array, "n"] = None, *, offset: str = 0
    ) -> Array:
        return x * scale

    assert np.array_equal(f(jnp.ones(2)), jnp.ones(2))
    assert np.array_equal(f(jnp.ones(2), 2.0, mask=jnp.ones(2)), [2.0, 2.0])
    with pytest.raises(TypeError):
        f(jnp.ones(2), "text")
    with raises("mask", '"n" has size 3 here, and 2 in `x`', error=ft.AxesError):
        f(jnp.ones(2), mask=jnp.ones(3))


class Block(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]

    @ft.typed
    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch hidden"]:
        return (x @ self.up) * self.bias[0]

    @ft.typed
    def wrong(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        return x @ self.up


def test_the_fields_of_self_have_the_names_of_its_methods():
    block = Block(jnp.ones((6, 8)), jnp.ones(8))
    assert block(jnp.ones((2, 3, 6))).shape == (2, 3, 8)
    with raises('x   f32[2, 5]   "*batch embed"', '"embed" has size 5 here, and 6 in `self.up`'):
        block(jnp.ones((2, 5)))
    with raises('result   f32[2, 8]   "*batch embed"', '"embed" has size 8'):
        block.wrong(jnp.ones((2, 6)))


def test_a_name_with_several_sizes_in_self_is_bound_by_the_arguments():
    block = Block(jnp.ones((6, 8)), jnp.ones(1))

    @ft.typed
    def apply(self: Block, x: Float[Array, "hidden"], y: Float[Array, "hidden"]) -> Any:
        return x + y

    assert apply(block, jnp.ones(3), jnp.ones(3)).shape == (3,)
    with raises('y   f32[4]   "hidden"', '"hidden" has size 4 here, and 3 in `x`'):
        apply(block, jnp.ones(3), jnp.ones(4))
