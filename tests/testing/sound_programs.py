"""Programs that compute on a mesh what they compute on one device: no operation of theirs differs.

Each is a function that makes `(fn, args, layouts, mesh)`, as `assert_same_as_unsharded` takes them.
Those with a shard_map take the mesh of the context.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

import functree as ft
from tests.lib.meshes import EXPLICIT, MESH
from tests.lib.training import LAYOUTS, batch_spec, loss, make

P = ft.P
Case = tuple[Callable[..., Any], tuple[Any, ...], Any, Any]
SOUND: dict[str, Callable[[], Case]] = {}


def sound(case: Callable[[], Case]) -> Callable[[], Case]:
    SOUND[case.__name__] = case
    return case


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


TOKENS = jax.random.randint(jax.random.key(1), (8, 17), 0, 256)


def gradient(name: str, mesh: Any = MESH, **options: Any) -> Case:
    fun = ft.jit(
        lambda model, tokens: ft.value_and_grad(loss)(model, tokens), rules=LAYOUTS[name], mesh=mesh
    )
    model = make(jax.random.key(0), layers=2, **options)
    return fun, (model, TOKENS), (LAYOUTS[name], batch_spec(name)), mesh


for _name in LAYOUTS:
    SOUND[f"transformer {_name}"] = functools.partial(gradient, _name)
SOUND["transformer, remat"] = functools.partial(gradient, "FSDP+TP", remat="full")
SOUND["transformer Explicit"] = functools.partial(gradient, "FSDP", mesh=EXPLICIT)


# By hand, in shard_maps


def mapped(body: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool = True) -> Any:
    return ft.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@sound
def scan_in_a_shard_map() -> Case:
    def body(x: Any, ws: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            y = lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)
            return jnp.tanh(y), (y**2).sum()

        x, sums = lax.scan(layer, x, ws)
        return x, lax.psum(sums, ("data", "model"))

    specs = P("data", "model"), P(None, "model")
    return (
        mapped(body, specs, (P("data", "model"), P())),
        (normal(0, 8, 8), normal(1, 3, 8, 8)),
        specs,
        MESH,
    )


@sound
def conditional_by_device() -> Case:
    def body(x: Any) -> Any:
        first = lax.axis_index("model") == 0
        y = lax.cond(first, lambda x: x * 1.0, lambda x: x * 0.0, x)
        return lax.psum(y, "model")

    return mapped(body, P("data"), P("data"), False), (normal(0, 8, 8),), (P("data"),), MESH


@sound
def partly_manual() -> Case:
    def fun(x: Any, w: Any) -> Any:
        body = lambda x, w: lax.psum(jnp.sin(x @ w).sum(0), "data")  # noqa: E731
        return jax.shard_map(body, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"})(
            x, w
        )

    return fun, (normal(0, 8, 8), normal(1, 8, 8)), (P("data"), P(None, "model")), MESH


# In jax.numpy alone


@sound
def newton() -> Case:
    def fun(x: Any) -> Any:
        def more(state: Any) -> Any:
            return (jnp.abs(state[0] ** 2 - x).max() > 1e-3) & (state[1] < 30)

        root, count = lax.while_loop(more, lambda s: ((s[0] + x / s[0]) / 2, s[1] + 1), (x, 0))
        return root.mean(), count

    return fun, (jnp.abs(normal(0, 8, 8)) + 1,), (P("data", "model"),), MESH


@sound
def integers() -> Case:
    def fun(x: Any) -> Any:
        order = jnp.argsort(x[:, 0])
        return jnp.cumsum(x[order], 1), jnp.bincount(x.reshape(-1), length=256), x.argmax(1)

    return fun, (TOKENS[:, :16],), (P("data", "model"),), MESH


@sound
def dropout() -> Case:
    def fun(x: Any, key: Any) -> Any:
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x / 0.5, 0.0) @ x.T

    return fun, (normal(0, 8, 8), jax.random.key(3)), (P("data", "model"), P()), MESH


@sound
def cancelling_sums() -> Case:
    def fun(x: Any) -> Any:
        centred = x - x.mean(1, keepdims=True)
        rest = centred.sum(1)  # rounding and nothing else
        return rest / jnp.sqrt((centred**2).sum(1)), jax.nn.softmax(x, 1).sum(1) - 1

    return fun, (normal(0, 8, 64),), (P("data", "model"),), MESH


@sound
def masks() -> Case:
    def fun(x: Any) -> Any:
        allowed = jnp.tri(8, dtype=bool)
        low = jnp.where(allowed, x, jnp.finfo(x.dtype).min)
        gone = jnp.where(allowed, x, -jnp.inf)
        return jax.nn.softmax(low, 1), jax.nn.softmax(gone, 1), jax.nn.logsumexp(gone, 0)

    return fun, (normal(0, 8, 8),), (P("data", "model"),), MESH


@sound
def half_precision() -> Case:
    def fun(x: Any, w: Any) -> Any:
        y = jax.nn.gelu(x @ w)
        return (y @ w.T).astype(jnp.float32).mean(), y

    args = normal(0, 8, 64, dtype=jnp.bfloat16), normal(1, 64, 64, dtype=jnp.bfloat16)
    return fun, args, (P("data", "model"), P("model")), MESH
