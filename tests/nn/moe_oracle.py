"""A mixture of experts and its gradient in float64 by numpy, one token and expert after the other;
it imports nothing of functree."""

import math
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Result(NamedTuple):
    """What a layer computes of some tokens, and the gradient of `sum(cotangent * y) + balance + z`."""

    y: np.ndarray
    balance: float
    z: float
    dropped: int
    gradient: Arrays


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
    w = {name: np.asarray(one, np.float64) for name, one in weights.items()}
    x, cotangent = np.asarray(x, np.float64), np.asarray(cotangent, np.float64)
    tokens, number = len(x), w["router"].shape[1]
    logits = x @ w["router"]
    total = np.log(np.exp(logits).sum(-1))
    p = np.exp(logits - total[:, None])
    chosen = np.argsort(-p, axis=-1, kind="stable")[:, :top_k]
    taken = np.take_along_axis(p, chosen, -1)
    scale = taken.sum(-1, keepdims=True) if normalize else np.ones((tokens, 1))
    of_chosen = taken / scale
    kept = _kept(chosen, number, capacity, shards)
    share = np.bincount(chosen.ravel(), minlength=number) / chosen.size
    y = np.zeros_like(x)
    gradient = {name: np.zeros_like(one) for name, one in {**w, "x": x}.items()}
    d_of_chosen = np.zeros_like(of_chosen)
    for t, k in np.argwhere(kept):
        one = {name: w[name][chosen[t, k]] for name in ("gate", "up", "down")}
        value, back = _expert(one, x[t])
        y[t] += of_chosen[t, k] * value
        d_of_chosen[t, k] = cotangent[t] @ value
        for name, d in back(of_chosen[t, k] * cotangent[t]).items():
            if name == "x":
                gradient["x"][t] += d
            else:
                gradient[name][chosen[t, k]] += d
    d_taken = d_of_chosen
    if normalize:
        d_taken = (d_of_chosen - (d_of_chosen * of_chosen).sum(-1, keepdims=True)) / scale
    dp = np.broadcast_to(number * share / tokens, p.shape).copy()  # of the balance
    for k in range(top_k):
        dp[np.arange(tokens), chosen[:, k]] += d_taken[:, k]
    d_logits = p * (dp - (p * dp).sum(-1, keepdims=True)) + 2 * (total / tokens)[:, None] * p
    gradient["router"] = x.T @ d_logits
    gradient["x"] += d_logits @ w["router"].T
    balance = number * float(share @ p.mean(0))
    return Result(y, balance, float((total**2).mean()), int((~kept).sum()), gradient)


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


def _expert(w: Arrays, x: np.ndarray) -> tuple[np.ndarray, Any]:
    gate, up = x @ w["gate"], x @ w["up"]
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    hidden = silu * up

    def back(d: np.ndarray) -> Arrays:
        d_hidden = w["down"] @ d
        d_up = d_hidden * silu
        d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
        return {
            "down": np.outer(hidden, d),
            "gate": np.outer(x, d_gate),
            "up": np.outer(x, d_up),
            "x": w["gate"] @ d_gate + w["up"] @ d_up,
        }

    return hidden @ w["down"], back
