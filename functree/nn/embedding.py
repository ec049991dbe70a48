"""`Embedding` maps tokens to vectors, and vectors to logits with the same table."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from functree.argument_checks import FloatingDtype, Key, Size, Takes, check, checked, is_integers
from functree.nn.activations import constrain_to, is_partly_manual
from functree.nn.weights import (
    Initializer,
    cast,
    dtype_or_none,
    product,
    rows,
    rows_on_shards,
    small_normal,
)
from functree.placing.constrain import has_axis_rules, spec

_TOKENS = Takes("an array of integers", is_integers)


class Embedding(eqx.Module):
    """A table with one row for each token of the vocabulary: `(*batch)` ─► `(*batch, embed)`.

    Args:
        vocab_size: the number of rows.
        embed: the size of a row.
        init: the initializer of the table; by default normal with standard deviation 0.02.
        key: the key for the table.
        param_dtype: the dtype of the table.
        compute_dtype: the dtype of the result; by default `param_dtype` for a lookup, and the dtype
            of `x` for `logits`.

    Raises:
        FunctreeError: if a size is not a positive integer.
        FunctreeError: if another argument is invalid.

    Examples:
        >>> table = ft.nn.Embedding(100, 8, key=jax.random.key(0))
        >>> table(jnp.array([1, 5, 99])).shape
        (3, 8)
    """

    weight: Float[Array, "vocab embed"]
    compute_dtype: np.dtype | None = eqx.field(static=True)

    @checked("Embedding: invalid arguments")
    def __init__(
        self,
        vocab_size: Size,
        embed: Size,
        *,
        init: Initializer = small_normal,
        key: Key,
        param_dtype: FloatingDtype = jnp.float32,
        compute_dtype: FloatingDtype | None = None,
    ):
        self.weight = init(key, (vocab_size, embed), param_dtype)
        self.compute_dtype = dtype_or_none(compute_dtype)

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
        """Look up each token's row, in `compute_dtype`; a token outside the vocabulary gets NaN.

        Args:
            tokens: the tokens; the ambient rules apply to their axes as "batch seq" or "seq".

        Raises:
            FunctreeError: if the tokens are not integers.
            ShardingError: if the ambient rules do not fit the table or its rows.
        """
        check("Embedding: invalid tokens", tokens=(tokens, _TOKENS))
        # Cast after the lookup, which reads only some rows of the table.
        vectors = lookup(self.weight, tokens)
        return vectors if self.compute_dtype is None else vectors.astype(self.compute_dtype)

    def logits(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Compute logits with the table: the product of `x` with each row, in `compute_dtype`.

        This is a tied embedding (Press & Wolf, "Using the output embedding to improve language
        models", 2017).

        Examples:
            >>> table = ft.nn.Embedding(100, 8, key=jax.random.key(0))
            >>> table.logits(jnp.ones((2, 3, 8))).shape
            (2, 3, 100)
        """
        x, weight = cast(self.compute_dtype, x, self.weight)
        return product(x, weight.T)  # (*batch, embed) by (embed, vocab)


def lookup(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "*batch"]
) -> Float[Array, "*batch embed"]:
    """Look up the tokens' rows in a table; each device uses its own rows and tokens.

    Without ambient `AxisRules`, nothing is constrained.

    Args:
        table: the table.
        tokens: the tokens to look up, with axes "batch seq" or "seq".

    Raises:
        ShardingError: if the rules do not fit the table or the tokens, as in `ft.constrain`.

    Examples:
        >>> from functree.nn.embedding import lookup
        >>> lookup(jnp.ones((7, 4)), jnp.array([1, 2])).shape
        (2, 4)
    """
    if not has_axis_rules() or tokens.ndim > 2:
        return rows(table, tokens)
    names = ["batch", "seq"][2 - tokens.ndim :]
    # One spec covers tokens and table, so that each mesh axis shards only one of them.
    *outer, vocab, embed = spec(" ".join([*names, "vocab", "embed"]))
    # The table is replicated along the mesh axes of the tokens. Under FSDP, this gathers the table;
    # the partitioner alone would move the vectors of all tokens instead.
    table = constrain_to(table, ["vocab", "embed"], [vocab, embed])
    # If rules shard the sequence between layers over the vocabulary's mesh axes, the entry for
    # "seq" omits these axes in this spec. Each device then looks up the tokens of the whole
    # sequence in its own rows. If the sequence were sharded, the table would be gathered.
    if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types and is_partly_manual():
        # The partitioner would abort the process on this lookup (JAX 0.12).
        tokens = constrain_to(tokens, names, outer)
        return rows_on_shards(table, tokens, (vocab, embed), tuple(outer))
    return constrain_to(rows(table, tokens), [*names, "embed"], [*outer, embed])
