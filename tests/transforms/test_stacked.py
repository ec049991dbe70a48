"""`Stacked` against a Python loop over its layers."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

import functree as ft
from functree.errors import AxesError, FunctreeValueError
from functree.transforms.remat import offload
from functree.transforms.stacked import Stacked, stack

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
    assert layers.stack_axes() == ("layers",) and layers[1:].axis == "layers"
    assert stack(Layer, 2, KEY, axis="stages").stack_axes() == ("stages",)
    for i, key in enumerate(keys):
        np.testing.assert_array_equal(layers.layer.weight[i], Layer(key).weight)


@pytest.mark.parametrize("args", [(), (2.0,), (jnp.float32(2), jnp.ones((3, SIZE)))], ids=len)
def test_a_call_is_a_loop(layers: Stacked[Layer], args: tuple[Any, ...]) -> None:
    np.testing.assert_allclose(layers(X, *args), loop(layers, X, *args), rtol=1e-6)
    np.testing.assert_allclose(eqx.filter_jit(layers)(X, *args), loop(layers, X, *args), rtol=1e-6)


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


# A sequence


def test_iteration_and_index(layers: Stacked[Layer]) -> None:
    assert len(layers) == DEPTH and len(list(layers)) == DEPTH
    for i, layer in enumerate(layers):
        assert isinstance(layer, Layer)
        for same in (layers[i], layers[i - DEPTH], layers[np.int64(i)], layers[jnp.int32(i)]):
            assert eqx.tree_equal(layer, same)
        np.testing.assert_array_equal(layer.weight, layers.layer.weight[i])


def test_an_index_that_is_an_array_is_clamped(layers: Stacked[Layer]) -> None:
    pick = eqx.filter_jit(lambda layers, i: layers[i])
    for i, wanted in ((3, 3), (-1, -1), (DEPTH, -1), (DEPTH + 5, -1), (-DEPTH - 5, 0)):
        for found in (layers[jnp.int32(i)], pick(layers, jnp.int32(i))):
            assert eqx.tree_equal(found, layers[wanted])
    with pytest.raises(IndexError):
        layers[DEPTH]


PARTS = [slice(1, 3), slice(None, None, -1)]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_slices(layers: Stacked[Layer], part: slice) -> None:
    some = layers[part]
    assert isinstance(some, Stacked) and len(some) == len(range(DEPTH)[part])
    for layer, i in zip(some, range(DEPTH)[part], strict=True):
        assert eqx.tree_equal(layer, layers[i])


def test_numpy_and_keys_are_arrays_too() -> None:
    held = Stacked(
        {"n": np.arange(6.0, dtype=np.float32).reshape(3, 2), "key": jax.random.split(KEY, 3)}
    )
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
def test_compiled_size_does_not_grow_with_depth(
    layers: Stacked[Layer], remat: Any, transform: Any
) -> None:
    def size(n: int) -> int:
        weights = jnp.ones((n, SIZE, SIZE))
        return instructions(transform(lambda weights: run(layers[0], weights, remat)), weights)

    assert size(64) <= 1.02 * size(8)


@pytest.mark.parametrize("unroll", [1, True])
def test_remat_recomputes(layers: Stacked[Layer], unroll: Any) -> None:
    """By the tanhs of the compiled program: once forward, and again in the backward pass if
    recomputed."""

    def tanhs(remat: Any) -> int:
        grad = jax.grad(lambda w: run(layers[0], w, remat, unroll=unroll))
        return jax.jit(grad).lower(layers.layer.weight).compile().as_text().count(" tanh(")

    once = DEPTH if unroll is True else 1
    assert tanhs(None) == tanhs(policies.everything_saveable) == once
    assert once < tanhs("full") <= 2 * once
    assert once < tanhs("dots") <= 2 * once


# Offload. The compiled CPU program shows none: the gradient's jaxpr does.


class Twice(eqx.Module):
    """Names two values, of different shapes, that the backward pass needs."""

    up: Array
    down: Array

    def __init__(self, key: PRNGKeyArray):
        self.up, self.down = jax.random.normal(key, (SIZE, 6)), jax.random.normal(key, (6, SIZE))

    def __call__(self, x: Array) -> Array:
        wide = checkpoint_name(jnp.tanh(x @ self.up), "wide")
        return jnp.tanh(checkpoint_name(wide @ self.down, "narrow"))


TWICE = stack(Twice, DEPTH, KEY)
SMALL, LARGE = "float32[5,3,4]", "float32[5,3,6]"
NARROW, WIDE = "float32<host>[5,3,4]", "float32<host>[5,3,6]"


def gradient(remat: Any, unroll: int | bool = 1) -> Callable[[Any, Array], Any]:
    return jax.grad(lambda layers, x: jnp.sum(layers.scan(x, remat=remat, unroll=unroll)))


def inside(jaxpr: Any) -> Iterator[Any]:
    """All equations below, those of inner programs too."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                yield from inside(inner) if hasattr(inner, "eqns") else ()


def loops(fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The forward and the backward loop of a gradient."""
    forward, backward = (
        eqn for eqn in jax.make_jaxpr(fun)(*args).eqns if eqn.primitive.name == "scan"
    )
    assert backward.params["reverse"] and not forward.params["reverse"]
    return forward, backward


def moved(loop: Any) -> list[tuple[tuple[int, ...], str]]:
    """The shapes that a loop moves in each step, and where to."""
    puts = [eqn for eqn in inside(loop.params["jaxpr"]) if eqn.primitive.name == "device_put"]
    return sorted((eqn.outvars[0].aval.shape, eqn.params["devices"][0].name) for eqn in puts)


@pytest.mark.parametrize("unroll", [1, True])
@pytest.mark.parametrize(
    ("remat", "kept"),
    [
        ("full", [SMALL]),  # the layer's input
        (offload("wide"), [WIDE, SMALL]),
        (offload("narrow", "wide"), [NARROW, WIDE, SMALL]),
        (offload("narrow", others=offload("wide")), [NARROW, WIDE, SMALL]),
        (
            offload("wide", others="dots"),
            [WIDE, SMALL, SMALL, LARGE],
        ),  # the input and the two products
        (offload("wide", others=policies.save_only_these_names("narrow")), [WIDE, SMALL, SMALL]),
    ],
)
def test_offload_keeps_named_values_on_the_host(remat: Any, kept: list[str], unroll: int) -> None:
    forward, backward = loops(gradient(remat, unroll), TWICE, X)
    assert sorted(str(var.aval) for var in forward.outvars[1:]) == kept
    shapes = [(3, 4)] * kept.count(NARROW) + [(3, 6)] * kept.count(WIDE)
    assert moved(forward) == [(shape, "Host") for shape in shapes]
    assert moved(backward) == [(shape, "Device") for shape in shapes]
    value, expected = gradient(remat, unroll)(TWICE, X), gradient(None)(TWICE, X)
    np.testing.assert_allclose(value.layer.up, expected.layer.up, rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(value.layer.down, expected.layer.down, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("others", "again"), [("full", 2), ("dots", 2), (None, 0)])
def test_what_is_computed_again_beside_an_offload(others: Any, again: int) -> None:
    _, backward = loops(gradient(offload("wide", others=others)), TWICE, X)
    assert [eqn.primitive.name for eqn in inside(backward.params["jaxpr"])].count("tanh") == again


def test_names_are_found_in_inner_programs_too() -> None:
    """Each is offloaded by JAX as well."""

    @jax.custom_vjp
    def custom(x: Array) -> Array:
        return jnp.sin(x)

    custom.defvjp(
        lambda x: (jnp.sin(x), checkpoint_name(jnp.cos(x), "in_rule")),
        lambda cos, tangent: (tangent * cos,),
    )

    def square(name: str) -> Callable[[Array], Array]:
        return lambda x: checkpoint_name(jnp.sin(x), name) ** 2

    def layer(x: Array) -> Array:
        x = jax.jit(square("in_jit"))(x)
        x = jax.lax.scan(lambda x, _: (square("in_scan")(x), None), x, length=2)[0]
        return custom(jax.lax.cond(x[0, 0] > 0, square("in_cond"), jnp.cos, x))

    layers = returning(layer)
    for name in ("in_jit", "in_scan", "in_cond", "in_rule"):
        by_x = jax.grad(lambda x, name=name: jnp.sum(layers.scan(x, remat=offload(name))))
        forward, _ = loops(by_x, X)
        assert [where for _, where in moved(forward)] == ["Host"]
        layers.scan(X, remat=offload(name))  # nor is it missed where nothing is differentiated
    with pytest.raises(FunctreeValueError, match="one of `in_cond`, `in_jit`, `in_scan`"):
        layers.scan(X, remat=offload("elsewhere"))


def test_offload_is_a_value() -> None:
    assert offload("a", "b") == offload("a", "b") and hash(offload("a")) == hash(offload("a"))
    others = offload("b"), offload("a", others="dots"), offload("a", others=None)
    assert len({offload("a"), *others}) == 4


# The names in `ft.nn`

CONFIG = ft.nn.TransformerConfig(16, 8, layers=3, heads=4, kv_heads=2, head_dim=6, hidden=10)
TOKENS = jnp.arange(5)
NAMES = {
    "block_input": (5, 8),
    "attn_query": (5, 4, 6),
    "attn_key": (5, 2, 6),
    "attn_value": (5, 2, 6),
    "attn_mixed": (5, 4, 6),
    "attn_out": (5, 8),
    "mlp_gate": (5, 10),
    "mlp_up": (5, 10),
}


def model_loss(remat: Any) -> tuple[Callable[..., Any], ft.nn.Transformer]:
    """The loss and gradient of a transformer, and the transformer's shapes."""
    create = ft.abstract(ft.nn.Transformer.create)
    model = create(dataclasses.replace(CONFIG, remat=remat), key=KEY)
    return jax.value_and_grad(lambda model: jnp.mean(model(TOKENS) ** 2)), model


def test_the_names_of_the_transformer() -> None:
    forward, backward = loops(*model_loss(offload(*NAMES)))
    assert moved(forward) == sorted((shape, "Host") for shape in NAMES.values())
    assert moved(backward) == sorted((shape, "Device") for shape in NAMES.values())


def test_a_transformer_with_its_blocks_inputs_offloaded_keeps_nothing_on_the_device() -> None:
    forward, _ = loops(*model_loss(offload("block_input")))
    assert [str(var.aval) for var in forward.outvars[1:]] == ["float32<host>[3,5,8]"]


def test_every_name_is_known_to_the_error() -> None:
    loss, model = model_loss(offload("mpl_gate"))
    with pytest.raises(FunctreeValueError, match="did you mean `mlp_gate`") as caught:
        jax.eval_shape(loss, model)
    assert ", ".join(f"`{name}`" for name in sorted(NAMES)) in str(caught.value)


# Inputs and outputs of each layer


class Cell(eqx.Module):
    """A layer with dropout, a cache that it reads and writes, and a count of its calls."""

    weight: Float[Array, "embed embed"]
    dropout: ft.nn.Dropout
    calls: ft.StateRef

    def __init__(self, key: PRNGKeyArray):
        self.weight = jax.random.normal(key, (SIZE, SIZE)) / 2
        self.dropout = ft.nn.Dropout(0.5)
        self.calls = ft.StateRef(jnp.zeros((), jnp.int32))

    def __call__(self, x: Array, *args: Any, **given: Any) -> Any:
        y = jnp.tanh(x @ self.weight)
        for scale in (*args, given.get("scale", 1.0)):
            y = y * scale
        if "key" in given:
            y = self.dropout(y, key=given["key"])
        results: list[Any] = [y]
        if "cache" in given:
            cache = {"k": given["cache"]["k"] + y, "unused": None}
            results.append({"cache": cache, "norm": jnp.sum(y**2), "number": 1.5})
        if "state" in given:
            state = given["state"]
            results.append(state.set(self.calls, state[self.calls] + 1))
        return results[0] if len(results) == 1 else tuple(results)


def cells() -> tuple[Stacked[Cell], ft.State]:
    return ft.make_state(stack(Cell, DEPTH, KEY))


KEYS = jax.random.split(jax.random.key(2), DEPTH)
SCALES = jnp.linspace(0.5, 1.5, DEPTH)
CACHES = {
    "k": jnp.arange(DEPTH * 3 * SIZE, dtype=jnp.float32).reshape(DEPTH, 3, SIZE),
    "unused": None,
}
EACH: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "a key": ((), {"key": KEYS}),
    "of numpy": ((), {"scale": np.asarray(SCALES)}),
    "beside what is shared": (
        (2.0, jnp.float32(3)),
        {"key": KEYS, "scale": SCALES, "cache": CACHES},
    ),
}


def by_hand(stacked: Any, x: Any, args: Any, each: Any, state: Any = None) -> tuple[Any, list[Any]]:
    """Layer by layer, each with its own part."""
    outs: list[Any] = []
    for i in range(DEPTH):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], eqx.filter(stacked.layer, eqx.is_array))
        layer = eqx.combine(layer, eqx.filter(stacked.layer, eqx.is_array, inverse=True))
        result = layer(x, *args, **jax.tree.map(lambda leaf, i=i: leaf[i], each))
        x, out = result if isinstance(result, tuple) else (result, None)
        outs.append(out)
    return x, outs


@pytest.mark.parametrize("case", EACH)
@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("unroll", [1, True])
def test_each_layer_gets_its_part(case: str, remat: Any, unroll: Any) -> None:
    args, each = EACH[case]
    stacked, _ = cells()
    collect = "cache" in each

    def scanned(stacked: Any, each: Any) -> Any:
        result = stacked.scan(X, *args, each=each, collect=collect, remat=remat, unroll=unroll)
        return result if collect else (result, None)

    y, outs = ft.jit(scanned)(stacked, each) if case != "nothing" else scanned(stacked, None)
    expected, parts = by_hand(stacked, X, args, each)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    if collect:
        wanted = jax.tree.map(lambda *leaves: jnp.stack(list(map(jnp.asarray, leaves))), *parts)
        assert jax.tree.structure(outs) == jax.tree.structure(wanted)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4), outs, wanted
        )
        assert outs["number"].tolist() == [1.5] * DEPTH and outs["cache"]["unused"] is None


@pytest.mark.parametrize("collect", [False, True])
def test_state_comes_last(collect: bool) -> None:
    stacked, state = cells()
    each: dict[str, Any] = {"scale": SCALES, **({"cache": CACHES} if collect else {})}
    *results, after = stacked.scan(X, each=each, collect=collect, state=state)
    assert len(results) == 1 + collect
    np.testing.assert_allclose(results[0], by_hand(stacked, X, (), each)[0], rtol=1e-5)
    [calls] = jax.tree.leaves(after)
    assert calls.tolist() == [1] * DEPTH


# Errors


class Returns(eqx.Module):
    """A layer that returns whatever it is told to."""

    weight: Array
    result: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, x: Array, *, key: Any = None, **given: Any) -> Any:
        return self.result(x)


def returning(result: Callable[[Any], Any]) -> Stacked[Returns]:
    return Stacked(Returns(jnp.ones(DEPTH), result))


SAME = returning(lambda x: x)
# A call, and how its error begins.
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "leading sizes differ": (
        lambda: Stacked({"a": jnp.ones((3, 4)), "b": [jnp.ones(2)]}, axis="stage"),
        'Stacked: all arrays need the same leading size, the size of "stage"\n\n'
        "  layer.b.0   f32[2]\n      does not have a leading dimension of size 3\n\n",
    ),
    "no arrays": (lambda: Stacked({"a": 1}), "Stacked: dict has no array leaves"),
    "the axis is no identifier": (
        lambda: Stacked(jnp.ones(3), axis="my axis"),
        "Stacked(axis='my axis'): the name of an axis must be an identifier",
    ),
    "index below": (
        lambda: SAME[-6],
        "range object index out of range",
    ),
    "no names in a layer": (
        lambda: SAME.scan(X, remat=offload("wide")),
        'offload: cannot find 1 name in Returns\n\n  "wide"\n'
        "      no value has this name\n\nTry: name a value: `x = jax.ad_checkpoint.checkpoint_name(x",
    ),
    "another shape": (
        lambda: returning(lambda x: x[:, :2])(X),
        "Stacked.scan: Returns takes float32[3,4] but returns float32[3,2]. The result of each",
    ),
    "one key for all": (
        lambda: SAME.scan(X, each={"key": KEY}),
        "Stacked.scan: arrays in `each` need one slice for each layer\n\n  each.key   key<fry>[]\n"
        "      does not have a leading dimension of size 5\n\n"
        "Try: split a random key, `jax.random.split(key, 5)`, and pass a value that all layers share",
    ),
    "arrays for another number": (
        lambda: SAME.scan(X, each={"cache": {"k": jnp.ones((4, 2)), "v": jnp.ones((5, 2))}}),
        "Stacked.scan: arrays in `each` need one slice for each layer\n\n"
        "  each.cache.k   f32[4, 2]\n      does not have a leading dimension of size 5\n\n",
    ),
    "the state": (
        lambda: SAME.scan(X, each={"state": KEYS}),
        "Stacked.scan: invalid arguments\n\n  each={'state': ",
    ),
    "no pair": (
        lambda: SAME.scan(X, collect=True),
        "Stacked.scan: with these options, Returns must return `(y, out)`",
    ),
    "no state": (
        lambda: returning(lambda x: (x, x)).scan(X, collect=True, state=ft.State((), {})),
        "Stacked.scan: with these options, Returns must return `(y, out, state)`",
    ),
}


# What is not of the class FunctreeValueError.
CLASSES: dict[str, type[Exception]] = {
    "index below": IndexError,
    "the axis is no identifier": AxesError,
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, beginning = ERRORS[case]
    with pytest.raises(CLASSES.get(case, FunctreeValueError)) as caught:
        call()
    assert str(caught.value).startswith(beginning), str(caught.value)


REMATS = {
    "full": "full",
    "dots": "dots",
    "a policy of JAX": policies.save_only_these_names("y"),
    "offload and dots": offload("y", others="dots"),
    "offload, and keep the others": offload("y", others=None),
}


@pytest.mark.parametrize("unroll", [1, True])
@pytest.mark.parametrize("remat", REMATS)
def test_remat_changes_nothing(layers: Stacked[Layer], remat: str, unroll: int) -> None:
    def value_and_grad(**options: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda w: run(layers[0], w, **options)))(
            layers.layer.weight
        )

    value, grad = value_and_grad(remat=None)
    again, grad_again = value_and_grad(remat=REMATS[remat], unroll=unroll)
    np.testing.assert_allclose(value, again, rtol=1e-5)
    np.testing.assert_allclose(grad, grad_again, rtol=1e-4, atol=1e-5)
