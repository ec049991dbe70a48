"""This package exports layers with named axes, and a Llama-like transformer built from them."""

import types as _types

from functree.compiled import sources as _sources
from functree.nn.attention.layer import Attention as Attention
from functree.nn.batch_norm import BatchNorm as BatchNorm
from functree.nn.block import Block as Block
from functree.nn.cache import Cache as Cache
from functree.nn.config import TransformerConfig as TransformerConfig
from functree.nn.cross_entropy import cross_entropy as cross_entropy
from functree.nn.dropout import Dropout as Dropout
from functree.nn.embedding import Embedding as Embedding
from functree.nn.families import config_from_json as config_from_json
from functree.nn.families import families as families
from functree.nn.generate import generate as generate
from functree.nn.linear import Linear as Linear
from functree.nn.matrix_dimensions import matrix_dimensions as matrix_dimensions
from functree.nn.mlp import MLP as MLP
from functree.nn.moe.layer import MoE as MoE
from functree.nn.moe.router import MoELosses as MoELosses
from functree.nn.norm import LayerNorm as LayerNorm
from functree.nn.norm import RMSNorm as RMSNorm
from functree.nn.rope import Llama3Rope as Llama3Rope
from functree.nn.sequential import Constrain as Constrain
from functree.nn.sequential import Jitted as Jitted
from functree.nn.sequential import Sequential as Sequential
from functree.nn.transformer import Transformer as Transformer
from functree.nn.zigzag import zigzag as zigzag


def __dir__() -> list[str]:
    """Return the public names, for `dir` and completion.

    Submodules are attributes of their package, so without this function, `nn.linear` would
    appear next to `nn.Linear`.
    """
    return [name for name, value in globals().items() if not isinstance(value, _types.ModuleType)]


# Type checkers read the imports above instead.
__all__ = [name for name in __dir__() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]

_sources.name_lines_of(*(globals()[name] for name in __all__ if name != "families"))
