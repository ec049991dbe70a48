"""This example runs one small model with JAX's three types of mesh axes: Auto, Explicit and Manual.

    python examples/three_ways.py                                 # Simulates 8 devices on the CPU.
    python examples/three_ways.py --data 4 --model 2 --hidden 512

All three use the same rules. They shard the batch over the mesh axis `data` and the hidden units
over `model`, so the result needs a sum over `model`. The three types differ in three ways: who
inserts this sum, what the types of arrays show, and what happens if you forget the sum.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

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
from jaxtyping import Array, Float, PRNGKeyArray
from rich.console import Console
from rich.table import Table

import functree as ft

# --- The model

RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})

seen: list[str] = []  # the types of the hidden layer, recorded while it is traced


class Block(eqx.Module):
    """A residual block, in which all three ways share the code up to the hidden layer."""

    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __init__(self, embed: int, hidden: int, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        self.up = jax.random.normal(up_key, (embed, hidden)) / embed**0.5
        self.down = jax.random.normal(down_key, (hidden, embed)) / hidden**0.5

    def hidden(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch hidden"]:
        hidden = jax.nn.gelu(jax.nn.standardize(x) @ self.up)
        seen.append(str(jax.typeof(hidden)))
        return hidden


# --- The three ways


# Auto axes: arrays are global, and their types have no shardings. The compiler chooses them, guided
# by constraints.
@ft.jit(rules=RULES)
def automatic(block: Block, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    hidden = ft.constrain(block.hidden(x), "batch hidden")
    return x + ft.constrain(hidden @ block.down, "batch embed")


# Explicit axes: arrays are global, and their types have shardings. If the sharding of a result is
# ambiguous, JAX asks for it.
@ft.jit(rules=RULES)
def explicit(block: Block, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    return x + jnp.dot(block.hidden(x), block.down, out_sharding=ft.spec("batch embed"))


# Manual axes: arrays are local, and their types have the mesh axes along which they vary. You write
# all collectives.
@ft.shard_map(rules=RULES)
def manual(block: Block, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    return x + jax.lax.psum(block.hidden(x) @ block.down, "model")


# Without the sum, this is correct on one device only.
def forgetful(block: Block, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    return x + block.hidden(x) @ block.down


# --- Training: one step for all three


# The block is donated, so the new block reuses its memory and keeps its shardings. `way` is static,
# because it is not an array.
@ft.jit(rules=RULES, donate="block")
def train_step(way: Any, block: Block, x: Array) -> tuple[Block, Array]:
    loss, gradients = ft.value_and_grad(lambda block: jnp.mean(way(block, x) ** 2))(block)
    return jax.tree.map(lambda p, g: p - 0.1 * g, block, gradients), loss


# --- The comparison

Way = Callable[[Block, Array], Array]
# The way, `forgetful` run in this way, and what inserts the sum.
WAYS: dict[str, tuple[Way, Way, str]] = {
    "automatic": (automatic, ft.jit(forgetful, rules=RULES), "the compiler"),
    "explicit": (explicit, ft.jit(forgetful, rules=RULES), "`out_sharding=`"),
    "manual": (manual, ft.shard_map(forgetful, rules=RULES), "`psum`"),
}


def collectives(way: Way, block: Block, x: Array) -> str:
    """Count the collectives in the compiled program of a call, by kind."""
    program = ft.jit(way).lower(block, x).compile().as_text() or ""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    counts = Counter(re.findall(rf" ({kinds})(?:-start)?\(", program))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def attempt(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the result of a function as text, or the error that it raises."""
    try:
        return str(function(*arguments))
    except Exception as error:  # JAX's own error has no public name
        return f"{type(error).__name__}: {error}"


def compare(batch: int, embed: int, hidden: int, data: int, model: int) -> None:
    """Run and train the block in each way, then without the sum, and print the results."""
    block_key, x_key = jax.random.split(jax.random.key(0))
    whole, whole_x = Block(embed, hidden, block_key), jax.random.normal(x_key, (batch, embed))
    expected, make, forgotten = forgetful(whole, whole_x), ft.init(Block, RULES), []
    auto, typed = (ft.make_mesh(data=data, model=model, explicit=types) for types in (False, True))
    print(ft.plan(whole, RULES, auto), end="\n\n")
    looks = Table("", "sum inserted by", "type of hidden", "collectives", box=None, pad_edge=False)
    results = Table("", "error", "loss in five training steps", box=None, pad_edge=False)
    for name, (way, wrong, who) in WAYS.items():
        with jax.set_mesh(typed if way is explicit else auto):
            block, x = make(embed, hidden, block_key), ft.shard(whole_x, RULES, axes="batch embed")
            off = np.abs(np.asarray(way(block, x)) - expected).max()
            looks.add_row(name, who, seen[-1], collectives(way, block, x))
            forgotten.append(f"{name}: {attempt(collectives, wrong, block, x)}")
            losses = []
            for _ in range(5):
                block, loss = train_step(way, block, x)
                losses.append(f"{loss:.4f}")
            results.add_row(name, f"{off:.0e}", "  ".join(losses))

    Console().print(looks, "", results)
    print("\nWithout the sum:", *forgotten, sep="\n\n")
    with jax.set_mesh(auto):
        print(
            f"\nWith one more hidden unit, in all three ways:\n\n{attempt(make, embed, hidden + 1, block_key)}"
        )


def main() -> None:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description="Run a small model with JAX's three types of mesh axes.",
        formatter_class=shown,
    )
    parser.add_argument("--batch", type=int, default=16, help="inputs in a batch")
    parser.add_argument("--embed", type=int, default=64, help="size of an input")
    parser.add_argument("--hidden", type=int, default=256, help="hidden units")
    parser.add_argument("--data", type=int, default=2, help="devices that share the batch")
    parser.add_argument("--model", type=int, default=4, help="devices that share the hidden units")
    options = vars(parser.parse_args())
    if min(options.values()) < 1:
        parser.error("all sizes must be at least 1")
    try:
        with jax.default_matmul_precision("highest"):
            compare(**options)
    except ft.FunctreeError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
