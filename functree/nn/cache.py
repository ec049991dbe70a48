"""`Cache`: the keys and values of the tokens so far, for all layers of a model."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.errors import FunctreeError
from functree.nn.activations import activation
from functree.nn.attention.cached import cached_positions
from functree.nn.config import TransformerConfig
from functree.nn.shards import on_shards
from functree.parameters import EXTENT, SIZE, Takes, check

CONFIG = Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, TransformerConfig))

Layers = Float[Array, "layers batch seq kv_heads head_dim"]


class Cache(eqx.Module):
    """The keys and values of the tokens so far, of which a model that is given more tokens computes nothing again.

    It is immutable: `logits, cache = model(tokens, cache=cache)`. Donate it, and it is updated in place. With a window
    it forgets the tokens that the model does not see any more. Without one it has room for `length` tokens, and the
    logits of those behind them are NaN.

    Args:
        key: the keys of each layer, after the rotation. The slot of a token is its position modulo their number.
        value: the values of each layer.
        filled: how many tokens each row has had.

    Examples:
        >>> config = ft.nn.TransformerConfig(100, 8, layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> cache = ft.nn.Cache.create(model, batch=1, length=16)
        >>> cache.key.shape
        (2, 1, 16, 2, 2)
        >>> logits, cache = model(jnp.array([[1, 2, 3]]), cache=cache)
        >>> logits.shape, cache.filled
        ((1, 3, 100), Array([3], dtype=int32))
    """

    key: Float[Array, "layers batch _ kv_heads head_dim"]
    value: Float[Array, "layers batch _ kv_heads head_dim"]
    filled: Int[Array, "batch"]

    @classmethod
    def create(cls, model: Any, batch: int, length: int) -> "Cache":
        """An empty cache.

        Args:
            model: the `ft.nn.Transformer`.
            batch: the number of rows.
            length: for how many tokens of each row; with a window it holds no more than that.

        Raises:
            FunctreeError: `length` is longer than the model's `max_seq`.
        """
        config: Any = getattr(model, "config", None)
        check("no cache can be created", model=(config, CONFIG), batch=(batch, SIZE), length=(length, EXTENT))
        if length > config.max_seq:
            raise FunctreeError(
                f"a cache for {length} tokens is longer than the model's max_seq={config.max_seq}: shorten it, or "
                "build the model with a larger max_seq"
            )
        slots = length if config.window is None else min(length, config.window)
        shape = (config.layers, batch, slots, config.kv_heads, config.head_dim)
        key, value = (activation(jnp.zeros(shape, config.compute_dtype), _AXES) for _ in range(2))
        return cls(key, value, activation(jnp.zeros(batch, jnp.int32), "batch"))

    def most_tokens(self, config: TransformerConfig) -> int:
        """How many tokens a row may have in a model with this config."""
        slots = self.key.shape[2]
        forgets = config.window is not None and slots >= config.window  # those that nobody sees any more
        return config.max_seq if forgets else min(slots, config.max_seq)

    def fits(self, config: TransformerConfig) -> bool:
        """Whether it is a cache for models of a config."""
        layers, _, _, kv_heads, head_dim = self.key.shape
        own = (layers, kv_heads, head_dim, self.key.dtype)
        return own == (config.layers, config.kv_heads, config.head_dim, config.compute_dtype)

    def extended(self, key: Layers, value: Layers, lengths: Int[Array, "batch"] | None = None) -> "Cache":
        """The cache with more tokens.

        Args:
            key: their keys in each layer.
            value: their values in each layer.
            lengths: how many of them each row has, from the left; by default all.
        """
        names = [_AXES, _AXES, "batch", "batch"]
        count = jnp.full_like(self.filled, key.shape[2]) if lengths is None else lengths
        write = _write_next if lengths is None and key.shape[2] == 1 else _write
        key = on_shards(write, (self.key, key, self.filled, count), names)
        value = on_shards(write, (self.value, value, self.filled, count), names)
        return Cache(key, value, self.filled + count)


_AXES = "layers batch _ kv_heads head_dim"


def _write_next(cached: Layers, new: Layers, filled: Int[Array, "batch"], lengths: Int[Array, "batch"]) -> Layers:
    """One more token in each row, in place."""
    rows = jnp.arange(filled.shape[0])
    # Each row has one, so nothing is written twice.
    options: Any = {"unique_indices": True, "indices_are_sorted": True, "mode": "promise_in_bounds"}
    return cached.at[:, rows, filled % cached.shape[2]].set(new[:, :, 0], **options)


def _write(cached: Layers, new: Layers, filled: Int[Array, "batch"], lengths: Int[Array, "batch"]) -> Layers:
    """More tokens in each row: each slot gets the last one that belongs there."""
    index = cached_positions(filled + lengths, cached.shape[2]) - filled[:, None]
    at = (None, slice(None), slice(None), None, None)
    found = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1)[at], axis=2)
    return jnp.where((index >= 0)[at], found, cached)
