"""A language model and prompts ─► the prompts, and the tokens that continue them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from functree.argument_checks import (
    FRACTION,
    KEY,
    POSITION,
    POSITIONS,
    ROOM,
    SIZE,
    Takes,
    check,
    is_integers,
    parameter_error,
    shown,
)
from functree.devices.meshes import devices_along
from functree.devices.specs import mesh_axes
from functree.errors import Problem
from functree.nn.activations import (
    HEADS,
    activation,
    gather_last,
    on_one_device,
    on_shards,
    sequence_by_rules,
    unsharded_sequence,
)
from functree.nn.cache import Cache, LayersCache
from functree.nn.config import sizes_of
from functree.nn.transformer import Transformer
from functree.nn.weights import as_int32
from functree.placing.ambient import has_axis_rules
from functree.placing.constrain import axis_shards
from functree.transforms.jit.jit import jit

_MODEL = Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, Transformer))
_PROMPTS = Takes(
    "an array of integers, (batch, seq), of at least one token",
    lambda x: is_integers(x) and x.ndim == 2 and x.size > 0,
)
_STOP = Takes("a token, or several", POSITIONS.fits)
# The least length that prompts are padded to: 1, 2, 4 and 8 would be programs of their own.
_LEAST = 16
# Divided by a smaller one, logits would be infinite in float32.
_LEAST_TEMPERATURE = 1e-30
_INT32 = np.iinfo(np.int32)

IntArray = Int[Array | np.ndarray, "..."]


class Sampling(NamedTuple):
    """How the next token is chosen. Its values are arrays, so that others need no other program.

    Attributes:
        key: the random key; None: the likeliest token is chosen.
        temperature: divides the logits.
        top_k: only so many of the likeliest tokens are chosen from; None: all.
        top_p: only the likeliest tokens are chosen from, so many that their probability is at least
            this; None: all.
    """

    key: PRNGKeyArray | None
    temperature: Float[Array, ""] | np.float32
    top_k: Int[Array, ""] | np.int32 | None
    top_p: Float[Array, ""] | np.float32 | None


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

    One program is compiled for all prompts that are padded to the same power of two, and for all
    values of `temperature`, `top_k` and `top_p`.

    `top_k` is from Fan et al., "Hierarchical neural story generation" (2018), `top_p` from Holtzman
    et al., "The curious case of neural text degeneration" (2020).

    Args:
        model: the model.
        prompts: a prompt in each row, of any integer dtype.
        length: the number of new tokens.
        lengths: the length of each prompt, if they differ: what follows in a row is padding. Each
            is continued at its own end.
        key: the random key, for a `temperature` above 0.
        temperature: 0 chooses the likeliest token. Else tokens are drawn, with logits that are
            divided by it.
        top_k: draw from so many of the likeliest tokens only.
        top_p: draw from the likeliest tokens only, so many that their probabilities sum up to it.
        stop: a token, or several, behind which a row ends.
        pad: what stands behind the end of a row.

    Returns:
        The prompts, each with its new tokens: an array that is `length` wider. It has their dtype,
        or int32 if that one does not hold all tokens and `pad`. Where no token can be chosen, since
        the logits are NaN, it is -1, or the largest number of an unsigned dtype; so are all behind
        it.

    Raises:
        FunctreeError: the sequences would be longer than the model's `max_seq`; a value does not
            fit; there is no key for a temperature above 0.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
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
    seq, (vocab,) = prompts.shape[1], sizes_of(model.embed, ["vocab"])
    # As Python's integers, of which no one wraps.
    stops = np.asarray([] if stop is None else stop, object).reshape(-1)
    problems = _prompt_problems(model, vocab, prompts, length, lengths)
    problems += _option_problems(vocab, key, temperature, top_k, top_p, stops, pad)
    if problems:
        right_type = lengths is None or is_integers(lengths)
        raise parameter_error(
            "generate cannot continue these prompts", problems, right_type=right_type
        )
    sampling = Sampling(
        None if temperature == 0 else key,
        np.float32(np.clip(float(temperature), _LEAST_TEMPERATURE, np.finfo(np.float32).max)),
        None if top_k is None else np.int32(min(top_k, vocab)),
        None if top_p is None else np.float32(top_p),
    )
    padded: Any = prompts
    # A number, and not an array that nobody has placed beside the model.
    ends: Any = np.asarray(seq, np.int32) if lengths is None else lengths
    # Of lengths whose values are not known, one that is too large would count the padding.
    if _is_known(ends):
        # Not so long that no room is left for the new tokens.
        padded = _padded(prompts, min(_bucket(seq), model.max_seq - length))
    stop_tokens: Any = tuple(map(np.int32, stops))
    padding: Any = np.asarray(pad, _dtype(prompts, vocab, pad))
    tokens = generation(model, padded, ends, sampling, stop_tokens, padding, range(length))
    return _first_columns(tokens, seq + length)


# Of these values each is one that its parameter takes. `lengths` may still be anything.


def _prompt_problems(
    model: Transformer, vocab: int, prompts: IntArray, length: int, lengths: IntArray | None
) -> list[Problem]:
    """What is wrong with prompts and lengths."""
    found: list[Problem] = []
    batch, seq = prompts.shape
    if seq + length > model.max_seq:
        why = f"with prompts of {seq} it is more than the model's max_seq={model.max_seq}"
        remedy = "shorten them, or build the model with a larger max_seq"
        found.append(Problem(None, None, f"length={length}", why, remedy))
    if lengths is not None and (not is_integers(lengths) or lengths.shape != (batch,)):
        why = f"it must be an array of an integer for each of {batch} prompts"
        found.append(Problem(None, None, f"lengths={shown(lengths)}", why))
    elif lengths is not None and _is_known(lengths):
        # A prompt without a token has no vector from which the first token could be chosen.
        if not all(0 < one <= seq for one in np.asarray(lengths)):
            why = f"a prompt has from 1 to {seq} tokens"
            found.append(Problem(None, None, f"lengths={lengths}", why))
    # Of prompts whose values are not known, a token that the model does not have gives NaN.
    if _is_known(prompts) and len(unknown := _outside(_read(prompts, lengths), vocab)):
        why = f"the model has {vocab} tokens, and some are not among them: {_first_few(unknown)}"
        found.append(Problem(None, None, "prompts", why))
    return found


def _option_problems(
    vocab: int,
    key: PRNGKeyArray | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stops: np.ndarray,
    pad: int,
) -> list[Problem]:
    """What is wrong with the options."""
    found: list[Problem] = []
    if len(unknown := _outside(stops, vocab)):
        what = f"stop={_first_few(unknown)}"
        found.append(Problem(None, None, what, f"the model has {vocab} tokens"))
    if not _INT32.min <= pad <= _INT32.max:
        found.append(Problem(None, None, f"pad={pad}", "it must be a number that int32 holds"))
    if temperature and key is None:
        what, why = f"temperature={temperature}", "tokens are drawn with a key"
        found.append(Problem(None, None, what, why, "key=jax.random.key(0)"))
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and not temperature:
            why = "at temperature 0 the likeliest token is chosen, whatever it is"
            found.append(Problem(None, None, f"{name}={value}", why, "temperature=1.0"))
    return found


def _read(prompts: IntArray, lengths: IntArray | None) -> np.ndarray:
    """The tokens of known prompts, without their padding where that is known."""
    tokens = np.asarray(prompts)
    if lengths is None or not is_integers(lengths) or not _is_known(lengths):
        return tokens
    if lengths.shape != tokens.shape[:1]:
        return tokens
    return tokens[np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]]


def _outside(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """The tokens that a vocabulary does not have."""
    # The dtypes of less than a byte are not numpy's: a larger number does not compare with them.
    if tokens.dtype.itemsize < 8:
        tokens = tokens.astype(np.int64)
    return np.unique(tokens[(tokens < 0) | (tokens >= vocab)])


def _first_few(tokens: np.ndarray) -> str:
    return ", ".join(map(str, tokens[:5].tolist())) + ", …" * (len(tokens) > 5)


def _is_known(x: IntArray) -> bool:
    """Whether this process has the values of an array: it is neither traced nor on other hosts."""
    if isinstance(x, np.ndarray):
        return True
    return not isinstance(x, Tracer) and x.is_fully_addressable


def _dtype(prompts: IntArray, vocab: int, pad: int) -> np.dtype:
    """The dtype of the result."""
    own = jnp.iinfo(prompts.dtype)
    # One number more than there are tokens: that of no token, which -1 is in an unsigned dtype.
    holds_all = vocab <= own.max and own.min <= pad <= own.max
    return np.dtype(prompts.dtype) if holds_all else np.dtype(np.int32)


# Around the program. On the host: each would be a program of its own for each length of prompts.


def _bucket(seq: int) -> int:
    """The length that prompts are padded to: a power of two."""
    return max(_LEAST, 1 << (seq - 1).bit_length())


def _padded(prompts: IntArray, seq: int) -> IntArray:
    """Prompts padded to a length; those whose values are not known stay as they are."""
    if not _is_known(prompts) or prompts.shape[1] == seq:
        return prompts
    padded = np.pad(np.asarray(prompts), [(0, 0), (0, seq - prompts.shape[1])])
    # Those that were put on a mesh go back there. Others are placed by the rules of the call.
    if isinstance(prompts, jax.Array) and prompts.committed:
        return jax.device_put(padded, prompts.sharding)
    return padded


def _first_columns(tokens: Array, seq: int) -> Array:
    """The first tokens of each row."""
    if tokens.shape[1] == seq or not _is_known(tokens):
        return tokens[:, :seq]
    return jax.device_put(np.asarray(tokens)[:, :seq], tokens.sharding)


# The program

_Carry = tuple[
    Int[Array, ""], Int[Array, "batch"], Cache, Int[Array, "batch new+1"], Bool[Array, "batch"]
]
"""The number of tokens so far, the last of each row, the cache, all of them, and which rows have
ended."""


@jit
def generation(
    model: Transformer,
    prompts: Int[Array, "batch _"],
    lengths: Int[Array, "batch"] | Int[Array, ""],
    sampling: Sampling,
    stops: tuple[Int[Array, ""], ...],
    pad: Int[Array, ""],
    new_tokens: range,  # a number that differs would be warned of, as one that could be traced
) -> Int[Array, "batch _"]:
    """The prompts, each with its new tokens and then padding, as one program.

    The dtype of the result is that of `pad`.
    """
    # On Explicit axes they may come with a sharded sequence, which no rule says.
    prompts, seq = gather_last(prompts), prompts.shape[1]
    length, dtype = len(new_tokens), pad.dtype
    # All tokens are int32 inside, so that none wraps.
    prompts, lengths, pad = as_int32(prompts), as_int32(lengths), as_int32(pad)
    if not lengths.ndim:
        lengths = lengths + 0 * prompts[:, 0]  # sharded as the prompts are, on Explicit axes too
    # A length that is not known here, and is none, gives a row without new tokens.
    given, lengths = lengths, jnp.where((lengths >= 1) & (lengths <= seq), lengths, seq)
    prompts = on_shards(_zeroed, [prompts, lengths], ["batch _", "batch"])
    last, new = _read_prompts(model, prompts, given)
    with unsharded_sequence():
        tokens = _continued(model, last, new, lengths, sampling, stops, pad, (seq, length))
    # To an unsigned dtype -1 is cast as its largest number.
    return on_shards(_appended, [prompts, tokens, lengths], ["batch _", "batch _", "batch"]).astype(
        dtype
    )


def _zeroed(
    prompts: Int[Array, "batch seq"], lengths: Int[Array, "batch"]
) -> Int[Array, "batch seq"]:
    """The prompts, with tokens in the place of their padding, which may be anything."""
    # Of a number that is no token the vector is NaN, and so are the sums over all vectors of which
    # its weight is 0.
    return jnp.where(jnp.arange(prompts.shape[1])[None] < lengths[:, None], prompts, 0)


def _read_prompts(
    model: Transformer, prompts: Int[Array, "batch seq"], lengths: Int[Array, "batch"]
) -> tuple[Float[Array, "batch 1 embed"], LayersCache]:
    """The vector of the last token of each prompt, and the keys and values of all tokens.

    Args:
        model: the model.
        prompts: the prompts, padded at their right with tokens.
        lengths: the length of each; the vector of a row that has no such token is NaN.
    """
    batch, seq = prompts.shape
    # All prompts at once, behind a cache without slots. In parts where the rules shard a sequence
    # while heads are mixed, unless the prompts have no equal parts.
    if _context_parts() > 1 and seq % axis_shards("seq", "batch seq embed").parts == 0:
        features, new = model.features_with_cache(prompts, Cache.create(model, batch, 0))
        # A sum over parts, of which all others are zeros: the vectors themselves stay where they
        # are. No row is at -1, so that the sum over such a row is 0 as well, and no token.
        index = jnp.broadcast_to(jnp.arange(seq)[None], prompts.shape)
        is_last = (index == lengths[:, None] - 1)[..., None]
        last = jnp.where(is_last, features, 0).sum(1, keepdims=True)
        last = jnp.where(is_last.any(1, keepdims=True), last, jnp.nan)
        return activation(last, "batch _ embed"), new
    with unsharded_sequence():
        features, new = model.features_with_cache(prompts, Cache.create(model, batch, 0))
        return on_shards(_last, [features, lengths], ["batch _ _", "batch"]), new


def _context_parts() -> int:
    """In how many parts a sequence is while heads are mixed, by the ambient rules."""
    if not has_axis_rules() or on_one_device():
        return 1
    return devices_along(mesh_axes(sequence_by_rules(HEADS)))


def _last(
    x: Float[Array, "batch seq embed"], lengths: Int[Array, "batch"]
) -> Float[Array, "batch 1 embed"]:
    """The vector of the last token of each row; NaN if the row does not have so many tokens."""
    # Beyond the last row JAX gives NaN too, but takes -1 for one from the end.
    index = jnp.where(lengths > 0, lengths - 1, x.shape[1])
    return jnp.take_along_axis(x, index[:, None, None], axis=1, mode="fill")


def _continued(
    model: Transformer,
    last: Float[Array, "batch 1 embed"],
    new: LayersCache,
    lengths: Int[Array, "batch"],
    sampling: Sampling,
    stops: tuple[Int[Array, ""], ...],
    pad: Int[Array, ""],
    sizes: tuple[int, int],
) -> Int[Array, "batch new+1"]:
    """The new tokens of each row, and one more for the padding behind its end.

    Args:
        model: the model.
        last: the vector of the last token of each prompt.
        new: the keys and values of the prompts.
        lengths: the length of each.
        sampling: how a token is chosen.
        stops: the tokens behind which a row ends.
        pad: what stands there.
        sizes: the length of the longest prompt, and the number of new tokens.
    """
    seq, length = sizes
    # With room for the new tokens. Tokens behind the end of a shorter prompt were computed, and are
    # not written: `lengths`.
    cache = Cache.create(model, last.shape[0], seq + length).extended(*new, lengths=lengths)
    # (batch, 1, embed): logits are computed for the last tokens only.
    logits = model.logits(last)
    first = _next_token(logits[:, 0], sampling, jnp.int32(0))
    # (batch, length + 1): one more, for the padding behind the end.
    tokens = jnp.where(jnp.arange(length + 1)[None] == 0, first[:, None], pad)

    def goes_on(carry: _Carry) -> Bool[Array, ""]:
        i, _, _, _, ended = carry
        # Without stops no row ends: `all` would be a collective in each step.
        return (i < length) & ~ended.all() if stops else i < length

    def step(carry: _Carry) -> _Carry:
        i, token, cache, tokens, ended = carry
        # Padding need not be a token.
        logits, cache = model.decode(jnp.where(ended, 0, token)[:, None], cache)
        # A row has ended after the stop itself, which is a part of the result.
        for stop in stops:
            ended |= token == stop
        token = jnp.where(ended, pad, _next_token(logits[:, 0], sampling, i))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, 1)
        return i + 1, token, cache, tokens, ended

    # `first != first` is False for each row, and sharded like `first` on Explicit axes: a carry has
    # to keep its type.
    start = jnp.int32(1), first, cache, tokens, first != first
    *_, tokens, _ = jax.lax.while_loop(goes_on, step, start)
    return tokens


def _appended(
    prompts: Int[Array, "batch seq"],
    tokens: Int[Array, "batch new+1"],
    lengths: Int[Array, "batch"],
) -> Int[Array, "batch seq+new"]:
    """Each prompt, followed by its own new tokens, and then by the last one, which is padding."""
    new = tokens.shape[1] - 1
    # Which new token is at each position: negative for the prompt, clipped to the padding behind.
    index = jnp.arange(prompts.shape[1] + new)[None] - lengths[:, None]
    found = jnp.take_along_axis(tokens, jnp.clip(index, 0, new), axis=1)
    return jnp.where(index < 0, jnp.pad(prompts, [(0, 0), (0, new)]), found)


def _next_token(
    logits: Float[Array, "batch vocab"], sampling: Sampling, i: Int[Array, ""]
) -> Int[Array, "batch"]:
    """The next token of each row, by the logits; `i` is the number of tokens before it.

    It is -1 if a logit is NaN: `argmax` would take that one. The model gives NaN for -1 too, so
    that all tokens behind it are -1.
    """
    # The vocabulary whole: it is sorted and summed over. For a step these logits are few.
    logits = activation(gather_last(logits), "batch _")
    if sampling.key is None:
        chosen = jnp.argmax(logits, axis=-1)
    else:
        chosen = _drawn(logits, sampling, jax.random.fold_in(sampling.key, i))
    return jnp.where(jnp.isnan(logits).any(-1), -1, chosen).astype(jnp.int32)


def _drawn(
    logits: Float[Array, "batch vocab"], sampling: Sampling, key: PRNGKeyArray
) -> Int[Array, "batch"]:
    """A token of each row, drawn with its probability by the logits."""
    # Without the largest one, which divided by a small temperature might be infinite.
    logits = logits.astype(jnp.float32)
    logits = (logits - logits.max(-1, keepdims=True)) / sampling.temperature
    least = jnp.finfo(logits.dtype).min
    if sampling.top_k is not None:
        falling = -jnp.sort(-logits, axis=-1)
        # An index that is an array, so that all values of `top_k` share a program: `jax.lax.top_k`
        # takes a number.
        last = jnp.minimum(sampling.top_k, logits.shape[-1]) - 1
        lowest = jax.lax.dynamic_slice_in_dim(falling, last, 1, 1)
        logits = jnp.where(logits < lowest, least, logits)
    if sampling.top_p is not None:
        falling = -jnp.sort(-logits, axis=-1)
        weights = jax.nn.softmax(falling)
        # A token is kept if those that are likelier sum up to less; the likeliest always.
        kept = jnp.cumsum(weights, axis=-1) - weights < sampling.top_p
        lowest = jnp.min(jnp.where(kept | (falling == falling[:, :1]), falling, jnp.inf), axis=-1)
        logits = jnp.where(logits < lowest[:, None], least, logits)
    return jax.random.categorical(key, logits)
