"""Programs whose mistake is mended by other code: no layout and no constraint does it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import descend, floats, laid, normed
from tests.why.mistake import Made, mistake


def attended(query: Array, key: Array, value: Array, mask: Array | bool = True) -> Array:
    scores = jnp.einsum("bshd,bthd->bhst", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
    return jnp.einsum("bhst,bthd->bshd", weights, value)


@mistake(
    "small vision transformer: six heads on four devices",
    wrong=6,
    right=8,
    edit=None,
    named="return y.reshape(*y.shape[:2], heads, -1)",
    third="tensor",
)
def small_vision(mesh: Mesh, heads: int) -> Made:
    """Attention of a small vision transformer, its width sharded over four devices.

    The width lies on four devices, which do not divide six heads, so queries, keys and values
    are gathered at the reshape. Eight heads of the same width mend it.
    """

    def attention(params, x):
        def split(y):
            return y.reshape(*y.shape[:2], heads, -1)

        query, key, value = (split(normed(x) @ params[name]) for name in ("q", "k", "v"))
        mixed = attended(query, key, value)
        return x + mixed.reshape(x.shape) @ params["out"]

    weight = floats(384, 384)
    params = {name: weight for name in ("q", "k", "v", "out")}
    into = ft.P(None, ("model", "tensor"))
    specs = {"q": into, "k": into, "v": into, "out": ft.P(("model", "tensor"), None)}
    x = floats(64, 64, 384)
    images = ft.P("data", None, None)
    return attention, (params, x), laid((specs, images), images)


class Fused(eqx.Module):
    """Causal attention with one weight for queries, keys and values."""

    qkv: Float[Array, "embed heads"]
    out: Float[Array, "heads embed"]
    heads: int = eqx.field(static=True)
    mistaken: bool = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        qkv = x @ self.qkv
        by_heads = (*x.shape[:2], self.heads, -1)
        if self.mistaken:
            parts = [y.reshape(by_heads) for y in jnp.split(qkv, 3, axis=-1)]
        else:
            parts = jnp.split(qkv.reshape(by_heads), 3, axis=-1)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        mixed = attended(*parts, mask=causal)
        return mixed.reshape(*x.shape[:2], -1) @ self.out


@mistake(
    "causal attention: a fused weight split across shards",
    edit=None,
    named="jnp.split(qkv, 3, axis=-1)",
)
def fused(mesh: Mesh, mistaken: bool) -> Made:
    """A step of gradient descent for causal attention with a fused weight.

    The fused result is split into three along its sharded dimension, whose two shards do not
    end where the parts do. With the heads outermost each shard has its own queries, keys and
    values.
    """

    def loss(model, x, y):
        return jnp.mean((x + model(normed(x)) - y) ** 2)

    def step(model, x, y):
        value, gradients = jax.value_and_grad(loss)(model, x, y)
        return descend(model, gradients), value

    qkv = floats(256, 768)
    model = Fused(qkv, floats(256, 256), 8, mistaken)
    rules = ft.AxisRules({"batch": "data", "heads": "model", "embed": None})
    x = floats(64, 32, 256)
    texts = ft.P("data", None, None)
    layouts = laid((rules, texts, texts), (rules, ft.P()))
    return step, (model, x, x), layouts
