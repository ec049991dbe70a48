"""This benchmark compares training on one GPU in functree, plain JAX and Flax nnx.

    python benchmarks/gpu.py                  # 0.3 and 1.3 billion parameters, bfloat16, sequence 2,048.
    python benchmarks/gpu.py --sizes tiny     # A tiny size for a CPU, to check that the three agree.
    python benchmarks/gpu.py --sizes mixture  # functree alone: 0.9 billion parameters, of which a token uses 0.3.

All three models begin with the same weights, and their losses must agree. They run in turn in one
process. It needs the extra `functree[bench]`, and on a GPU `jax[cuda13]` with cuDNN.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from machine import machine
from plain import Config, Model, rms_norm, rotated
from steps import TX, Run, make_state, make_step, transformer_config, weights_of

import functree as ft

SIZES = {
    "tiny": (Config(512, 64, 2, 4, 2, 16, 192), 4, 64),
    "0.3B": (Config(32000, 1024, 24, 16, 16, 64, 2816, dtype=jnp.bfloat16), 16, 2048),
    "1.3B": (Config(32000, 2048, 24, 16, 16, 128, 5632, dtype=jnp.bfloat16), 8, 2048),
}
# Dense bfloat16 operations per second, as published by NVIDIA.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute causal attention, with cuDNN on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


# --- The model in Flax nnx


class Block(nnx.Module):
    """A Llama block as Flax users write it, with float32 parameters."""

    def __init__(self, config: Config, weights: dict[str, np.ndarray]):
        self.config = config
        self.attn_norm, self.mlp_norm = (
            nnx.Param(jnp.asarray(weights[n])) for n in ("attn_norm", "mlp_norm")
        )
        self.query, self.key, self.value = (
            einsum(weights[n], "bse,ehd->bshd", config) for n in ("query", "key", "value")
        )
        self.out = einsum(weights["out"], "bshd,hde->bse", config)
        self.gate, self.up, self.down = (
            einsum(weights[n], "bse,eh->bsh", config) for n in ("gate", "up", "down")
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = rms_norm(self.attn_norm[...], x)
        query, key = (rotated(one(y), self.config.theta) for one in (self.query, self.key))
        x = x + self.out(attend(query, key, self.value(y)))
        y = rms_norm(self.mlp_norm[...], x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def einsum(weight: np.ndarray, text: str, config: Config) -> nnx.Einsum:
    """Create a Flax layer with this weight."""
    layer = nnx.Einsum(text, weight.shape, dtype=config.dtype, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(weight)
    return layer


class Decoder(nnx.Module):
    """The language model."""

    def __init__(self, config: Config, weights: Any):
        self.embed = nnx.Embed(config.vocab, config.embed, dtype=config.dtype, rngs=nnx.Rngs(0))
        self.embed.embedding[...] = jnp.asarray(weights["embed"])
        layers = (
            {name: w[i] for name, w in weights["blocks"].items()} for i in range(config.layers)
        )
        self.blocks = nnx.List([Block(config, layer) for layer in layers])
        self.norm = nnx.Param(jnp.asarray(weights["norm"]))
        self.unembed = einsum(weights["unembed"], "bse,ev->bsv", config)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembed(rms_norm(self.norm[...], x))


def in_nnx(config: Config, weights: Any, batch: int, seq: int) -> tuple[Callable[..., Any], Any]:
    """Return Flax's step and its state, split once as Flax's performance guide recommends."""
    model = Decoder(config, weights)
    graph, state = nnx.split((model, nnx.Optimizer(model, TX, wrt=nnx.Param)))

    def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: Any, tokens: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    return jax.jit(step, donate_argnums=0), state


# --- The comparison


def operations(config: Config, seq: int) -> float:
    """Count the operations that a token needs, forward and backward.

    A causal model needs only half of the attention.
    """
    shapes = jax.tree.leaves(config.shapes, is_leaf=lambda x: isinstance(x, tuple))
    weights = sum(int(np.prod(shape)) for shape in shapes) - config.vocab * config.embed
    return 3 * (2 * weights + 2 * config.layers * config.heads * config.head_dim * seq)


def compare(name: str, rounds: int) -> None:
    """Print the rows of one size."""
    config, batch, seq = SIZES[name]
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, config.vocab, (batch, seq + 1)), jnp.int32
    )
    state = ft.jit(make_state)(transformer_config(config, seq), jax.random.key(0))
    weights = weights_of(state.model)
    params = jax.tree.map(jnp.asarray, weights)
    nnx_step, nnx_state = in_nnx(config, weights, batch, seq)
    lowered: dict[str, tuple[Any, Any]] = {
        "functree": (make_step(None, ft.AxisRules({...: None})).lower(state, tokens), state),
        "by hand": (
            Model(config, None, attend).compiled(TX, batch, seq),
            (params, TX.init(params)),
        ),
        "Flax nnx": (nnx_step.lower(nnx_state, tokens), nnx_state),
    }
    compiled = {who: (one.compile(), own) for who, (one, own) in lowered.items()}
    runs = {who: Run(step, own, tokens) for who, (step, own) in compiled.items()}
    del state, params, nnx_state, lowered
    losses = {who: [float(run.once()[1]) for _ in range(3)] for who, run in runs.items()}
    for found in losses.values():  # in bfloat16, the order of sums affects the losses
        np.testing.assert_allclose(
            found, losses["by hand"], rtol=1e-4 if config.dtype == jnp.float32 else 2e-2
        )
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds):
        for who, run in runs.items():
            seconds[who].append(run.seconds())
    kind = jax.devices()[0].device_kind
    peak = next((most for part, most in PEAKS.items() if part in kind), None)
    for who, taken in seconds.items():
        speed = batch * seq / statistics.median(taken)
        share = f"{speed * operations(config, seq) / peak:.1%}" if peak else "-"
        memory = compiled[who][0].memory_analysis()
        held = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        print(
            f"| {name} | {batch} × {seq} | {who} | {speed:,.0f} | {share} | {held / 2**30:.2f} |",
            flush=True,
        )


# A size, the number of experts in a block, and how many of them compute a token.
MIXTURES = {
    "tiny mixture": (SIZES["tiny"], 4, 2),
    "mixture": ((Config(32000, 1024, 12, 16, 16, 64, 2816, dtype=jnp.bfloat16), 16, 2048), 8, 2),
}


def measure_mixture(name: str, rounds: int) -> None:
    """Print the rows of a mixture of experts, with and without a capacity."""
    (config, batch, seq), experts, top_k = MIXTURES[name]
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, config.vocab, (batch, seq + 1)), jnp.int32
    )
    for capacity in (1.25, None):
        fields = dict(experts=experts, top_k=top_k, capacity=capacity)
        of_model = dataclasses.replace(transformer_config(config, seq), **fields)
        state = ft.jit(make_state)(of_model, jax.random.key(0))
        compiled = make_step(None, ft.AxisRules({...: None})).lower(state, tokens).compile()
        run = Run(compiled, state, tokens)
        run.once()
        taken = [run.seconds() for _ in range(rounds)]
        memory = compiled.memory_analysis()
        held = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        speed = batch * seq / statistics.median(taken)
        mlp = 3 * 2 * 3 * config.layers * config.embed * config.hidden
        active = operations(config, seq) + (top_k - 1) * mlp
        peak = next(
            (most for part, most in PEAKS.items() if part in jax.devices()[0].device_kind), None
        )
        share = f"{speed * active / peak:.1%}" if peak else "-"
        who = "no capacity" if capacity is None else f"capacity {capacity}"
        print(
            f"| {name} | {batch} × {seq} | {who} | {speed:,.0f} | {share} | {held / 2**30:.2f} |",
            flush=True,
        )


def main() -> None:
    """Measure the sizes that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *MIXTURES], default=["0.3B", "1.3B"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{device}; {machine('jax', 'flax')}; medians of {options.rounds} rounds\n")
    print("| parameters | batch | | tokens/s | % of peak | arguments and temporaries, GiB |")
    print("|---|---|---|---|---|---|")
    for name in options.sizes:
        if name in MIXTURES:
            measure_mixture(name, options.rounds)
        else:
            compare(name, options.rounds)


if __name__ == "__main__":
    main()
