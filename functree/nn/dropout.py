"""`Dropout` sets random elements of an activation to zero in training."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from functree.argument_checks import Decay, Flag, checked
from functree.errors import FunctreeTypeError
from functree.nn.activations import entries_of, explicit_mesh, out_sharding


class Dropout(eqx.Module):
    """A layer that zeroes each element with probability `p`, and divides the rest by `1 - p`.

    The expected value is unchanged (Srivastava et al., "Dropout", 2014). In inference, the layer
    returns `x` unchanged. The result has the dtype of `x`.

    The same key drops the same elements, however `x` is sharded. Inside shard_map, one key drops
    the same elements in all shards, so fold `jax.lax.axis_index` into the key.

    Args:
        p: the probability that an element is zeroed.
        inference: whether to return `x` unchanged; `eqx.nn.inference_mode` sets this field.

    Raises:
        FunctreeError: if `p` is not in [0, 1).
        FunctreeError: if the layer is called in training without a key.

    Examples:
        >>> x = ft.nn.Dropout(0.5)(jnp.ones(8), key=jax.random.key(0))
        >>> sorted(set(x.tolist()))
        [0.0, 2.0]
    """

    p: float = eqx.field(static=True)
    # Not static, as in Equinox: `eqx.nn.inference_mode(model)` sets it with `eqx.tree_at`.
    inference: bool

    @checked("Dropout: invalid arguments")
    def __init__(self, p: Decay = 0.5, inference: Flag = False):
        self.p, self.inference = p, inference

    def __call__(
        self,
        x: Float[Array, "*shape"],
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Float[Array, "*shape"]:
        """Zero random elements of `x`.

        Args:
            x: any array.
            key: the random key; not needed in inference.
            inference: a value that overrides the field `inference`; `None` uses the field.

        Raises:
            FunctreeError: if there is no key in training.
        """
        if inference is None:
            inference = self.inference
        if inference or self.p == 0:
            return x
        if key is None:
            raise FunctreeTypeError(
                "Dropout needs a key in training. Call `layer(x, key=key)`, or pass "
                "`inference=True`"
            )
        # On Explicit axes, the random bits need the sharding of `x`.
        sharding = out_sharding(explicit_mesh(x), entries_of(x))
        keep = jax.random.bernoulli(key, 1 - self.p, x.shape, out_sharding=sharding)
        return jnp.where(keep, x / (1 - self.p), jnp.zeros_like(x))
