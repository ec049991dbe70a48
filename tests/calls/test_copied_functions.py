"""What `ft.jit`, `ft.shard_map` and `ft.init` return, copied and pickled."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.lib.meshes import MESH

X = jnp.ones(8)


@ft.jit
def decorated(x: Any) -> Any:
    return x + 1


def plain(x: Any) -> Any:
    return x + 1


class Layer(eqx.Module):
    bias: jax.Array
    inner: Any = None

    def __call__(self, x: Any) -> Any:
        return x + self.bias if self.inner is None else self.inner(x) * self.bias

    @ft.jit(donate="x")
    def step(self, x: Any) -> Any:
        return x + self.bias


BIAS = jnp.ones(())  # an array that any mesh has whole
LAYER = Layer(BIAS)
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "jit": lambda: ft.jit(lambda x: x + 1),
    "decorated": lambda: decorated,
    "of a module": lambda: ft.jit(LAYER),
    "of a bound method": lambda: LAYER.step,
    "shard_map": lambda: ft.shard_map(plain, in_specs=P("data"), out_specs=P("data")),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda f: pickle.loads(cloudpickle.dumps(f)),
}


@pytest.mark.parametrize("called", [False, True], ids=["before", "after a call"])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_copy_is_called(name: str, how: str, called: bool):
    f = FUNCTIONS[name]()
    with jax.set_mesh(MESH):
        if called:
            f(jnp.ones(8))
        assert COPIES[how](f)(jnp.ones(8)).tolist() == [2.0] * 8


def test_options_are_copied():
    f = ft.jit(lambda m: jax.tree.map(lambda x: x + 1, m), donate="m", in_shardings=P("data"))
    for how in ("deepcopy", "cloudpickle"):
        x = ft.shard(jnp.ones(8), P("data"), MESH)
        with jax.set_mesh(MESH):
            COPIES[how](f)(x)
        assert x.is_deleted()


def test_a_function_is_copied_as_one_of_python():
    f = ft.jit(plain)
    assert copy.copy(f) is copy.deepcopy(f) is f
    # What is bound to it is copied, as in a partial.
    bound = ft.jit(LAYER)
    assert copy.deepcopy(bound) is not bound


def test_devices_cannot_be_pickled():
    with pytest.raises(TypeError, match="Device"):
        cloudpickle.dumps(ft.jit(plain, mesh=MESH))
    # By the remedy.
    without = pickle.loads(cloudpickle.dumps(ft.jit(plain, in_shardings=P("data"))))
    with jax.set_mesh(MESH):
        assert without(X).sharding.is_equivalent_to(jax.NamedSharding(MESH, P("data")), 1)
