"""The loss of a language model: against one with all logits; what it holds and moves; bad input."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functree as ft
from tests.lib.checks import raises
from tests.lib.training import filled

RANDOM = np.random.default_rng(0)
TOKENS, TARGETS = (RANDOM.integers(0, 96, (4, 30)).astype(np.int32) for _ in range(2))
MASK = RANDOM.integers(0, 2, (4, 30)).astype(bool)
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
RULES = ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP("data", min_size=0)


def model(tied: bool = False, layers: int = 1, vocab: int = 96) -> ft.nn.Transformer:
    config = ft.nn.TransformerConfig(
        vocab, 32, layers, 4, 2, 8, 64, max_seq=512, tie_embedding=tied
    )
    return filled(config, 0.25)


def whole(model: Any, mask: Any, z_loss: float) -> Any:
    """The loss, from all logits."""
    logits = model(TOKENS)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS)
    each += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return each.mean() if mask is None else each.mean(where=mask)


@functools.cache
def gradients_of_whole(masked: bool, z_loss: float, tied: bool) -> Any:
    """The loss from all logits on one device, and its gradients."""
    mask = MASK if masked else None
    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.value_and_grad(lambda model: whole(model, mask, z_loss)))(model(tied))


CASES = [
    (8, False, 0.0, False),
    (8, True, 1e-2, True),
    (10, True, 0.0, True),
    (64, False, 1e-2, False),
]
MESHES: dict[str, Any] = {
    "one device": None,
    "auto": False,
    "explicit": True,
    "a batch on one device": False,
}


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize(("chunk", "masked", "z_loss", "tied"), CASES)
def test_against_all_logits(
    chunk: int, masked: bool, z_loss: float, tied: bool, where: str
) -> None:
    def loss(model: Any, tokens: Any, targets: Any, mask: Any) -> Any:
        return ft.nn.cross_entropy(model, tokens, targets, chunk=chunk, mask=mask, z_loss=z_loss)

    given: list[Any] = [model(tied), TOKENS, TARGETS, MASK if masked else None]
    step = ft.jit(ft.value_and_grad(loss), rules=None if where == "one device" else RULES)
    if where != "one device":
        data = 1 if where == "a batch on one device" else 2
        mesh = ft.make_mesh(
            data=data, model=2, devices=jax.devices()[: 2 * data], explicit=MESHES[where]
        )
        given[0] = ft.shard(given[0], RULES, mesh)
        given[1:] = [
            one if one is None else ft.shard(one, RULES, mesh, axes="batch seq")
            for one in given[1:]
        ]
    with jax.default_matmul_precision("highest"):
        found, gradients = step(*given)
    expected, others = gradients_of_whole(masked, z_loss, tied)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6 * np.abs(other).max() + 1e-7)


@pytest.mark.parametrize("target", [-100, -1, 96, 1000])
def test_a_target_that_is_no_token_is_seen_unless_it_is_masked(target: int) -> None:
    targets = TARGETS.copy()
    targets[1, 3] = target
    mask = np.ones_like(MASK)
    mask[1, 3] = False
    own = jax.device_put(model())
    loss = jax.jit(
        lambda targets, mask=None: ft.nn.cross_entropy(own, TOKENS, targets, chunk=8, mask=mask)
    )
    assert np.isnan(loss(targets))
    np.testing.assert_allclose(loss(targets, mask), loss(TARGETS, mask), rtol=1e-6)
    grads = jax.jit(
        jax.grad(lambda model: ft.nn.cross_entropy(model, TOKENS, targets, chunk=8, mask=mask))
    )(own)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# The size of the vocabulary is none of the numbers of the narrow dtypes.
@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_tokens_and_targets_of_any_integers(dtype: str) -> None:
    own = model(vocab=256)
    loss = ft.jit(ft.nn.cross_entropy)
    most = np.int64(min(np.iinfo(dtype).max, 255))
    tokens, targets = TOKENS + most - 95, TARGETS + most - 95
    expected = loss(own, tokens.astype(np.int32), targets.astype(np.int32))
    np.testing.assert_allclose(loss(own, tokens.astype(dtype), targets.astype(dtype)), expected)


# A weight that stands in the place of one of the mask ─► whether the loss is seen to be none.
WEIGHTS = [
    (0, False),
    (1, False),
    (-1, True),
    (0.5, False),
    (-1e-9, True),
    (np.nan, True),
    (np.inf, True),
]


@pytest.mark.parametrize(("weight", "is_nan"), WEIGHTS, ids=str)
def test_weights_that_are_none(weight: float, is_nan: bool) -> None:
    for others in (0, 1):
        mask = np.full(TOKENS.shape, others, np.float32)
        mask[1, 3] = weight
        loss = _masked_loss(mask)
        assert np.isnan(loss) == is_nan


def test_a_mask_of_integers() -> None:
    for dtype in (np.int8, np.uint8, np.float32):
        np.testing.assert_allclose(_masked_loss(MASK.astype(dtype)), _masked_loss(MASK), rtol=1e-6)
    assert np.isnan(_masked_loss(-MASK.astype(np.int8)))


def _masked_loss(mask: Any) -> Any:
    return _loss(model(), TOKENS, TARGETS, mask=mask)


_loss = ft.jit(ft.nn.cross_entropy)


def test_nothing_counts() -> None:
    loss, gradients = ft.jit(ft.value_and_grad(ft.nn.cross_entropy))(
        model(), TOKENS, TARGETS, mask=jnp.zeros_like(MASK)
    )
    assert loss == 0 and not any(leaf.any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_it_never_holds_all_logits(what: str) -> None:
    vocab, seq = 32768, 128
    function: Any = lambda model, tokens: ft.nn.cross_entropy(model, tokens, tokens, chunk=16)  # noqa: E731
    function = function if what == "loss" else ft.grad(function)
    tokens = jax.ShapeDtypeStruct((4, seq), jnp.int32)
    abstract = jax.eval_shape(lambda: model(vocab=vocab))
    memory = ft.jit(function).lower(abstract, tokens).compile().ledger().memory
    assert memory.temporaries < 4 * seq * vocab * 4 / 2  # bytes of the logits in float32


def test_the_weights_of_the_head_are_moved_once() -> None:
    """However many chunks there are; and the gradient of the head is summed once."""
    mesh = ft.make_mesh(data=2, model=4)
    rules = ft.AxisRules({"batch": "data", **TENSOR, "kv_heads": None, ...: None}) | ft.FSDP(
        "data", min_size=0
    )
    step = ft.jit(
        lambda model, tokens: ft.grad(lambda model: ft.nn.cross_entropy(model, tokens, tokens, chunk=8))(model),
        in_shardings=(rules, ft.P("data")), out_shardings=rules, mesh=mesh, rules=rules,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    ledger = step.lower(jax.eval_shape(model), tokens).compile().ledger()
    head = [
        one
        for one in ledger.collectives
        if "unembed.weight" in map(str, one.paths) and "data" in one.mesh_axes
    ]
    shard = 32 * 96 * 4 // 4  # bytes, with the vocabulary sharded over `model`
    assert Counter((one.kind, one.bytes, one.count) for one in head) == {
        ("all-gather", shard, 1): 1,
        ("all-reduce", shard, 1): 1,
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"targets": TARGETS[:, 1:]}, "it must be integers of shape (4, 30)"),
    (
        {"mask": MASK[0]},
        "it must be an array of booleans or real numbers, of shape (4, 30)",
    ),
    ({"mask": MASK * 1j}, "mask=complex128[4, 30]"),
    ({"chunk": 0}, "chunk=0"),
    ({"z_loss": -1.0}, "z_loss=-1.0"),
]


@pytest.mark.parametrize(("given", "why"), WRONG, ids=[why for _, why in WRONG])
def test_bad_input(given: dict[str, Any], why: str) -> None:
    with raises(why):
        ft.nn.cross_entropy(model(), **{"tokens": TOKENS, "targets": TARGETS, **given})


def test_the_gradient_of_a_narrow_head_is_summed_over_chunks_in_float32():
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), model())
    tokens, targets = np.tile(TOKENS, (1, 8)), np.tile(TARGETS, (1, 8))

    def of_head(chunk: int) -> np.ndarray:
        gradient = jax.jit(
            jax.grad(lambda model: ft.nn.cross_entropy(model, tokens, targets, chunk=chunk))
        )(narrow)
        return np.asarray(jax.tree.leaves(gradient.head)[0], np.float32)

    found, whole = of_head(1), of_head(1024)
    assert np.linalg.norm(found - whole) < 0.01 * np.linalg.norm(whole)
