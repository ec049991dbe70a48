"""This benchmark measures optax's Muon and `ft.muon` on sharded matrices, and micro-batches.

    python benchmarks/optimizers.py bytes                 # The bytes that the CPU program of 12 matrices moves.
    python benchmarks/optimizers.py target tpu:v5e:2x4    # A small transformer compiled for TPUs, and with AdamW.
    python benchmarks/optimizers.py step                  # The time of a training step, relative to AdamW.
    python benchmarks/optimizers.py batches tpu:v5e:2x4   # `ft.accumulate` over 4 micro-batches, compiled for TPUs.

Compiling for TPUs needs the extra `functree[tpu]`, but no TPU.
"""

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
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
from machine import machine
from steps import TENSOR, Run, loss

import functree as ft

MIB = 2**20
WHOLE_LIMIT = 3.75  # MiB, for the 12 matrices
STEP_LIMIT = 1.3  # relative to AdamW's step


def muon(model: Any) -> optax.GradientTransformation:
    """Create optax's Muon for the matrices of a model."""
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=ft.nn.matrix_dimensions(model))


def whole(model: Any) -> optax.GradientTransformation:
    """Create `ft.muon`, which works on whole matrices."""
    return ft.muon(1e-3, muon_weight_dimension_numbers=ft.nn.matrix_dimensions(model))


# --- Twelve matrices


class Matrix(eqx.Module):
    """A matrix of 256 × 512."""

    weight: Float[Array, "embed hidden"]

    @classmethod
    def create(cls, key: Array) -> "Matrix":
        return cls(jax.random.normal(key, (256, 512)))

    def __matrix_dimensions__(self) -> Any:
        return {"weight": (-2, -1)}


def three(key: Array) -> list[Matrix]:
    return [Matrix.create(key) for _ in range(3)]


TWELVE: dict[str, Callable[[Array], Any]] = {
    "a stack of 12": lambda key: ft.stack(Matrix.create, 12, key),
    "3 in each of 4 layers": lambda key: ft.stack(three, 4, key),
    "a list of 12": lambda key: [Matrix.create(key) for _ in range(12)],
}
# FSDP over `data`, tensor parallelism over `model`.
LAYOUT = ft.AxisRules({"hidden": "model", "embed": "data", ...: None})


def twelve() -> None:
    """Print what one update of 12 matrices moves on each of 8 devices."""
    print(f"{machine('jax', 'optax')}; 12 matrices of 256 × 512, float32, FSDP + TP\n")
    print("| matrices | Muon, MiB | whole matrices, MiB | limit |")
    print("|---|---|---|---|")
    mesh = ft.make_mesh(data=2, model=4)
    for name, make in TWELVE.items():
        model = ft.abstract(make)(jax.random.key(0))
        moved = [update_bytes(tx, model, mesh) for tx in (muon(model), whole(model))]
        print(f"| {name} | {moved[0]:.2f} | {moved[1]:.2f} | {WHOLE_LIMIT} |")


def update_bytes(tx: Any, model: Any, mesh: Any) -> float:
    """Return the MiB that an update moves on each device."""
    state = jax.eval_shape(tx.init, model)
    of_state = ft.plan_optimizer(tx, model, LAYOUT, mesh)
    update = ft.jit(
        lambda gradients, state, model: tx.update(gradients, state, model),
        in_shardings=(LAYOUT, of_state, LAYOUT),
        out_shardings=(LAYOUT, of_state),
        rules=LAYOUT,
        mesh=mesh,
    )
    ledger = update.lower(model, state, model).compile().ledger()
    return sum(one.bytes * (one.count or 1) for one in ledger.collectives) / MIB


# --- A small transformer


def config(layers: int, embed: int, seq: int) -> ft.nn.TransformerConfig:
    """Return the sizes of a model."""
    return ft.nn.TransformerConfig(
        4096,
        embed,
        layers=layers,
        heads=8,
        kv_heads=4,
        head_dim=embed // 8,
        hidden=3 * embed,
        max_seq=seq,
    )


def optimizers(sizes: ft.nn.TransformerConfig) -> dict[str, Any]:
    """Create AdamW, Muon, and Muon on whole matrices."""
    model = ft.abstract(ft.nn.Transformer.create)(sizes, key=jax.random.key(0))
    return {"AdamW": optax.adamw(1e-3), "Muon": muon(model), "whole matrices": whole(model)}


def make_layout() -> ft.Layout:
    return ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP("data")


def make_step(mesh: Any, layout: ft.Layout) -> Any:
    """Make a training step."""

    @ft.jit(
        in_shardings=(layout, ft.P("data")),
        out_shardings=(layout, None),
        mesh=mesh,
        rules=layout,
        donate="ts",
    )
    def step(ts: ft.TrainState, tokens: Any) -> tuple[ft.TrainState, Any]:
        value, grads = ft.value_and_grad(loss)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), value

    return step


def state_of(sizes: ft.nn.TransformerConfig, tx: Any) -> Callable[[Array], ft.TrainState]:
    """Return a function that creates a training state."""
    return lambda key: ft.TrainState.create(ft.nn.Transformer.create(sizes, key=key), tx)


def on_target(target: str, layers: int) -> None:
    """Print what the update of a training step moves on a target."""
    seq = 512
    sizes, mesh, layout = (
        config(layers, 512, seq),
        ft.make_mesh(target=target, data=2, model=4),
        make_layout(),
    )
    print(f"{machine('jax', 'optax')}; {target}, {layers} layers of width 512, FSDP + TP\n")
    print(
        "| optimizer | moved by the update, MiB | moved by the step, MiB | most exchanges of a matrix | attributed | rematerialization warnings |"
    )
    print("|---|---|---|---|---|---|")
    for name, tx in optimizers(sizes).items():
        state = ft.abstract(state_of(sizes, tx))(jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((16, seq + 1), jnp.int32)
        ledger = make_step(mesh, layout).lower(state, tokens).compile().ledger()
        update = [one for one in ledger.collectives if one.phase == "update"]
        each = Counter(path for one in update for path in one.paths)
        moved, whole = (
            sum(one.bytes * (one.count or 1) for one in some) / MIB
            for some in (update, ledger.collectives)
        )
        warnings = sum("remat" in one.lower() for one in ledger.warnings)
        named = f"{sum(bool(one.paths) for one in update)} of {len(update)}"
        print(
            f"| {name} | {moved:.2f} | {whole:.2f} | {max(each.values(), default=0)} | {named} | {warnings} |",
            flush=True,
        )


def timed(rounds: int, batch: int, seq: int) -> None:
    """Print the time of a training step on 8 simulated devices, with the optimizers in turn."""
    sizes, mesh, layout = config(4, 256, seq), ft.make_mesh(data=2, model=4), make_layout()
    print(
        f"{machine('jax', 'optax')}; medians of {rounds} rounds, 8 simulated devices, 4 layers of width "
        f"256, {batch} × {seq} tokens, float32, FSDP + TP\n"
    )
    tokens = np.random.default_rng(0).integers(0, 4096, (batch, seq + 1)).astype(np.int32)
    runs: dict[str, Run] = {}
    for name, tx in optimizers(sizes).items():
        state = ft.init(state_of(sizes, tx), layout, mesh)(jax.random.key(0))
        runs[name] = Run(make_step(mesh, layout), state, ft.shard(tokens, ft.P("data"), mesh))
    for _ in range(3):
        for run in runs.values():
            run.once()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run.seconds())
    print("| optimizer | ms per step | relative to AdamW | limit |")
    print("|---|---|---|---|")
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, seconds["AdamW"], strict=True))
        limit = STEP_LIMIT if name == "whole matrices" else ""
        print(f"| {name} | {statistics.median(own) * 1000:.0f} | {ratio:.2f} | {limit} |")


# --- Micro-batches

STEPS = 4
DATA = ft.AxisRules({"batch": "data", ...: None})


class Square(eqx.Module):
    """A layer with a matrix of 1024 × 1024."""

    weight: Float[Array, "embed hidden"]

    def __call__(self, x: Array) -> Array:
        return jnp.tanh(x @ self.weight)


def eight() -> list[Square]:
    return [Square(jnp.zeros((1024, 1024))) for _ in range(8)]


def of_layers(layers: list[Square], x: Float[Array, "batch embed"]) -> Array:
    """Return a loss of the layers."""
    for layer in layers:
        x = layer(x)
    return jnp.mean(x**2)


def of_text(model: ft.nn.Transformer, tokens: Int[Array, "batch seq"]) -> Array:
    """Return the loss of a language model."""
    return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])


def micro_batches(target: str) -> None:
    """Print the bytes that a gradient over micro-batches moves and holds on each device."""
    mesh = ft.make_mesh(target=target, data=8)
    print(
        f"{machine('jax', 'optax')}; {target}, `data=8`, {STEPS} micro-batches; MiB on each device\n"
    )
    print("| model | over | gathered | scattered | summed | other | peak | attributed |")
    print("|---|---|---|---|---|---|---|---|")
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    fsdp = DATA | ft.FSDP("data", axes="embed")
    for over in ("whole", None, "data"):
        name = "8 matrices of 1024 × 1024, FSDP"
        print_row(name, over, of_layers, fsdp, mesh, ft.abstract(eight)(), x)
    make = ft.abstract(ft.nn.Transformer.create)
    model = make(config(2, 512, 512), key=jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((64, 513), jnp.int32)
    for over in ("whole", None, "data"):
        for name, layout in (("FSDP", DATA | ft.FSDP("data")), ("data parallel", DATA)):
            what = f"a transformer of 2 layers, {name}"
            print_row(what, over, of_text, layout, mesh, model, tokens)


def print_row(
    name: str, over: str | None, loss: Any, layout: ft.Layout, mesh: Any, model: Any, batch: Any
) -> None:
    """Print a row of the table, without micro-batches if `over` is "whole"."""
    step = ft.value_and_grad(loss)
    if over != "whole":
        step = ft.accumulate(step, STEPS, over=over)
    compiled = ft.jit(step, in_shardings=(layout, ft.P("data")), mesh=mesh, rules=layout)
    ledger = compiled.lower(model, batch).compile().ledger()
    moved = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce", "otherwise"), 0)
    for one in ledger.collectives:
        kind = one.kind if one.kind in moved else "otherwise"
        moved[kind] += one.bytes * (one.count or 1)
    cells = " | ".join(f"{one / MIB:.1f}" for one in (*moved.values(), ledger.memory.peak))
    how = "(the whole batch)" if over == "whole" else f"`{over!r}`"
    print(f"| {name} | {how} | {cells} | {ledger.attributed:.1%} |", flush=True)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bytes", help="measure what the CPU program of 12 matrices moves")
    target = commands.add_parser("target", help="compile a small transformer for TPUs")
    target.add_argument("target", nargs="?", default="tpu:v5e:2x4")
    target.add_argument("--layers", type=int, default=8)
    step = commands.add_parser("step", help="time a training step")
    step.add_argument("--rounds", type=int, default=20)
    step.add_argument("--batch", type=int, default=8)
    step.add_argument("--seq", type=int, default=256)
    batches = commands.add_parser("batches", help="compile micro-batches for TPUs")
    batches.add_argument("target", nargs="?", default="tpu:v5e:2x4")
    options = parser.parse_args()
    if options.command == "bytes":
        twelve()
    elif options.command == "batches":
        micro_batches(options.target)
    elif options.command == "target":
        on_target(options.target, options.layers)
    else:
        timed(options.rounds, options.batch, options.seq)


if __name__ == "__main__":
    main()
