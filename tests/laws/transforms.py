"""The transforms of JAX that another function is called in: each as `(function, array, mesh) ->
array`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import functree as ft

P = PartitionSpec
SPEC = P("data", "model")
Function = Callable[[Array], Array]


def custom(f: Function) -> Function:
    @jax.custom_vjp
    def g(x: Array) -> Array:
        return f(x)

    g.defvjp(lambda x: (f(x), x), lambda x, cotangent: (f(cotangent),))
    return g


def total(f: Function) -> Function:
    return lambda x: (f(x) ** 2).sum()


def by_rows(f: Any, mesh: Mesh) -> Function:
    """Under shard_map over the rows. On Explicit axes its argument has to be sharded so by its
    type."""

    def mapped(x: Array) -> Array:
        if AxisType.Explicit in mesh.axis_types and jax.typeof(x).sharding.spec != SPEC:
            x = jax.sharding.reshard(x, NamedSharding(mesh, P("data")))
        return jax.shard_map(
            f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )(x)

    def called(x: Array) -> Array:
        with jax.set_mesh(mesh):
            return jax.jit(mapped)(x)

    return called


TRANSFORMS: dict[str, Callable[[Any, Array, Mesh], Array]] = {
    "eager": lambda f, x, mesh: f(x),
    "lower": lambda f, x, mesh: (f if hasattr(f, "lower") else jax.jit(f)).lower(x).compile()(x),
    "jax.jit": lambda f, x, mesh: jax.jit(lambda x: f(x))(x),
    "ft.jit": lambda f, x, mesh: ft.jit(lambda x: f(x))(x),
    "grad": lambda f, x, mesh: jax.grad(total(f))(x),
    "grad in jit": lambda f, x, mesh: jax.jit(jax.grad(total(f)))(x),
    "vmap": lambda f, x, mesh: jax.vmap(f)(x[None])[0],
    "vmap in jit": lambda f, x, mesh: jax.jit(jax.vmap(f))(x[None])[0],
    "scan": lambda f, x, mesh: jax.lax.scan(lambda _, i: (0, f(x + i)), 0, jnp.arange(2.0))[1][0],
    "cond": lambda f, x, mesh: jax.lax.cond(jnp.bool_(True), f, lambda x: x, x),
    "remat": lambda f, x, mesh: jax.checkpoint(f)(x),
    "grad of remat": lambda f, x, mesh: jax.grad(total(jax.checkpoint(f)))(x),
    "custom_vjp": lambda f, x, mesh: jax.grad(total(custom(f)))(x),
    "shard_map": lambda f, x, mesh: by_rows(f, mesh)(x),
}
EAGER_GRADIENTS = {"grad", "grad of remat", "custom_vjp"}
GRADIENTS = {*EAGER_GRADIENTS, "grad in jit"}
