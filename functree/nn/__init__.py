"""This package exports layers with named axes, and a Llama-like transformer built from them."""

from functree.compiled.sources import name_lines_of as _name_lines_of
from functree.nn.attention.layer import Attention
from functree.nn.batch_norm import BatchNorm
from functree.nn.block import Block
from functree.nn.cache import Cache
from functree.nn.config import TransformerConfig
from functree.nn.cross_entropy import cross_entropy
from functree.nn.dropout import Dropout
from functree.nn.embedding import Embedding
from functree.nn.families import config_from_json, families
from functree.nn.generate import generate
from functree.nn.linear import Linear
from functree.nn.matrix_dimensions import matrix_dimensions
from functree.nn.mlp import MLP
from functree.nn.moe.layer import MoE
from functree.nn.moe.router import MoELosses
from functree.nn.norm import LayerNorm, RMSNorm
from functree.nn.rope import Llama3Rope
from functree.nn.sequential import Constrain, Jitted, Sequential
from functree.nn.transformer import Transformer
from functree.nn.zigzag import zigzag

__all__ = [
    "Linear",
    "Embedding",
    "RMSNorm",
    "LayerNorm",
    "BatchNorm",
    "Dropout",
    "Sequential",
    "Constrain",
    "Jitted",
    "Attention",
    "MLP",
    "MoE",
    "MoELosses",
    "Block",
    "Transformer",
    "TransformerConfig",
    "Llama3Rope",
    "Cache",
    "generate",
    "cross_entropy",
    "zigzag",
    "matrix_dimensions",
    "config_from_json",
    "families",
]

_name_lines_of(*(globals()[name] for name in __all__ if name != "families"))


def __dir__() -> list[str]:
    """Return the public names, for `dir` and completion.

    Submodules are attributes of their package, so without this function, `nn.linear` would
    appear next to `nn.Linear`.
    """
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
