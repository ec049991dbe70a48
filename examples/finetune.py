"""This script fine-tunes a published model with LoRA.

    python examples/finetune.py                                   # A tiny Llama with random weights, half a minute.
    python examples/finetune.py --model path/to/llama --rank 16 --steps 1000 --adapters adapters --out merged

It loads the model sharded, inserts LoRA adapters, then trains and saves only the adapters. Read it
from top to bottom: the adapter, the surgery, the training, the saved adapters, the merged model.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685) freezes each weight W and adds a trainable
product of low rank: W + (alpha / rank) · A · B.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

# Simulate 8 devices if there is only a CPU, so that this runs anywhere. JAX reads the flags once,
# when it creates its devices.
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import functree as ft

LLAMA = Path(__file__).parents[1] / "tests" / "fixtures" / "hf" / "llama"

# Tensor parallelism over `model`, and FSDP over `data` for large arrays. `rank` is small, so it
# stays unsharded.
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
RULES = ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP(
    "data", min_size=2**12, otherwise=ft.P()
)

# --- 1. The adapter: a weight of the queries or values, with its product


class LoRA(eqx.Module):
    """A weight with a product of low rank.

    Its arrays use the axes of the weight, so the same rules shard them.
    """

    weight: Float[Array, "embed heads head_dim"]
    lora_a: Float[Array, "embed rank"]
    lora_b: Float[Array, "rank heads head_dim"]
    scale: float = eqx.field(static=True)

    def merged(self) -> Array:
        """Return one weight that computes the same function.

        This works with and without a leading dimension of layers.
        """
        product = jnp.einsum("...er,...rhd->...ehd", self.lora_a, self.lora_b)
        return self.weight + self.scale * product.astype(self.weight.dtype)


ADAPTERS = ft.glob("**.lora_a") | ft.glob("**.lora_b")
ADAPTED = ("blocks.layer.attn.query", "blocks.layer.attn.value")

# --- 2. The surgery: replace each weight with an adapter, and merge it again


def with_adapters(
    model: ft.nn.Transformer, rank: int, alpha: float, key: Array
) -> ft.nn.Transformer:
    """Wrap some of the model's weights in adapters.

    B is zero, so the model computes the same function as before.
    """

    def adapter(weight: Array, key: Array) -> LoRA:
        layers, embed, heads, head_dim = weight.shape  # the layers are stacked
        a = jax.random.normal(key, (layers, embed, rank), weight.dtype) / np.sqrt(embed)
        return LoRA(
            weight, a, jnp.zeros((layers, rank, heads, head_dim), weight.dtype), alpha / rank
        )

    for path, subkey in zip(ADAPTED, jax.random.split(key, len(ADAPTED)), strict=True):
        model = ft.select(model).at(path).apply(lambda weight, k=subkey: adapter(weight, k))
    return ft.shard(model, RULES)


def merged(model: ft.nn.Transformer) -> ft.nn.Transformer:
    """Return a model without adapters that computes the same function."""
    return ft.select(model).under(LoRA).apply(LoRA.merged)


# --- 3. The training: only the adapters have gradients and moments


def loss(model: ft.nn.Transformer, tokens: Int[Array, "batch _"]) -> Float[Array, ""]:
    return ft.nn.cross_entropy(merged(model), tokens[:, :-1], tokens[:, 1:])


def train(
    ts: ft.TrainState, text: np.ndarray, options: argparse.Namespace
) -> tuple[ft.TrainState, float, float]:
    """Train the adapters.

    Returns:
        The state after `options.steps` steps, and the mean losses of the first and the last ten
        steps.
    """

    @ft.jit(donate="ts")
    def train_step(ts: ft.TrainState, tokens: Int[Array, "batch _"]) -> tuple[ft.TrainState, Array]:
        value, grads = ft.value_and_grad(loss, wrt=ADAPTERS)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), value

    rng, losses = np.random.default_rng(options.seed), list[float]()
    for step in range(1, options.steps + 1):
        starts = rng.integers(0, len(text) - options.seq, (options.batch, 1))
        tokens = ft.shard(text[starts + np.arange(options.seq + 1)], RULES, axes="batch _")
        ts, value = train_step(ts, tokens)
        losses.append(float(value))
        if step % max(1, options.steps // 5) == 0:
            print(f"step {step:>5}: loss {np.mean(losses[-10:]):.3f}")
    return ts, float(np.mean(losses[:10])), float(np.mean(losses[-10:]))


# --- 4. The adapters, which are saved, and 5. the merged model, which is used


def finetune(options: argparse.Namespace) -> None:
    key = jax.random.key(options.seed)

    def published() -> ft.nn.Transformer:
        base = ft.load_weights(options.model, RULES, max_seq=options.seq + options.sample)
        return with_adapters(base, options.rank, options.alpha, key)

    model = published()
    print(f"{ft.plan(model)}\n")
    tx = optax.adam(options.lr)
    ts = ft.TrainState.create(model, tx, layout=RULES, wrt=ADAPTERS)
    _, adapters, rest = ft.split(model, ADAPTERS, ...)
    trained, kept = (sum(leaf.size for leaf in jax.tree.leaves(part)) for part in (adapters, rest))
    print(f"{trained:,} of {trained + kept:,} parameters are trained\n")

    # Use the model's own tokenizer for a real model. The tiny model has fewer tokens than a byte
    # has values.
    text = (np.frombuffer(Path(__file__).read_bytes(), np.uint8) % model.config.vocab_size).astype(
        np.int32
    )
    ts, before, after = train(ts, text, options)
    print(f"\nThe loss: {before:.3f} in the first steps, {after:.3f} in the last")

    folder = options.adapters or Path(tempfile.mkdtemp()) / "adapters"
    _, adapters, _ = ft.split(ts.model, ADAPTERS, ...)
    ft.save(folder, adapters, overwrite=True, meta={"rank": options.rank, "alpha": options.alpha})
    print(
        f"Saved in {folder}: {ft.inspect(folder).total_bytes:,} of the model's {ft.plan(ts.model).total_bytes:,} bytes"
    )

    # In another program: load the published model, add new adapters, and restore the saved ones.
    final = merged(ft.restore(folder, published(), only=ADAPTERS))
    if options.out is not None:
        ft.save_weights(options.out, final)
        print(f"The merged model, ready to be published: {options.out}")
    # The rules shard the batch, so generate one sequence per shard.
    rows = jax.sharding.get_abstract_mesh().shape["data"]
    prompts = np.tile(text[: options.seq // 2], (rows, 1))
    written = ft.nn.generate(final, prompts, options.sample, temperature=0.0)
    print(f"It continues with the tokens {np.asarray(written)[0, : options.sample].tolist()}")


def main(arguments: list[str] | None = None) -> int:
    described, formatter = (
        "Fine-tune a published model with LoRA.",
        argparse.ArgumentDefaultsHelpFormatter,
    )
    parser = argparse.ArgumentParser(description=described, formatter_class=formatter)
    parser.add_argument(
        "--model",
        type=Path,
        default=LLAMA,
        metavar="DIR",
        help="folder with config.json and *.safetensors",
    )
    parser.add_argument("--rank", type=int, default=4, metavar="N", help="rank of the adapters")
    parser.add_argument(
        "--alpha", type=float, default=8.0, metavar="X", help="their scale is alpha / rank"
    )
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="training steps")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences per step")
    parser.add_argument("--seq", type=int, default=32, metavar="N", help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-2, metavar="X", help="learning rate")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of adapters and batches"
    )
    parser.add_argument("--sample", type=int, default=16, metavar="N", help="tokens to generate")
    parser.add_argument(
        "--adapters",
        type=Path,
        metavar="DIR",
        help="folder for the adapters; None: a temporary folder",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the merged model; None: not saved"
    )
    options = parser.parse_args(arguments)
    # Checked before the training.
    if options.out is not None and options.out.is_dir() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} already contains files")
    data = jax.device_count() // 2 or 1
    try:
        with (
            jax.set_mesh(ft.make_mesh(data=data, model=jax.device_count() // data)),
            ft.axis_rules(RULES),
        ):
            finetune(options)
    except ft.FunctreeError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
