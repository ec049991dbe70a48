"""Prompts ─► their last vectors, and the keys and values of all of their tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.devices.meshes import devices_along
from functree.devices.specs import mesh_axes
from functree.nn.activations import (
    HEADS,
    activation,
    on_one_device,
    on_shards,
    sequence_by_rules,
    unsharded_sequence,
)
from functree.nn.cache import Cache, LayersCache
from functree.nn.transformer import Transformer
from functree.placing.ambient import has_axis_rules
from functree.placing.constrain import axis_shards


def without_padding(
    prompts: Int[Array, "batch seq"], lengths: Int[Array, "batch"]
) -> Int[Array, "batch seq"]:
    """The prompts, with tokens in the place of their padding, which may be anything.

    Examples:
        >>> from functree.nn.prompts import without_padding
        >>> without_padding(jnp.array([[5, 7, -1]]), jnp.array([2]))
        Array([[5, 7, 0]], dtype=int32)
    """
    return on_shards(_zeroed, [prompts, lengths], ["batch _", "batch"])


def _zeroed(
    prompts: Int[Array, "batch seq"], lengths: Int[Array, "batch"]
) -> Int[Array, "batch seq"]:
    # Of a number that is no token the vector is NaN, and so are the sums over all vectors of which
    # its weight is 0.
    return jnp.where(jnp.arange(prompts.shape[1])[None] < lengths[:, None], prompts, 0)


def read_prompts(
    model: Transformer, prompts: Int[Array, "batch seq"], lengths: Int[Array, "batch"]
) -> tuple[Float[Array, "batch 1 embed"], LayersCache]:
    """The vector of the last token of each prompt, and the keys and values of all tokens.

    Args:
        model: the model.
        prompts: the prompts, padded at their right with tokens.
        lengths: the length of each; the vector of a row that has no such token is NaN.

    Raises:
        FunctreeError: as in a call of the model.

    Examples:
        >>> from functree.nn.prompts import read_prompts
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> last, (keys, values) = read_prompts(
        ...     model, jnp.array([[1, 2, 0]]), jnp.array([2])
        ... )
        >>> last.shape, keys.shape
        ((1, 1, 8), (2, 1, 3, 2, 2))
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
