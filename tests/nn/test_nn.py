"""The layers and the transformer: values, axes, dtypes, initial weights, and the config of a model."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Float

import functree as ft
from functree import nn
from functree.errors import AxesError, FunctreeError
from functree.labels.leaves import tree_axes
from functree.layout.rules import AxisRules
from functree.nn.activations import activation, inputs
from functree.nn.embedding import lookup
from functree.nn.rope import rope
from functree.nn.weights import rows
from functree.placing.constrain import axis_rules
from functree.state.train import TrainState, apply_gradients
from functree.transforms.grad.grad import value_and_grad
from functree.transforms.jit.jit import jit
from functree.tree.axes import Axes
from tests.lib.checks import raises

CONFIG = nn.TransformerConfig(
    vocab_size=37, embed=12, layers=3, heads=4, kv_heads=2, head_dim=6, hidden=20, max_seq=16
)
KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 9)).astype(np.int32)
X = np.random.default_rng(1).normal(size=(2, 9, 12)).astype(np.float32)
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


@pytest.fixture(autouse=True)
def _precise() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def create(config: nn.TransformerConfig) -> nn.Transformer:
    """With scales that are not one and embeddings that are not small, so that each is seen to be
    used."""
    random = np.random.default_rng(0)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = random.normal(size=leaf.shape) * 0.3
        return jnp.asarray(values + ("scale" in jax.tree_util.keystr(path)), leaf.dtype)

    abstract = eqx.filter_eval_shape(nn.Transformer.create, config, key=KEY)
    return jax.tree_util.tree_map_with_path(fill, abstract)


@jax.jit
def run(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return model(x)


def exact(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


# The whole: `tests/io/test_weights.py` compares its logits with those of the reference


def test_any_number_of_batch_dimensions() -> None:
    model = create(CONFIG)
    logits = run(model, TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(run(model, TOKENS[0]), logits[0], **TOLERANCE)
    np.testing.assert_allclose(run(model, TOKENS[None])[0], logits, **TOLERANCE)


def loss(model: nn.Transformer, tokens: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(model(tokens[:, :-1]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1))


gradient = functools.cache(lambda config: jax.jit(jax.grad(loss))(create(config), TOKENS))


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_gradients_are_finite_and_do_not_depend_on_remat(remat: str) -> None:
    plain, again = gradient(CONFIG), gradient(dataclasses.replace(CONFIG, remat=remat))
    for grad, expected in zip(jax.tree.leaves(again), jax.tree.leaves(plain), strict=True):
        assert np.isfinite(grad).all() and np.any(grad)
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


# Dtypes


@pytest.mark.parametrize("tie_embedding", [True, False])
def test_dtypes_apart(tie_embedding: bool) -> None:
    config = dataclasses.replace(CONFIG, compute_dtype=jnp.bfloat16, tie_embedding=tie_embedding)
    model = create(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)} == {
        jnp.dtype("float32")
    }
    logits = run(model, TOKENS)
    assert logits.dtype == jnp.bfloat16
    exact_logits = run(create(dataclasses.replace(config, compute_dtype="float32")), TOKENS)
    np.testing.assert_allclose(logits.astype(jnp.float32), exact_logits, rtol=0.1, atol=0.15)
    grads = jax.eval_shape(jax.grad(loss), model, TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


PRECISIONS: dict[str, tuple[str, str, str | None]] = {
    "bfloat16 in parameters": ("bfloat16", "bfloat16", "float32"),
    "float16 in compute": ("float32", "float16", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PRECISIONS)
def test_mixed_precision_trains(case: str) -> None:
    """Parameters, computation and moments in the dtypes asked for, with strict promotion; the loss
    in float32."""
    param_dtype, compute_dtype, mu_dtype = PRECISIONS[case]
    config = dataclasses.replace(
        CONFIG, layers=1, param_dtype=param_dtype, compute_dtype=compute_dtype, qk_norm=True
    )
    tx = optax.adam(1e-2, mu_dtype=mu_dtype)
    ts = TrainState.create(nn.Transformer.create(config, key=KEY), tx)

    @jit
    def step(ts: TrainState, tokens: Any) -> Any:
        value, grads = value_and_grad(nn.cross_entropy)(ts.model, tokens[:, :-1], tokens[:, 1:])
        with jax.numpy_dtype_promotion("standard"):  # for optax's own arithmetic
            return apply_gradients(ts, grads), value, grads

    losses: list[float] = []
    for _ in range(8):
        ts, value, grads = step(ts, TOKENS)
        losses.append(float(value))
    assert value.dtype == "float32" and losses[-1] < 0.9 * losses[0] and np.isfinite(losses).all()
    for tree, dtype in (
        (ts.model, param_dtype),
        (grads, param_dtype),
        (ts.opt_state[0].mu, mu_dtype or param_dtype),
    ):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(dtype)}


LAYERS: dict[str, Callable[..., Callable[[jax.Array], jax.Array]]] = {
    "Linear": lambda **options: nn.Linear(12, 8, key=KEY, **options),
    "RMSNorm": lambda **options: nn.RMSNorm(12, **options),
    "MLP": lambda **options: nn.MLP(12, 20, key=KEY, **options),
    "Attention": lambda **options: nn.Attention(12, 4, 2, 6, key=KEY, **options),
    "Embedding.logits": lambda **options: nn.Embedding(37, 12, key=KEY, **options).logits,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_computes_in_the_dtype_of_its_input_unless_told(layer: str) -> None:
    def dtype(x: Any, **options: Any) -> Any:
        return jax.eval_shape(lambda x: LAYERS[layer](**options)(x), x).dtype

    assert dtype(X) == dtype(X, param_dtype=jnp.bfloat16) == jnp.float32
    assert dtype(X.astype(jnp.bfloat16)) == dtype(X, compute_dtype=jnp.bfloat16) == jnp.bfloat16


def test_norms_are_computed_in_float32() -> None:
    """A sum of 4096 squares near 1 in bfloat16 would stop at 256."""
    x = jnp.full((4096,), 1.5, jnp.bfloat16)
    np.testing.assert_allclose(nn.RMSNorm(4096)(x).astype(jnp.float32), 1.0, rtol=1e-3)
    large = jnp.full((4,), 1e4, jnp.float16)  # its square is not a float16
    np.testing.assert_allclose(nn.RMSNorm(4)(large).astype(jnp.float32), 1.0, rtol=1e-3)


@pytest.mark.parametrize("use_bias", [True, False])
def test_linear(use_bias: bool) -> None:
    linear = nn.Linear(12, 8, use_bias=use_bias, key=KEY)
    if use_bias:
        linear = eqx.tree_at(lambda layer: layer.bias, linear, jnp.arange(8.0))
    expected = exact(X) @ exact(linear.weight) + (np.arange(8) if use_bias else 0)
    np.testing.assert_allclose(linear(jnp.asarray(X)), expected, **TOLERANCE)
    np.testing.assert_allclose(linear(jnp.asarray(X[0, 0])), expected[0, 0], **TOLERANCE)


def test_linear_names_its_own_axes() -> None:
    assert tree_axes(nn.Linear(4, 8, key=KEY)).weight == Axes("embed", "hidden")
    head = tree_axes(nn.Linear(4, 8, axes="embed vocab", key=KEY))
    assert (head.weight, head.bias) == (Axes("embed", "vocab"), Axes("vocab"))
    unnamed = tree_axes(nn.Linear(4, 8, axes=Axes("embed", None), key=KEY))
    assert (unnamed.weight, unnamed.bias) == (Axes("embed", None), Axes(None))
    assert tree_axes(nn.Linear(4, 8, use_bias=False, key=KEY)).bias is None


def test_embedding() -> None:
    table = nn.Embedding(37, 12, key=KEY)
    np.testing.assert_array_equal(table(jnp.asarray(TOKENS)), table.weight[TOKENS])
    np.testing.assert_array_equal(table(jnp.int32(3)), table.weight[3])
    assert np.isnan(table(jnp.array([37, 1]))).tolist() == [[True] * 12, [False] * 12]
    np.testing.assert_allclose(
        table.logits(jnp.asarray(X)), exact(X) @ exact(table.weight).T, **TOLERANCE
    )


# Of a table whose size is none of the numbers of int8 and uint8.
DTYPES = ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_any_integers(dtype: str, sharded: bool) -> None:
    """All numbers of the dtype at the ends of its range and of the table; NaN outside of that."""
    info, table = jnp.iinfo(dtype), nn.Embedding(300, 8, key=KEY)
    ends = [0, 1, 7, 299, 300, 2**32, 2**32 + 5, -1, -299, -300, -301, info.min, info.max]
    tokens = np.array([token for token in ends if info.min <= token <= info.max], dtype)
    if sharded:
        mesh = ft.make_mesh(model=4, devices=jax.devices()[:4], explicit=True)
        table = ft.shard(table, ft.AxisRules({"vocab": "model", ...: None}), mesh)
    with jax.set_mesh(table.weight.sharding.mesh) if sharded else contextlib.nullcontext():
        found = np.asarray(table(tokens))
    for token, row in zip(tokens.tolist(), found, strict=True):
        if 0 <= token < 300:
            np.testing.assert_array_equal(row, np.asarray(table.weight)[token])
        else:
            assert np.isnan(row).all(), token


@pytest.mark.parametrize(
    "tokens",
    [np.ones(3), jnp.ones(3, bool), np.array(["a"]), [1], 1, jax.ShapeDtypeStruct((), "c8")],
)
def test_tokens_that_are_none(tokens: Any) -> None:
    with raises("Embedding: invalid tokens", "tokens=", "it must be an array of integers"):
        nn.Embedding(300, 8, key=KEY)(tokens)


def test_no_gradient_of_a_row_that_was_not_read() -> None:
    gradient = jax.grad(lambda weight: rows(weight, jnp.array([-1, 2, 9])).sum())(jnp.ones((7, 2)))
    assert gradient[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if jnp.iinfo(dtype).max >= 100])
def test_positions_and_segments_of_any_integers(dtype: str) -> None:
    attention, x = nn.Attention(8, 4, 2, key=KEY), jax.random.normal(KEY, (1, 600, 8))
    values = np.arange(600)[None] // 6
    for given in ((values.astype(dtype), None), (None, values.astype(dtype))):
        whole = [None if value is None else value.astype(np.int32) for value in given]
        np.testing.assert_array_equal(attention(x, *given), attention(x, *whole))


# Rotary positions, by their laws


turned = jax.jit(rope, static_argnames="theta")


def test_rotations_are_computed_in_float32() -> None:
    """In bfloat16, with 8 bits, all of these positions would be 4096."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2, 16)), jnp.bfloat16)
    positions = jnp.arange(4096, 4104)
    found = turned(x, positions=positions)
    wanted = turned(x.astype(jnp.float32), positions=positions)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=1e-2, atol=1e-2)


# Initializers


def test_initial_weights_keep_the_scale() -> None:
    config = nn.TransformerConfig(512, 256, layers=2, heads=8, kv_heads=4, head_dim=64, hidden=1024)
    model = nn.Transformer.create(config, key=KEY)
    attn, mlp = model.blocks.layer.attn, model.blocks.layer.mlp
    variances = {
        256: (attn.query, attn.key, attn.value, mlp.gate, mlp.up),
        512: (attn.out,),
        1024: (mlp.down,),
    }
    for summed, weights in variances.items():
        for weight in weights:
            np.testing.assert_allclose(jnp.var(weight) * summed, 1.0, rtol=0.03)
    np.testing.assert_allclose(jnp.var(model.unembed.weight) * 256, 1.0, rtol=0.03)
    np.testing.assert_allclose(jnp.std(model.embed.weight), 0.02, rtol=0.03)
    assert not np.array_equal(attn.query[0], attn.query[1])


def test_initializers_are_arguments() -> None:
    def constant(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.full(shape, 0.25, dtype)

    model = nn.Transformer.create(CONFIG, init=constant, embed_init=constant, key=KEY)
    norms = model.norm.scale.size + 2 * model.blocks.layer.mlp_norm.scale.size
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)])
    assert (values == 1).sum() == norms and (values == 0.25).sum() == values.size - norms
    assert nn.RMSNorm(3, init=constant).scale.tolist() == [0.25] * 3
    assert nn.Linear(2, 3, init=constant, key=KEY).weight.tolist() == [[0.25] * 3] * 2


# Activations


def test_nobody_names_further_batch_dimensions() -> None:
    x = jnp.ones((1, 2, 3, 4))
    with axis_rules(AxisRules({"batch": "data"})):
        assert activation(x, "batch seq embed") is x
        assert [one is x for one in inputs(x, "hidden", "heads head_dim")] == [True, True]
        found = jax.make_jaxpr(lookup)(jnp.ones((5, 4)), jnp.ones((1, 2, 3), jnp.int32))
        assert "sharding_constraint" not in str(found)


# Errors


BAD_CONFIG = """TransformerConfig: invalid fields

  hidden=-2
      it must be a positive integer

  rope_theta=inf
      it must be a positive number

  tie_embedding='no'
      it must be True or False

  remat='some'
      it must be None, "full", "dots", `ft.offload("name")` or one of `jax.checkpoint_policies`

  param_dtype='x'
      it must be a floating-point dtype, such as `jnp.float32`"""


def test_a_bad_config() -> None:
    with pytest.raises(FunctreeError) as caught:
        dataclasses.replace(
            CONFIG, hidden=-2, tie_embedding="no",
            rope_theta=float("inf"), param_dtype="x", remat="some",
        )  # fmt: skip
    assert str(caught.value) == BAD_CONFIG


def test_equal_configs_are_equal() -> None:
    other = dataclasses.replace(CONFIG, param_dtype="float32", compute_dtype=np.dtype(np.float32))
    assert other == CONFIG and hash(other) == hash(CONFIG)
    numbers = dataclasses.replace(CONFIG, layers=np.int64(CONFIG.layers), rope_theta=10_000)
    assert numbers == CONFIG and type(numbers.layers) is int and type(numbers.rope_theta) is float


def test_bad_heads_and_axes() -> None:
    bad = dataclasses.replace(CONFIG, kv_heads=3, head_dim=5)
    with raises("kv_heads=3", "divide heads=4", "head_dim=5", "one of 1, 2, 4", "set head_dim=6"):
        create(bad)
    with raises("head_dim=0", error=FunctreeError):
        nn.Attention(2, 4, key=KEY)
    with pytest.raises(FunctreeError, match=r"head_dim=3[\s\S]*even"):
        nn.Attention(12, 4, key=KEY)
    with pytest.raises(AxesError, match=r'Linear\(axes="embed"\): name 2 dimensions'):
        nn.Linear(4, 8, axes="embed", key=KEY)


def test_a_sequence_that_is_too_long() -> None:
    with raises("tokens of shape (1, 17)", "max_seq=16", "larger max_seq", error=FunctreeError):
        create(CONFIG)(jnp.zeros((1, 17), jnp.int32))


# A config that has an option of each kind ─► the model that is created with it.
OPTIONS: dict[str, dict[str, Any]] = {
    "one key head": dict(kv_heads=1),
    "other constants": dict(rope_theta=500.0, norm_eps=1e-2, tie_embedding=True),
    "a policy": dict(remat=jax.checkpoint_policies.dots_saveable),
    "options of attention": dict(
        window=5,
        rope_scaling=nn.Llama3Rope(8, 1, 4, 16),
        attention="xla",
        context="gather",
        qk_norm=True,
        attention_bias=True,
    ),
    "an attention function": dict(attention=jax.nn.dot_product_attention),
    "dot_general": dict(dot_general=jax.lax.dot_general),
    "options of the model": dict(remat="full", microbatches=3, max_seq=99),
    "dtypes": dict(param_dtype=jnp.bfloat16, compute_dtype=jnp.float16),
    "experts": dict(experts=4, top_k=2, capacity=1.5, normalize=False, dispatch="gather"),
    "small experts": dict(experts=4, top_k=2, expert_hidden=7),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_the_config_of_a_model_is_that_which_it_was_created_with(case: str) -> None:
    config = dataclasses.replace(CONFIG, **OPTIONS[case])
    model = jax.eval_shape(lambda: nn.Transformer.create(config, key=KEY))
    assert model.config == config and hash(model.config) == hash(config)


class Gelu(eqx.Module):
    """A feed-forward layer that says nothing of its sizes."""

    up: jax.Array

    def __call__(self, x: Any) -> Any:
        return jax.nn.gelu(x @ self.up) @ self.up.T


class Around(eqx.Module):
    """A layer around another one."""

    layer: Any

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.layer(*args, **options)

    def decode(self, *args: Any) -> Any:
        return self.layer.decode(*args)


class Adapted(eqx.Module):
    weight: jax.Array
    low: Float[jax.Array, "embed rank"]


# What surgery has changed ─► what the config says of it.
SURGERY: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "fewer layers": (lambda m: dataclasses.replace(m, blocks=m.blocks[:2]), dict(layers=2)),
    "a tied head": (lambda m: dataclasses.replace(m, unembed=None), dict(tie_embedding=True)),
    "another dtype": (
        lambda m: jax.tree.map(lambda x: x.astype(jnp.bfloat16), m),
        dict(param_dtype=jnp.bfloat16),
    ),
    "a list": (lambda m: eqx.tree_at(lambda m: m.blocks, m, replace=list(m.blocks)), {}),
    "quantized": (
        lambda m: eqx.tree_at(lambda m: m.embed.weight, m, replace_fn=lambda w: w.astype("int8")),
        {},
    ),
    "an adapter": (
        lambda m: eqx.tree_at(
            lambda m: m.blocks.layer.attn.query, m, replace_fn=lambda w: Adapted(w, w[..., 0, :2])
        ),
        {},
    ),
}


@pytest.mark.parametrize("case", SURGERY)
def test_the_config_of_a_model_after_surgery(case: str) -> None:
    change, expected = SURGERY[case]
    assert change(create(CONFIG)).config == dataclasses.replace(CONFIG, **expected)


def test_a_config_that_cannot_be_read() -> None:
    model = create(CONFIG)
    with raises("from its layers", '"hidden"', "no array", error=FunctreeError):
        _ = eqx.tree_at(lambda m: m.blocks.layer.mlp, model, replace=jnp.sin).config
    with raises("no layer is an `ft.nn.RMSNorm`", error=FunctreeError):
        _ = ft.select(model).under(nn.RMSNorm).set(jnp.sin).config
    with raises("no array", error=FunctreeError):
        _ = eqx.partition(model, lambda x: x.ndim > 4)[0].config
    for option in ("max_seq", "microbatches", "hidden"):
        with raises("Transformer: invalid arguments", f"{option}=0", error=FunctreeError):
            dataclasses.replace(model, **{option: 0})
    with raises("remat='some'", error=FunctreeError):
        dataclasses.replace(model, remat="some")


def test_a_model_generates_with_layers_of_other_classes() -> None:
    model = create(dataclasses.replace(CONFIG, window=5))
    up = jnp.ones((3, 12, 7)) * 0.1
    changed = eqx.tree_at(lambda m: m.blocks.layer.mlp, model, replace=Gelu(up))
    around = eqx.tree_at(lambda m: m.blocks.layer.attn, changed, replace_fn=Around)
    expected = nn.generate(changed, TOKENS[:, :6], 3)
    assert jnp.array_equal(nn.generate(around, TOKENS[:, :6], 3), expected)
    following = jnp.argmax(changed(expected[:, :-1])[:, 5:], -1)
    assert jnp.array_equal(following, expected[:, 6:])
