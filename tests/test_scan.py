"""`Stacked` against a Python loop over its layers."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from functree.errors import AxesError, FunctreeError
from functree.transforms.scan import Stacked, remat_policy, stack

DEPTH, SIZE = 5, 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (3, SIZE))
policies = jax.checkpoint_policies


class Layer(eqx.Module):
    """With all that a leaf can be: an array, a function, a number, a static field."""

    weight: Float[Array, "embed embed"]
    fun: Callable[[Array], Array]
    number: float
    power: int = eqx.field(static=True)

    def __init__(self, key: PRNGKeyArray):
        self.weight = jax.random.normal(key, (SIZE, SIZE))
        self.fun, self.number, self.power = jnp.tanh, 0.5, 2

    def __call__(self, x: Array, *scales: Any) -> Array:
        y = checkpoint_name(self.fun(x @ self.weight), "y") ** self.power + self.number
        for scale in scales:
            y = y * scale
        return y


def loop(stacked: Stacked[Layer], x: Array, *args: Any) -> Array:
    for layer in stacked:
        x = layer(x, *args)
    return x


@pytest.fixture(scope="module")
def layers() -> Stacked[Layer]:
    return stack(Layer, DEPTH, KEY)


def test_stack_is_filter_vmap(layers: Stacked[Layer]) -> None:
    keys = jax.random.split(KEY, DEPTH)
    other = Stacked(eqx.filter_vmap(Layer)(keys), axis="layers")
    assert eqx.tree_equal(layers, other)
    assert layers.layer.fun is jnp.tanh and layers.layer.number == 0.5
    for i, key in enumerate(keys):
        np.testing.assert_array_equal(layers.layer.weight[i], Layer(key).weight)


def test_axis(layers: Stacked[Layer]) -> None:
    assert layers.__stack_axes__() == ("layers",)
    assert stack(Layer, 2, KEY, axis="stages").__stack_axes__() == ("stages",)
    assert layers[1:].axis == "layers"


@pytest.mark.parametrize("args", [(), (2.0,), (jnp.float32(2), jnp.ones((3, SIZE)))], ids=len)
def test_a_call_is_a_loop(layers: Stacked[Layer], args: tuple[Any, ...]) -> None:
    np.testing.assert_allclose(layers(X, *args), loop(layers, X, *args), rtol=1e-6)
    np.testing.assert_allclose(eqx.filter_jit(layers)(X, *args), loop(layers, X, *args), rtol=1e-6)


def test_a_stack_of_one(layers: Stacked[Layer]) -> None:
    np.testing.assert_allclose(stack(Layer, 1, KEY)(X), stack(Layer, 1, KEY)[0](X), rtol=1e-6)


def test_no_layer_is_the_identity(layers: Stacked[Layer]) -> None:
    none = layers[2:2]
    assert len(none) == 0 and list(none) == []
    np.testing.assert_array_equal(none(X), X)


def test_a_tree_may_go_through() -> None:
    class Pair(eqx.Module):
        layer: Layer

        def __call__(self, x: dict[str, Array]) -> dict[str, Array]:
            return {"a": self.layer(x["b"]), "b": x["a"]}

    pairs = stack(lambda key: Pair(Layer(key)), 2, KEY)
    out = pairs({"a": X, "b": 2 * X})
    np.testing.assert_allclose(out["a"], pairs[1].layer(X), rtol=1e-6)
    np.testing.assert_allclose(out["b"], pairs[0].layer(2 * X), rtol=1e-6)


def test_stacks_nest() -> None:
    nested = stack(lambda key: stack(Layer, 3, key, axis="inner"), 2, KEY, axis="outer")
    assert nested.layer.layer.weight.shape == (2, 3, SIZE, SIZE)
    assert [len(inner) for inner in nested] == [3, 3]
    expected = X
    for inner in nested:
        expected = loop(inner, expected)
    np.testing.assert_allclose(nested(X), expected, rtol=1e-6)


def test_a_weak_input() -> None:
    class Double(eqx.Module):
        factor: Array

        def __call__(self, x: Array) -> Array:
            return x * self.factor

    doubles = Stacked(Double(jnp.full((3,), 2.0)))
    assert float(doubles(1.0)) == 8.0


# A sequence


def test_iteration_and_index(layers: Stacked[Layer]) -> None:
    assert len(layers) == DEPTH and len(list(layers)) == DEPTH
    for i, layer in enumerate(layers):
        assert isinstance(layer, Layer)
        for same in (layers[i], layers[i - DEPTH], layers[np.int64(i)], layers[jnp.int32(i)]):
            assert eqx.tree_equal(layer, same)
        np.testing.assert_array_equal(layer.weight, layers.layer.weight[i])


def test_a_traced_index(layers: Stacked[Layer]) -> None:
    pick = eqx.filter_jit(lambda layers, i: layers[i](X))
    for i in (0, 3, -1):
        np.testing.assert_allclose(pick(layers, jnp.int32(i)), layers[i](X), rtol=1e-6)


PARTS = [slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(-2, None)]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_slices(layers: Stacked[Layer], part: slice) -> None:
    some = layers[part]
    assert isinstance(some, Stacked) and len(some) == len(range(DEPTH)[part])
    for layer, i in zip(some, range(DEPTH)[part], strict=True):
        assert eqx.tree_equal(layer, layers[i])


def test_numpy_and_keys_are_arrays_too() -> None:
    held = Stacked({"n": np.arange(6.0, dtype=np.float32).reshape(3, 2), "key": jax.random.split(KEY, 3)})
    assert len(held) == 3
    assert held[1]["key"] == jax.random.split(KEY, 3)[1]
    assert jax.jit(lambda i: held[i]["n"])(2).tolist() == [4.0, 5.0]


def test_an_abstract_stack(layers: Stacked[Layer]) -> None:
    abstract = eqx.filter_eval_shape(stack, Layer, DEPTH, KEY)
    assert len(abstract) == DEPTH
    assert abstract[0].weight == jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    assert abstract[1:].layer.weight.shape == (DEPTH - 1, SIZE, SIZE)
    assert Stacked(abstract.layer, axis="other").axis == "other"


# Compilation and memory


def instructions(fun: Callable[..., Any], *args: Any) -> int:
    return len(jax.jit(fun).lower(*args).compile().as_text().splitlines())


def run(layer: Layer, arrays: Array, remat: Any, **options: Any) -> Array:
    stacked = Stacked(eqx.tree_at(lambda layer: layer.weight, layer, arrays))
    return jnp.sum(stacked.scan(X, remat=remat, **options))


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("transform", [lambda fun: fun, jax.grad], ids=["forward", "backward"])
def test_compiled_size_does_not_grow_with_depth(layers: Stacked[Layer], remat: Any, transform: Any) -> None:
    def size(n: int) -> int:
        weights = jnp.ones((n, SIZE, SIZE))
        return instructions(transform(lambda weights: run(layers[0], weights, remat)), weights)

    assert size(64) <= 1.02 * size(8)


OFFLOAD = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["y"],
    offload_src="device",
    offload_dst="pinned_host",
)
REMATS = {
    "full": "full",
    "dots": "dots",
    "everything": policies.everything_saveable,
    "names": policies.save_only_these_names("y"),
    "offload": OFFLOAD,
}


@pytest.mark.parametrize("unroll", [1, 2, True])
@pytest.mark.parametrize("remat", REMATS)
def test_remat_changes_nothing(layers: Stacked[Layer], remat: str, unroll: int) -> None:
    def value_and_grad(**options: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda w: run(layers[0], w, **options)))(layers.layer.weight)

    value, grad = value_and_grad(remat=None)
    again, grad_again = value_and_grad(remat=REMATS[remat], unroll=unroll)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    np.testing.assert_allclose(grad, grad_again, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unroll", [1, True])
def test_remat_recomputes(layers: Stacked[Layer], unroll: Any) -> None:
    """By the tanhs of the compiled program: once forward, and again in the backward pass if recomputed."""

    def tanhs(remat: Any) -> int:
        grad = jax.grad(lambda w: run(layers[0], w, remat, unroll=unroll))
        return jax.jit(grad).lower(layers.layer.weight).compile().as_text().count(" tanh(")

    once = DEPTH if unroll is True else 1
    assert tanhs(None) == tanhs(policies.everything_saveable) == once
    assert once < tanhs("full") <= 2 * once
    assert once < tanhs("dots") <= 2 * once


def test_policies() -> None:
    assert remat_policy(None) is None
    assert remat_policy("full") is policies.nothing_saveable
    assert remat_policy("dots") is policies.dots_with_no_batch_dims_saveable
    assert remat_policy(policies.dots_saveable) is policies.dots_saveable


# Errors


class Odd(eqx.Module):
    """Returns something other than it was given."""

    weight: Array
    fun: Callable[[Array], Any] = eqx.field(static=True)

    def __call__(self, x: Array) -> Any:
        return self.fun(x)


def odd(fun: Callable[[Array], Any]) -> Stacked[Odd]:
    return Stacked(Odd(jnp.ones((2, 1)), fun))


ERRORS: dict[str, tuple[type[Exception], Callable[[], Any], list[str]]] = {
    "leading sizes differ": (
        FunctreeError,
        lambda: Stacked({"a": jnp.ones((3, 4)), "b": [jnp.ones(2)]}),
        ['one leading size, that of "layers"', "layer.a", "size 3", "layer.b.0", "size 2", "ft.stack"],
    ),
    "a scalar leaf": (
        FunctreeError,
        lambda: Stacked({"a": jnp.ones(3), "b": jnp.float32(1)}, axis="stage"),
        ['that of "stage"', "layer.b", "no dimension at all"],
    ),
    "no arrays": (FunctreeError, lambda: Stacked({"a": 1}), ["dict has no array leaves"]),
    "no arrays in a layer": (FunctreeError, lambda: stack(lambda key: {"a": 1}, 3, KEY), ["no array leaves"]),
    "the axis is no identifier": (
        AxesError,
        lambda: Stacked(jnp.ones(3), axis="my axis"),
        ["Stacked(axis='my axis')", "identifier"],
    ),
    "the axis is no text": (
        AxesError,
        lambda: Stacked(jnp.ones(3), axis=0),
        ["Stacked(axis=0)", "identifier"],
    ),
    "no layers": (FunctreeError, lambda: stack(Layer, 0, KEY), ["stack(n=0)", "positive integer"]),
    "half a layer": (FunctreeError, lambda: stack(Layer, 2.5, KEY), ["stack(n=2.5)", "positive integer"]),
    "index above": (
        FunctreeError,
        lambda: stack(Layer, 2, KEY)[2],
        ["layer 2 of a Stacked of 2", "out of range"],
    ),
    "index below": (FunctreeError, lambda: stack(Layer, 2, KEY)[-3], ["layer -3 of a Stacked of 2"]),
    "index of a wrong type": (
        FunctreeError,
        lambda: stack(Layer, 2, KEY)["first"],
        ["takes an integer", "slice", "'first'"],
    ),
    "index of a wrong dtype": (
        FunctreeError,
        lambda: stack(Layer, 2, KEY)[jnp.ones(())],
        ["takes an integer"],
    ),
    "an unknown policy": (
        FunctreeError,
        lambda: stack(Layer, 2, KEY).scan(X, remat="all"),
        ["remat='all'", '"full"', '"dots"', "jax.checkpoint_policies"],
    ),
    "another shape": (
        FunctreeError,
        lambda: odd(lambda x: x[:, :2])(X),
        ["Odd takes float32[3,4] and returns float32[3,2]", "for layer in stacked"],
    ),
    "another dtype": (
        FunctreeError,
        lambda: odd(lambda x: x.astype(jnp.bfloat16)).scan(X, remat="full"),
        ["Odd takes float32[3,4] and returns bfloat16[3,4]"],
    ),
    "another structure": (
        FunctreeError,
        lambda: odd(lambda x: (x, x))(X),
        ["Odd takes float32[3,4] and returns (float32[3,4], float32[3,4])"],
    ),
    "nothing": (FunctreeError, lambda: odd(lambda x: None)(X), ["returns None"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    error, wrong, fragments = ERRORS[case]
    with pytest.raises(error) as caught:
        wrong()
    for fragment in fragments:
        assert fragment in str(caught.value)
