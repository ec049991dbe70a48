"""Tokens ─► vectors; and by the same table, vectors ─► logits."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.nn.activations import looked_up
from functree.nn.products import product
from functree.nn.weights import Initializer, cast, dtype_or_none, small_normal
from functree.parameters import FLOATING, FUNCTION, KEY, SIZE, check


class Embedding(eqx.Module):
    """A table with one row for each token.

    Args:
        vocab_size: the number of rows.
        embed: the size of a row.
        init: the initializer of the table; by default normal with standard deviation 0.02.
        key: the key for the table.
        param_dtype: the dtype of the table.
        compute_dtype: the dtype of the result; `None`: `param_dtype`, and for `logits` that of `x`.

    Raises:
        FunctreeError: a size is not a positive integer.

    Examples:
        >>> table = ft.nn.Embedding(100, 8, key=jax.random.key(0))
        >>> table(jnp.array([1, 5, 99])).shape
        (3, 8)
    """

    weight: Float[Array, "vocab embed"]
    compute_dtype: np.dtype | None = eqx.field(static=True)

    def __init__(
        self,
        vocab_size: int,
        embed: int,
        *,
        init: Initializer = small_normal,
        key: PRNGKeyArray,
        param_dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        check(
            "Embedding cannot be built",
            vocab_size=(vocab_size, SIZE),
            embed=(embed, SIZE),
            init=(init, FUNCTION),
            key=(key, KEY),
            param_dtype=(param_dtype, FLOATING),
            compute_dtype=(compute_dtype, FLOATING.or_none()),
        )
        self.weight = init(key, (vocab_size, embed), param_dtype)
        self.compute_dtype = dtype_or_none(compute_dtype)

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
        """The rows of the tokens. A token that is not less than `vocab_size` gets a row of NaN."""
        vectors = looked_up(self.weight, tokens)
        return vectors if self.compute_dtype is None else vectors.astype(self.compute_dtype)

    def logits(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """The product of `x` with each row, for the logits of a language model with a tied embedding."""
        x, weight = cast(self.compute_dtype, x, self.weight)
        return product(x, weight.T)
