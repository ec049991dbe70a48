"""`ft.jit` inside JAX's transforms, around them and inside itself: the values and shardings of
plain JAX."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH, assert_lies
from tests.lib.trees import MLP

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def mlp(key: int = 0) -> MLP:
    up, down = jax.random.normal(jax.random.key(key), (2, 8, 16))
    return MLP(up, down.T, jnp.tanh)


MODEL = ft.shard(mlp(), RULES, MESH)
Y = np.arange(32, dtype=np.float32).reshape(4, 8)
X = jax.device_put(jax.random.normal(jax.random.key(1), (4, 8)), NamedSharding(MESH, P("data")))
# With modules


def mean_square(model: Any, x: Array) -> Array:
    return jnp.mean(model(x) ** 2)


MODULES: dict[str, Callable[[], Any]] = {
    "ft.grad of it": lambda: ft.grad(ft.jit(mean_square))(MODEL, X),
    "eqx.filter_grad of it": lambda: eqx.filter_grad(ft.jit(mean_square))(MODEL, X),
    "eqx.filter_jit around it": lambda: eqx.filter_jit(ft.grad(ft.jit(mean_square)))(MODEL, X),
    "packed": lambda: ft.jit(ft.grad(ft.jit(mean_square)))(ft.pack(MODEL), X),
    "a method that is jitted": lambda: ft.jit(
        ft.grad(lambda m, x: jnp.mean(ft.jit(m.__call__)(x) ** 2))
    )(MODEL, X),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str):
    found = MODULES[name]()
    arrays = {"up": MODEL.up, "down": MODEL.down}
    expected = jax.jit(jax.grad(lambda arrays: mean_square(MLP(**arrays, activation=jnp.tanh), X)))(
        arrays
    )
    for part, wanted in expected.items():
        np.testing.assert_allclose(getattr(found, part), wanted, rtol=1e-5, atol=1e-6)
        if "of it" not in name and "method" not in name:
            assert getattr(found, part).sharding.is_equivalent_to(wanted.sharding, 2)


# What stands for `jit` closes over a tracer of what is around it.
CLOSURES: dict[str, Callable[[Any], Any]] = {
    "jit": lambda jit: jax.jit(lambda w, x: jit(lambda x: x * w)(x))(Y, Y),
    "itself": lambda jit: jit(lambda w, x: jit(lambda x: x * w)(x))(Y, Y),
    "grad": lambda jit: jax.grad(lambda w: jit(lambda x: jnp.sum(jnp.sin(w) * x))(Y))(Y),
    "vmap": lambda jit: jax.vmap(lambda w: jit(lambda x: x * w)(Y[0]))(Y),
    "scan": lambda jit: jax.lax.scan(
        lambda carry, w: (carry, jit(lambda x: x * w + carry)(Y[0])), Y[0], Y
    ),
}


@pytest.mark.parametrize("around", CLOSURES)
def test_closing_over_a_tracer(around: str):
    found, expected = CLOSURES[around](ft.jit), CLOSURES[around](jax.jit)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_shard_map_in_it_takes_its_mesh():
    f = ft.jit(
        lambda x: ft.shard_map(
            lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P()
        )(x),
        mesh=MESH,
    )
    np.testing.assert_allclose(f(np.ones((4, 8), np.float32)), np.full((2, 8), 2.0))


def test_inside_shard_map_the_mesh_is_the_manual_one():
    def summed(x: Array) -> Array:
        assert set(jax.sharding.get_abstract_mesh().manual_axes) == {"data", "model"}
        return jax.lax.psum(x, "data")

    def body(x: Array) -> Array:
        return ft.jit(summed)(x) + ft.jit(summed, mesh=MESH)(x)

    out = ft.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P())(X)
    np.testing.assert_allclose(out, 2 * (X[:2] + X[2:]), rtol=1e-6)


def test_calls_inside_traces_are_no_compilations_of_their_own():
    f = ft.jit(lambda x: x * 2)
    jax.jit(f)(X), jax.grad(lambda x: f(x).sum())(X), jax.vmap(f)(X)
    assert f.compilations == []
    f(X)
    assert len(f.compilations) == 1
    jax.jit(lambda x: f(x) + 1)(X)
    f(X)
    assert len(f.compilations) == 1


def test_a_failure_leaves_nothing_behind():
    def body(x: Array, fail: bool) -> Array:
        if fail:
            raise KeyError("mine")
        return x * 2

    f = ft.jit(body, mesh=MESH, rules=RULES)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            f(X, True)
        np.testing.assert_allclose(f(X, False), X * 2)
    assert jax.sharding.get_mesh().empty and len(f.compilations) == 1
    with pytest.raises(ft.ShardingError, match="there are no ambient `AxisRules`"):
        ft.spec("batch")


FIRST_INSIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "in_shardings": {"in_shardings": P("data", "model")},
    "out_shardings": {"out_shardings": P("data", "model")},
    "rules": {"rules": RULES},
    "donated": {"donate": 0},
}


@pytest.mark.parametrize("options", FIRST_INSIDE)
@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_silent_failure_41_a_function_first_called_inside_a_trace(options: str, mesh: Any):
    f = ft.jit(lambda x: x * 2, **FIRST_INSIDE[options])
    x = jax.device_put(Y, NamedSharding(mesh, P("data", "model")))
    with jax.set_mesh(mesh):
        inside = jax.jit(lambda x: f(x))(x)
    outside = f(x)
    assert np.array_equal(inside, 2 * Y) and np.array_equal(outside, 2 * Y)
    assert outside.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    if options in ("nothing", "rules", "donated"):
        assert f(jnp.asarray(Y)).sharding.num_devices == 1


AROUND = {
    "eager": lambda f: f,
    "ft.jit": ft.jit,
    "ft.jit, mesh=": ft.jit(mesh=EXPLICIT),
}


@pytest.mark.parametrize("ambient", [False, True], ids=["", "set_mesh"])
@pytest.mark.parametrize("options", [name for name in FIRST_INSIDE if name != "donated"])
@pytest.mark.parametrize("around", AROUND)
def test_auto_axes_of_it(options: str, around: str, ambient: bool):
    sharding = NamedSharding(EXPLICIT, P("data", "model"))
    x = jax.device_put(Y, sharding)
    f = ft.jit(lambda x: x * 2, **FIRST_INSIDE[options])
    with jax.set_mesh(EXPLICIT) if ambient else nullcontext():
        found = AROUND[around](lambda x: jax.sharding.auto_axes(f, out_sharding=sharding)(x))(x)
        assert np.array_equal(found, 2 * Y) and found.sharding == sharding
        if ambient and options != "in_shardings":  # NumPy's array is replicated by auto_axes
            found = AROUND[around](lambda: jax.sharding.auto_axes(f, out_sharding=sharding)(Y))()
            assert np.array_equal(found, 2 * Y) and found.sharding == sharding
        other = ft.jit(lambda x: x * 2, mesh=EXPLICIT)
        here = r"x   f32\[4, 8\]\n +is on the mesh \(data=2, model=4\) with Auto axes"
        with pytest.raises(ft.ShardingError, match=here):
            AROUND[around](lambda x: jax.sharding.auto_axes(other, out_sharding=sharding)(x))(x)


def test_auto_axes_in_a_body_do_not_lose_the_devices():
    def body(x: Any) -> Any:
        return ft.constrain(x * 2, P("data", "model"))

    spec = P("data", "model")
    f = ft.jit(lambda x: jax.sharding.auto_axes(body, out_sharding=spec)(x), mesh=EXPLICIT)
    assert f(Y).sharding == NamedSharding(EXPLICIT, spec)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "in jit"])
@pytest.mark.parametrize("options", [{}, {"spmd_axis_name": "data"}], ids=["sharded", "spmd"])
def test_vmap_over_a_sharded_dimension_around_shard_map(mesh: Any, around: Any, options: Any):
    x = jax.device_put(Y, NamedSharding(mesh, P("data", "model")))
    specs = {"in_specs": P("model"), "out_specs": P("model"), "mesh": mesh}
    found = around(jax.vmap(ft.shard_map(lambda x: x * 2, **specs), **options))(x)
    plain = around(jax.vmap(jax.jit(jax.shard_map(lambda x: x * 2, **specs)), **options))(x)
    assert np.array_equal(found, plain) and found.sharding.is_equivalent_to(plain.sharding, 2)


def test_an_inner_mesh_over_the_same_devices():
    """One of other sizes holds; in another order, or over others, it is an error: JAX compiles one
    program."""

    def called(inner: Any) -> Any:
        f = ft.jit(lambda x: ft.constrain(x * 2, P("data", "model")), mesh=inner)
        return ft.jit(lambda x: f(x) + 0, mesh=MESH)(jnp.ones((8, 8)))

    other_sizes = ft.make_mesh(data=4, model=2)
    assert_lies(called(other_sizes), "data", "model", mesh=other_sizes)
    order = Mesh(MESH.devices[::-1, ::-1], MESH.axis_names, axis_types=MESH.axis_types)
    half = ft.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    for inner in (order, half):
        with pytest.raises(ValueError, match=r"incompatible devices|one number of devices"):
            called(inner)


def test_a_derivative_rule_that_constrains_has_the_rules_of_the_caller():
    @jax.custom_vjp
    def double(x: Array) -> Array:
        return x * 2

    double.defvjp(lambda x: (x * 2, x), lambda x, d: (ft.constrain(2 * d + 0 * x, "rows cols"),))
    rules, x = (
        ft.AxisRules({"rows": "data", "cols": "model"}),
        ft.shard(jnp.ones((8, 4)), P(), MESH),
    )
    f = ft.jit(lambda x: double(x).sum(), rules=rules, mesh=MESH)
    with raises("no rules lay out `rows cols`", "enter `with ft.axis_rules(rules):`"):
        jax.grad(f)(x)
    with jax.set_mesh(MESH), ft.axis_rules(rules):
        assert_lies(jax.grad(f)(x), "data", "model")
    assert_lies(ft.jit(jax.grad(f), rules=rules, mesh=MESH)(x), "data", "model")


def test_a_function_whose_mesh_would_be_lost():
    x = jax.device_put(Y, NamedSharding(MESH, P("data", "model")))
    f = ft.jit(lambda x: ft.constrain(jnp.zeros((8, 8)), P("data", "model")))
    assert_lies(f(x), "data", "model")
    told = "its result depends on no argument on that mesh", "pass `mesh=`"
    with raises(*told, error=ft.ShardingError):
        jax.jit(lambda x: f(x))(x)
    g = ft.jit(lambda x: ft.constrain(jnp.zeros((8, 8)), P("data", "model")), mesh=MESH)
    assert_lies(jax.jit(lambda x: g(x))(x), "data", "model")


def test_its_result_is_sharded_as_asked_on_explicit_axes():
    """`jax.jit(out_shardings=)` changes no type in a trace, so the result would be as `x`."""
    f = ft.jit(lambda x: 2 * x, out_shardings=P("data", "model"), mesh=EXPLICIT)
    x = ft.shard(jnp.ones((8, 4)), P(None, "data"), EXPLICIT)
    assert_lies(jax.jit(lambda x: f(x) + 1)(x), "data", "model", mesh=EXPLICIT)
