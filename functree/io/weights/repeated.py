"""Tensors that say again what a model has ─► whether they say the same.

Older files have the frequencies of the rotation, and the table of the logits also where it is that
of the embedding. Readers pass over both; here they have to be what the model computes with.
"""

from collections.abc import Mapping

import numpy as np

from functree.io.weights.files import Tensor
from functree.nn.config import TransformerConfig
from functree.nn.rope import frequencies_of
from functree.nn.weight_map import WeightMap

_FREQUENCIES = ".rotary_emb.inv_freq"
# They were kept in the dtype of the weights: bfloat16 has 8 bits.
_TOLERANCE = 2.0**-7
# So many rows of two tables are compared at a time: whole, they may be gigabytes.
_ROWS = 4096


def why_not_repeated(
    name: str, tensors: Mapping[str, Tensor], config: TransformerConfig, family: WeightMap
) -> tuple[str, str] | None:
    """Why a tensor that no weight is read from cannot be passed over, and the remedy.

    None if it says what the model computes with.

    Args:
        name: its name.
        tensors: all tensors in the files.
        config: the config of the model.
        family: the family of the model.
    """
    if name.endswith(_FREQUENCIES):
        if _are_frequencies(tensors[name], config):
            return None
        return "it has other frequencies than the config says", "correct the config"
    unembed, table = family.weights.get("unembed.weight", ""), family.weights["embed.weight"]
    if name == unembed.removesuffix(".T") and config.tie_embedding and table in tensors:
        # The table of the embedding is never transposed: (vocab, embed).
        if _are_equal(tensors[table], tensors[name], transposed=not unembed.endswith(".T")):
            return None
        return (
            f"the config ties it to {table}, which has other values",
            'write "tie_word_embeddings": false if it is meant, or remove the tensor',
        )
    return "no part of the model is read from it", ""


def _are_frequencies(tensor: Tensor, config: TransformerConfig) -> bool:
    expected = np.asarray(frequencies_of(config.head_dim, config.rope_theta, config.rope_scaling))
    if tensor.shape != expected.shape:
        return False
    found = tensor.read([slice(None)]).astype(np.float32)
    return bool(np.allclose(found, expected, rtol=_TOLERANCE, atol=0))


def _are_equal(table: Tensor, other: Tensor, transposed: bool) -> bool:
    """Whether a table is equal to another one, which may be (embed, vocab)."""
    shape = other.shape[::-1] if transposed else other.shape
    if table.shape != shape:
        return False
    columns = slice(None)
    for first in range(0, shape[0], _ROWS):
        some = slice(first, min(first + _ROWS, shape[0]))
        found = other.read([columns, some]).T if transposed else other.read([some, columns])
        if not np.array_equal(table.read([some, columns]), found):
            return False
    return True
