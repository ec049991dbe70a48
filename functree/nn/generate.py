"""`generate` continues prompts with a language model, token by token."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from functree.argument_checks import (
    POSITION,
    POSITIONS,
    Fraction,
    Key,
    Room,
    Size,
    Takes,
    check,
    checked,
    is_integers,
)
from functree.devices.meshes import devices_along, mesh_axes
from functree.errors import FunctreeValueError, Problem
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
from functree.nn.transformer import Model, Transformer, integers
from functree.nn.weights import as_int32
from functree.placing.constrain import axis_shards, has_axis_rules
from functree.transforms.jit.jit import jit

_PROMPTS = Takes(
    "an array of integers of shape (batch, seq), with at least one token",
    lambda x: is_integers(x) and x.ndim == 2 and x.size > 0,
)
_PAD = Takes(
    "an integer that fits in int32", lambda pad: POSITION.fits(pad) and -(2**31) <= pad < 2**31
)
_STOP = Takes("a token, or several tokens", POSITIONS.fits)
# The minimum padded length of prompts. Lengths of 1, 2, 4 and 8 would need separate programs.
_LEAST = 16
# Dividing by a smaller temperature would make logits infinite in float32.
_LEAST_TEMPERATURE = 1e-30

IntArray = Int[Array | np.ndarray, "..."]


class Sampling(NamedTuple):
    """The options for choosing the next token.

    The options are arrays, so that all values share one program.

    Attributes:
        key: the random key; None to choose the likeliest token.
        temperature: the divisor of the logits.
        top_k: the number of likeliest tokens to choose from; None for all.
        top_p: the least total probability of the set of likeliest tokens to choose from; None for
            all.
    """

    key: PRNGKeyArray | None
    temperature: Float[Array, ""] | np.float32
    top_k: Int[Array, ""] | np.int32 | None
    top_p: Float[Array, ""] | np.float32 | None


@checked("generate: invalid arguments")
def generate(
    model: Model,
    prompts: Annotated[Int[Array, "batch seq"], _PROMPTS],
    length: Size,
    *,
    lengths: Int[Array, "batch"] | None = None,
    key: Key | None = None,
    temperature: Room = 0.0,
    top_k: Size | None = None,
    top_p: Fraction | None = None,
    stop: Annotated[int | Sequence[int], _STOP] | None = None,
    pad: Annotated[int, _PAD] = 0,
) -> Int[Array, "batch seq"]:
    """Continue prompts token by token, with a cache of keys and values.

    Prompts are padded to a power of two, so that prompts of similar lengths share one compiled
    program. All positive temperatures share a program too, as do all values of `top_k` or `top_p`.

    `top_k` is from Fan et al., "Hierarchical neural story generation" (2018), and `top_p` is from
    Holtzman et al., "The curious case of neural text degeneration" (2020).

    Args:
        model: the model.
        prompts: an array of any integer dtype, with a prompt in each row.
        length: the number of new tokens.
        lengths: the length of each prompt, if the lengths differ; the rest of a row is padding.
            Each prompt is continued at its own end.
        key: the random key; required if `temperature` is above 0.
        temperature: a divisor of the logits before tokens are drawn; 0 chooses the likeliest token.
        top_k: draw only from this number of likeliest tokens.
        top_p: draw only from the smallest set of likeliest tokens with at least this total
            probability.
        stop: a token, or several tokens, after which a row ends.
        pad: the token that fills a row after its end.

    Returns:
        The prompts, each followed by its new tokens: an int32 array with `length` more columns than
        `prompts`. If a row's logits contain a NaN, as after a traced prompt with a token outside
        the vocabulary, no token can be chosen. The rest of that row's new tokens are then -1.

    Raises:
        FunctreeError: if the sequences would be longer than the model's `max_seq`.
        FunctreeError: if `temperature` is above 0 and there is no key.
        FunctreeError: if another argument is invalid.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> ft.nn.generate(model, jnp.array([[1, 2, 3]]), 4).shape
        (1, 7)
    """
    (batch, seq), (vocab,) = prompts.shape, sizes_of(model.embed, ["vocab"])
    check("generate: invalid arguments", lengths=(lengths, integers((batch,)).or_none()))
    # Stop tokens are kept as Python integers, which do not overflow.
    stops = np.asarray([] if stop is None else stop, object).reshape(-1)
    problems = _prompt_problems(model, vocab, prompts, length, lengths)
    problems += _option_problems(vocab, key, temperature, top_k, top_p, stops)
    if problems:
        raise FunctreeValueError("generate: invalid arguments", problems)
    sampling = Sampling(
        None if temperature == 0 else key,
        np.float32(np.clip(float(temperature), _LEAST_TEMPERATURE, np.finfo(np.float32).max)),
        None if top_k is None else np.int32(min(top_k, vocab)),
        None if top_p is None else np.float32(top_p),
    )
    padded: Any = prompts
    # A NumPy number: a JAX array would be uncommitted next to a model on a mesh.
    ends: Any = np.asarray(seq, np.int32) if lengths is None else lengths
    # Without known lengths, padding could count as tokens of the prompt.
    if _is_known(ends):
        # The padding leaves room for the new tokens.
        padded = _padded(prompts, min(_bucket(seq), model.max_seq - length))
    stop_tokens: Any = tuple(map(np.int32, stops))
    padding: Any = np.int32(pad)
    tokens = generation(model, padded, ends, sampling, stop_tokens, padding, range(length))
    return _first_columns(tokens, seq + length)


# `check` has already accepted these values.


def _prompt_problems(
    model: Transformer, vocab: int, prompts: IntArray, length: int, lengths: IntArray | None
) -> list[Problem]:
    """Return the problems with prompts and lengths."""
    problems: list[Problem] = []
    batch, seq = prompts.shape
    if seq + length > model.max_seq:
        why = f"with prompts of length {seq}, rows would exceed the model's max_seq={model.max_seq}"
        remedy = "shorten the prompts, reduce `length`, or create the model with a larger max_seq"
        problems.append(Problem(None, None, f"length={length}", why, remedy))
    if lengths is not None and _is_known(lengths):
        # A prompt without tokens has no vector from which the first new token could be chosen.
        if not all(0 < size <= seq for size in np.asarray(lengths)):
            why = f"each length must be from 1 to {seq}"
            problems.append(Problem(None, None, f"lengths={lengths}", why))
    ends: Any = np.full(batch, seq) if lengths is None else lengths
    # Padding may be outside the vocabulary. So may tokens in a trace: their rows' logits are NaN.
    if not problems and _is_known(prompts) and (lengths is None or _is_known(lengths)):
        tokens = np.asarray(prompts)[np.arange(seq) < np.asarray(ends)[:, None]].tolist()
        unknown = sorted({token for token in tokens if not 0 <= token < vocab})
        if unknown:
            why = f"some tokens, such as {unknown[0]}, are outside the vocabulary of size {vocab}"
            problems.append(Problem(None, None, "prompts", why))
    return problems


def _option_problems(
    vocab: int,
    key: PRNGKeyArray | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stops: np.ndarray,
) -> list[Problem]:
    """Return the problems with the options."""
    problems: list[Problem] = []
    for stop in stops:
        if not 0 <= stop < vocab:
            why = f"stop tokens must be from 0 to {vocab - 1}"
            problems.append(Problem(None, None, f"stop={stop}", why))
    if temperature and key is None:
        what, why = f"temperature={temperature}", "sampling tokens requires a key"
        problems.append(Problem(None, None, what, why, "pass key=jax.random.key(0)"))
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and not temperature:
            why = "it has no effect at temperature 0, which chooses the likeliest token"
            problems.append(Problem(None, None, f"{name}={value}", why, "pass temperature=1.0"))
    return problems


def _is_known(x: IntArray) -> bool:
    """Return whether an array is not traced, and all of its values are in this process."""
    if isinstance(x, np.ndarray):
        return True
    return not isinstance(x, Tracer) and x.is_fully_addressable


# The functions below use NumPy. With JAX, each would compile a program per prompt length.


def _bucket(seq: int) -> int:
    """Return the length to which prompts are padded: a power of two."""
    return max(_LEAST, 1 << (seq - 1).bit_length())


def _padded(prompts: IntArray, seq: int) -> IntArray:
    """Pad prompts to a length; return prompts with unknown values unchanged."""
    if not _is_known(prompts) or prompts.shape[1] == seq:
        return prompts
    padded = np.pad(np.asarray(prompts), [(0, 0), (0, seq - prompts.shape[1])])
    # Prompts on a mesh are placed there again. The call's rules place all other prompts.
    if isinstance(prompts, jax.Array) and prompts.committed:
        return jax.device_put(padded, prompts.sharding)
    return padded


def _first_columns(tokens: Array, seq: int) -> Array:
    """Return the first tokens of each row."""
    if tokens.shape[1] == seq or not _is_known(tokens):
        return tokens[:, :seq]
    return jax.device_put(np.asarray(tokens)[:, :seq], tokens.sharding)


# The program

_Carry = tuple[
    Int[Array, ""], Int[Array, "batch"], Cache, Int[Array, "batch new+1"], Bool[Array, "batch"]
]
"""The number of new tokens so far, each row's last token, the cache, all new tokens, and whether
each row has ended."""


@jit
def generation(
    model: Transformer,
    prompts: Int[Array, "batch _"],
    lengths: Int[Array, "batch"] | Int[Array, ""],
    sampling: Sampling,
    stops: tuple[Int[Array, ""], ...],
    pad: Int[Array, ""],
    new_tokens: range,  # an integer would cause a warning, since it could be traced
) -> Int[Array, "batch _"]:
    """Continue the prompts in one program.

    Each row of the result contains the prompt, the new tokens, then padding.
    """
    # On Explicit axes, prompts may arrive with a sharded sequence that no rule asks for.
    prompts, seq = gather_last(prompts), prompts.shape[1]
    length = len(new_tokens)
    # All tokens are int32, so that no token overflows.
    prompts, lengths = as_int32(prompts), as_int32(lengths)
    if not lengths.ndim:
        lengths = lengths + 0 * prompts[:, 0]  # sharded like the prompts, even on Explicit axes
    # `generate` does not check traced lengths. An invalid length gives a row whose new tokens are
    # -1.
    given, lengths = lengths, jnp.where((lengths >= 1) & (lengths <= seq), lengths, seq)
    prompts = on_shards(_zeroed, [prompts, lengths], ["batch _", "batch"])
    last, new = _read_prompts(model, prompts, given)
    with unsharded_sequence():
        tokens = _continued(model, last, new, lengths, sampling, stops, pad, (seq, length))
    return on_shards(_appended, [prompts, tokens, lengths], ["batch _", "batch _", "batch"])


def _zeroed(
    prompts: Int[Array, "batch seq"], lengths: Int[Array, "batch"]
) -> Int[Array, "batch seq"]:
    """Replace the prompts' padding, which may contain invalid tokens, with zeros."""
    # The vector of an invalid token is NaN. Even multiplied by a weight of 0, it makes a sum NaN.
    return jnp.where(jnp.arange(prompts.shape[1])[None] < lengths[:, None], prompts, 0)


def _read_prompts(
    model: Transformer, prompts: Int[Array, "batch seq"], lengths: Int[Array, "batch"]
) -> tuple[Float[Array, "batch 1 embed"], LayersCache]:
    """Return the vector of each prompt's last token, and the keys and values of all tokens.

    Args:
        model: the model.
        prompts: the prompts, padded on the right with valid tokens.
        lengths: the length of each prompt; a row with an invalid length gets NaN.
    """
    batch, seq = prompts.shape
    # If rules shard the sequence inside attention, it stays sharded, unless the parts would be
    # unequal.
    context = unsharded_sequence()
    if _context_parts() > 1 and seq % axis_shards("seq", "batch seq embed").parts == 0:
        context = nullcontext()
    with context:
        # All prompts are read at once, with a cache that has no slots.
        features, new = model.features_with_cache(prompts, Cache.create(model, batch, 0))
    # A masked sum over the sequence leaves the vectors where they are. No index equals -1, so for a
    # row without tokens, the sum is 0 and `is_last` is false everywhere.
    index = jnp.broadcast_to(jnp.arange(seq)[None], prompts.shape)
    is_last = (index == lengths[:, None] - 1)[..., None]
    last = jnp.where(is_last, features, 0).sum(1, keepdims=True)
    last = jnp.where(is_last.any(1, keepdims=True), last, jnp.nan)
    return activation(last, "batch _ embed"), new


def _context_parts() -> int:
    """Return how many parts the ambient rules divide a sequence into inside attention."""
    if not has_axis_rules() or on_one_device():
        return 1
    return devices_along(mesh_axes(sequence_by_rules(HEADS)))


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
    """Return each row's new tokens, followed by one padding token.

    Args:
        model: the model.
        last: the vector of each prompt's last token.
        new: the keys and values of the prompts.
        lengths: the length of each prompt.
        sampling: the options for choosing a token.
        stops: the tokens after which a row ends.
        pad: the token that fills a row after its end.
        sizes: the padded length of the prompts, and the number of new tokens.
    """
    seq, length = sizes
    # The cache has room for the new tokens. Keys and values after the end of a shorter prompt were
    # computed, but `lengths` excludes them.
    cache = Cache.create(model, last.shape[0], seq + length).extended(*new, lengths=lengths)
    # (batch, 1, embed): logits are computed for the last tokens only.
    logits = model.logits(last)
    first = _next_token(logits[:, 0], sampling, jnp.int32(0))
    # (batch, length + 1): the last column is the padding after the end.
    tokens = jnp.where(jnp.arange(length + 1)[None] == 0, first[:, None], pad)

    def goes_on(carry: _Carry) -> Bool[Array, ""]:
        i, _, _, _, ended = carry
        # Without stop tokens, no row ends. `all` would add a needless collective to each step.
        return (i < length) & ~ended.all() if stops else i < length

    def step(carry: _Carry) -> _Carry:
        i, token, cache, tokens, ended = carry
        # Padding may be outside the vocabulary.
        logits, cache = model.decode(jnp.where(ended, 0, token)[:, None], cache)
        # A row ends after the stop token, which is part of the result.
        for stop in stops:
            ended |= token == stop
        token = jnp.where(ended, pad, _next_token(logits[:, 0], sampling, i))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, 1)
        return i + 1, token, cache, tokens, ended

    # `first != first` is False for each row, and sharded like `first` on Explicit axes, where a
    # carry must keep its type.
    start = jnp.int32(1), first, cache, tokens, first != first
    *_, tokens, _ = jax.lax.while_loop(goes_on, step, start)
    return tokens


def _appended(
    prompts: Int[Array, "batch seq"],
    tokens: Int[Array, "batch new+1"],
    lengths: Int[Array, "batch"],
) -> Int[Array, "batch seq+new"]:
    """Join each prompt and its new tokens, and fill the row with the last token, the padding."""
    new = tokens.shape[1] - 1
    # The index of the new token at each position: negative in the prompt, and clipped to the
    # padding's index after the end.
    index = jnp.arange(prompts.shape[1] + new)[None] - lengths[:, None]
    following = jnp.take_along_axis(tokens, jnp.clip(index, 0, new), axis=1)
    return jnp.where(index < 0, jnp.pad(prompts, [(0, 0), (0, new)]), following)


def _next_token(
    logits: Float[Array, "batch vocab"], sampling: Sampling, i: Int[Array, ""]
) -> Int[Array, "batch"]:
    """Choose each row's next token from its logits; `i` is the number of new tokens before it.

    If a logit is NaN, the token is -1, since `argmax` would return the NaN's index. The model
    returns NaN for the token -1, so all later tokens are -1 too.
    """
    # The vocabulary is gathered, because it is sorted and summed over. A step has few logits.
    logits = activation(gather_last(logits), "batch _")
    if sampling.key is None:
        chosen = jnp.argmax(logits, axis=-1)
    else:
        chosen = _drawn(logits, sampling, jax.random.fold_in(sampling.key, i))
    return jnp.where(jnp.isnan(logits).any(-1), -1, chosen).astype(jnp.int32)


def _drawn(
    logits: Float[Array, "batch vocab"], sampling: Sampling, key: PRNGKeyArray
) -> Int[Array, "batch"]:
    """Draw a token for each row from the distribution that the row's logits define."""
    # The largest logit is subtracted, since a large logit could become infinite when divided by a
    # small temperature.
    logits = logits.astype(jnp.float32)
    logits = (logits - logits.max(-1, keepdims=True)) / sampling.temperature
    least = jnp.finfo(logits.dtype).min
    if sampling.top_k is not None:
        falling = -jnp.sort(-logits, axis=-1)
        # The index is an array, so that all values of `top_k` share a program. `jax.lax.top_k`
        # needs a Python integer.
        last = jnp.minimum(sampling.top_k, logits.shape[-1]) - 1
        lowest = jax.lax.dynamic_slice_in_dim(falling, last, 1, 1)
        logits = jnp.where(logits < lowest, least, logits)
    if sampling.top_p is not None:
        falling = -jnp.sort(-logits, axis=-1)
        weights = jax.nn.softmax(falling)
        # A token is kept if the probabilities of likelier tokens sum to less than `top_p`. The
        # likeliest token is always kept.
        kept = jnp.cumsum(weights, axis=-1) - weights < sampling.top_p
        lowest = jnp.min(jnp.where(kept | (falling == falling[:, :1]), falling, jnp.inf), axis=-1)
        logits = jnp.where(logits < lowest[:, None], least, logits)
    return jax.random.categorical(key, logits)
