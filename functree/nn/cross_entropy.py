"""A language model, tokens and those that follow them ─► the mean cross-entropy, without an array of all logits."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from functree.errors import FunctreeError, Problem
from functree.layout.specs import entry, mesh_axes
from functree.nn.activations import activation
from functree.nn.attention.layer import Positions, Segments
from functree.nn.products import indices_along
from functree.nn.shards import on_one_device, specs_of
from functree.nn.transformer import TOKENS, Tokens, Transformer
from functree.nn.weights import accumulator
from functree.parameters import ROOM, SIZE, Takes, check, is_integers, shown

_MODEL = Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, Transformer))


def cross_entropy(
    model: Transformer,
    tokens: Tokens,
    targets: Int[Array, "*batch seq"],
    *,
    positions: Positions = None,
    segments: Segments = None,
    chunk: int = 1024,
    mask: Bool[Array, "*batch seq"] | None = None,
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """The mean cross-entropy of the tokens that follow, in nats, in float32.

    The logits of all tokens would be the largest array of a training step. So they are computed for a part of the
    sequence at a time. If the loss is differentiated, its gradient is computed in the same pass, and no logits are
    computed twice. (So `jax.jvp` does not differentiate it, unless `chunk` covers the whole sequence.)

    Args:
        model: the model.
        tokens: the tokens.
        targets: the token that follows each of them. One that is not in the vocabulary makes the loss NaN, unless the
            mask leaves it out.
        positions: as in a call of the model.
        segments: as in a call of the model.
        chunk: of how many positions of the sequence the logits are held at one time; the last may be fewer.
        mask: which positions count; by default all. The loss is 0 if none does.
        z_loss: the factor of the squared logarithm of the sum of exponentials, which is added to keep logits small
            (Chowdhery et al., "PaLM", 2022, uses 1e-4).

    Raises:
        FunctreeError: targets or mask do not have the shape of the tokens, or another value does not fit.

    Examples:
        >>> config = ft.nn.TransformerConfig(100, 8, layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> text = jnp.array([[1, 2, 3, 4]])
        >>> ft.nn.cross_entropy(model, text[:, :-1], text[:, 1:]).shape
        ()
    """
    check(
        "no cross-entropy of these values",
        model=(model, _MODEL),
        tokens=(tokens, TOKENS),
        chunk=(chunk, SIZE),
        z_loss=(z_loss, ROOM),
    )
    problems: list[Problem] = []
    if not is_integers(targets) or targets.shape != tokens.shape:
        why = f"they must be integers of the shape of the tokens, {tokens.shape}"
        problems.append(Problem(None, None, f"targets={shown(targets)}", why))
    if mask is not None and getattr(mask, "shape", None) != tokens.shape:
        why = f"it must be an array of the shape of the tokens, {tokens.shape}"
        problems.append(Problem(None, None, f"mask={shown(mask)}", why))
    if problems:
        raise FunctreeError("no cross-entropy of these values", problems)
    # All of the sequence where it is needed, once and not for each chunk.
    x = activation(model.features(tokens, positions, segments), "batch _ embed")
    weights = jnp.ones(tokens.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    total = _on_batches(functools.partial(_sum, chunk, float(z_loss)), model.head, x, targets, weights)
    count = weights.sum()
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)


Loss = Callable[[Any, Array, Array, Array], Float[Array, ""]]
"""The sum of the losses: of the head, vectors, targets, and the weight of each."""


def _on_batches(loss: Loss, head: Any, x: Array, targets: Array, weights: Array) -> Float[Array, ""]:
    """The loss, computed on each device for its own batches.

    So the weights of the head are gathered once, and their gradients are summed once. In a loop over chunks that the
    compiler's partitioner sees, both would be done for each chunk.
    """
    specs = None if on_one_device() else specs_of([x, targets, weights], ["batch _ _", "batch _", "batch _"])
    sizes = jax.sharding.get_abstract_mesh().shape
    # XLA's partitioner refuses a sum over a mesh axis of one device (in jax 0.12).
    axes = () if specs is None else tuple(axis for axis in mesh_axes(specs[0][0]) if sizes[axis] > 1)
    if specs is None or not axes:
        return loss(head, x, targets, weights)
    arrays, static = eqx.partition(head, eqx.is_array)

    def of_batches(arrays: Any, *parts: Array) -> Array:
        own = jax.tree.map(lambda array: jax.lax.pcast(array, axes, to="varying"), arrays)
        return jax.lax.psum(loss(eqx.combine(own, static), *parts), axes)

    whole, batch = PartitionSpec(), PartitionSpec(entry(axes))
    mapped: Any = jax.shard_map(
        of_batches, in_specs=(whole, batch, batch, batch), out_specs=whole, axis_names=set(axes)
    )
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        # JAX 0.10 gathers what enters here along the other mesh axes, if these are Explicit.
        mapped = jax.sharding.auto_axes(mapped, out_sharding=whole)
    return mapped(arrays, x, targets, weights)


def _sum(chunk: int, z_loss: float, head: Any, x: Array, targets: Array, weights: Array) -> Float[Array, ""]:
    """The sum of the losses, by chunks of the sequence."""
    seq = x.shape[-2]
    whole = seq // chunk * chunk if seq > chunk else 0
    total = jnp.zeros((), jnp.float32)
    if whole:
        total += _of_chunks((head, x[..., :whole, :]), targets[..., :whole], weights[..., :whole], chunk, z_loss)
    if whole < seq:
        total += _of_chunk((head, x[..., whole:, :]), targets[..., whole:], weights[..., whole:], z_loss)
    return total


def _of_chunk(given: tuple[Any, Array], targets: Array, weights: Array, z_loss: float) -> Float[Array, ""]:
    head, x = given
    logits = head(x).astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    # A sum, and not an index: the vocabulary may be sharded.
    is_target = indices_along(logits) == targets[..., None]
    loss = log_total - jnp.where(is_target, logits, 0).sum(-1)
    if z_loss:
        loss += z_loss * log_total**2
    loss = jnp.where((targets >= 0) & (targets < logits.shape[-1]), loss, jnp.nan)
    return jnp.where(weights > 0, loss * weights, 0).sum()


@eqx.filter_custom_vjp
def _of_chunks(given: tuple[Any, Array], targets: Array, weights: Array, chunk: int, z_loss: float) -> Float[Array, ""]:
    head, x = given

    def add(total: Array, i: Any) -> tuple[Array, None]:
        own, places = _chunk(weights, i, chunk, -1), _chunk(targets, i, chunk, -1)
        return total + _of_chunk((head, _chunk(x, i, chunk, -2)), places, own, z_loss), None

    start = jnp.zeros_like(weights, shape=())
    return jax.lax.scan(add, start, jnp.arange(x.shape[-2] // chunk))[0]


@_of_chunks.def_fwd
def _forward(
    perturbed: Any, given: tuple[Any, Array], targets: Array, weights: Array, chunk: int, z_loss: float
) -> tuple[Float[Array, ""], Any]:
    """The loss, and its gradient: of a sum, so that the backward pass only multiplies it."""
    head, x = given
    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, accumulator(w.dtype)), eqx.filter(head, eqx.is_inexact_array))

    def add(carry: Any, i: Any) -> tuple[Any, Array]:
        total, d_head = carry
        own, places = _chunk(weights, i, chunk, -1), _chunk(targets, i, chunk, -1)
        value_and_grad = eqx.filter_value_and_grad(_of_chunk)
        value, (more, d_x) = value_and_grad((head, _chunk(x, i, chunk, -2)), places, own, z_loss)
        d_head = jax.tree.map(lambda one, new: one + new.astype(one.dtype), d_head, more)
        return (total + value, d_head), d_x

    start = jnp.zeros_like(weights, shape=()), zeros
    (total, d_head), d_x = jax.lax.scan(add, start, jnp.arange(x.shape[-2] // chunk))
    return total, (d_head, jnp.moveaxis(d_x, 0, -3).reshape(x.shape))


@_of_chunks.def_bwd
def _backward(
    gradient: tuple[Any, Array], cotangent: Float[Array, ""], perturbed: Any, given: tuple[Any, Array], *args: Any
) -> Any:
    """The gradient of the loss, times its cotangent."""
    like = eqx.filter(given, eqx.is_inexact_array)
    return jax.tree.map(lambda one, w: (cotangent * one.astype(cotangent.dtype)).astype(w.dtype), gradient, like)


def _chunk(x: Array, i: Any, size: int, axis: int) -> Array:
    """Chunk `i` along a dimension."""
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)
