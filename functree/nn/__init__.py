"""Layers whose axes are named, and a Llama-like transformer made of them."""

from functree.nn.attention.layer import Attention as Attention
from functree.nn.batch_norm import BatchNorm as BatchNorm
from functree.nn.cache import Cache as Cache
from functree.nn.config import TransformerConfig as TransformerConfig
from functree.nn.cross_entropy import cross_entropy as cross_entropy
from functree.nn.dropout import Dropout as Dropout
from functree.nn.embedding import Embedding as Embedding
from functree.nn.generate import generate as generate
from functree.nn.linear import Linear as Linear
from functree.nn.mlp import MLP as MLP
from functree.nn.norm import LayerNorm as LayerNorm
from functree.nn.norm import RMSNorm as RMSNorm
from functree.nn.rope import Llama3Rope as Llama3Rope
from functree.nn.sequential import Constrain as Constrain
from functree.nn.sequential import Jitted as Jitted
from functree.nn.sequential import Sequential as Sequential
from functree.nn.transformer import Block as Block
from functree.nn.transformer import Transformer as Transformer
from functree.nn.weight_map import WeightMap as WeightMap
from functree.nn.weight_map import config_from_json as config_from_json
