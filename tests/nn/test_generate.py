"""The cache and generation: equal to the model without a cache, in one compilation, in place, on a
mesh."""

import functools
import itertools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree.nn.attention.attend import cached_positions, next_positions
from functree.nn.generate import generation
from tests.lib.checks import raises
from tests.lib.training import filled

SIZES = {
    "vocab_size": 96,
    "embed": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "hidden": 48,
}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": ft.nn.Llama3Rope(8, 1, 4, 16)},
    "qwen 2": {"attention_bias": True},
    "qwen 3": {"qk_norm": True, "tie_embedding": True},
    "mistral": {"window": 5},
    "mixtral": {"experts": 4, "top_k": 2},
    "olmo 2": {"qk_norm": "all", "norms": "after"},
}
RANDOM = np.random.default_rng(0)
PROMPTS = RANDOM.integers(1, 96, (2, 9)).astype(np.int32)
LENGTHS = np.array([4, 9], np.int32)
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
# The sequence too, which is that of training: a step of one token cannot be sharded.
RULES = ft.AxisRules({"batch": "data", **TENSOR, "seq": "model", ...: None})


@functools.cache
def model(name: str) -> ft.nn.Transformer:
    """A model whose weights and biases are large enough to matter."""
    config = ft.nn.TransformerConfig(**SIZES, **FAMILY[name], max_seq=64)
    return jax.tree.map(jnp.asarray, filled(config, 0.25))


@functools.cache
def continued(name: str, row: int, length: int, new: int) -> list[int]:
    """The likeliest tokens, by the whole model for each of them."""
    tokens, run = list(PROMPTS[row, :length]), ft.jit(lambda model, tokens: model(tokens))
    for _ in range(new):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(np.asarray(run(model(name), padded))[0, len(tokens) - 1])))
    return tokens


STEPS = [
    ("llama", [1] * 9),
    ("qwen 2", [7, 2]),
    ("qwen 3", [3, 1, 1, 4]),
    ("mistral", [1] * 9),
    ("mistral", [7, 1, 1]),
]


@pytest.mark.parametrize(("name", "steps"), STEPS, ids=str)
def test_a_cache_changes_no_logits(name: str, steps: list[int]) -> None:
    run = ft.jit(lambda model, tokens, cache: model.decode(tokens, cache), donate="cache")
    cache, found, start = ft.nn.Cache.create(model(name), 2, 12), [], 0
    for step in steps:
        logits, cache = run(model(name), PROMPTS[:, start : start + step], cache)
        found.append(logits)
        start += step
    expected = ft.jit(model(name))(PROMPTS)
    np.testing.assert_allclose(jnp.concatenate(found, 1), expected, rtol=1e-5, atol=1e-5)
    assert cache.filled.tolist() == [9, 9] and cache.key.shape[2] == (
        5 if name == "mistral" else 12
    )


@pytest.mark.parametrize("name", FAMILY)
def test_generation_is_what_the_model_says(name: str) -> None:
    tokens = ft.nn.generate(model(name), PROMPTS, 8)
    assert tokens.tolist() == [continued(name, row, 9, 8) for row in range(2)]
    ragged = ft.nn.generate(model(name), PROMPTS, 8, lengths=LENGTHS, pad=-1)
    assert ragged.tolist() == [[*continued(name, 0, 4, 8), *[-1] * 5], continued(name, 1, 9, 8)]


@pytest.mark.parametrize(
    ("name", "explicit"), [*zip(FAMILY, itertools.cycle([False, True]), strict=False)], ids=str
)
def test_generation_on_a_mesh(name: str, explicit: bool) -> None:
    mesh = ft.make_mesh(data=2, model=2, devices=jax.devices()[:4], explicit=explicit)
    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        tokens = ft.nn.generate(ft.shard(model(name), RULES, mesh), PROMPTS, 8, lengths=LENGTHS)
    assert tokens.tolist() == ft.nn.generate(model(name), PROMPTS, 8, lengths=LENGTHS).tolist()
    assert tokens.sharding.is_equivalent_to(jax.NamedSharding(mesh, ft.P("data")), 2)


def test_types_tell_where_there_are_no_rules() -> None:
    mesh = ft.make_mesh(data=2, model=2, devices=jax.devices()[:4], explicit=True)
    prompts = np.pad(PROMPTS, [(0, 0), (0, 1)])
    tokens = ft.nn.generate(
        ft.shard(model("llama"), RULES, mesh), ft.shard(prompts, ft.P(None, "model"), mesh), 4
    )
    assert tokens.tolist() == ft.nn.generate(model("llama"), prompts, 4).tolist()


def test_one_compilation_for_prompts_of_a_bucket() -> None:
    generate = functools.partial(
        ft.nn.generate, model("llama"), length=4, key=jax.random.key(0), top_k=5, top_p=0.9
    )
    generation.clear_cache()  # another test may have compiled it
    generate(PROMPTS, temperature=1.0)
    assert len(generation.compilations) == 1
    with ft.testing.assert_no_recompile():
        for seq in (1, 5, 9):
            tokens = np.asarray(generate(PROMPTS[:, :seq], temperature=0.5))
            assert tokens.shape == (2, seq + 4) and np.array_equal(
                tokens[:, :seq], PROMPTS[:, :seq]
            )


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_tokens_of_a_larger_vocabulary_than_the_dtype_of_the_prompts(dtype: str) -> None:
    config = ft.nn.TransformerConfig(**{**SIZES, "vocab_size": 300}, max_seq=64)
    own = ft.nn.Transformer.create(
        config, embed_init=jax.nn.initializers.normal(1.0), key=jax.random.key(7)
    )
    expected = ft.nn.generate(own, PROMPTS, 8, stop=299, pad=-1)
    assert int(np.max(expected)) > 255
    assert (
        ft.nn.generate(own, PROMPTS.astype(dtype), 8, stop=299, pad=-1).tolist()
        == expected.tolist()
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_cache_counts_in_any_integers(dtype: str) -> None:
    """Beyond 127 and 255, where a sum in a narrow dtype would wrap."""
    sizes = (140, 140, 30, 30)
    key, value, *new = (jnp.asarray(RANDOM.normal(size=(2, 2, n, 2, 8)), "float32") for n in sizes)
    filled = jnp.array([0, 120], dtype)
    found = ft.nn.Cache(key, value, filled).extended(*new)
    expected = ft.nn.Cache(key, value, filled.astype("int32")).extended(*new)
    assert found.filled.tolist() == [30, 150]
    np.testing.assert_array_equal(found.key, expected.key)
    assert next_positions(filled, 300)[:, -1].tolist() == [299, 419]
    assert cached_positions(filled, 300)[:, [0, -1]].tolist() == [[-300, -1], [0, -1]]


# Rows without a next token


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logits_that_are_nan_give_no_tokens(temperature: float) -> None:
    """A single one too; and the other rows go on."""
    own = eqx.tree_at(
        lambda m: m.embed.weight, model("llama"), replace_fn=lambda w: w.at[7].set(jnp.nan)
    )
    prompts = np.array([[1, 2, 3], [4, 7, 5]], "uint8")
    options: Any = {"temperature": temperature, "key": jax.random.key(0)}
    tokens = np.asarray(ft.nn.generate(own, prompts, 3, **options))
    assert tokens.dtype == "int32" and tokens[1, 3:].tolist() == [-1] * 3
    assert (tokens[0] < 96).all()
    broken = eqx.tree_at(
        lambda m: m.unembed.weight, model("llama"), replace_fn=lambda w: w.at[0, 5].set(jnp.nan)
    )
    assert ft.nn.generate(broken, prompts, 3, **options)[0, 3:].tolist() == [-1] * 3


def test_lengths_and_tokens_in_a_trace() -> None:
    """Lengths that are none, and tokens outside the vocabulary, are seen; padding is not read."""
    run = jax.jit(
        lambda prompts, lengths: ft.nn.generate(model("llama"), prompts, 4, lengths=lengths)
    )
    known = jax.jit(lambda lengths: ft.nn.generate(model("llama"), PROMPTS, 4, lengths=lengths))
    expected = run(PROMPTS, LENGTHS)
    for length in (0, -1, 10, 12, 100):
        for found in (run(PROMPTS, np.array([4, length])), known(np.array([4, length]))):
            assert found[0].tolist() == expected[0].tolist()
            assert found[1].tolist() == [*PROMPTS[1].tolist(), *[-1] * 4]
    for token in (-1, -96, 96, 1000):
        padded, wrong = PROMPTS.copy(), PROMPTS.copy()
        padded[0, 4:] = wrong[0, 2] = token
        assert run(padded, LENGTHS).tolist() == expected.tolist()
        assert run(wrong, LENGTHS)[0, 4:8].tolist() == [-1] * 4
        assert (
            ft.nn.generate(model("llama"), padded, 4, lengths=LENGTHS).tolist() == expected.tolist()
        )


def test_extreme_temperatures() -> None:
    """Small ones are greedy; with large ones, and numbers beyond 32 bits, tokens are tokens."""
    options: Any = {"key": jax.random.key(0), "top_k": 5, "top_p": 0.9}
    for small in (1e-10, 1e-38, 5e-324):
        tokens = ft.nn.generate(model("llama"), PROMPTS, 4, temperature=small, **options)
        assert tokens.tolist() == [continued("llama", row, 9, 4) for row in range(2)]
    options |= {"temperature": 1e300, "top_k": 2**70}
    tokens = np.asarray(ft.nn.generate(model("llama"), PROMPTS, 4, **options))
    assert ((tokens >= 0) & (tokens < 96)).all()


def test_the_cache_is_updated_in_place() -> None:
    cache = ft.abstract(ft.nn.Cache.create)(model("llama"), 2, 48)
    step = ft.jit(lambda model, tokens, cache: model.decode(tokens, cache), donate="cache")
    compiled = step.lower(model("llama"), jax.ShapeDtypeStruct((2, 1), jnp.int32), cache).compile()
    assert compiled.ledger().memory.aliases == 2 * cache.key.size * 4 + cache.filled.size * 4
    # No array as large as the cache is made besides.
    made = re.findall(r"= f32\[2,2,48,2,8\]\S* (\w[\w-]*)\(", compiled.as_text())
    assert not [opcode for opcode in made if opcode == "copy"]


@pytest.mark.parametrize(
    ("name", "length", "most"),
    [("llama", 5, 5), ("mistral", 16, 64), ("mistral", 3, 3), ("mistral", 5, 64)],
)
def test_a_token_that_a_cache_has_no_room_for_is_seen(name: str, length: int, most: int) -> None:
    """With a window of 5 a cache of 5 is enough, up to `max_seq`."""
    step = ft.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    cache = ft.nn.Cache.create(model(name), 1, length)
    tokens = RANDOM.integers(0, 96, (1, 66)).astype(np.int32)
    for start in range(0, 66, 3):
        logits, cache = step(model(name), tokens[:, start : start + 3], cache)
        beyond = np.arange(start, start + 3) >= most
        assert (
            np.isnan(logits[0]).all(-1).tolist()
            == np.isnan(logits[0]).any(-1).tolist()
            == beyond.tolist()
        )


def test_what_stops_a_row() -> None:
    name = "qwen 3"
    rows = [continued(name, row, 9, 8) for row in range(2)]
    stop = rows[0][11]
    expected = [row[: row.index(stop, 9) + 1] if stop in row[9:] else row for row in rows]
    expected = [row + [7] * (17 - len(row)) for row in expected]
    assert ft.nn.generate(model(name), PROMPTS, 8, stop=stop, pad=7).tolist() == expected
    assert (
        ft.nn.generate(model(name), PROMPTS, 8, stop=[95, stop], pad=7)[0].tolist() == expected[0]
    )


# temperature, top_k, top_p: how many of the likeliest tokens are drawn
DRAWN = [(1.0, 1, None, 1), (1.0, 3, None, 3), (2.0, None, 1e-6, 1), (1.0, 4, 0.5, 4)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "most"), DRAWN)
def test_tokens_are_drawn_from_the_likeliest(
    temperature: float, top_k: Any, top_p: Any, most: int
) -> None:
    logits = np.asarray(ft.jit(model("llama"))(PROMPTS[:1]))[0, -1]
    likeliest = set(np.argsort(-logits)[:most].tolist())
    many = np.repeat(PROMPTS[:1], 64, 0)
    options: Any = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "key": jax.random.key(3),
    }
    found = set(np.asarray(ft.nn.generate(model("llama"), many, 1, **options))[:, 9].tolist())
    assert found <= likeliest and (len(found) > 1) == (most > 1)


def test_draws_follow_the_probabilities() -> None:
    logits = np.asarray(ft.jit(model("llama"))(PROMPTS[:1]), np.float64)[0, -1]
    weights = np.exp((logits - logits.max()) / 2)
    weights /= weights.sum()
    many = np.repeat(PROMPTS[:1], 4096, 0)
    found = np.asarray(
        ft.nn.generate(model("llama"), many, 1, temperature=2.0, key=jax.random.key(4))
    )[:, 9]
    counted = np.bincount(found, minlength=96) / 4096
    np.testing.assert_allclose(counted, weights, atol=4 * np.sqrt(weights.max() / 4096))


def test_each_token_is_drawn_for_itself() -> None:
    """If all tokens are equally likely, two equal columns are two equal draws."""
    uniform = jax.tree.map(jnp.zeros_like, model("llama"))
    many, key = np.repeat(PROMPTS[:1], 64, 0), jax.random.key(5)
    drawn = np.asarray(ft.nn.generate(uniform, many, 4, temperature=1.0, key=key))[:, 9:]
    for a, b in itertools.combinations(drawn.T, 2):
        assert np.mean(a == b) < 0.25


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"length": 60}, "length=60  with prompts of length 9, rows would exceed the model's max_seq=64"),
    ({"temperature": 1.0}, "temperature=1.0  sampling tokens requires a key"),
    ({"top_k": 3}, "top_k=3  it has no effect at temperature 0, which chooses the likeliest token"),
    ({"lengths": np.array([0, 9])}, "each length must be from 1 to 9"),
    ({"lengths": [3, 4]}, "lengths=[3, 4]  it must be integers of shape (2,)"),
    ({"prompts": PROMPTS + 95}, ", are outside the vocabulary of size 96"),
    ({"prompts": -PROMPTS}, "are outside the vocabulary of size 96"),
    ({"stop": [3, 96]}, "stop=96  stop tokens must be from 0 to 95"),
    ({"pad": 2**31}, f"pad={2**31}  it must be an integer that fits in int32"),
    ({"stop": "end"}, "it must be a token, or several tokens"),
    ({"prompts": PROMPTS[0]}, "it must be an array of integers of shape (batch, seq), with at least one token"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "why"), WRONG, ids=[why for _, why in WRONG])
def test_what_cannot_be_continued(given: dict[str, Any], why: str) -> None:
    arguments = {"prompts": PROMPTS, "length": 4, **given}
    with raises("generate: invalid arguments") as error:
        ft.nn.generate(model("llama"), **arguments)
    assert re.sub(r"\s+", " ", why) in re.sub(r"\s+", " ", str(error.value))


def test_what_does_not_go_with_a_cache() -> None:
    cache = ft.nn.Cache.create(model("llama"), 2, 12)
    with raises("must have the shape (2, seq), since the cache has 2 rows"):
        model("llama").decode(PROMPTS[:1], cache)
    with raises("length=65 exceeds the model's max_seq=64"):
        ft.nn.Cache.create(model("llama"), 2, 65)
    other = ft.nn.TransformerConfig(**{**SIZES, "kv_heads": 4}, max_seq=64)
    foreign = jax.eval_shape(
        lambda: ft.nn.Cache.create(ft.nn.Transformer.create(other, key=jax.random.key(0)), 2, 12)
    )
    with raises("an `ft.nn.Cache` for the model's layers, heads and compute_dtype"):
        model("llama").decode(PROMPTS, foreign)


FLOATS, SHORT = np.zeros((2, 9)), np.zeros((2, 8), int)


@pytest.mark.parametrize(
    ("positions", "segments"), [(SHORT, None), (None, SHORT), (FLOATS, None), (SHORT, FLOATS)]
)
def test_positions_and_segments_that_do_not_fit(positions: Any, segments: Any) -> None:
    with raises("it must be integers of shape (2, 9)") as caught:
        model("llama")(PROMPTS, positions, segments)
    given = {"positions": positions, "segments": segments}
    assert [one.what.partition("=")[0] for one in caught.value.problems] == [
        name for name, value in given.items() if value is not None
    ]


# Positions and segments without a cache


@pytest.mark.parametrize("name", FAMILY)
def test_packed_texts_are_as_if_apart(name: str) -> None:
    run = ft.jit(lambda model, *given: model(*given))
    packed = np.concatenate([PROMPTS[:1, :4], PROMPTS[1:, :9]], 1)
    positions = np.array([[*range(4), *range(9)]])
    segments = np.array([[0] * 4 + [3] * 9])
    found = run(model(name), packed, positions, segments)
    for part, row in ((found[:, :4], PROMPTS[:1, :4]), (found[:, 4:], PROMPTS[1:, :9])):
        np.testing.assert_allclose(part, run(model(name), row), rtol=1e-5, atol=1e-5)


def test_a_cache_has_the_dtype_of_the_activations() -> None:
    config = ft.nn.TransformerConfig(**SIZES, max_seq=64)
    whole = ft.abstract(ft.nn.Transformer.create)(config, key=jax.random.key(0))
    sizes = whole.embed.weight.shape
    embed = ft.abstract(ft.nn.Embedding)(*sizes, param_dtype=jnp.bfloat16, key=jax.random.key(0))
    narrow = eqx.tree_at(lambda model: model.embed, whole, embed)
    for model, dtype in ((whole, jnp.float32), (narrow, jnp.bfloat16)):
        assert ft.abstract(ft.nn.Cache.create)(model, 2, 48).key.dtype == dtype
