"""Annotated layers, and a Llama-like transformer built from them."""

from functree.nn.attention import Attention as Attention
from functree.nn.config import TransformerConfig as TransformerConfig
from functree.nn.embedding import Embedding as Embedding
from functree.nn.linear import Linear as Linear
from functree.nn.mlp import MLP as MLP
from functree.nn.norm import RMSNorm as RMSNorm
from functree.nn.transformer import Block as Block
from functree.nn.transformer import Transformer as Transformer
