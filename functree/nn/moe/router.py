"""A router chooses the experts and weights of each token, and reports its `MoELosses`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.nn.weights import accumulator


class MoELosses(NamedTuple):
    """The losses that regularize a router, and the number of dropped assignments.

    All values cover the whole batch, whatever the mesh. `ft.nn.cross_entropy` multiplies `balance`
    and `z` by its arguments `balance=` and `router_z=`, and adds the products to the loss.

    Attributes:
        balance: `experts * sum(share * probability)`, where `share` is the fraction of assignments
            that go to each expert, and `probability` is each expert's mean probability (Fedus et
            al., "Switch transformers", 2021). It is 1 if the experts are used evenly, and usually
            larger if they are not. Only the probabilities have a gradient.
        z: the mean over tokens of the squared logsumexp of the logits, a penalty that keeps logits
            small (Zoph et al., "ST-MoE", 2022).
        dropped: the number of assignments of tokens to experts that were dropped, because the
            expert had no room left. A token's result does not include its dropped assignments.

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
    """A router's decisions about some tokens.

    Attributes:
        experts: the experts of each token.
        weights: the factor for the result of each of these experts.
        probabilities: the probabilities of all experts, for each token.
        log_totals: the logsumexp of each token's logits.
    """

    experts: Int[Array, "tokens top_k"]
    weights: Float[Array, "tokens top_k"]
    probabilities: Float[Array, "tokens experts"]
    log_totals: Float[Array, "tokens"]

    def losses(self, dropped: Int[Array, ""] | None, axes: tuple[str, ...]) -> MoELosses:
        """Compute the losses of the whole batch.

        Args:
            dropped: the number of these tokens' dropped assignments; None without a capacity.
            axes: the mesh axes over which the tokens are sharded, inside a shard_map over them.
        """
        number = self.probabilities.shape[-1]
        is_expert = self.experts.reshape(-1, 1) == jnp.arange(number)[None]
        share = jnp.mean(is_expert, axis=0, dtype=self.weights.dtype)
        means = (share, self.probabilities.mean(0), jnp.mean(self.log_totals**2))
        if axes:
            # The shards have the same size, so the mean of their means is the mean of the whole
            # batch. A mean of the shards' products would depend on the mesh.
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
    """Choose the experts with the highest probabilities for each token.

    Args:
        x: the tokens.
        router: the weights of the router.
        top_k: the number of experts for each token.
        normalize: whether a token's weights are divided by their sum.
    """
    # The logits are computed in float32 or wider, whatever the dtype of other layers, and on TPUs
    # without bfloat16 products. Rounding could swap experts with nearly equal probabilities.
    wide = accumulator(x.dtype)
    logits = jnp.matmul(x.astype(wide), router.astype(wide), precision=jax.lax.Precision.HIGHEST)
    log_totals = jax.nn.logsumexp(logits, axis=-1)
    probabilities = jnp.exp(logits - log_totals[:, None])
    weights, experts = jax.lax.top_k(probabilities, top_k)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights, probabilities, log_totals)
