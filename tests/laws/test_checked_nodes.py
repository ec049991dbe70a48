"""Every door × classes that check what they are unflattened with: nothing is built to find
something out, and what a user asks for and a class cannot hold is an error by path."""

import pickle
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
from tests.lib.checks import raises

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


@registered
class Strict(ArraysOnly):
    """Both."""

    def check(self, value: Any, sizes: tuple[int, ...]) -> None:
        super().check(value, sizes)
        if value.shape != sizes:
            raise ValueError(f"sizes {value.shape}, not {sizes}")


CLASSES = pytest.mark.parametrize("cls", [ArraysOnly, SizesOnly, Strict])


def tree_of(cls: Any) -> Any:
    return {"a": cls.of(8, 16), "b": cls.of(8), "text": "t", "none": None}


def loss(tree: Any) -> jax.Array:
    return tree["a"].value.sum() + tree["b"].value.sum()


def merged(tree: Any, *filters: Any) -> None:
    again = ft.merge(*ft.split(tree, *filters))
    assert type(again["a"]) is type(tree["a"]) and again["b"].value is tree["b"].value
    assert again["text"] == "t" and again["none"] is None


def pickled(tree: Any) -> None:
    static, _ = ft.split(tree)
    again = pickle.loads(pickle.dumps(static))
    assert again == static and again.paths == static.paths and hash(again) == hash(static)
    packed = pickle.loads(pickle.dumps(ft.pack(tree)))
    assert packed.tree["a"].sizes == (8, 16)


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
    assert found["b"] is None or found["b"].value is None


def accumulated(tree: Any) -> None:
    def batch_loss(tree: Any, x: jax.Array) -> jax.Array:
        return loss(tree) * x.mean()

    found = ft.accumulate(ft.grad(batch_loss, wrt="**.value"), 2)(tree, jnp.ones((4, 3)))
    np.testing.assert_allclose(found["a"].value, 1.0)


def selected(tree: Any) -> None:
    changed = ft.select(tree).at(lambda tree: tree["a"].value).apply(lambda x: 2 * x)
    assert float(changed["a"].value[0, 0]) == 2 and changed["b"] is tree["b"]
    chosen, rest = ft.select(tree).at("a").partition()
    assert chosen["a"] is tree["a"] and rest["b"].value is tree["b"].value
    assert chosen["b"] is None or chosen["b"].value is None


DOORS: dict[str, Callable[[Any], object]] = {
    "split": lambda tree: ft.split(tree, "a.**", ...),
    "merge": merged,
    "merge of parts": lambda tree: merged(tree, "a.**", ...),
    "pickle": pickled,
    "pack": lambda tree: ft.unpack(ft.pack(tree)),
    "plan": lambda tree: ft.plan(tree, LAYOUT, MESH),
    "shard": lambda tree: ft.shard(tree, ft.plan(tree, LAYOUT, MESH)),
    "plan_optimizer": optimizer,
    "plan_optimizer(wrt=)": lambda tree: optimizer(tree, wrt="a.**"),
    "TrainState": trained,
    "TrainState(wrt=)": lambda tree: trained(tree, "a.**"),
    "abstract TrainState": abstractly_trained,
    "grad": gradient,
    "accumulate": accumulated,
    "select": selected,
    "jit": lambda tree: ft.jit(loss).trace(tree),
    "assert_closed": lambda tree: ft.testing.assert_closed(lambda tree: tree, (tree,)),
    "init": lambda tree: ft.init(lambda: tree, LAYOUT, MESH).trace(),
}


@CLASSES
@pytest.mark.parametrize("door", DOORS)
def test_is_not_rebuilt(door: str, cls: Any):
    DOORS[door](tree_of(cls))


def test_a_stack_of_layers_with_such_nodes():
    def layer(key: jax.Array) -> Any:
        return ft.nn.Sequential([Scaled(ArraysOnly(jax.random.normal(key, (4,)), (4,)))])

    layers = ft.stack(layer, 3, jax.random.key(0))
    x = jnp.ones(4)
    np.testing.assert_allclose(layers(x), layers.scan(x), rtol=1e-6)


class Scaled(eqx.Module):
    scale: Any

    def __call__(self, x: jax.Array, **_: Any) -> jax.Array:
        return x * self.scale.value


# What a user asks for by name, and the class cannot hold.
HELD: dict[str, Callable[[Any], object]] = {
    "tree_axes": ft.tree_axes,
    "Plan.specs": lambda tree: ft.plan(tree, LAYOUT, MESH).specs,
    "Plan.shardings": lambda tree: ft.plan(tree, LAYOUT, MESH).shardings,
    "args_info": lambda tree: ft.jit(loss).trace(tree).args_info,
    "in_shardings": lambda tree: ft.jit(loss, in_shardings=LAYOUT, mesh=MESH).trace(tree).in_avals,
}


@pytest.mark.parametrize("door", HELD)
def test_what_a_class_cannot_hold_is_an_error_by_path(door: str):
    with raises(
        "2 nodes cannot be built with these values",
        "a.value",
        "b.value",
        "its class ArraysOnly cannot be unflattened with",
        "TypeError: no array: ",
        "take any value where it is unflattened, as JAX asks, and check in the constructor",
    ):
        HELD[door](tree_of(ArraysOnly))


def test_an_optimizer_that_builds_other_values():
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    for make in (
        lambda tree: ft.plan_optimizer(factored, tree, LAYOUT, MESH),
        lambda tree: ft.init_optimizer(factored, tree, LAYOUT, MESH),
        lambda tree: ft.TrainState.create(tree, factored, wrt="**.value"),
    ):
        for cls in (ArraysOnly, SizesOnly, Strict):
            with raises(
                "`tx.init` raised ",
                "an optimizer may build the nodes of a model with other values",
                "a.value",
                f"its class {cls.__name__} cannot be unflattened with ",
                "take any value where it is unflattened, as JAX asks, and check in the constructor",
            ):
                make(tree_of(cls))


class CheckedInTheConstructor(Strict):
    """As the remedy says."""


def unflattened(sizes: tuple[int, ...], children: Any) -> CheckedInTheConstructor:
    node = object.__new__(CheckedInTheConstructor)
    node.value, node.sizes = children[0], sizes
    return node


jax.tree_util.register_pytree_with_keys(
    CheckedInTheConstructor,
    lambda node: (((jax.tree_util.GetAttrKey("value"), node.value),), node.sizes),
    unflattened,
)


@pytest.mark.parametrize("door", [*DOORS, *HELD])
def test_the_remedy(door: str):
    (DOORS | HELD)[door](tree_of(CheckedInTheConstructor))
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    plan = ft.plan_optimizer(factored, tree_of(CheckedInTheConstructor), LAYOUT, MESH)
    assert plan["v_row.a.value"].spec == P(None) and plan["v_col.a.value"].spec == P("data")


@registered
class Both(Checked):
    """A node with two arrays, whose class holds both or none."""

    def check(self, value: Any, sizes: tuple[int, ...]) -> None:
        if any(not is_array(one) for one in value):
            raise TypeError("one is missing")


@pytest.mark.parametrize(
    "choose",
    [
        lambda tree: ft.split(tree, "**.0", ...),
        lambda tree: ft.grad(lambda tree: tree[0].value[0].sum(), wrt="**.0")(tree),
        lambda tree: ft.plan_optimizer(optax.adam(1e-3), tree, LAYOUT, MESH, wrt="**.0"),
        lambda tree: ft.select(tree).at("0.value.0").partition(),
    ],
)
def test_a_node_of_which_some_arrays_are_chosen(choose: Callable[[Any], object]):
    tree = [Both([jnp.ones(8), jnp.ones(8)], ())]
    with raises("  0", "Both", "TypeError: one is missing", "all arrays of ", "or none"):
        choose(tree)


def test_the_remedy_for_such_a_node():
    tree = [Both([jnp.ones(8), jnp.ones(8)], ()), jnp.ones(2)]
    static, both, rest = ft.split(tree, "0.**", ...)
    assert rest[0] is None and ft.merge(static, both, rest)[0].value[1] is tree[0].value[1]
