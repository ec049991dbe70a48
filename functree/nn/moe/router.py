"""Tokens ─► the experts of each, with their weights, and what keeps a router even: `MoELosses`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.nn.weights import accumulator


class MoELosses(NamedTuple):
    """What a router's losses are made of, and how many tokens its experts did not get.

    All are of the whole batch, whatever the mesh. `ft.nn.cross_entropy` adds the first two to the
    loss, times the factors that it is given.

    Attributes:
        balance: the number of experts, times the sum over all of them of the share of the
            assignments that an expert has and its mean probability (Fedus et al., "Switch
            transformers", 2021): 1 if the experts are used evenly, and more otherwise. Its gradient
            is that of the probabilities.
        z: the mean of the squared logarithm of the sum of exponentials of a token's logits (Zoph et
            al., "ST-MoE", 2022), which keeps logits small.
        dropped: how many assignments of a token to an expert were dropped, since the expert had no
            room left. What these experts would have added is missing from the result.

    Examples:
        >>> moe = ft.nn.MoE(4, 8, experts=6, top_k=2, key=jax.random.key(0))
        >>> y, losses = moe(jnp.ones((2, 3, 4)))
        >>> int(losses.dropped)
        0
    """

    balance: Float[Array, ""]
    z: Float[Array, ""]
    dropped: Int[Array, ""]


class Routing(NamedTuple):
    """What a router decides about some tokens.

    Attributes:
        experts: the experts of each token.
        weights: by what the result of each is multiplied.
        probabilities: of all experts.
        log_totals: the logarithm of the sum of exponentials of the logits.
    """

    experts: Int[Array, "tokens top_k"]
    weights: Float[Array, "tokens top_k"]
    probabilities: Float[Array, "tokens experts"]
    log_totals: Float[Array, "tokens"]

    def losses(self, dropped: Int[Array, ""] | None, axes: tuple[str, ...]) -> MoELosses:
        """The losses of the whole batch.

        Args:
            dropped: how many assignments of these tokens were dropped; None if none can be.
            axes: the mesh axes over which the tokens are sharded, inside a shard_map over them.
        """
        number = self.probabilities.shape[-1]
        is_expert = self.experts.reshape(-1, 1) == jnp.arange(number)[None]
        share = jnp.mean(is_expert, axis=0, dtype=self.weights.dtype)
        means = (share, self.probabilities.mean(0), jnp.mean(self.log_totals**2))
        if axes:
            # Means of shards of one size. The product is of the means of the whole batch: the mean
            # of the products of the shards would be another loss on each mesh.
            means = jax.lax.pmean(means, axes)
        total = jnp.zeros((), jnp.int32) if dropped is None else dropped
        if axes and dropped is not None:
            total = jax.lax.psum(dropped, axes)
        share, probability, z = means
        return MoELosses(number * jnp.sum(share * probability), z, total)


def route(
    x: Float[Array, "tokens embed"],
    router: Float[Array, "embed experts"],
    top_k: int,
    normalize: bool,
) -> Routing:
    """The experts of each token: those with the highest probabilities.

    Args:
        x: the tokens.
        router: the weights of the router.
        top_k: how many experts a token has.
        normalize: whether the weights of a token are divided by their sum.
    """
    # In float32 or wider, and on TPUs not by products of bfloat16, whatever the dtype of the rest:
    # two experts that are nearly equal would be taken for each other.
    wide = accumulator(x.dtype)
    logits = jnp.matmul(x.astype(wide), router.astype(wide), precision=jax.lax.Precision.HIGHEST)
    log_totals = jax.nn.logsumexp(logits, axis=-1)
    probabilities = jnp.exp(logits - log_totals[:, None])
    weights, experts = jax.lax.top_k(probabilities, top_k)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights, probabilities, log_totals)
