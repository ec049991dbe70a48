"""This example writes a tensor-parallel MLP in three ways.

    python examples/tensor_parallel.py                            # Simulates 8 devices on the CPU.
    python examples/tensor_parallel.py --model 4 --hidden 4096

The first two ways use `ft.shard_map`, with specs or with an annotated signature. The third leaves
the collectives to the compiler.

The hidden units are sharded over the mesh axis `model`, and each device computes with its own
units. Each device thus has a partial sum of every element of the result, and one all-reduce adds
them. The gradient with respect to the input needs a second all-reduce. All three ways compile to
just these collectives.
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
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

import functree as ft

# --- The model, which names its axes and mentions no devices


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return jax.nn.gelu(x @ self.up) @ self.down


# --- Three ways to run it

# A rule for each axis, and the resulting specs of an MLP, by path.
RULES = ft.AxisRules({"hidden": "model", "batch": None, "embed": None})
SPECS = ft.StateSharding({"up": ft.P(None, "model"), "down": ft.P("model", None)})


# 1. Specs give the shards, and the function runs on each device with its own shards. `psum` adds
# the partial sums.
@ft.shard_map(in_specs={"mlp": SPECS, "x": ft.P()}, out_specs=ft.P())
def by_specs(mlp: MLP, x: Array) -> Array:
    return jax.lax.psum(mlp(x), "model")


# 2. The annotations and the rules give the shards. Every call is checked against the annotations.
@ft.shard_map(rules=RULES)
def by_signature(mlp: MLP, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    return jax.lax.psum(mlp(x), "model")


# 3. The function runs on global arrays. The compiler derives the collectives from the shardings of
# the arguments and the result.
@ft.jit(in_shardings=RULES, out_shardings=ft.P())
def by_compiler(mlp: MLP, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    return mlp(x)


Way = Callable[[MLP, Array], Array]
WAYS: dict[str, Way] = {
    "by_specs": by_specs,
    "by_signature": by_signature,
    "by_compiler": by_compiler,
}

# --- The comparison


def gradients_through(way: Way) -> Callable[[MLP, Array], Any]:
    """Return a function for the gradients of the result's mean square.

    The gradients are with respect to the MLP and its input.
    """
    return ft.grad(
        lambda mlp, x: jnp.mean(way(mlp, x) ** 2), argnums=(0, 1), layout=(RULES, ft.P())
    )


def collectives(program: str) -> str:
    """Count the collectives in a compiled program, by kind.

    All of them are over the only mesh axis.
    """
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    counts = Counter(re.findall(rf" ({kinds})(?:-start)?\(", program))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference between two trees of arrays.

    It is relative to the largest number in the same array.
    """
    pairs = zip(
        map(np.asarray, jax.tree.leaves(found)),
        map(np.asarray, jax.tree.leaves(expected)),
        strict=True,
    )
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def compare(mlp: MLP, x: Array, devices: int) -> float:
    """Run the MLP in each way and on one device, and print a comparison.

    Returns:
        The largest difference.
    """
    mesh = ft.make_mesh(model=devices)
    print(ft.plan({"mlp": mlp, "x": x}, {"mlp": RULES, "x": ft.P()}, mesh), end="\n\n")
    table = Table(
        "",
        "result spec",
        "error",
        "collectives",
        "gradients'\nerror",
        "their\ncollectives",
        box=None,
        pad_edge=False,
    )
    expected, worst = (mlp(x), gradients_through(MLP.__call__)(mlp, x)), 0.0
    with jax.set_mesh(mesh):
        mlp, x = ft.shard((mlp, x), (RULES, ft.P()))
        for name, way in WAYS.items():
            programs = ft.jit(way), ft.jit(gradients_through(way))
            found = [program(mlp, x) for program in programs]
            off = [difference(*both) for both in zip(found, expected, strict=True)]
            counted = [
                collectives(program.lower(mlp, x).compile().as_text() or "") for program in programs
            ]
            (result,) = ft.plan(found[0])
            table.add_row(
                name, str(result.spec), f"{off[0]:.0e}", counted[0], f"{off[1]:.0e}", counted[1]
            )
            worst = max(worst, *off)
    Console().print(table)
    return worst


def main() -> None:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description="Run a tensor-parallel MLP in three ways.", formatter_class=shown
    )
    parser.add_argument("--batch", type=int, default=16, help="inputs in a batch")
    parser.add_argument("--embed", type=int, default=256, help="size of an input")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden units")
    parser.add_argument(
        "--model", type=int, default=jax.device_count(), help="devices that share the hidden units"
    )
    options = parser.parse_args()
    if min(vars(options).values()) < 1:
        parser.error("all sizes must be at least 1")
    up_key, down_key, x_key = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(up_key, (options.embed, options.hidden)) / options.embed**0.5
    down = jax.random.normal(down_key, (options.hidden, options.embed)) / options.hidden**0.5
    x = jax.random.normal(x_key, (options.batch, options.embed))
    try:
        with jax.default_matmul_precision("highest"):
            worst = compare(MLP(up, down), x, options.model)
    except ft.FunctreeError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if not worst < 1e-4:
        parser.exit(1, f"{parser.prog}: the results differ by {worst:.0e}\n")
    print(
        f"\nAll results equal the results on one device, to {worst:.0e} of the largest number in each array."
    )


if __name__ == "__main__":
    main()
