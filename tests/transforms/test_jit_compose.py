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
from jax.sharding import NamedSharding, PartitionSpec

import functree as ft
from tests.lib.meshes import EXPLICIT, MESH
from tests.lib.trees import MLP

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def mlp(key: int = 0) -> MLP:
    up, down = jax.random.normal(jax.random.key(key), (2, 8, 16))
    return MLP(up, down.T, jnp.tanh)


MODEL = ft.shard(mlp(), RULES, MESH)
X = jax.device_put(jax.random.normal(jax.random.key(1), (4, 8)), NamedSharding(MESH, P("data")))
W = jax.device_put(jax.random.normal(jax.random.key(2), (8,)), NamedSharding(MESH, P()))

Jit = Callable[[Any], Any]


def forward(model: Any, x: Array) -> Array:
    return model["act"](x @ model["up"]) @ model["down"]


PARTS = {"up": MODEL.up, "down": MODEL.down}


def call(jit: Jit) -> Callable[[Any, Array], Array]:
    """The layer on its arrays, jitted."""
    return jit(lambda parts, x: jnp.tanh(x @ parts["up"]) @ parts["down"])


def loss(jit: Jit) -> Callable[[Any, Array], Array]:
    return jit(lambda parts, x: jnp.mean(forward({**parts, "act": jnp.tanh}, x) ** 2))


def repeated(body: Any, x: Array) -> Array:
    return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=3)[0]


# Each takes what stands for `jit`, and gives the result of some composition.
COMPOSED: dict[str, Callable[[Jit], Any]] = {
    "grad of it": lambda jit: jax.grad(loss(jit))(PARTS, X),
    "grad in it": lambda jit: jit(jax.grad(loss(lambda f: f)))(PARTS, X),
    "value_and_grad of it, with aux": lambda jit: jax.value_and_grad(
        jit(lambda parts, x: (loss(lambda f: f)(parts, x), x * 2)), has_aux=True
    )(PARTS, X),
    "jvp of it": lambda jit: jax.jvp(lambda x: call(jit)(PARTS, x), (X,), (X,)),
    "vjp of it": lambda jit: jax.vjp(lambda x: call(jit)(PARTS, x), X)[1](X),
    "hessian of it": lambda jit: jax.hessian(jit(lambda w: jnp.sum(jnp.tanh(w) ** 3)))(W),
    "grad of grad": lambda jit: jax.grad(
        lambda w: jit(jax.grad(jit(lambda w: jnp.sum(w**3))))(w).sum()
    )(W),
    "vmap of it": lambda jit: jax.vmap(call(jit), (None, 0))(PARTS, X),
    "vmap in it": lambda jit: jit(jax.vmap(call(lambda f: f), (None, 0)))(PARTS, X),
    "vmap of grad of it": lambda jit: jax.vmap(jax.grad(loss(jit)), (None, 0))(PARTS, X),
    "vmap over parameters": lambda jit: jax.vmap(call(jit), (0, None))(
        jax.tree.map(lambda w: jnp.stack([w, -w]), PARTS), X
    ),
    "scan of it": lambda jit: repeated(lambda x: call(jit)(PARTS, x), X),
    "scan in it": lambda jit: jit(
        lambda parts, x: repeated(lambda x: call(lambda f: f)(parts, x), x)
    )(PARTS, X),
    "grad of scan of it": lambda jit: jax.grad(
        lambda parts: repeated(lambda x: call(jit)(parts, x), X).sum()
    )(PARTS),
    "cond of it": lambda jit: jax.lax.cond(
        X.sum() > 100, call(jit), lambda parts, x: x * 2, PARTS, X
    ),
    "while of it": lambda jit: jax.lax.while_loop(
        lambda w: w.sum() < 100, jit(lambda w: w * w + 1), W
    ),
    "map of it": lambda jit: jax.lax.map(lambda x: call(jit)(PARTS, x), X),
    "checkpoint of it": lambda jit: jax.grad(jax.checkpoint(loss(jit)))(PARTS, X),
    "checkpoint in it": lambda jit: jax.grad(jit(jax.checkpoint(loss(lambda f: f))))(PARTS, X),
    "jax.jit of it": lambda jit: jax.jit(lambda parts, x: call(jit)(parts, x) + 1)(PARTS, X),
    "jax.jit in it": lambda jit: jit(lambda parts, x: call(jax.jit)(parts, x) + 1)(PARTS, X),
    "it in it": lambda jit: jit(lambda parts, x: call(jit)(parts, x) + jit(jnp.sum)(x))(PARTS, X),
    "closing over a tracer of jit": lambda jit: jax.jit(lambda w, x: jit(lambda x: x * w)(x))(
        W[:, None][:4], X
    ),
    "closing over a tracer of itself": lambda jit: jit(lambda w, x: jit(lambda x: x * w)(x))(
        W[:, None][:4], X
    ),
    "closing over a tracer of grad": lambda jit: jax.grad(
        lambda w: jit(lambda x: jnp.sum(jnp.sin(w) * x))(W)
    )(W),
    "closing over a tracer of vmap": lambda jit: jax.vmap(lambda w: jit(lambda x: x * w)(X))(W),
    "closing over a tracer of scan": lambda jit: jax.lax.scan(
        lambda carry, w: (carry, jit(lambda x: x * w + carry)(X)), W[0], W
    ),
    "closing over a tracer of checkpoint": lambda jit: jax.grad(
        jax.checkpoint(lambda w: jit(lambda x: jnp.sum(jnp.sin(w * x)))(W))
    )(W),
    "shard_map of it": lambda jit: jax.jit(
        jax.shard_map(
            lambda parts, x: jax.lax.psum(call(jit)(parts, x), "model"),
            mesh=MESH,
            in_specs=({"up": P(None, "model"), "down": P("model")}, P("data")),
            out_specs=P("data"),
        )
    )(PARTS, X),
    "shard_map in it": lambda jit: jit(
        jax.shard_map(
            lambda parts, x: jax.lax.psum(call(lambda f: f)(parts, x), "model"),
            mesh=MESH,
            in_specs=({"up": P(None, "model"), "down": P("model")}, P("data")),
            out_specs=P("data"),
        )
    )(PARTS, X),
    "grad of shard_map of it": lambda jit: jax.grad(
        lambda w: jax.shard_map(
            lambda x: jit(lambda x: x * 2)(x), mesh=MESH, in_specs=P("data"), out_specs=P("data")
        )(w).sum()
    )(W),
    "custom_jvp in it": lambda jit: jax.grad(lambda w: jit(jax.nn.relu)(w).sum())(W),
    "eval_shape of it": lambda jit: jax.eval_shape(call(jit), PARTS, X),
    "make_jaxpr of it": lambda jit: jax.make_jaxpr(call(jit))(PARTS, X).out_avals,
    "linearize of it": lambda jit: jax.linearize(lambda x: call(jit)(PARTS, x), X)[1](X),
}


def assert_same(found: Any, expected: Any, shardings: bool = True) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if isinstance(y, jax.Array):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
            assert not shardings or x.sharding.is_equivalent_to(y.sharding, y.ndim), (
                x.sharding,
                y.sharding,
            )


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", COMPOSED)
def test_as_jax_jit(name: str):
    with jax.numpy_rank_promotion("allow"):
        expected = COMPOSED[name](jax.jit)
        assert_same(COMPOSED[name](ft.jit), expected)


@pytest.mark.parametrize(
    "name",
    [name for name in COMPOSED if "of it" not in name or "grad" in name or "shard_map" in name],
)
def test_with_a_mesh_and_rules(name: str):
    """The options make no difference where nothing in the body asks for them."""
    with jax.numpy_rank_promotion("allow"):
        expected = COMPOSED[name](jax.jit)
        assert_same(
            COMPOSED[name](lambda f: ft.jit(f, mesh=MESH, rules=RULES)), expected, shardings=False
        )


# With modules


def mean_square(model: Any, x: Array) -> Array:
    return jnp.mean(model(x) ** 2)


def by_hand() -> Any:
    return jax.jit(jax.grad(loss(lambda f: f)))(PARTS, X)


MODULES: dict[str, Callable[[], Any]] = {
    "ft.grad of it": lambda: ft.grad(ft.jit(mean_square))(MODEL, X),
    "ft.grad in it": lambda: ft.jit(ft.grad(mean_square))(MODEL, X),
    "both": lambda: ft.jit(ft.grad(ft.jit(mean_square)))(MODEL, X),
    "eqx.filter_grad of it": lambda: eqx.filter_grad(ft.jit(mean_square))(MODEL, X),
    "eqx.filter_grad in it": lambda: ft.jit(eqx.filter_grad(mean_square))(MODEL, X),
    "eqx.filter_jit around it": lambda: eqx.filter_jit(ft.grad(ft.jit(mean_square)))(MODEL, X),
    "eqx.filter_jit in it": lambda: ft.jit(ft.grad(eqx.filter_jit(mean_square)))(MODEL, X),
    "checkpoint": lambda: ft.jit(ft.grad(eqx.filter_checkpoint(ft.jit(mean_square))))(MODEL, X),
    "packed": lambda: ft.jit(ft.grad(ft.jit(mean_square)))(ft.pack(MODEL), X),
    "a module that is jitted": lambda: ft.grad(lambda m, x: jnp.mean(ft.jit(m)(x) ** 2))(MODEL, X),
    "a method that is jitted": lambda: ft.jit(
        ft.grad(lambda m, x: jnp.mean(ft.jit(m.__call__)(x) ** 2))
    )(MODEL, X),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str):
    found, expected = MODULES[name](), by_hand()
    for part in ("up", "down"):
        np.testing.assert_allclose(getattr(found, part), expected[part], rtol=1e-5, atol=1e-6)
        wanted = expected[part].sharding
        if "of it" not in name and "module" not in name:
            assert getattr(found, part).sharding.is_equivalent_to(wanted, 2)


def test_shard_map_of_ft_and_it():
    def body(model: MLP, x: Array) -> Array:
        return jax.lax.psum(model(x), "model")

    specs = (RULES, P("data"))
    plain = call(jax.jit)(PARTS, X)
    inside = ft.shard_map(ft.jit(body), mesh=MESH, in_specs=specs, out_specs=P("data"))(MODEL, X)
    outside = ft.jit(ft.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("data")))(MODEL, X)
    for found in (inside, outside):
        assert_same(found, plain)


def test_shard_map_in_it_takes_its_mesh():
    f = ft.jit(
        lambda x: ft.shard_map(
            lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P()
        )(x),
        mesh=MESH,
    )
    np.testing.assert_allclose(f(np.ones((4, 8), np.float32)), np.full((2, 8), 2.0))


def test_inside_shard_map_the_mesh_is_the_manual_one():
    seen = []

    def body(x: Array) -> Array:
        inner = ft.jit(
            lambda x: (
                seen.append(jax.sharding.get_abstract_mesh().manual_axes) or jax.lax.psum(x, "data")
            )
        )
        with_mesh = ft.jit(lambda x: jax.lax.psum(x, "data"), mesh=MESH)
        return inner(x) + with_mesh(x)

    out = ft.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P())(X)
    np.testing.assert_allclose(out, 2 * (X[:2] + X[2:]), rtol=1e-6)
    assert seen and set(seen[0]) == {"data", "model"}


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_constrain_inside_two_jits(mesh: Any):
    x = ft.shard(np.ones((4, 8), np.float32), P("data"), mesh)
    inner = ft.jit(lambda x: ft.constrain(x * 2, "batch hidden"), rules=RULES)
    for outer in (
        jax.jit(lambda x: inner(x) + 1),
        ft.jit(lambda x: inner(x) + 1),
        jax.jit(jax.vmap(lambda x: x)),
    ):
        found = outer(x)
        assert found.shape == (4, 8)
    assert inner(x).sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)


def test_donation_and_layouts_inside_a_trace():
    inner = ft.jit(
        lambda state, x: {"w": state["w"] * x},
        donate="state",
        in_shardings=(P("data"), None),
        out_shardings=P("data"),
        mesh=MESH,
    )
    state = {"w": X}
    found = jax.jit(lambda state, x: inner(inner(state, x), x))(state, jnp.float32(2))
    np.testing.assert_allclose(found["w"], X * 4)
    assert found["w"].sharding.is_equivalent_to(NamedSharding(MESH, P("data")), 2)
    assert not state["w"].is_deleted() and inner.compilations == []
    grads = jax.grad(
        lambda w: ft.jit(lambda s: s["w"] ** 2, out_shardings=P("data"), mesh=MESH)({"w": w}).sum()
    )(X)
    np.testing.assert_allclose(grads, 2 * X, rtol=1e-6)


def test_calls_inside_traces_are_no_compilations_of_their_own():
    f = ft.jit(lambda x: x * 2)
    jax.jit(f)(X), jax.grad(lambda x: f(x).sum())(X), jax.vmap(f)(X)
    assert f.compilations == []
    f(X)
    assert len(f.compilations) == 1
    jax.jit(lambda x: f(x) + 1)(X)
    f(X)
    assert len(f.compilations) == 1


EAGER: dict[str, tuple[Callable[[Any], Any], Any, P]] = {
    "grad": (lambda f: jax.grad(lambda x: f(x).sum())(X), 2 * jnp.ones((4, 8)), P("data")),
    "vmap": (lambda f: jax.vmap(f, in_axes=1)(X), 2 * X.T, P(None, "data")),
    "jvp": (lambda f: jax.jvp(f, (X,), (X,))[1], 2 * X, P("data")),
}


@pytest.mark.parametrize("transform", EAGER)
def test_in_an_eager_transform_the_ambient_mesh_has_devices(transform: str):
    """Under the trace of the transform the mesh is abstract; and yet the call runs at once."""
    apply, expected, spec = EAGER[transform]
    with jax.set_mesh(MESH):
        found = apply(ft.jit(lambda x: x * 2, in_shardings=P("data")))
    np.testing.assert_allclose(found, expected)
    assert found.sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)


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
    with pytest.raises(ft.ShardingError, match="there are no ambient rules"):
        ft.spec("batch")


def test_disabled():
    with jax.disable_jit():
        assert ft.jit(lambda tree: tree["x"] * 2, donate=...)({"x": jnp.ones(3)}).sum() == 6


FIRST_INSIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "in_shardings": {"in_shardings": P("data", "model")},
    "out_shardings": {"out_shardings": P("data", "model")},
    "rules": {"rules": RULES},
    "donated": {"donate": 0},
}
Y = np.arange(32, dtype=np.float32).reshape(4, 8)


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
    "jax.jit": jax.jit,
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


@pytest.mark.parametrize("around", ["eager", "jax.jit", "ft.jit"])
@pytest.mark.parametrize("options", [name for name in FIRST_INSIDE if name != "donated"])
def test_explicit_axes_of_it(options: str, around: str):
    sharding = NamedSharding(MESH, P("data", "model"))
    x = jax.device_put(Y, sharding)
    f = ft.jit(lambda x: x * 2, **FIRST_INSIDE[options])
    with jax.set_mesh(MESH):
        found = AROUND[around](
            lambda x: jax.sharding.explicit_axes(f, in_sharding=P("data", "model"))(x)
        )(x)
    assert np.array_equal(found, 2 * Y) and found.sharding == sharding


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
    devices = jax.devices()

    def called(inner: Any) -> Any:
        f = ft.jit(lambda x: ft.constrain(x * 2, P("data", "model")), mesh=inner)
        return ft.jit(lambda x: f(x) + 0, mesh=MESH)(jnp.ones((8, 8)))

    kinds = (jax.sharding.AxisType.Auto,) * 2
    other_sizes = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=devices)
    assert called(other_sizes).sharding.is_equivalent_to(
        NamedSharding(other_sizes, P("data", "model")), 2
    )
    order = jax.sharding.Mesh(
        np.array(devices[::-1]).reshape(2, 4), ("data", "model"), axis_types=kinds
    )
    half = jax.sharding.Mesh(
        np.array(devices[:4]).reshape(2, 2), ("data", "model"), axis_types=kinds
    )
    for inner, told in ((order, "the same devices in another order"), (half, "other devices")):
        with pytest.raises(
            ft.ShardingError, match=f"is called in a function that runs on .*, with {told}"
        ):
            called(inner)


def test_a_function_whose_mesh_would_be_lost():
    x = jax.device_put(Y, NamedSharding(MESH, P("data", "model")))
    f = ft.jit(lambda x: ft.constrain(jnp.zeros((8, 8)), P("data", "model")))
    assert f(x).sharding.is_equivalent_to(NamedSharding(MESH, P("data", "model")), 2)
    with pytest.raises(
        ft.ShardingError, match=r"its result depends on none that is on the mesh.*pass `mesh=`"
    ):
        jax.jit(lambda x: f(x))(x)
    g = ft.jit(lambda x: ft.constrain(jnp.zeros((8, 8)), P("data", "model")), mesh=MESH)
    assert jax.jit(lambda x: g(x))(x).sharding.is_equivalent_to(
        NamedSharding(MESH, P("data", "model")), 2
    )
