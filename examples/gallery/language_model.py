"""This small language model learns from this repository's documentation.

    python examples/gallery/language_model.py --picture language.png

A token is a byte. The model is `ft.nn.Transformer`, with FSDP and tensor
parallelism. The picture shows the loss, a sample, and how sure the model
is of each letter in a text that it has not seen. `examples/train_lm.py`
is a larger version, with checkpoints, experts and several processes.
"""

from pathlib import Path
from textwrap import wrap
from typing import Any

from runs import (
    bare,
    curve,
    figure,
    options,
    save,
    train,
)  # imported first: simulates the devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

import functree as ft

ROOT = Path(__file__).parents[2]
SPLIT = {
    "heads": "model",
    "kv_heads": "model",
    "hidden": "model",
    "vocab": "model",
}
RULES = ft.AxisRules({"batch": "data", **SPLIT, ...: None})
LAYOUT = RULES | ft.FSDP("data", min_size=2**12)
CONFIG = ft.nn.TransformerConfig(
    vocab_size=128,
    embed=128,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=32,
    hidden=256,
    max_seq=256,
    tie_embedding=True,
)
SEQ, PROMPT = 96, "A plan "
UNSEEN = (
    "The batch is sharded over the mesh axis `data`, and is not changed."
)


def read_text() -> np.ndarray:
    """Read the documentation's pages as bytes, but only their ASCII."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(
        page.read_text(encoding="utf-8")
        for page in pages
        if page.stem != "design"
    )
    return encoded(text)


def encoded(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(
        np.int32
    )


def make(
    key: PRNGKeyArray, steps: int
) -> ft.TrainState[ft.nn.Transformer]:
    rate = optax.warmup_cosine_decay_schedule(
        3e-4, 3e-3, min(30, steps), steps + 30
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    return ft.TrainState.create(
        ft.nn.Transformer.create(CONFIG, key=key), tx
    )


def bits(
    model: ft.nn.Transformer, tokens: Int[Array, "batch _"]
) -> Float[Array, ""]:
    return ft.nn.cross_entropy(
        model, tokens[:, :-1], tokens[:, 1:]
    ) / np.log(2)


@ft.jit(rules=LAYOUT, donate="ts")
def step(
    ts: ft.TrainState[ft.nn.Transformer], tokens: Int[Array, "batch _"]
) -> tuple[ft.TrainState[ft.nn.Transformer], Array]:
    value, gradients = ft.value_and_grad(bits)(ts.model, tokens)
    return ft.apply_gradients(ts, gradients), value


@ft.jit(rules=LAYOUT)
def sureness(
    model: ft.nn.Transformer, tokens: Int[Array, "batch _"]
) -> Array:
    """Return the probability of each token except the first."""
    chances = jax.nn.log_softmax(model(tokens[:, :-1]))
    return jnp.exp(
        jnp.take_along_axis(chances, tokens[:, 1:, None], axis=2)
    )[0, :, 0]


def main() -> None:
    given = options(__doc__, steps=600)
    mesh, rng = ft.make_mesh(data=4, model=2), np.random.default_rng(0)
    text = read_text()
    print(f"{len(text):,} bytes of text")
    ts = ft.init(make, LAYOUT, mesh)(jax.random.key(0), given.steps)
    print(ft.plan(ts.model))

    def one_step(
        ts: ft.TrainState[ft.nn.Transformer], _: int
    ) -> tuple[ft.TrainState, Array]:
        starts = rng.integers(0, len(text) - SEQ, 16)
        tokens = text[starts[:, None] + np.arange(SEQ + 1)]
        return step(ts, ft.shard(tokens, RULES, mesh, axes="batch _"))

    ts, losses = train(given.steps, ts, one_step)
    prompts = ft.shard(
        np.tile(encoded(PROMPT), (4, 1)), RULES, mesh, axes="batch _"
    )
    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        samples = ft.nn.generate(
            ts.model, prompts, 180, key=jax.random.key(1), temperature=0.4
        )
    letters = map(chr, np.asarray(samples)[0])
    sample = "".join(
        letter if letter.isprintable() or letter == "\n" else "·"
        for letter in letters
    )
    print(f"A sample:\n\n{sample}")
    row = np.tile(encoded(UNSEEN), (4, 1))
    sure = np.asarray(
        sureness(ts.model, ft.shard(row, RULES, mesh, axes="batch _"))
    )

    made, plots = figure(1, 2, (9, 2.2))
    curve(plots[0], losses, "bits per byte")
    bare(
        plots[1],
        "a sample, and how sure it is of a sentence (dark: sure)",
    ).axis("off")
    lines = [
        part for line in sample.splitlines() for part in wrap(line, 52)
    ]
    looks: dict[str, Any] = {
        "family": "monospace",
        "fontsize": 7,
        "parse_math": False,
    }
    plots[1].text(0, 1, "\n".join(lines[:6]), va="top", **looks)
    for i, letter in enumerate(UNSEEN):
        shade = str(0.8 * (1 - float(sure[i - 1]))) if i else "0.8"
        at = (i % 52 / 52, 0.25 - 0.15 * (i // 52))
        plots[1].text(*at, letter, color=shade, **looks)
    save(made, given.picture)


if __name__ == "__main__":
    main()
