"""This example shards a plain Equinox model, without changing its code.

    python examples/bring_your_own.py

It uses FSDP first, then tensor parallelism. The classifier below does not use functree. The lines
that shard it are marked `# +fsdp` and `# +tensor`. All other lines only run it and print the
results. `ft.jit` takes modules as arguments.
"""

import os
import sys

# Simulate 8 devices on the CPU, so that this runs anywhere. Both variables must be set before JAX is
# imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

import functree as ft

# --- The model: a text classifier made of `eqx.nn` layers


class Block(eqx.Module):
    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, size: int, heads: int, *, key: PRNGKeyArray):
        attention_key, up_key, down_key = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(size)
        self.attention = eqx.nn.MultiheadAttention(heads, size, key=attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(size)
        self.up = eqx.nn.Linear(size, 4 * size, key=up_key)
        self.down = eqx.nn.Linear(4 * size, size, key=down_key)

    def __call__(self, x: Array) -> Array:
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.mlp_norm)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class Classifier(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self,
        words: int,
        length: int,
        classes: int,
        size: int,
        heads: int,
        depth: int,
        *,
        key: PRNGKeyArray,
    ):
        embedding_key, positions_key, head_key, *block_keys = jax.random.split(key, 3 + depth)
        self.embedding = eqx.nn.Embedding(words, size, key=embedding_key)
        self.positions = 0.02 * jax.random.normal(positions_key, (length, size))
        self.blocks = [Block(size, heads, key=key) for key in block_keys]
        self.norm = eqx.nn.LayerNorm(size)
        self.head = eqx.nn.Linear(size, classes, key=head_key)

    def __call__(self, words: Array) -> Array:
        x = jax.vmap(self.embedding)(words) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(axis=0)))


@ft.jit
@ft.value_and_grad
def loss_and_grads(model: Classifier, words: Array, labels: Array) -> Array:
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(words))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


# --- The two layouts


def fsdp(model: Classifier, words: Array, labels: Array):
    """FSDP: each device has an eighth of every large array and an eighth of the batch."""
    mesh = ft.make_mesh(data=8)  # +fsdp
    layout = ft.FSDP("data", min_size=4096)  # +fsdp
    print(ft.plan(model, layout, mesh))
    model = ft.shard(model, layout, mesh)  # +fsdp
    words, labels = ft.shard((words, labels), ft.P("data"), mesh)  # +fsdp
    return loss_and_grads(model, words, labels)


def tensor_parallel(model: Classifier, words: Array, labels: Array):
    """Tensor parallelism: four devices share heads and hidden units, and two share the batch."""
    mesh = ft.make_mesh(data=2, model=4)  # +tensor
    out = {"attention.output*.weight": "embed heads"}  # +tensor
    others = {"attention.*.weight": "heads embed"}  # +tensor
    up = {"up.weight": "hidden embed", "up.bias": "hidden"}  # +tensor
    down = {"down.weight": "embed hidden"}  # +tensor
    # The first matching pattern applies. The last one matches norms and a bias, which have only the
    # dimension `embed`.
    names = {Block: ft.names({**out, **others, **up, **down, "**": "embed"})}  # +tensor
    rules = ft.AxisRules({"heads": "model", "hidden": "model", "embed": None}, names)  # +tensor
    layout = ft.StateSharding({"blocks.**": rules, ...: ft.P()})  # +tensor
    print(ft.plan(model, layout, mesh))
    model = ft.shard(model, layout, mesh)  # +tensor
    words, labels = ft.shard((words, labels), ft.P("data"), mesh)  # +tensor
    return loss_and_grads(model, words, labels)


# --- The comparison with unsharded results


def main() -> None:
    model = Classifier(
        words=1000, length=32, classes=10, size=64, heads=4, depth=2, key=jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    words, labels = (
        jnp.asarray(rng.integers(0, 1000, (16, 32))),
        jnp.asarray(rng.integers(0, 10, 16)),
    )
    expected = loss_and_grads(model, words, labels)
    for shard in (fsdp, tensor_parallel):
        print(f"{shard.__doc__}\n")
        sharded = shard(model, words, labels)
        differences = jax.tree.map(
            lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), expected, sharded
        )
        worst = max(jax.tree.leaves(differences))
        if not worst < 1e-5:
            sys.exit(f"The sharded and the unsharded results differ by {worst}.")
        print(
            f"\nLoss {sharded[0]:.6f}, unsharded {expected[0]:.6f}. No gradient differs by more than {worst:.0e}.\n"
        )


if __name__ == "__main__":
    main()
