"""Every door × classes that check what they are unflattened with: no node is built to find something
out. What puts other values into a node raises what its class raises, as in JAX and Equinox."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft

MESH = ft.make_mesh(data=8)
LAYOUT = ft.FSDP("data", min_size=1)


class Checked:
    """A node with one array. Its constructor checks nothing; see its subclasses."""

    def __init__(self, value: Any, sizes: tuple[int, ...]):
        self.check(value, sizes)
        self.value, self.sizes = value, sizes

    def check(self, value: Any, sizes: tuple[int, ...]) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls, *sizes: int) -> "Checked":
        return cls(jnp.ones(sizes), sizes)


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def registered(cls: Any) -> Any:
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda node: (((jax.tree_util.GetAttrKey("value"), node.value),), node.sizes),
        lambda sizes, children: cls(children[0], sizes),
    )
    return cls


@registered
class ArraysOnly(Checked):
    """It holds nothing but arrays."""

    def check(self, value: Any, sizes: tuple[int, ...]) -> None:
        if not is_array(value):
            raise TypeError(f"no array: {type(value).__name__}")


@registered
class SizesOnly(Checked):
    """It holds anything, but no arrays of other sizes, as the fields of coordax."""

    def check(self, value: Any, sizes: tuple[int, ...]) -> None:
        if is_array(value) and value.shape != sizes:
            raise ValueError(f"sizes {value.shape}, not {sizes}")


def tree_of(cls: Any) -> Any:
    return {"a": cls.of(8, 16), "b": cls.of(8), "text": "t", "none": None}


def loss(tree: Any) -> jax.Array:
    return tree["a"].value.sum() + tree["b"].value.sum()


def merged(tree: Any, *filters: Any) -> None:
    again = ft.merge(*ft.split(tree, *filters))
    assert type(again["a"]) is type(tree["a"]) and again["b"].value is tree["b"].value
    assert again["text"] == "t" and again["none"] is None


def optimizer(tree: Any, tx: Any = None, **options: Any) -> None:
    plan = ft.plan_optimizer(tx or optax.adam(1e-3), tree, LAYOUT, MESH, **options)
    assert plan["0.mu.a.value"].spec == P(None, "data")
    assert plan["0.count"].spec == P()


def trained(tree: Any, wrt: Any = "**.value") -> None:
    ts = ft.TrainState.create(tree, optax.adam(1e-3), layout=LAYOUT, mesh=MESH, wrt=wrt)

    def step(ts: Any) -> Any:
        return ft.apply_gradients(ts, ft.grad(loss, wrt=wrt)(ts.model))

    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        made = ft.jit(step).eval_shape(ts)
    assert type(made.model["b"]) is type(tree["b"])
    plan = ft.plan(ts, LAYOUT, MESH)
    assert plan["opt_state.0.mu.a.value"].spec == P(None, "data")


def abstractly_trained(tree: Any) -> None:
    ts = ft.TrainState.create(ft.abstract(lambda: tree)(), optax.adam(1e-3))
    assert ts.opt_state[0].mu["a"].value.shape == (8, 16)


def gradient(tree: Any) -> None:
    found = ft.grad(loss, wrt="a.**")(tree)
    assert found["a"].value.shape == (8, 16)
    assert found["b"].value is None


def accumulated(tree: Any) -> None:
    def batch_loss(tree: Any, x: jax.Array) -> jax.Array:
        return loss(tree) * x.mean()

    found = ft.accumulate(ft.grad(batch_loss, wrt="**.value"), 2)(tree, jnp.ones((4, 3)))
    np.testing.assert_allclose(found["a"].value, 1.0)


def selected(tree: Any) -> None:
    changed = ft.select(tree).at(lambda tree: tree["a"].value).apply(lambda x: 2 * x)
    assert float(changed["a"].value[0, 0]) == 2 and changed["b"] is tree["b"]
    chosen, rest = ft.select(tree).at("a").partition()
    assert chosen["a"].value is tree["a"].value and rest["b"].value is tree["b"].value
    assert chosen["b"].value is None and rest["a"].value is None


# What needs the arrays of a tree, and no node with other values.
DOORS: dict[str, Callable[[Any], object]] = {
    "pack": lambda tree: ft.unpack(ft.pack(tree)),
    "plan": lambda tree: ft.plan(tree, LAYOUT, MESH),
    "shard": lambda tree: ft.shard(tree, ft.plan(tree, LAYOUT, MESH)),
    "plan_optimizer": optimizer,
    "TrainState": trained,
    "abstract TrainState": abstractly_trained,
    "accumulate": accumulated,
    "jit": lambda tree: ft.jit(loss).trace(tree),
    "assert_closed": lambda tree: ft.testing.assert_closed(lambda tree: tree, (tree,)),
    "init": lambda tree: ft.init(lambda: tree, LAYOUT, MESH).trace(),
}


# What has None, specs or types in a node in the place of arrays.
BUILDING: dict[str, Callable[[Any], object]] = {
    "split": lambda tree: ft.split(tree, "a.**", ...),
    "merge": merged,
    "merge of parts": lambda tree: merged(tree, "a.**", ...),
    "plan_optimizer(wrt=)": lambda tree: optimizer(tree, wrt="a.**"),
    "TrainState(wrt=)": lambda tree: trained(tree, "a.**"),
    "grad": gradient,
    "select": selected,
    "tree_axes": ft.tree_axes,
    "Plan.specs": lambda tree: ft.plan(tree, LAYOUT, MESH).specs,
    "Plan.shardings": lambda tree: ft.plan(tree, LAYOUT, MESH).shardings,
    "args_info": lambda tree: ft.jit(loss).trace(tree).args_info,
}


@pytest.mark.parametrize("cls", [ArraysOnly, SizesOnly])
@pytest.mark.parametrize("door", DOORS)
def test_is_not_rebuilt(door: str, cls: Any):
    DOORS[door](tree_of(cls))


@pytest.mark.parametrize("door", BUILDING)
def test_what_a_class_cannot_hold_is_its_own_error(door: str):
    BUILDING[door](tree_of(SizesOnly))  # it holds anything that is no array
    with pytest.raises(TypeError, match="no array: "):
        BUILDING[door](tree_of(ArraysOnly))


def test_a_stack_of_layers_with_such_nodes():
    def layer(key: jax.Array) -> Any:
        return ft.nn.Sequential([Scaled(ArraysOnly(jax.random.normal(key, (4,)), (4,)))])

    layers = ft.Stacked(jax.vmap(layer)(jax.random.split(jax.random.key(0), 3)))
    x = jnp.ones(4)
    np.testing.assert_allclose(layers(x), layers.scan(x), rtol=1e-6)


class Scaled(eqx.Module):
    scale: Any

    def __call__(self, x: jax.Array, **_: Any) -> jax.Array:
        return x * self.scale.value
