"""This tour generates text with a model that has learned the Zen of Python by heart.

    python examples/generate.py                              # Simulates 8 devices on the CPU, half a minute.
    python examples/generate.py --steps 400 --mesh data=2,model=4

Read it from top to bottom: the model, `ft.nn.generate`, the cache and the time per token, a mesh.
"""

import argparse
import codecs
import contextlib
import io
import os
import re
import time
from typing import Any

# Simulate 8 devices on the CPU, so that this runs anywhere. Both variables must be set before JAX is
# imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

import functree as ft

with contextlib.redirect_stdout(io.StringIO()):
    import this

ZEN = codecs.decode(this.s, "rot13").encode()  # type: ignore[attr-defined]
SEQ, END = 64, ord("\n")

# --- 1. A model that learns the text by heart

# Qwen 3's norms and Mistral's window: each byte attends to a window of 64 bytes, so a text may be
# longer than the training sequences.
CONFIG = ft.nn.TransformerConfig(
    256,
    64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=192,
    max_seq=1024,
    qk_norm=True,
    window=SEQ,
)


def train(steps: int) -> tuple[ft.nn.Transformer, float]:
    """Train a model, and return it with its last loss."""
    tx = optax.adamw(optax.cosine_decay_schedule(3e-3, steps))
    ts = ft.TrainState.create(ft.nn.Transformer.create(CONFIG, key=jax.random.key(0)), tx)

    @ft.jit(donate="ts")
    def train_step(ts: ft.TrainState, tokens: Int[Array, "batch _"]) -> tuple[ft.TrainState, Array]:
        loss, grads = ft.value_and_grad(ft.nn.cross_entropy)(
            ts.model, tokens[:, :-1], tokens[:, 1:]
        )
        return ft.apply_gradients(ts, grads), loss

    random, text, loss = np.random.default_rng(0), np.frombuffer(b"\n" + ZEN, np.uint8), jnp.nan
    for _ in range(steps):
        starts = random.integers(0, len(text) - SEQ, (16, 1))
        ts, loss = train_step(ts, text[starts + np.arange(SEQ + 1)].astype(np.int32))
    return ts.model, float(loss)


# --- 2. `ft.nn.generate`, which continues prompts of different lengths to the end of their lines

PROMPTS = ["\nBeautiful", "\nExplicit is", "\nIn the face of", "\nSpecial cases"]


def padded(prompts: list[str]) -> tuple[Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch"]]:
    """Return prompts as tokens, padded on the right, and their lengths."""
    rows = [np.frombuffer(prompt.encode(), np.uint8) for prompt in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    return np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows]).astype(
        np.int32
    ), lengths


def lines(tokens: Any) -> list[str]:
    """Return rows of tokens as text, without padding."""
    return [
        bytes(row[row > 0].astype(np.uint8)).decode(errors="replace").strip()
        for row in np.asarray(tokens)
    ]


def show_generation(model: ft.nn.Transformer) -> list[str]:
    """Print how the model continues the prompts, and check that a second call does not compile."""
    tokens, lengths = padded(PROMPTS)
    texts = lines(ft.nn.generate(model, tokens, 64, lengths=lengths, stop=END))
    for line in texts:
        known = "a line of the text" if line.encode() in ZEN.splitlines() else "not in the text"
        print(f"    {line}    ({known})")
    drawn = {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "key": jax.random.key(1)}
    print("With random sampling:")
    for line in lines(ft.nn.generate(model, tokens, 64, lengths=lengths, stop=END, **drawn)):
        print(f"    {line}")
    # Other prompts in a batch of the same size, and other options.
    with ft.testing.assert_no_recompile():
        shorter, lengths = padded(["\nFlat", "\nSparse", "\nNow", "\nErrors"])
        ft.nn.generate(
            model, shorter, 64, lengths=lengths, stop=END, **{**drawn, "temperature": 0.5}
        )
    print("Other prompts and options cause no recompilation.\n")
    return texts


# --- 3. The cache, with the keys and values of the tokens so far


@ft.jit(donate="cache")
def step(
    model: ft.nn.Transformer, tokens: Int[Array, "batch _"], cache: ft.nn.Cache
) -> tuple[Array, ft.nn.Cache]:
    logits, cache = model.decode(tokens, cache)
    return logits[:, -1].argmax(-1).astype(tokens.dtype), cache


def show_cache(model: ft.nn.Transformer, new: int) -> None:
    """Print the cache's size, and the time per token at the start, at the end, and without a cache."""
    prompt = np.frombuffer(b"\nBeautiful", np.uint8)[None].astype(np.int32)
    cache = ft.nn.Cache.create(model, batch=1, length=len(prompt[0]) + new)
    print(
        f"A cache for {len(prompt[0]) + new:,} tokens: {cache.key.shape} keys, as long as the window"
    )
    token, cache = step(model, prompt, cache)
    text, seconds = [token], []
    for _ in range(new):
        start = time.perf_counter()
        token, cache = jax.block_until_ready(step(model, token[:, None], cache))
        seconds.append(time.perf_counter() - start)
        text.append(token)
    expected = ft.nn.generate(model, prompt, new + 1)[0, prompt.size :]
    assert np.array_equal(np.concatenate(text), expected), (
        "step by step, the tokens equal the result of `generate`"
    )
    print(f"{len(step.compilations)} programs: one for the prompt, one for every token after it")
    compiled = step.lower(model, token[:, None], cache).compile()
    print(
        f"updated in place, not copied: {compiled.ledger().memory.aliases / 2**10:.1f} KiB of the cache"
    )
    first, last = (np.median(part) * 1e3 for part in (seconds[1:101], seconds[-100:]))
    print(f"time per token: {first:.2f} ms after {prompt.size} tokens, {last:.2f} ms after {new:,}")

    whole = ft.jit(lambda model, tokens: model(tokens)[:, -1].argmax(-1))
    for length in (64, 256, 1024):
        tokens = jnp.ones((1, length), jnp.int32)
        whole(model, tokens)
        start = time.perf_counter()
        jax.block_until_ready([whole(model, tokens) for _ in range(5)])
        print(
            f"    without a cache, after {length:>5,} tokens: {(time.perf_counter() - start) / 5 * 1e3:.2f} ms"
        )
    print()


# --- 4. A mesh, on which the model's rules also shard its cache

RULES = ft.AxisRules(
    {
        "batch": "data",
        "heads": "model",
        "kv_heads": "model",
        "hidden": "model",
        "vocab": "model",
        ...: None,
    }
)


def show_mesh(model: ft.nn.Transformer, mesh: Mesh, expected: list[str]) -> None:
    """Print the cache's plan, and check that the texts are the same on a mesh."""
    cache = ft.abstract(ft.nn.Cache.create)(model, len(PROMPTS), 1024)
    print(f"{ft.plan(cache, RULES, mesh)}\n")
    tokens, lengths = padded(PROMPTS)
    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        sharded = ft.nn.generate(
            ft.shard(model, RULES, mesh), tokens, 64, lengths=lengths, stop=END
        )
    assert lines(sharded) == expected
    print(
        f"{len(expected)} texts, in shards of {sharded.sharding.shard_shape(sharded.shape)}, equal the texts on one device."
    )


# --- The command line


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse `data=4,model=2` into `{"data": 4, "model": 2}`."""
    match = re.fullmatch(r"data=(\d+),model=(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh: write both mesh axes, as in data=4,model=2"
        )
    return {"data": int(match[1]), "model": int(match[2])}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def main() -> None:
    described = "Generate text with a small model: its cache, the time per token, and a mesh."
    parser = argparse.ArgumentParser(
        description=described, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="training steps")
    parser.add_argument(
        "--new", type=positive, default=900, metavar="N", help="tokens to generate one by one"
    )
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        default="data=4,model=2",
        metavar="data=4,model=2",
        help="mesh axes",
    )
    options = parser.parse_args()
    try:
        mesh = ft.make_mesh(**options.mesh)
        model, loss = train(options.steps)
        print(
            f"After {options.steps} steps: a loss of {loss:.3f} nats per byte of the Zen of Python\n"
        )
        texts = show_generation(model)
        show_cache(model, options.new)
        show_mesh(model, mesh, texts)
    except ft.FunctreeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
