"""What JAX takes and functree does not: the error, and what it says to write."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify, hijax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH

X = jnp.ones(8)
DEVICE = jax.devices()[0]


@dataclass(frozen=True)
class PairType(hijax.HiType):
    size: int


class Pair:
    def __init__(self, values: Any) -> None:
        self.values = values


hijax.register_hitype(Pair, lambda pair: PairType(pair.values.shape[0]))


class Bias(eqx.Module):
    bias: Float[Array, "embed"]


def loss(w: Array, x: Array) -> Array:
    return ((x @ w) ** 2).sum()


def in_pmap(x: Array) -> Array:
    return jax.pmap(lambda x: ft.grad(loss)(jnp.ones(2), x))(x)


def positive(x: Array) -> Array:
    checkify.check(jnp.all(x > 0), "not positive")
    return x


def without_mesh(x: Array) -> Any:
    mapped = jax.shard_map(positive, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return checkify.checkify(mapped)(x)


def abstract() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((3,), jnp.float32)


def with_ref() -> Any:
    ref = jax.new_ref(jnp.zeros(8))
    return ft.jit(lambda x: x + ref[...]).lower(X)


def exported_with_ref() -> Any:
    ref = jax.new_ref(jnp.zeros(8))
    return ft.export(ft.jit(lambda x: x + ref[...]), X)


PMAP = "If you use `jax.pmap`, replace it with `ft.shard_map`, or use `jax.grad` and"
NO_LAYOUT = "is not a layout"
SINGLE = SingleDeviceSharding(DEVICE)
FORMAT = Format(Layout((0,)), NamedSharding(MESH, P("data")))

JAX_VALUE = ("is a JAX value, but not an array", "Try: use its arrays instead, such as `ref[...]`")

CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "pmap": (lambda: in_pmap(jnp.ones((8, 2))), (PMAP,)),
    "a ref": (lambda: ft.jit(lambda r: r[...])(jax.new_ref(X)), ("r   Ref\n", *JAX_VALUE)),
    "a ref as a result": (
        lambda: ft.jit(lambda x: {"r": jax.new_ref(x)})(X),
        ("result.r ", *JAX_VALUE),
    ),
    "a ref that is closed over": (
        with_ref,
        ("closes over a `jax.Ref`", "pass the ref's value, and return the new value"),
    ),
    "hijax": (lambda: ft.jit(lambda pair: pair.values)([Pair(X)]), ("pair.0   Pair\n", *JAX_VALUE)),
    "hijax as a result": (lambda: ft.jit(Pair)(X), ("result   Pair\n", *JAX_VALUE)),
    "abstract": (
        lambda: ft.jit(lambda x: (x, abstract()))(X),
        (
            "the result has 1 value that a compiled function cannot return",
            "result.1   f32[3]\n      is abstract",
        ),
    ),
    "export of a closed ref": (
        exported_with_ref,
        (
            "<lambda> closes over a `jax.Ref`, so it can be called, but neither lowered nor exported",
        ),
    ),
    "typed class": (
        lambda: ft.typed(Bias),
        (
            "typed: Bias is a class, not a function: decorate its methods",
            "`@jaxtyped(typechecker=beartype)` above the class",
        ),
    ),
    "one device, in": (lambda: ft.jit(lambda x: x, in_shardings=SINGLE)(X), (NO_LAYOUT,)),
    "one device, shard": (lambda: ft.shard(X, SINGLE, MESH), (NO_LAYOUT,)),
    "a device": (lambda: ft.shard(X, DEVICE, MESH), (NO_LAYOUT,)),
    "a format": (lambda: ft.shard(X, FORMAT, MESH), (NO_LAYOUT,)),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str):
    call, said = CASES[case]
    with raises(*said):
        call()


def test_checkify_of_a_shard_map():
    """By the remedy of the page for migrating. The last shard's check is told too."""
    x = ft.shard(X, P("data"), MESH)
    assert ft.jit(without_mesh)(x)[0].get() is None
    assert "not positive" in ft.jit(without_mesh)(x.at[7].set(-1))[0].get()


def test_what_the_errors_say_to_write():
    ref = jax.new_ref(X)
    assert ft.jit(lambda x: x + 1)(ref[...]).sum() == 16
    assert ft.jit(lambda x: x + ref[...])(X).sum() == 16
    assert ft.jit(lambda pair: pair + 1)(Pair(X).values).sum() == 16

    one = ft.make_mesh(data=1, devices=[DEVICE])
    assert ft.shard(X, P(), one).sharding.device_set == {DEVICE}
    assert ft.jit(lambda x: x, in_shardings=P(), mesh=one)(X).sharding.device_set == {DEVICE}
    assert ft.shard(X, FORMAT.sharding, MESH).sharding.spec == P("data")
