"""`cross_entropy` computes a language model's mean loss without an array of all logits."""

from collections.abc import Sequence
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from functree.argument_checks import (
    Room,
    Size,
    Takes,
    check,
    checked,
)
from functree.devices.meshes import Entry, mesh_axes, without
from functree.devices.placement import check_deleted
from functree.devices.varying import varying_over, without_varying
from functree.nn.activations import (
    activation,
    constrain_to,
    divided,
    entries_of,
    indices_along,
    on_one_device,
    resharded,
    sequence_by_rules,
    specs_of,
)
from functree.nn.attention.layer import Positions, Segments
from functree.nn.attention.mask import chunk_of
from functree.nn.transformer import (
    TOKENS,
    Head,
    Model,
    Tokens,
    Transformer,
    check_tokens,
    integers,
    logits_of,
)
from functree.nn.weights import accumulator, as_int32
from functree.placing.constrain import has_axis_rules, spec
from functree.transforms.compiled_once import compiled_once
from functree.tree.arrays import Tree

# Mesh axes of the vocabulary do not shard the sequence while logits are computed.
_LOGITS = "batch seq vocab"


@checked("cross_entropy: invalid arguments")
def cross_entropy(
    model: Model,
    tokens: Annotated[Tokens, TOKENS],
    targets: Int[Array, "*batch seq"],
    *,
    positions: Positions = None,
    segments: Segments = None,
    in_order: bool = True,
    chunk: Size = 1024,
    mask: Bool[Array, "*batch seq"] | None = None,
    z_loss: Room = 0.0,
    balance: Room = 0.0,
    router_z: Room = 0.0,
) -> Float[Array, ""]:
    """Compute the mean cross-entropy of the next tokens in nats, as a float32 number.

    The logits of all tokens would be the largest array of a training step. They are therefore
    computed for one chunk of the sequence at a time. If the loss is differentiated, its gradient is
    computed in the same pass, and no logits are computed twice. For this reason, `jax.jvp` can
    differentiate the loss only if `chunk` covers the whole sequence.

    Args:
        model: the model.
        tokens: the tokens.
        targets: the token that follows each token, of any integer dtype. A target outside the
            vocabulary makes the loss NaN, unless the mask excludes it.
        positions: as in a call of the model.
        segments: as in a call of the model.
        in_order: as in a call of the model.
        chunk: the number of positions whose logits are held at once; the last chunk may be smaller.
            If the sequence is sharded while logits are computed, `chunk` applies to each shard.
        mask: the positions to average over; by default all. If the mask excludes all positions, the
            mean is 0. A numeric mask contains the positions' weights; a negative or NaN weight
            makes the loss NaN.
        z_loss: the factor of the squared logsumexp of the logits, a penalty that keeps logits small
            (Chowdhery et al., "PaLM", 2022, uses 1e-4).
        balance: the factor of `MoELosses.balance`, summed over the blocks. This penalty keeps
            experts evenly used (Mixtral uses 0.02, "Switch transformers" 0.01).
        router_z: the factor of `MoELosses.z`, summed over the blocks (Zoph et al., "ST-MoE", 2022,
            uses 1e-3).

    Raises:
        FunctreeError: if `targets` or `mask` does not have the shape of `tokens`.
        FunctreeError: if `balance` or `router_z` is set and the model has no experts.
        FunctreeError: if another value is invalid.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> text = jnp.array([[1, 2, 3, 4]])
        >>> ft.nn.cross_entropy(model, text[:, :-1], text[:, 1:]).shape
        ()
    """
    check(
        "cross_entropy: invalid arguments",
        targets=(targets, integers(tokens.shape)),
        mask=(mask, _numbers(tokens.shape).or_none()),
    )
    given = {"model": model, "tokens": tokens, "targets": targets, "mask": mask}
    check_deleted("cross_entropy", given)
    check_tokens(model.max_seq, tokens, positions, segments, in_order)
    factors = float(z_loss), float(balance), float(router_z)
    return _mean(model, given, positions, segments, in_order, int(chunk), *factors)


@compiled_once
def _mean(
    model: Transformer,
    given: dict[str, Any],
    positions: Positions,
    segments: Segments,
    in_order: bool,
    chunk: int,
    z_loss: float,
    balance: float,
    router_z: float,
) -> Float[Array, ""]:
    """Compute the mean over the positions in the mask; see `cross_entropy` for the arguments."""
    tokens, targets, mask = given["tokens"], given["targets"], given["mask"]
    added = jnp.zeros((), jnp.float32)
    if balance or router_z:
        x, of_experts = model.features_with_losses(tokens, positions, segments, in_order)
        added = balance * of_experts.balance + router_z * of_experts.z
    else:
        x = model.features(tokens, positions, segments, in_order)
    x = _before_the_head(x)
    weights = jnp.ones(tokens.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    # With a negative weight, the loss would be divided by too small a count.
    weights = jnp.where(weights >= 0, weights, jnp.nan)
    total = _on_batches(model.head, x, as_int32(targets), weights, chunk, z_loss)
    count = weights.sum()
    # JAX differentiates both branches of a `where`: 0 / 0 here would make the gradients NaN.
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count)) + added


def _before_the_head(x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
    """Shard the vectors of the tokens for the product with the head."""
    if not has_axis_rules() or x.ndim != 3:
        return activation(x, "batch _ embed")
    # A device with a shard of the vocabulary needs the whole sequence, which is gathered once,
    # here. Otherwise each chunk would be gathered separately. Along other mesh axes, a device keeps
    # its own part.
    seq = sequence_by_rules(_LOGITS)
    batch, _, embed = without(spec("batch _ embed"), mesh_axes(seq))
    return constrain_to(x, ["batch", "seq", "embed"], [batch, seq, embed])


def _numbers(shape: tuple[int, ...]) -> Takes:
    """Return the check of an array of booleans or real numbers, not of complex numbers."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating)

    def fits(value: object) -> bool:
        if not isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return False
        is_real = any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
        return is_real and value.shape == shape

    return Takes(f"an array of booleans or real numbers, of shape {shape}", fits)


def _on_batches(
    head: Head,
    x: Float[Array, "*batch seq embed"],
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
    chunk: int,
    z_loss: float,
) -> Float[Array, ""]:
    """Compute the loss on each device for its own batches and its own part of the sequence.

    The head's weights are gathered once, and their gradients are summed once. In a loop over chunks
    that the compiler partitions, both would happen for each chunk.
    """
    outer = _outer([x, targets, weights])
    axes = tuple(axis for of_dim in outer for axis in mesh_axes(of_dim))
    arrays, static = eqx.partition(head, eqx.is_array)

    def of_arrays(arrays: Head, *parts: Array) -> Array:
        return _sum(chunk, z_loss, eqx.combine(arrays, static), *parts)

    def of_batches(arrays: Head, *parts: Array) -> Array:
        # The arrays are marked as different on each device, so each device sums gradients over its
        # own batches. The devices' sums are added once, when the gradients leave the `shard_map`.
        # If the arrays were equal on all devices, JAX would sum their gradients where they are
        # used: in each chunk.
        own = jax.tree.map(lambda array: varying_over(array, axes), arrays)
        return jax.lax.psum(of_arrays(own, *parts), axes)

    if not axes:
        # On Explicit axes, targets may be sharded like the sequence between layers, over a mesh
        # axis that shards the vocabulary here.
        own = PartitionSpec(*entries_of(x)[:-1])
        return without_varying(of_arrays)(
            arrays, x, resharded(targets, own), resharded(weights, own)
        )
    # The shard_map covers only the mesh axes of batch and sequence. The head stays sharded over
    # other mesh axes, such as the vocabulary over `model`. The partitioner handles these mesh axes.
    whole, batch = PartitionSpec(), PartitionSpec(*outer)
    mapped: Any = jax.shard_map(
        of_batches, in_specs=(whole, batch, batch, batch), out_specs=whole, axis_names=set(axes)
    )
    mesh, parts = jax.sharding.get_abstract_mesh(), (x, targets, weights)
    if mesh.manual_axes:
        parts = [resharded(x, PartitionSpec(*batch, *entries_of(x)[2:])) for x in parts]
    elif AxisType.Explicit in mesh.axis_types:
        # JAX 0.10 gathers operands along the other mesh axes if these are Explicit. It does not
        # support Auto axes inside a shard_map over Explicit axes.
        mapped = jax.sharding.auto_axes(mapped, out_sharding=whole)
    return without_varying(mapped)(arrays, *parts)


def _outer(arrays: Sequence[Array]) -> tuple[Entry, ...]:
    """Return the logits' spec entries for batch and sequence, or `()` if they are unknown."""
    if on_one_device():
        return ()
    specs = specs_of(arrays, ["batch seq _", "batch seq", "batch seq"])
    if specs is None:
        return ()
    batch, seq = specs[1]
    if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
        seq = sequence_by_rules(_LOGITS)
    return divided(batch), divided(seq)


def _sum(
    chunk: int,
    z_loss: float,
    head: Head,
    x: Float[Array, "*batch seq embed"],
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
) -> Float[Array, ""]:
    """Sum the losses, one chunk of the sequence at a time."""
    seq = x.shape[-2]
    # The positions after the last full chunk form a smaller chunk, without padding. A sequence of
    # one chunk needs no loop, so it supports forward-mode and second derivatives.
    whole = seq // chunk * chunk if seq > chunk else 0
    total = jnp.zeros((), jnp.float32)
    if whole:
        given = head, x[..., :whole, :]
        total += _of_chunks(given, targets[..., :whole], weights[..., :whole], chunk, z_loss)
    if whole < seq:
        given = head, x[..., whole:, :]
        total += _of_chunk(given, targets[..., whole:], weights[..., whole:], z_loss)
    return total


_Given = tuple[Head, Float[Array, "*batch seq embed"]]
"""The values that the loss is differentiated with respect to."""


def _of_chunk(
    given: _Given,
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
    z_loss: float,
) -> Float[Array, ""]:
    head, x = given
    # The logits have the shape (*batch, seq, vocab). They are cast after the product: otherwise
    # exponentials of bfloat16 logits would be summed over the vocabulary with 8 bits of precision.
    logits = logits_of(head, x).astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    # The logit of the target is computed as a masked sum: the vocabulary may be sharded, and
    # indexing would gather the logits.
    is_target = indices_along(logits) == targets[..., None]
    loss = log_total - jnp.where(is_target, logits, 0).sum(-1)
    if z_loss:
        loss += z_loss * log_total**2
    # A target outside the vocabulary matches no index. Without NaN, its loss would look valid.
    loss = jnp.where((targets >= 0) & (targets < logits.shape[-1]), loss, jnp.nan)
    # A product alone would not mask NaN: NaN times 0 is NaN.
    return jnp.where(weights > 0, loss * weights, 0).sum()


@eqx.filter_custom_vjp
def _of_chunks(
    given: _Given,
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
    chunk: int,
    z_loss: float,
) -> Float[Array, ""]:
    """Compute the loss when it is not differentiated."""
    head, x = given

    def add(total: Array, i: Int[Array, ""]) -> tuple[Array, None]:
        own, tokens = chunk_of(weights, i, chunk, -1), chunk_of(targets, i, chunk, -1)
        return total + _of_chunk((head, chunk_of(x, i, chunk, -2)), tokens, own, z_loss), None

    # The start is derived from `weights`: inside the `shard_map`, a sum over a device's own batches
    # varies between devices, and the carry of a scan needs that type from the start.
    start = jnp.zeros_like(weights, shape=())
    return jax.lax.scan(add, start, jnp.arange(x.shape[-2] // chunk))[0]


@_of_chunks.def_fwd
def _forward(
    perturbed: Tree,
    given: _Given,
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
    chunk: int,
    z_loss: float,
) -> tuple[Float[Array, ""], tuple[Tree, Array]]:
    """Compute the loss and its gradient together; the backward pass only scales the gradient.

    JAX's own rule would keep all chunks' logits for the backward pass, or compute them twice.
    """
    head, x = given
    # The sums are in float32 or wider, since the head's gradient is a sum over all chunks.
    zeros = jax.tree.map(
        lambda w: jnp.zeros_like(w, accumulator(w.dtype)), eqx.filter(head, eqx.is_inexact_array)
    )

    def add(carry: tuple[Array, Tree], i: Int[Array, ""]) -> tuple[tuple[Array, Tree], Array]:
        total, d_head = carry
        own, tokens = chunk_of(weights, i, chunk, -1), chunk_of(targets, i, chunk, -1)
        value_and_grad = eqx.filter_value_and_grad(_of_chunk)
        value, (more, d_x) = value_and_grad((head, chunk_of(x, i, chunk, -2)), tokens, own, z_loss)
        d_head = jax.tree.map(lambda total, new: total + new.astype(total.dtype), d_head, more)
        return (total + value, d_head), d_x

    start = jnp.zeros_like(weights, shape=()), zeros
    (total, d_head), d_x = jax.lax.scan(add, start, jnp.arange(x.shape[-2] // chunk))
    # (chunks, *batch, chunk, embed) ─► (*batch, seq, embed)
    return total, (d_head, jnp.moveaxis(d_x, 0, -3).reshape(x.shape))


@_of_chunks.def_bwd
def _backward(
    gradient: tuple[Tree, Array],
    cotangent: Float[Array, ""],
    perturbed: Tree,
    given: _Given,
    *args: object,
) -> Tree:
    """Multiply the gradient by the cotangent, and cast each result to its argument's dtype."""
    like = eqx.filter(given, eqx.is_inexact_array)
    return jax.tree.map(
        lambda d, w: (cotangent * d.astype(cotangent.dtype)).astype(w.dtype), gradient, like
    )
