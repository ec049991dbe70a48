"""`Cache` holds the keys and values of the tokens so far, for all layers of a model."""

from typing import Annotated, Any, Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from functree.argument_checks import EXTENT, Size, Takes, checked
from functree.errors import FunctreeValueError
from functree.nn.activations import activation, on_shards
from functree.nn.attention.attend import cached_positions
from functree.nn.attention.layer import Attention
from functree.nn.config import compute_dtype_of, first_layer, sizes_of
from functree.nn.weights import as_int32

# The check does not use the class, since the class's module imports this one.
_Model = Annotated[
    Any,
    Takes(
        "an `ft.nn.Transformer`",
        lambda model: hasattr(model, "blocks") and hasattr(model, "max_seq"),
    ),
]

NewTokens = Float[Array, "layers batch seq kv_heads head_dim"]
"""Keys or values of new tokens, in each layer."""

LayersCache = tuple[NewTokens, NewTokens]
"""Keys and values of new tokens, in each layer."""

Slots = Float[Array, "layers batch slots kv_heads head_dim"]
"""Keys or values in a cache."""

# The slots are named `_`, which is never sharded. A token's slot depends on values, so a device
# with a shard of the slots could not tell from shapes whether it has that slot.
_AXES = "layers batch _ kv_heads head_dim"


class Cache(eqx.Module):
    """The keys and values of the tokens so far, so that a model does not recompute them.

    A cache is immutable: `logits, cache = model.decode(tokens, cache)`. If you donate the cache, it
    is updated in place. With a window of at most `length` tokens, the cache drops tokens that no
    later token attends to. Otherwise, it has room for `length` tokens, and the logits of later
    tokens are NaN.

    Args:
        key: the keys of each layer, after the rotation, in the model's `compute_dtype`. The slot of
            a token is its position modulo the number of slots.
        value: the values of each layer.
        filled: the number of tokens that each row has received so far.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> cache = ft.nn.Cache.create(model, batch=1, length=16)
        >>> cache.key.shape
        (2, 1, 16, 2, 2)
        >>> logits, cache = model.decode(jnp.array([[1, 2, 3]]), cache)
        >>> logits.shape, cache.filled
        ((1, 3, 100), Array([3], dtype=int32))
    """

    key: Float[Array, "layers batch _ kv_heads head_dim"]
    value: Float[Array, "layers batch _ kv_heads head_dim"]
    filled: Int[Array, "batch"]

    @classmethod
    @checked("Cache.create: invalid arguments")
    def create(cls, model: _Model, batch: Size, length: Annotated[int, EXTENT]) -> Self:
        """Create an empty cache, sharded according to the ambient rules.

        Args:
            model: the `ft.nn.Transformer`.
            batch: the number of rows.
            length: the number of tokens per row. With a window, the cache has at most one slot for
                each token of the window.

        Raises:
            FunctreeError: if `length` exceeds the model's `max_seq`.
            FunctreeError: if an argument is invalid.
            ShardingError: if the ambient rules do not fit the cache.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes, window=8)
            >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
            >>> ft.nn.Cache.create(
            ...     model, batch=1, length=16
            ... ).key.shape  # a window of 8 tokens
            (2, 1, 8, 2, 2)
        """
        if length > model.max_seq:
            raise FunctreeValueError(
                f"Cache.create: length={length} exceeds the model's max_seq={model.max_seq}. Pass "
                "a shorter length, or create the model with a larger max_seq"
            )
        # No token attends to tokens at least `window` positions before it, so the slots of those
        # tokens can be reused.
        slots, window = length, _window(model)
        if window is not None:
            slots = min(length, window)
        layers, kv_heads, head_dim, dtype = _of_slot(model)
        shape = (layers, batch, slots, kv_heads, head_dim)
        key = activation(jnp.zeros(shape, dtype), _AXES)
        value = activation(jnp.zeros(shape, dtype), _AXES)
        return cls(key, value, activation(jnp.zeros(batch, jnp.int32), "batch"))

    def most_tokens(self, model: Any) -> int:
        """Return the maximum number of tokens that each row can hold with this model."""
        slots, window = self.key.shape[2], _window(model)
        # With a slot for each token of the window, a new token overwrites only a token that nothing
        # attends to. With fewer slots, it would overwrite a token that is still needed.
        if window is not None and slots >= window:
            return model.max_seq
        return min(slots, model.max_seq)

    def fits(self, model: Any) -> bool:
        """Return whether this cache fits a model's layers, heads and dtype."""
        layers, _, _, kv_heads, head_dim = self.key.shape
        return (layers, kv_heads, head_dim, self.key.dtype) == _of_slot(model)

    def extended(
        self, key: NewTokens, value: NewTokens, lengths: Int[Array, "batch"] | None = None
    ) -> "Cache":
        """Return the cache with the new tokens added.

        Args:
            key: the new tokens' keys in each layer.
            value: the new tokens' values in each layer.
            lengths: the number of new tokens in each row, from the left; by default all.
        """
        # New tokens are written once for all layers, into the donated cache. If each layer returned
        # its cache, the loop over the layers would copy the whole cache for each token.
        names = [_AXES, _AXES, "batch", "batch"]
        filled = as_int32(self.filled)
        write = _write
        if lengths is None and key.shape[2] == 1:
            write = _write_next  # a step of generation
        if lengths is None:
            lengths = jnp.full_like(filled, key.shape[2])
        lengths = as_int32(lengths)
        key = on_shards(write, (self.key, key, filled, lengths), names)
        value = on_shards(write, (self.value, value, filled, lengths), names)
        return Cache(key, value, filled + lengths)


def _of_slot(model: Any) -> tuple[int, int, int, np.dtype]:
    """Return the sizes and dtype of a cache slot for a model: layers, heads, head size, dtype."""
    kv_heads, head_dim = sizes_of(model.blocks, ["kv_heads", "head_dim"])
    return len(model.blocks), kv_heads, head_dim, compute_dtype_of(model)


def _window(model: Any) -> int | None:
    attn = first_layer(model.blocks, Attention)
    return None if attn is None else attn.window


def _write_next(
    cached: Slots, new: NewTokens, filled: Int[Array, "batch"], lengths: Int[Array, "batch"]
) -> Slots:
    """Write one new token to each row, in place."""
    rows = jnp.arange(filled.shape[0])
    # Each row is written once, in order, at a slot that exists, so JAX need not check the indices.
    return cached.at[:, rows, filled % cached.shape[2]].set(
        new[:, :, 0], unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
    )


def _write(
    cached: Slots, new: NewTokens, filled: Int[Array, "batch"], lengths: Int[Array, "batch"]
) -> Slots:
    """Write new tokens to each row; each slot gets the last token that belongs there."""
    # This gathers a token for each slot instead of scattering the tokens. Several tokens may belong
    # to one slot of a window, and a scatter does not define which of them remains.
    index = cached_positions(filled + lengths, cached.shape[2]) - filled[:, None]
    # (batch, slots) ─► (1, batch, slots, 1, 1). An index is negative where the slot keeps an
    # earlier token or is still empty.
    index = index[None, :, :, None, None]
    tokens = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1), axis=2)
    return jnp.where(index >= 0, tokens, cached)
