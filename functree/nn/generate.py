"""A language model and prompts ─► the prompts with the tokens that the model continues them with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from functree.errors import FunctreeError, Problem
from functree.nn.activations import activation, whole_sequence
from functree.nn.cache import Cache
from functree.nn.products import whole
from functree.nn.shards import on_shards
from functree.nn.transformer import Transformer
from functree.parameters import FRACTION, KEY, POSITION, POSITIONS, ROOM, SIZE, Takes, check, is_integers, shown
from functree.transforms.jit.jit import jit

_MODEL = Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, Transformer))
_PROMPTS = Takes(
    "an array of integers, (batch, seq), of at least one token", lambda x: is_integers(x) and x.ndim == 2 and x.size > 0
)
_STOP = Takes("a token, or several", POSITIONS.fits)
_LEAST = 16


class _Choice(NamedTuple):
    """How the next token is chosen. Arrays, so that other values need no other program.

    Attributes:
        key: the random key; None: the likeliest token is chosen.
        temperature: divides the logits.
        top_k: only so many of the likeliest tokens are chosen from; None: all.
        top_p: only the likeliest tokens are chosen from, so many that their probability is at least this; None: all.
    """

    key: PRNGKeyArray | None
    temperature: Any
    top_k: Any
    top_p: Any


def generate(
    model: Transformer,
    prompts: Int[Array, "batch seq"],
    length: int,
    *,
    lengths: Int[Array, "batch"] | None = None,
    key: PRNGKeyArray | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] | None = None,
    pad: int = 0,
) -> Int[Array, "batch seq"]:
    """Continue prompts token by token, with a cache of keys and values.

    One program is compiled for all prompts that are padded to the same power of two, and for all values of
    `temperature`, `top_k` and `top_p`.

    Args:
        model: the model.
        prompts: a prompt in each row.
        length: the number of new tokens.
        lengths: the length of each prompt, if they differ: what follows in a row is padding. Each is continued at its
            own end.
        key: the random key, for a `temperature` above 0.
        temperature: 0 chooses the likeliest token. Else tokens are drawn, with logits that are divided by it.
        top_k: draw from so many of the likeliest tokens only.
        top_p: draw from the likeliest tokens only, so many that their probabilities sum up to it.
        stop: a token, or several, behind which a row ends.
        pad: what stands behind the end of a row.

    Returns:
        The prompts, each with its new tokens: an array that is `length` wider.

    Raises:
        FunctreeError: the sequences would be longer than the model's `max_seq`; a value does not fit; there is no key
            for a temperature above 0.

    Examples:
        >>> config = ft.nn.TransformerConfig(100, 8, layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> ft.nn.generate(model, jnp.array([[1, 2, 3]]), 4).shape
        (1, 7)
    """
    check(
        "generate cannot continue these prompts",
        model=(model, _MODEL),
        prompts=(prompts, _PROMPTS),
        length=(length, SIZE),
        key=(key, KEY.or_none()),
        temperature=(temperature, ROOM),
        top_k=(top_k, SIZE.or_none()),
        top_p=(top_p, FRACTION.or_none()),
        stop=(stop, _STOP.or_none()),
        pad=(pad, POSITION),
    )
    batch, seq = prompts.shape
    stops: Any = np.asarray([] if stop is None else stop, np.int32).reshape(-1)
    if problems := _problems(model, prompts, length, lengths, key, temperature, top_k, top_p, stops):
        raise FunctreeError("generate cannot continue these prompts", problems)
    choice = _Choice(
        None if temperature == 0 else key,
        np.float32(temperature),
        None if top_k is None else np.int32(top_k),
        None if top_p is None else np.float32(top_p),
    )
    ends: Any = np.full(batch, seq, np.int32) if lengths is None else lengths
    padded = _in_bucket(prompts, min(_bucket(seq), model.config.max_seq - length))
    return _narrowed(generation(model, padded, ends, choice, stops, jnp.int32(pad), range(length)), seq + length)


def _problems(
    model: Transformer,
    prompts: Any,
    length: int,
    lengths: Any,
    key: Any,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stops: np.ndarray,
) -> list[Problem]:
    """What is wrong, each value for itself being one that its parameter takes."""
    found: list[Problem] = []
    batch, seq = prompts.shape
    if seq + length > model.config.max_seq:
        why = f"with prompts of {seq} it is more than the model's max_seq={model.config.max_seq}"
        remedy = "shorten them, or build the model with a larger max_seq"
        found.append(Problem(None, None, f"length={length}", why, remedy))
    if lengths is not None:
        if not is_integers(lengths) or lengths.shape != (batch,):
            why = f"it must be an array of an integer for each of {batch} prompts"
            found.append(Problem(None, None, f"lengths={shown(lengths)}", why))
        elif _is_here(lengths) and not all(0 < one <= seq for one in np.asarray(lengths)):
            found.append(Problem(None, None, f"lengths={lengths}", f"a prompt has from 1 to {seq} tokens"))
    vocab = model.config.vocab_size
    if _is_here(prompts) and len(unknown := _outside(np.asarray(prompts), vocab)):
        why = f"the model has {vocab} tokens, and some are not among them: {_few(unknown)}"
        found.append(Problem(None, None, "prompts", why))
    if len(unknown := _outside(stops, vocab)):
        found.append(Problem(None, None, f"stop={_few(unknown)}", f"the model has {vocab} tokens"))
    if temperature and key is None:
        why = "tokens are drawn with a key"
        found.append(Problem(None, None, f"temperature={temperature}", why, "key=jax.random.key(0)"))
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and not temperature:
            why = "at temperature 0 the likeliest token is chosen, whatever it is"
            found.append(Problem(None, None, f"{name}={value}", why, "temperature=1.0"))
    return found


def _outside(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """The tokens that a vocabulary does not have."""
    return np.unique(tokens[(tokens < 0) | (tokens >= vocab)])


def _few(tokens: np.ndarray) -> str:
    """The first of some tokens."""
    return ", ".join(map(str, tokens[:5].tolist())) + ", …" * (len(tokens) > 5)


def _bucket(seq: int) -> int:
    """The length that prompts are padded to."""
    return max(_LEAST, 1 << (seq - 1).bit_length())


def _is_here(x: Any) -> bool:
    """Whether the values of an array are known, to this process."""
    return isinstance(x, np.ndarray) or (not isinstance(x, Tracer) and x.is_fully_addressable)


def _in_bucket(prompts: Any, seq: int) -> Any:
    """Prompts padded to a length, without a program for that; traced ones stay as they are."""
    if not _is_here(prompts) or prompts.shape[1] == seq:
        return prompts
    padded = np.pad(np.asarray(prompts), [(0, 0), (0, seq - prompts.shape[1])])
    return jax.device_put(padded, prompts.sharding) if getattr(prompts, "committed", False) else padded


def _narrowed(tokens: Array, seq: int) -> Array:
    """The first tokens of each row, without a program for that."""
    if tokens.shape[1] == seq or not _is_here(tokens):
        return tokens[:, :seq]
    return jax.device_put(np.asarray(tokens)[:, :seq], tokens.sharding)


@jit
@whole_sequence()
def generation(
    model: Transformer,
    prompts: Int[Array, "batch _"],
    lengths: Int[Array, "batch"],
    choice: _Choice,
    stops: Int[Array, "stops"],
    pad: Int[Array, ""],
    new_tokens: range,  # a number that differs would be warned of, as one that could be traced
) -> Int[Array, "batch _"]:
    prompts, (batch, seq) = whole(prompts), prompts.shape
    length = len(new_tokens)
    pad, lengths = pad.astype(prompts.dtype), lengths.astype(jnp.int32)
    features, new = model.run(prompts, cache=Cache.create(model, batch, 0))
    cache = Cache.create(model, batch, seq + length).extended(*new, lengths=lengths)
    logits = model.logits(on_shards(_last, [features, lengths], ["batch _ _", "batch"]))
    first = _chosen(logits[:, 0], choice, jnp.int32(0)).astype(prompts.dtype)
    # One more, for the padding behind the end.
    tokens = jnp.where(jnp.arange(length + 1)[None] == 0, first[:, None], pad)

    def goes_on(carry: Any) -> Bool[Array, ""]:
        i, _, _, _, ended = carry
        return (i < length) & ~ended.all() if stops.size else i < length

    def step(carry: Any) -> Any:
        i, token, cache, tokens, ended = carry
        logits, cache = model(token[:, None], cache=cache)
        ended |= _are_in(stops, token.astype(stops.dtype))
        token = jnp.where(ended, pad, _chosen(logits[:, 0], choice, i).astype(prompts.dtype))
        return i + 1, token, cache, _with(tokens, token, i), ended

    start = jnp.int32(1), first, cache, tokens, first != first
    *_, tokens, _ = jax.lax.while_loop(goes_on, step, start)
    return on_shards(_appended, [prompts, tokens, lengths], ["batch _", "batch _", "batch"])


def _last(x: Float[Array, "batch seq embed"], lengths: Int[Array, "batch"]) -> Float[Array, "batch 1 embed"]:
    """The vector of the last token of each row."""
    return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)


def _are_in(stops: Int[Array, "stops"], token: Int[Array, "batch"]) -> Bool[Array, "batch"]:
    return (token[:, None] == stops[None]).any(1)


def _with(tokens: Int[Array, "batch seq"], token: Int[Array, "batch"], i: Any) -> Int[Array, "batch seq"]:
    return jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, 1)


def _appended(
    prompts: Int[Array, "batch seq"], tokens: Int[Array, "batch new+1"], lengths: Int[Array, "batch"]
) -> Int[Array, "batch seq+new"]:
    """Each prompt, followed by its own new tokens, and then by the last one, which is padding."""
    new = tokens.shape[1] - 1
    index = jnp.arange(prompts.shape[1] + new)[None] - lengths[:, None]
    found = jnp.take_along_axis(tokens, jnp.clip(index, 0, new), axis=1)
    return jnp.where(index < 0, jnp.pad(prompts, [(0, 0), (0, new)]), found)


def _chosen(logits: Float[Array, "batch vocab"], choice: _Choice, i: Int[Array, ""]) -> Int[Array, "batch"]:
    """The next token of each row."""
    logits = activation(whole(logits), "batch _")
    if choice.key is None:
        return jnp.argmax(logits, axis=-1)
    logits = logits.astype(jnp.float32) / choice.temperature
    least = jnp.finfo(logits.dtype).min
    if choice.top_k is not None:
        falling = -jnp.sort(-logits, axis=-1)
        last = jnp.minimum(choice.top_k, logits.shape[-1]) - 1
        logits = jnp.where(logits < jax.lax.dynamic_slice_in_dim(falling, last, 1, 1), least, logits)
    if choice.top_p is not None:
        falling = -jnp.sort(-logits, axis=-1)
        weights = jax.nn.softmax(falling)
        # A token is kept if those that are likelier sum up to less; the likeliest always.
        kept = jnp.cumsum(weights, axis=-1) - weights < choice.top_p
        lowest = jnp.min(jnp.where(kept | (falling == falling[:, :1]), falling, jnp.inf), axis=-1)
        logits = jnp.where(logits < lowest[:, None], least, logits)
    return jax.random.categorical(jax.random.fold_in(choice.key, i), logits)
