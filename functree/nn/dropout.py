"""Activations ─► the same with some set to zero, in training."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, PRNGKeyArray

from functree.errors import FunctreeError


class Dropout(eqx.Module):
    """Each element is zero with probability `p`, and divided by `1 - p` otherwise; in inference all stay.

    The same key drops the same elements however `x` is laid out; inside shard_map, the same of each device's part: fold
    `jax.lax.axis_index` into the key there.

    Args:
        p: the probability.
        inference: whether nothing is dropped; `eqx.nn.inference_mode` sets it.

    Raises:
        FunctreeError: `p` is no probability; (when called) there is no key in training.

    Examples:
        >>> x = ft.nn.Dropout(0.5)(jnp.ones(8), key=jax.random.key(0))
        >>> sorted(set(x.tolist()))
        [0.0, 2.0]
    """

    p: float = eqx.field(static=True)
    inference: bool  # a leaf, as Equinox' own: `eqx.nn.inference_mode(model)` sets it

    def __init__(self, p: float = 0.5, inference: bool = False):
        if not 0 <= p < 1:
            raise FunctreeError(f"Dropout(p={p!r}): a probability from 0 up to, and without, 1")
        self.p, self.inference = p, inference

    def __call__(
        self, x: Float[Array, "*shape"], *, key: PRNGKeyArray | None = None, inference: bool | None = None
    ) -> Float[Array, "*shape"]:
        if (self.inference if inference is None else inference) or self.p == 0:
            return x
        if key is None:
            raise FunctreeError("Dropout in training needs a key: `layer(x, key=key)`; or pass `inference=True`")
        typed = jax.typeof(x).sharding
        # On Explicit axes JAX asks how the random bits lie; on others it wants not to be told.
        explicit = not typed.mesh.empty and AxisType.Explicit in typed.mesh.axis_types
        keep = jax.random.bernoulli(key, 1 - self.p, x.shape, **({"out_sharding": typed} if explicit else {}))
        return jnp.where(keep, x / (1 - self.p), jnp.zeros_like(x))
