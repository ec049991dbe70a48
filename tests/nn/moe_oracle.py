"""A mixture of experts in float64: every token by every expert, of which those that count are
picked; it imports nothing of functree."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]


class Result(NamedTuple):
    """What a layer computes of some tokens, and the gradient of `sum(cotangent * y) + balance + z`."""

    y: np.ndarray
    balance: float
    z: float
    dropped: int
    gradient: dict[str, np.ndarray]


def mixture(
    weights: Arrays,
    x: np.ndarray,
    cotangent: np.ndarray,
    top_k: int,
    capacity: float | None,
    shards: list[np.ndarray],
    normalize: bool = True,
) -> Result:
    """Of tokens (tokens, embed).

    Args:
        weights: router, gate, up and down.
        x: the tokens.
        cotangent: by what the result is multiplied in the loss.
        top_k: how many experts a token has.
        capacity: the factor of the capacity.
        shards: the tokens of each shard, in whose order experts take them.
        normalize: whether the weights of a token are divided by their sum.
    """
    with jax.enable_x64(True):
        w = {name: jnp.asarray(one, jnp.float64) for name, one in {**weights, "x": x}.items()}
        logits = np.asarray(w["x"] @ w["router"])
        number = logits.shape[-1]
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
        kept = _kept(chosen, number, capacity, shards)
        share = np.bincount(chosen.ravel(), minlength=number) / chosen.size

        def loss(w: Arrays) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            logits = w["x"] @ w["router"]
            p = jax.nn.softmax(logits)
            taken = jnp.take_along_axis(p, chosen, -1)
            scale = taken.sum(-1, keepdims=True) if normalize else 1.0
            gate, up = (jnp.einsum("te,neh->tnh", w["x"], w[name]) for name in ("gate", "up"))
            values = jnp.einsum("tnh,nhe->tne", jax.nn.silu(gate) * up, w["down"])
            values = jnp.take_along_axis(values, chosen[..., None], 1)
            y = ((taken / scale * kept.astype(float))[..., None] * values).sum(1)
            balance = number * (share * p.mean(0)).sum()
            z = (jax.nn.logsumexp(logits, -1) ** 2).mean()
            return (jnp.asarray(cotangent, y.dtype) * y).sum() + balance + z, (y, balance, z)

        gradient, found = jax.grad(loss, has_aux=True)(w)
        y, balance, z = map(np.asarray, found)
        dropped = int((~kept).sum())
        return Result(y, float(balance), float(z), dropped, jax.tree.map(np.asarray, gradient))


def _kept(
    chosen: np.ndarray, number: int, capacity: float | None, shards: list[np.ndarray]
) -> np.ndarray:
    kept = np.ones(chosen.shape, bool)
    if capacity is None:
        return kept
    for shard in shards:
        room = max(1, math.ceil(capacity * chosen.shape[1] * len(shard) / number))
        used = np.zeros(number, int)
        for t in shard:
            for k, expert in enumerate(chosen[t]):
                kept[t, k] = used[expert] < room
                used[expert] += 1
    return kept
