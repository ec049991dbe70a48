"""A tour of generation: a model that knows the Zen of Python by heart, its cache, and what a token
costs.

    python examples/generate.py                              # 8 devices simulated on the CPU, half a minute
    python examples/generate.py --steps 400 --mesh data=2,model=4

Read it from top to bottom: the model, `ft.nn.generate`, the cache by itself, a mesh.
"""

import argparse
import codecs
import contextlib
import io
import os
import re
import time
from typing import Any

# Simulate 8 devices on the CPU, so that this runs anywhere. JAX reads both variables once, when it
# is imported.
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

# --- 1. A model: it learns the text by heart

# Qwen 3's norms, Mistral's window: a byte sees the 64 before it, so a text may be longer than those
# of the training.
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
    """A model, and its loss at the end."""
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


# --- 2. `ft.nn.generate`: prompts of different lengths, continued to the end of their lines

PROMPTS = ["\nBeautiful", "\nExplicit is", "\nIn the face of", "\nSpecial cases"]


def padded(prompts: list[str]) -> tuple[Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch"]]:
    """Prompts as tokens, padded at their right, and their lengths."""
    rows = [np.frombuffer(prompt.encode(), np.uint8) for prompt in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    return np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows]).astype(
        np.int32
    ), lengths


def lines(tokens: Any) -> list[str]:
    """Rows of tokens as text; what pads them is left out."""
    return [
        bytes(row[row > 0].astype(np.uint8)).decode(errors="replace").strip()
        for row in np.asarray(tokens)
    ]


def show_generation(model: ft.nn.Transformer) -> list[str]:
    """Print what the model makes of the prompts, and what it costs to ask again."""
    tokens, lengths = padded(PROMPTS)
    found = lines(ft.nn.generate(model, tokens, 64, lengths=lengths, stop=END))
    for line in found:
        known = "a line of the text" if line.encode() in ZEN.splitlines() else "not in the text"
        print(f"    {line}    ({known})")
    drawn = {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "key": jax.random.key(1)}
    print("Drawn, and not the likeliest:")
    for line in lines(ft.nn.generate(model, tokens, 64, lengths=lengths, stop=END, **drawn)):
        print(f"    {line}")
    with (
        ft.testing.assert_no_recompile()
    ):  # other prompts, in a batch of the same size, and other options
        shorter, lengths = padded(["\nFlat", "\nSparse", "\nNow", "\nErrors"])
        ft.nn.generate(
            model, shorter, 64, lengths=lengths, stop=END, **{**drawn, "temperature": 0.5}
        )
    print("Other prompts and options: nothing is compiled again.\n")
    return found


# --- 3. The cache by itself: keys and values of the tokens so far


@ft.jit(donate="cache")
def step(
    model: ft.nn.Transformer, tokens: Int[Array, "batch _"], cache: ft.nn.Cache
) -> tuple[Array, ft.nn.Cache]:
    logits, cache = model.decode(tokens, cache)
    return logits[:, -1].argmax(-1).astype(tokens.dtype), cache


def show_cache(model: ft.nn.Transformer, new: int) -> None:
    """Print the cache's size, and what a token costs at the beginning, at the end, and without a
    cache."""
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
        "step by step it is what `generate` returns"
    )
    print(f"{len(step.compilations)} programs: one for the prompt, one for each token after it")
    compiled = step.lower(model, token[:, None], cache).compile()
    print(
        f"in place: {compiled.ledger().memory.aliases / 2**10:.1f} KiB of the cache are updated and not copied"
    )
    first, last = (np.median(part) * 1e3 for part in (seconds[1:101], seconds[-100:]))
    print(f"a token: {first:.2f} ms after {prompt.size} tokens, {last:.2f} ms after {new:,}")

    whole = ft.jit(lambda model, tokens: model(tokens)[:, -1].argmax(-1))
    for length in (64, 256, 1024):
        tokens = jnp.ones((1, length), jnp.int32)
        whole(model, tokens)
        start = time.perf_counter()
        jax.block_until_ready([whole(model, tokens) for _ in range(5)])
        print(
            f"    without a cache, of {length:>5,} tokens: {(time.perf_counter() - start) / 5 * 1e3:.2f} ms"
        )
    print()


# --- 4. On a mesh: the rules of the model lay out its cache

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
    """Print how the cache is laid out, and that the mesh changes nothing."""
    cache = ft.abstract(ft.nn.Cache.create)(model, len(PROMPTS), 1024)
    print(f"{ft.plan(cache, RULES, mesh)}\n")
    tokens, lengths = padded(PROMPTS)
    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        sharded = ft.nn.generate(
            ft.shard(model, RULES, mesh), tokens, 64, lengths=lengths, stop=END
        )
    assert lines(sharded) == expected
    print(
        f"{len(expected)} texts, in shards of {sharded.sharding.shard_shape(sharded.shape)}: the same as on one device."
    )


# --- The command line


def mesh_sizes(text: str) -> dict[str, int]:
    """`data=4,model=2` ─► `{"data": 4, "model": 2}`."""
    found = re.fullmatch(r"data=(\d+),model=(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh: write both axes, as in data=4,model=2"
        )
    return {"data": int(found[1]), "model": int(found[2])}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main() -> None:
    described = "A tour of generation: a small model, its cache, what a token costs, and a mesh."
    parser = argparse.ArgumentParser(
        description=described, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive, default=300, metavar="N", help="steps of training"
    )
    parser.add_argument(
        "--new", type=positive, default=900, metavar="N", help="tokens to generate one by one"
    )
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        default="data=4,model=2",
        metavar="data=4,model=2",
        help="its axes",
    )
    options = parser.parse_args()
    try:
        mesh = ft.make_mesh(**options.mesh)
        model, loss = train(options.steps)
        print(
            f"After {options.steps} steps: a loss of {loss:.3f} nats for each byte of the Zen of Python\n"
        )
        found = show_generation(model)
        show_cache(model, options.new)
        show_mesh(model, mesh, found)
    except ft.FunctreeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
