"""Context parallelism: sequences whose parts attend to each other, against an oracle in float64."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree.nn.attention import attend as attending
from functree.nn.attention import kernels
from functree.nn.attention.attend import attend
from functree.nn.attention.context import parts_of
from functree.nn.attention.mask import Inputs
from tests.lib.checks import raises
from tests.lib.covering import selected_cells
from tests.nn.attention_oracle import causal, oracle_gradients

BATCH, SEQ, HEADS, KV_HEADS, SIZE = 2, 32, 8, 2, 4
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE, GIVEN = (
    RANDOM.normal(size=(BATCH, SEQ, heads, SIZE)) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
)
SEGMENTS = np.sort(RANDOM.integers(0, 3, (BATCH, SEQ)), 1)
WINDOW = 5
MESHES = {
    2: {"data": 2, "context": 2, "model": 2},
    4: {"data": 1, "context": 4, "model": 2},
    8: {"data": 1, "context": 8, "model": 1},
}
NAMES = {"batch": "data", "heads": "model", "kv_heads": "model", "seq": "context"}
RULES = ft.AxisRules({**NAMES, "vocab": "model", "hidden": "model", ...: None})
TEXT = RANDOM.integers(0, 64, (4, 33))


def with_gradients(
    query: Any, key: Any, value: Any, given: Any, how: Any, window: Any, *rest: Any
) -> Any:
    segments, positions = rest

    def fun(*arrays: Any) -> Any:
        return attend(*arrays, window=window, segments=segments, positions=positions, context=how)

    result, pull = jax.vjp(fun, query, key, value)
    return result, *pull(given)


CELLS = list(
    itertools.product(
        ("gather", "heads", "ring"),
        ("in order", "zig-zag"),
        ("causal", "window", "segments"),
        (2, 4, 8),
        (False, True),
    )
)


@pytest.mark.parametrize(("how", "order", "mask", "parts", "explicit"), selected_cells(CELLS))
def test_against_the_oracle(
    monkeypatch: Any, how: Any, order: str, mask: str, parts: int, explicit: bool
) -> None:
    # Less than a part, and a part is no multiple of it.
    monkeypatch.setattr(attending, "CHUNK", 3)
    window = WINDOW if mask == "window" else None
    segments = SEGMENTS if mask == "segments" else None
    arrays, positions = [QUERY, KEY, VALUE, GIVEN], None
    if order == "zig-zag":
        arrays = [ft.nn.zigzag(x, parts)[0] for x in arrays]
        positions = ft.nn.zigzag(QUERY, parts)[1]
        segments = None if segments is None else ft.nn.zigzag(segments, parts)[0]
    mesh = ft.make_mesh(**MESHES[parts], explicit=explicit)
    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        names = ["heads", "kv_heads", "kv_heads", "heads"]
        placed = [
            ft.shard(jnp.asarray(x, jnp.float32), RULES, axes=f"batch seq {name} _")
            for x, name in zip(arrays, names, strict=True)
        ]
        # Positions are one row for all texts, or a row for each.
        rows = positions
        if segments is not None and positions is not None:
            rows = jnp.tile(positions, (BATCH, 1))
        found = jax.jit(with_gradients, static_argnums=(4, 5))(*placed, how, window, segments, rows)
    in_order = SEGMENTS if mask == "segments" else None
    wanted = oracle_gradients(GIVEN, QUERY, KEY, VALUE, mask=causal(SEQ, in_order, window))
    for one, expected in zip(found, wanted, strict=True):
        if positions is not None:
            expected = expected[:, np.asarray(positions)]
        assert one.sharding.spec[1] == "context"
        np.testing.assert_allclose(np.asarray(one, np.float64), expected, rtol=2e-5, atol=2e-5)


# Of one device, in float32: the parts of queries, and of keys or values, of context=4 and model=2.
_QUERY = BATCH * SEQ // 4 * HEADS // 2 * SIZE * 4
_KEY = BATCH * SEQ // 4 * KV_HEADS // 2 * SIZE * 4
MOVED = {
    # Queries and results of 4 heads, and keys and values of 1 head that is repeated 4 times: in and
    # out, and their gradients back.
    "heads": {("all-to-all", ("context",)): 2 * (2 * _QUERY + 2 * 4 * _KEY)},
    "gather": {
        ("all-gather", ("context",)): 2 * 4 * _KEY,
        ("reduce-scatter", ("context",)): 2 * _KEY,
    },
    # Keys and values three times forward, and backward, and their gradients four times.
    "ring": {("collective-permute", ("context",)): 2 * (3 + 3 + 4) * _KEY},
}


@pytest.mark.parametrize("how", MOVED)
def test_what_is_moved(how: str) -> None:
    mesh = ft.make_mesh(**MESHES[4])
    names = ["heads", "kv_heads", "kv_heads", "heads"]
    specs = tuple(RULES.spec(ft.Axes("batch", "seq", name, None)) for name in names)

    def fun(query: Any, key: Any, value: Any, given: Any) -> Any:
        return with_gradients(query, key, value, given, how, None, None, None)

    arrays = [jnp.asarray(x, jnp.float32) for x in (QUERY, KEY, VALUE, GIVEN)]
    jitted = ft.jit(fun, in_shardings=specs, mesh=mesh, rules=RULES)
    totals = jitted.lower(*arrays).compile().ledger().totals()
    assert totals == MOVED[how]


CONFIG = ft.nn.TransformerConfig(64, 16, 2, 4, 2, 4, 32)


def loss(model: Any, tokens: Any, targets: Any, positions: Any, in_order: bool) -> Any:
    return ft.nn.cross_entropy(
        model, tokens, targets, positions=positions, in_order=in_order, chunk=8
    )


@pytest.fixture(scope="module")
def expected() -> Any:
    model = ft.nn.Transformer.create(CONFIG, key=jax.random.key(0))
    tokens, targets = jnp.asarray(TEXT[:, :-1]), jnp.asarray(TEXT[:, 1:])
    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=4)
    return model, gradient(model, tokens, targets, None, True)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_loss_of_a_model(expected: Any, in_order: bool, explicit: bool) -> None:
    model, reference = expected
    texts, positions = [TEXT[:, :-1], TEXT[:, 1:]], None
    if not in_order:
        positions = ft.nn.zigzag(texts[0], 2)[1]
        texts = [ft.nn.zigzag(x, 2)[0] for x in texts]
    mesh = ft.make_mesh(**MESHES[2], explicit=explicit)
    with jax.set_mesh(mesh):
        placed = [ft.shard(jnp.asarray(x), RULES, axes="batch seq") for x in texts]
        if positions is not None:
            positions = ft.shard(positions, RULES, axes="seq")
        gradient = ft.jit(ft.value_and_grad(loss), rules=RULES)
        found = gradient(ft.shard(model, RULES), *placed, positions, in_order)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


def test_the_sequence_stays_in_parts_in_the_whole_step(expected: Any) -> None:
    """No device has the vectors of a whole sequence: what is gathered are keys and values."""
    mesh = ft.make_mesh(data=2, context=4)
    rules = ft.AxisRules({"batch": "data", "seq": "context", ...: None})
    step = ft.jit(ft.value_and_grad(loss), mesh=mesh, rules=rules)
    model = ft.abstract(lambda: expected[0], rules, mesh)()
    tokens = jax.ShapeDtypeStruct(
        (4, 32), jnp.int32, sharding=jax.NamedSharding(mesh, ft.P("data", "context"))
    )
    totals = step.lower(model, tokens, tokens, None, True).compile().ledger().totals()
    # 2 rows of 8 tokens: queries and results of 4 heads, and 2 key and value heads repeated to 4;
    # and all of it backward, in 2 layers.
    moved = {"all-to-all": 2 * 2 * 4 * (2 * 8 * 4 * 4 * 4)}
    # The gradients of all weights but those of the head, which are summed over `data` at once.
    own = ft.plan(model, rules, mesh)
    moved["all-reduce"] = own.bytes_per_device - own["unembed.weight"].bytes_per_device
    assert {kind: size for (kind, axes), size in totals.items() if axes == ("context",)} == moved


@pytest.mark.parametrize("heads", [True, False])
def test_a_mesh_axis_of_one_device(monkeypatch: pytest.MonkeyPatch, heads: bool) -> None:
    """Of the heads of queries alone: the gradients of keys are typed as these. Or of a sequence."""
    monkeypatch.setattr(attending, "CHUNK", 3)
    x = jnp.asarray(RANDOM.normal(size=(2, 8, 8)), jnp.float32)
    names = {"heads": "one", "batch": "data"} if heads else {"seq": ("one", "data")}
    rules = ft.AxisRules({**names, ...: None})

    def total(layer: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(layer(x)))

    layer = small()
    wanted = jax.grad(total)(layer, x)
    with jax.set_mesh(ft.make_mesh(data=2, one=1, devices=jax.devices()[:2])):
        placed = ft.shard(x, rules, axes="batch seq embed")
        found = ft.jit(ft.grad(total), rules=rules)(ft.shard(layer, rules), placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_of_a_part(window: int | None, packed: bool) -> None:
    """TPU's kernel for the queries of each part, interpreted, beside the one of the whole."""
    arrays = [
        jnp.asarray(RANDOM.normal(size=(1, 512, heads, 16)), "float32") for heads in (2, 1, 1)
    ]
    segments = None
    if packed:
        segments = jnp.asarray(np.sort(RANDOM.integers(0, 3, (1, 512)), 1), jnp.int32)
    whole = kernels.splash(
        *arrays, *([] if segments is None else [segments]), window=window, interpret=True
    )
    for part in (0, 1):
        own = slice(part * 256, part * 256 + 256)
        query = arrays[0][:, own]
        own_segments = None if segments is None else segments[:, own]
        found = kernels.splash_of_part(
            Inputs(query, *(x[:, own] for x in arrays[1:]), own_segments),
            Inputs(query, *arrays[1:], segments),
            jnp.int32(part * 256),
            parts=2,
            window=window,
            interpret=True,
        )
        np.testing.assert_allclose(found, whole[:, own], rtol=1e-5, atol=1e-5)


def test_auto() -> None:
    """By heads where the parts divide those of a device, else by gathered keys and values."""
    assert ft.nn.TransformerConfig(64, 16, 2, 4, 2, 4, 32).context == "auto"
    for heads in range(1, 9):
        how = parts_of(("context",), 4, "auto", heads).how
        assert how == ("heads" if heads in (4, 8) else "gather")


def test_zigzag() -> None:
    x, positions = ft.nn.zigzag(jnp.arange(24).reshape(1, 12, 2), 3)
    assert positions.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert (x[0, :, 0] == 2 * positions).all()
    numbers, _ = ft.nn.zigzag(np.arange(12)[None], 3)
    assert isinstance(numbers, np.ndarray)
    with raises("sequence length 12", "not divisible by 8", "multiple of 8"):
        ft.nn.zigzag(np.zeros((1, 12)), 4)
    mesh = ft.make_mesh(context=8, explicit=True)
    sharded = ft.shard(jnp.zeros((1, 16)), ft.P(None, "context"), mesh)
    with raises("already sharded", "before you place the array"):
        ft.nn.zigzag(sharded, 8)


def small(**options: Any) -> ft.nn.Attention:
    return ft.nn.Attention(8, 4, 2, key=jax.random.key(0), **options)


def own_attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return query


def test_messages() -> None:
    x = jnp.ones((2, 8, 8))
    with raises("context='sideways'", "'gather'", "'ring'"):
        small(context="sideways")
    with raises("context='ring'", "receives whole sequences"):
        small(context="ring", attention=own_attention)
    with raises("in_order=False", "positions", "zigzag"):
        small()(x, in_order=False)
    with raises("in_order=False", "receives no positions"):
        small(attention=own_attention)(x, jnp.arange(8), in_order=False)
    rules = ft.AxisRules({"seq": "context", ...: None})
    with jax.set_mesh(ft.make_mesh(context=8)), ft.axis_rules(rules):
        with raises('context="heads"', "query heads on a device (4)", "8 parts", '"gather"'):
            jax.eval_shape(small(context="heads"), x)
