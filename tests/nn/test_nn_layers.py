"""Every layer: on a mesh as on one device, and as Equinox's; state through jit; layers in a row,
jitted."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree import nn
from functree.errors import AxesError, FunctreeError
from tests.lib.checks import raises
from tests.lib.covering import selected_cells
from tests.lib.meshes import assert_lies

P = PartitionSpec
KEY = jax.random.key(0)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4, 8)).astype(np.float32)
TOKENS = RANDOM.integers(0, 16, (16, 4)).astype(np.int32)


@pytest.fixture(autouse=True)
def _precise() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def filled(tree: Any) -> Any:
    """With weights that are neither ones nor zeros, so that each is seen to be used."""
    random = np.random.default_rng(1)

    def fill(leaf: Any) -> Any:
        return np.asarray(random.normal(size=leaf.shape) / 2, leaf.dtype)

    trained = ft.select(tree).where(ft.is_trainable)
    return trained.apply(fill) if trained else tree


# Sharded equals unsharded

TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
FALLBACK = [("batch", "data"), *TENSOR.items(), ("embed", "data"), ("embed", None), (..., None)]
LAYOUTS = {
    "tensor": ft.AxisRules({"batch": "data", **TENSOR, ...: None}),
    "fsdp": ft.AxisRules(
        [("batch", "data"), ("embed", "data"), ("hidden", "data"), ("heads", "data"), (..., None)]
    ),
    "fsdp and tensor": ft.AxisRules(FALLBACK),
    "channels": ft.AxisRules({"batch": "data", "embed": "model", ...: None}),
}
# Those that are in no Transformer, which test_nn_sharded.py has on a mesh, and those of channels.
LAYERS: dict[str, Callable[[], Any]] = {
    "Embedding": lambda: nn.Embedding(16, 8, key=KEY),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "BatchNorm": lambda: nn.BatchNorm(8),
    "Dropout": lambda: nn.Sequential(
        [nn.Linear(8, 8, axes="embed hidden", key=KEY), nn.Dropout(0.3)]
    ),
    "Constrain": lambda: nn.Sequential(
        [nn.Linear(8, 16, key=KEY), nn.Constrain("batch seq hidden"), jax.nn.gelu]
    ),
    "Jitted": lambda: nn.Jitted(nn.MLP(8, 16, key=KEY)),
    "Sequential": lambda: nn.Sequential(
        [
            nn.LayerNorm(
                8, use_bias=False
            ),  # the gradient of a shift before a BatchNorm is nothing but rounding
            nn.Linear(8, 16, use_bias=False, key=KEY),
            nn.BatchNorm(16, axes="hidden"),
            jax.nn.gelu,
            nn.Jitted(nn.Dropout(0.2)),
            nn.Linear(16, 8, axes="hidden embed", key=KEY),
        ]
    ),
}
OF_TRANSFORMERS: list[Callable[[], Any]] = [
    lambda: nn.Attention(8, 2, qk_norm=True, window=4, key=KEY),
    lambda: nn.MoE(8, 16, 4, 2, capacity=1.25, key=KEY),
    lambda: nn.Transformer.create(nn.TransformerConfig(16, 8, 2, 2, 2, 4, 16), key=KEY),
]
CHANNELS = ("RMSNorm", "LayerNorm", "BatchNorm", "Embedding")


def run(layer: Any, x: Any, state: Any) -> tuple[Any, Any]:
    """Any layer, with what it needs."""
    if isinstance(layer, nn.Sequential):
        result = layer(x, state=state, key=KEY)
    elif isinstance(layer, nn.BatchNorm):
        result = layer(x, state)
    else:
        result = layer(x)
    return result if isinstance(result, tuple) else (result, state)


def loss(layer: Any, x: Any, state: Any) -> tuple[Any, Any]:
    y, state = run(layer, x, state)
    return jnp.sum(jnp.sin(y)), (y, state)  # whose gradient by y is neither constant nor y


@functools.cache
def made(name: str) -> tuple[Any, Any, Any]:
    """A layer, its state, its input."""
    layer, state = ft.make_state(filled(eqx.filter_jit(LAYERS[name])()))
    return layer, state, TOKENS if name == "Embedding" else X


@functools.cache
def alone(name: str) -> Any:
    """What it gives on one device: the value, the result, the state, the gradient."""
    layer, state, x = made(name)
    with jax.default_matmul_precision("highest"):
        return ft.jit(ft.value_and_grad(loss, has_aux=True))(layer, x, state)


CASES = [
    (name, layout, axes)
    for name in LAYERS
    for layout in LAYOUTS
    for axes in ("auto", "explicit")
    if layout != "channels" or name in CHANNELS
]


@pytest.mark.parametrize(("name", "layout", "kind"), selected_cells(CASES))
def test_sharded_is_unsharded(name: str, layout: str, kind: str) -> None:
    explicit, rules = kind == "explicit", LAYOUTS[layout]
    mesh = ft.make_mesh(data=2, model=2, explicit=explicit, devices=jax.devices()[:4])
    layer, state, x = made(name)
    axes = "batch seq" if x.ndim == 2 else "batch seq embed"
    placed = [ft.shard(tree, rules, mesh) for tree in (layer, state)]
    step = ft.jit(ft.value_and_grad(loss, has_aux=True), rules=rules)
    (_, (y, after)), grads = step(placed[0], ft.shard(x, rules, mesh, axes=axes), placed[1])
    (_, (expected, expected_state)), expected_grads = alone(name)
    # Sums over a batch in another order: an element near zero has the error of the others.
    near = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=near)
    close(after, expected_state, 1e-5)
    close(grads, expected_grads, 1e-4)
    shardings = zip(
        jax.tree.leaves(grads), ft.select(placed[0]).where(ft.is_trainable), strict=True
    )
    assert all(grad.sharding.is_equivalent_to(leaf.sharding, leaf.ndim) for grad, leaf in shardings)


def close(found: Any, expected: Any, rtol: float) -> None:
    """Leaf by leaf, where an element near zero has the error of the leaf's largest."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max() + 1e-7)


# LayerNorm


@pytest.mark.parametrize("use_weight", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
def test_layer_norm_is_equinoxs(use_weight: bool, use_bias: bool) -> None:
    ours, theirs = (
        nn.LayerNorm(8, 1e-3, use_weight, use_bias),
        eqx.nn.LayerNorm(8, 1e-3, use_weight, use_bias),
    )
    ours, theirs = filled(ours), filled(theirs)
    expected = jax.vmap(jax.vmap(theirs))(X + 3)
    np.testing.assert_allclose(ours(jnp.asarray(X + 3)), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.vmap(ours))(X + 3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("compute_dtype", "dtype", "near"), [(None, "bfloat16", 2e-2), ("float32", "float32", 1e-4)]
)
def test_layer_norm_computes_in_float32(compute_dtype: Any, dtype: str, near: float) -> None:
    x = jnp.asarray(X * 100 + 1000, jnp.bfloat16)
    y = nn.LayerNorm(8, compute_dtype=compute_dtype)(x)
    wide = np.asarray(x, np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=near)


def test_a_constant_vector_is_finite() -> None:
    for layer in (nn.LayerNorm(4), nn.RMSNorm(4)):
        assert jnp.isfinite(jax.grad(lambda x, layer=layer: layer(x).sum())(jnp.full(4, 1e4))).all()


@pytest.mark.parametrize("layer", [nn.LayerNorm, nn.BatchNorm], ids=["LayerNorm", "BatchNorm"])
def test_the_axes_of_norms(layer: Any) -> None:
    axes = ft.tree_axes(layer(4, axes="hidden"))
    assert axes.weight == axes.bias == ft.Axes("hidden") and ft.tree_axes(
        layer(4)
    ).weight == ft.Axes("embed")
    with pytest.raises(AxesError, match=r'axes="a b".*name 1 dimension'):
        layer(4, axes="a b")


def test_a_norm_over_several_dimensions() -> None:
    layer = filled(nn.RMSNorm((4, 2), 1e-3, axes="heads head_dim"))
    assert ft.tree_axes(layer).scale == ft.Axes("heads", "head_dim")
    x = X.reshape(*X.shape[:-1], 4, 2)
    mean = (x.astype(np.float64) ** 2).mean((-2, -1), keepdims=True)
    expected = x / np.sqrt(mean + 1e-3) * np.asarray(layer.scale)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AxesError, match=r'axes="embed".*name 2 dimensions'):
        nn.RMSNorm((4, 2))
    for size, axes in (((), ft.Axes()), ((4, 0), "heads head_dim"), (0, "embed")):
        with pytest.raises(
            ft.FunctreeError, match="a positive integer, or a tuple of positive integers"
        ):
            nn.RMSNorm(size, axes=axes)


# BatchNorm


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_batch_norm_is_equinoxs(affine: bool) -> None:
    ours, state = ft.make_state(filled(nn.BatchNorm(8, None, 1e-3, affine, 0.75)))
    theirs, their_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        8, "batch", 1e-3, affine, 0.75, mode="batch"
    )
    if affine:
        theirs = eqx.tree_at(
            lambda layer: (layer.weight, layer.bias), theirs, (ours.weight, ours.bias)
        )
    with jax.numpy_dtype_promotion("standard"):
        them = jax.vmap(theirs, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        for step in range(3):
            x = jnp.asarray(X * (step + 1) + step)
            y, state = ours(x, state)
            expected, their_state = them(x.reshape(-1, 8), their_state)
            np.testing.assert_allclose(y.reshape(-1, 8), expected, rtol=1e-4, atol=1e-5)
            averages = jnp.stack([state[ours.mean], state[ours.var]])
            theirs_now = their_state.get(theirs.batch_state_index)
            np.testing.assert_allclose(averages, theirs_now, rtol=1e-5, atol=1e-6)


def test_batch_norm_in_inference() -> None:
    trained, state = ft.make_state(filled(nn.BatchNorm(8, momentum=0.0)))
    _, state = trained(jnp.asarray(X), state)
    y, after = trained(jnp.asarray(X[:1, 0] * 2), state, inference=True)
    mean, var = np.asarray(state["mean"]), np.asarray(state["var"])
    expected = (X[:1, 0] * 2 - mean) / np.sqrt(var + 1e-5) * np.asarray(
        trained.weight
    ) + np.asarray(trained.bias)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert after is state
    one, _ = trained(jnp.asarray(X[0, 0] * 2), state, inference=True)  # no batch is needed
    np.testing.assert_allclose(one, y[0], rtol=1e-6)
    layer, state = ft.make_state(nn.BatchNorm(8, inference=True))
    assert layer(jnp.asarray(X), state)[1] is state
    assert layer(jnp.asarray(X), state, inference=False)[1] is not state


def test_batch_norm_in_bfloat16_keeps_wide_averages() -> None:
    layer, state = ft.make_state(nn.BatchNorm(8, param_dtype=jnp.bfloat16))
    y, after = layer(jnp.asarray(X, jnp.bfloat16), state)
    assert (
        y.dtype == layer.weight.dtype == jnp.bfloat16
        and after["mean"].dtype == after["var"].dtype == jnp.float32
    )


def test_one_vector_is_no_batch() -> None:
    layer, state = ft.make_state(nn.BatchNorm(8))
    with raises(
        "BatchNorm: x of shape (8,) has no batch dimension", "outside of `jax.vmap`", "axis_name="
    ):
        jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))(X[:, 0], state)


@pytest.mark.parametrize("axis", ["data", ["data", "model"]], ids=["one", "two"])
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_batch_norm_in_shard_map_with_axis_name(axis: Any, explicit: bool) -> None:
    mesh = ft.make_mesh(data=2, model=4, explicit=explicit)
    layer, state = ft.make_state(filled(nn.BatchNorm(8, axis)))
    spec = P(axis if isinstance(axis, str) else tuple(axis))

    @ft.shard_map(mesh=mesh, in_specs=(P(), spec, P()), out_specs=(spec, P()))
    def apply(layer: Any, x: Any, state: Any) -> Any:
        return layer(x, state)

    whole, _ = ft.make_state(filled(nn.BatchNorm(8)))
    expected, expected_state = whole(jnp.asarray(X), state)
    with jax.set_mesh(mesh):
        arguments = [ft.shard(tree, P(), mesh) for tree in (layer, state)]
        y, after = apply(arguments[0], ft.shard(jnp.asarray(X), spec, mesh), arguments[1])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    close(after, expected_state, 1e-5)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("channels", ["model", "data", ("data", "model"), None], ids=str)
def test_statistics_are_those_of_the_whole_batch_and_stay_where_they_are(
    channels: Any, explicit: bool
) -> None:
    mesh = ft.make_mesh(data=2, model=4, explicit=explicit)
    fallback = [("embed", "model")] if channels else []
    rules = ft.AxisRules([("batch", "data"), ("embed", channels), *fallback, ("seq", None)])
    layer, state = ft.init(lambda: ft.make_state(nn.BatchNorm(8)), rules, mesh)()
    alone, alone_state = ft.make_state(nn.BatchNorm(8))
    before = {path: value.sharding for path, value in state.items()}

    @ft.jit(rules=rules, donate="state")
    def apply(layer: Any, x: Any, state: Any) -> Any:
        return layer(x, state)

    for step in range(3):
        batch = jnp.asarray(X * (step + 1) + np.arange(16, dtype=np.float32)[:, None, None])
        x, old = ft.shard(batch, rules, mesh, axes="batch seq embed"), state
        y, state = apply(layer, x, state)
        expected, alone_state = alone(batch, alone_state)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        close(state, alone_state, 1e-5)
        assert all(value.is_deleted() for value in old.values())
    assert {path: value.sharding for path, value in state.items()} == before
    assert len(apply.compilations) == 1


class Residual(eqx.Module):
    norm: nn.BatchNorm
    scale: Float[Array, "embed"]

    def __call__(self, x: Any, *, state: Any) -> Any:
        y, state = self.norm(x, state)
        return x + jax.nn.relu(y) * jnp.broadcast_to(self.scale, y.shape), state


# What is called with `state=`: the stack, or a layer around it.
AROUND: dict[str, Any] = {
    "scan": lambda made: made,
    "Jitted in a Sequential": lambda made: nn.Sequential([nn.Jitted(made)]),
}


@pytest.mark.parametrize("how", AROUND)
def test_batch_norm_in_a_stack_has_a_state_for_each_layer(how: str) -> None:
    made = ft.stack(lambda key: Residual(nn.BatchNorm(8), jax.random.normal(key, (8,))), 3, KEY)
    layer, state = ft.make_state(AROUND[how](made))
    run = ft.jit(lambda layer, x, state: (layer.scan if how == "scan" else layer)(x, state=state))
    y, after = run(layer, jnp.asarray(X), state)
    x, means = jnp.asarray(X), []
    for i in range(3):
        layer, own = ft.make_state(Residual(nn.BatchNorm(8), made.layer.scale[i]))
        x, own = layer(x, state=own)
        means.append(own["norm.mean"])
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)
    (mean,) = [value for path, value in after.items() if path[-1] == "mean"]
    np.testing.assert_allclose(mean, jnp.stack(means), rtol=1e-5, atol=1e-6)


# Leaves


@pytest.mark.parametrize(
    "make", [*LAYERS.values(), *OF_TRANSFORMERS], ids=[*LAYERS, "Attention", "MoE", "Transformer"]
)
def test_a_layer_has_only_arrays_flags_and_functions(make: Callable[[], Any]) -> None:
    """Names of axes and numbers are static, so a layer can be mapped, and differentiated."""
    layer, _ = ft.make_state(make())
    for leaf in jax.tree.leaves(layer):
        assert isinstance(leaf, jax.Array | bool) or callable(leaf)


# Dropout


def test_dropout_is_equinoxs() -> None:
    x = jnp.asarray(X)
    assert jax.tree.leaves(nn.Dropout(0.25)) == [False]  # the probability is static
    for p in (0.0, 0.25, 0.9):
        np.testing.assert_array_equal(nn.Dropout(p)(x, key=KEY), eqx.nn.Dropout(p)(x, key=KEY))
    for ours, theirs in (
        (nn.Dropout(0.5, True), eqx.nn.Dropout(0.5, True)),
        (nn.Dropout(0.5), eqx.nn.Dropout(0.5)),
    ):
        for inference in (None, True, False):
            np.testing.assert_array_equal(
                ours(x, key=KEY, inference=inference), theirs(x, key=KEY, inference=inference)
            )


def test_dropout_in_inference_needs_no_key() -> None:
    x = jnp.asarray(X, jnp.bfloat16)
    assert nn.Dropout(0.5, inference=True)(x) is x and nn.Dropout(0.5)(x, inference=True) is x
    assert nn.Dropout(0.0)(x) is x and nn.Dropout(0.5)(x, key=KEY).dtype == jnp.bfloat16


def test_dropout_without_a_key() -> None:
    for call in (nn.Dropout(0.5), nn.Sequential([nn.Dropout(0.5)])):
        with pytest.raises(
            FunctreeError,
            match=r"needs a key in training. Call `layer\(x, key=key\)`, or pass `inference=True`",
        ):
            call(jnp.ones(3))


# Sequential


class Noise(eqx.Module):
    """Takes a key and state."""

    calls: ft.StateRef

    def __init__(self) -> None:
        self.calls = ft.StateRef(0)

    def __call__(self, x: Any, *, state: Any, key: Any) -> Any:
        return x + jax.random.normal(key, x.shape), state.set(self.calls, state[self.calls] + 1)


def test_sequential_is_one_after_another() -> None:
    linear, norm = nn.Linear(8, 4, key=KEY), nn.LayerNorm(4)
    mlp = nn.Sequential([linear, norm, jax.nn.relu, jnp.abs, eqx.nn.Lambda(jnp.sin)])
    x = jnp.asarray(X)
    np.testing.assert_array_equal(mlp(x), jnp.sin(jnp.abs(jax.nn.relu(norm(linear(x))))))
    assert len(mlp) == 5 and mlp[0] is linear and mlp[-4] is norm
    assert isinstance(mlp[:2], nn.Sequential) and len(mlp[:2]) == 2 and mlp[1:2][0] is norm
    assert nn.Sequential([])(x) is x and nn.Sequential(iter([linear]))[0] is linear
    assert ft.tree_axes(mlp).layers[0].weight == ft.Axes("embed", "hidden")


def test_sequential_gives_each_that_takes_one_a_key_of_its_own() -> None:
    keys: list[Any] = []

    def note(x: Any, key: Any) -> Any:
        keys.append(key)
        return x

    class Partial(eqx.Module):
        def __call__(self, x: Any, *, key: Any = None) -> Any:
            return note(x, key)

    layers = [note, jnp.sin, Partial(), nn.Sequential([Partial(), Partial()]), Partial()]
    nn.Sequential(layers)(jnp.ones(2), key=KEY)
    data = [tuple(map(int, jax.random.key_data(key))) for key in keys]
    assert len(data) == 5 and len({*data, tuple(map(int, jax.random.key_data(KEY)))}) == 6
    keys.clear()
    nn.Sequential([Partial()])(jnp.ones(2))
    assert keys == [None]


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, nn.Jitted, lambda x: nn.Jitted(nn.Jitted(x)), lambda x: nn.Sequential([x])],
    ids=["bare", "Jitted", "Jitted twice", "in one"],
)
def test_keys_and_state_reach_a_layer_that_is_wrapped(wrap: Any) -> None:
    model, state = ft.make_state(nn.Sequential([wrap(Noise()), wrap(nn.Dropout(0.5))]))
    x, after = model(jnp.ones((4, 4)), state=state, key=KEY)
    assert [int(calls) for calls in after.values()] == [1] and 0 < int((x == 0).sum()) < 16
    again, _ = model(jnp.ones((4, 4)), state=state, key=KEY)
    np.testing.assert_array_equal(x, again)


def test_sequential_without_the_state_it_needs() -> None:
    model, state = ft.make_state(nn.Sequential([nn.LayerNorm(8), nn.BatchNorm(8)]))
    told = (
        "Sequential: layer 1, BatchNorm, keeps state",
        "`state=state`",
        "ft.make_state(model)",
    )
    with raises(*told):
        model(jnp.asarray(X))
    assert nn.Sequential([jnp.sin])(X, state=state)[1] is state


# Constrain


RULES = ft.AxisRules({"batch": "data", "embed": "model", "seq": None})


def test_constrain_says_how_its_input_lies(mesh: Mesh) -> None:
    by_spec = nn.Constrain(P("data", None, "model"))
    for layer, ambient in ((nn.Constrain("batch seq embed"), RULES), (by_spec, None)):
        x = ft.shard(jnp.asarray(X), P(), mesh)
        y = ft.jit(lambda layer, x: layer(x), rules=ambient)(layer, x)
        assert_lies(y, "data", None, "model")
        np.testing.assert_array_equal(y, X)


def test_constrain_does_nothing_on_a_laptop(mesh: Mesh) -> None:
    x, rules = jnp.asarray(X), ft.AxisRules({"batch": "data", ...: None})
    assert (
        nn.Constrain("batch seq embed")(x) is x and nn.Constrain("batch seq embed", rules)(x) is x
    )
    with jax.set_mesh(mesh):
        assert nn.Constrain("batch seq embed")(x) is x


def test_constrain_is_a_value() -> None:
    rules = ft.AxisRules({"batch": "data"})
    assert nn.Constrain("batch embed", rules) == nn.Constrain(
        ft.Axes("batch", "embed"), ft.AxisRules({"batch": "data"})
    )
    assert (
        nn.Constrain("batch") != nn.Constrain("embed")
        and jax.tree.leaves(nn.Constrain("batch")) == []
    )


# Jitted


def test_equal_layers_share_what_is_compiled() -> None:
    traces: list[int] = []

    def scaled(weight: Any, x: Any) -> Any:
        traces.append(1)
        return x * weight

    layers = [nn.Jitted(jax.tree_util.Partial(scaled, jnp.full(8, float(i)))) for i in range(3)]
    for _ in range(2):
        for i, layer in enumerate(layers):
            np.testing.assert_array_equal(layer(jnp.ones(8)), np.full(8, i))
    assert len(traces) == 1


def test_equinox_inference_mode():
    model, state = ft.make_state(nn.Sequential([nn.BatchNorm(4), nn.Dropout(0.5)]))
    x = jnp.arange(12.0).reshape(3, 4)
    y, after = model(x, state=state, key=jax.random.key(0))
    assert float(after["layers.0.mean"].sum()) > 0 and bool((y == 0).any())
    y, after = eqx.nn.inference_mode(model)(x, state=state)
    assert np.allclose(y, x, rtol=1e-4) and float(after["layers.0.mean"].sum()) == 0


def test_batch_norm_under_vmap_with_a_name() -> None:
    whole, state = ft.make_state(filled(nn.BatchNorm(8)))
    layer, _ = ft.make_state(filled(nn.BatchNorm(8, "batch")))
    expected, expected_state = whole(jnp.asarray(X), state)
    y, after = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(X, state)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    close(after, expected_state, 1e-5)
