"""This benchmark compares `ft.nn.Transformer` with the same model in plain JAX (`plain.py`).

    python benchmarks/model.py step                    # The time of a training step on this machine's CPU.
    python benchmarks/model.py depth                   # The programs of 48 layers and of 2 layers.
    python benchmarks/model.py target tpu:v5e:16x16    # Llama 3 8B compiled for TPUs: memory, collectives, size.
    python benchmarks/model.py remat [--target ...]    # The memory with each `remat=`.

Compiling for TPUs needs the extra `functree[tpu]`, but no TPU.
"""

import argparse
import dataclasses
import os
import re
import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from machine import machine
from plain import Attend, Config, Model, attend_plain, attend_splash
from steps import TX, Run, layout_of, make_state, make_step, transformer_config, weights_of

import functree as ft
from functree.compiled.ledger import CompiledProgram, read_ledger
from functree.labels.leaves import read

# --- The time of a step


def timed_step(rounds: int) -> None:
    """Print the time of a training step per token, in functree and in the hand-written model.

    The two run in turn.
    """
    config = Config(vocab=4096, embed=256, layers=4, heads=8, kv_heads=4, head_dim=32, hidden=768)
    batch, seq = 8, 256
    print(
        f"{machine('jax')}; medians of {rounds} rounds, {batch} × {seq} tokens, 4 layers of width 256, float32\n"
    )
    print("| devices | attention | functree, µs per token | by hand | ratio | limit |")
    print("|---|---|---|---|---|---|")
    tokens = np.random.default_rng(0).integers(0, config.vocab, (batch, seq + 1)).astype(np.int32)
    for where, mesh in {"one": None, "data=4, model=2": ft.make_mesh(data=4, model=2)}.items():
        for attention in ("auto", "xla"):
            ours = Run(*of_functree(config, attention, mesh, tokens))
            by_hand = Run(*hand_written(config, mesh, tokens, ours.state.model))
            for _ in range(3):
                np.testing.assert_allclose(ours.once()[1], by_hand.once()[1], rtol=1e-4)
            pairs = [(ours.seconds(), by_hand.seconds()) for _ in range(rounds)]
            ratio = statistics.median(a / b for a, b in pairs)
            one, other = (
                statistics.median(column) / batch / seq * 1e6 for column in zip(*pairs, strict=True)
            )
            print(
                f"| {where} | {attention} | {one:.1f} | {other:.1f} | {ratio:.3f} | 1.03 |",
                flush=True,
            )


def of_functree(
    config: Config, attention: str, mesh: Mesh | None, tokens: Any
) -> tuple[Any, Any, Any]:
    """Return functree's step, state and batch."""
    own, key, layout = (
        transformer_config(config, tokens.shape[1] - 1, attention),
        jax.random.key(0),
        layout_of(config),
    )
    step = make_step(mesh, layout)
    if mesh is None:
        one = jax.devices()[0]
        return step, jax.device_put(make_state(own, key), one), jax.device_put(tokens, one)
    state = ft.init(make_state, layout, mesh)(own, key)
    return step, state, jax.device_put(tokens, NamedSharding(mesh, ft.P("data")))


def hand_written(
    config: Config, mesh: Mesh | None, tokens: Any, model: ft.nn.Transformer
) -> tuple[Any, Any, Any]:
    """Return the hand-written step, its state with functree's weights, and its batch."""
    batch, seq = tokens.shape
    step = Model(config, mesh, attend_plain).compiled(TX, batch, seq - 1).compile()
    params = weights_of(model)
    shardings: Any = step.input_shardings[0]
    return step, *jax.device_put(((params, TX.init(params)), tokens), shardings)


# --- The size of a program


def instructions(compiled: Any) -> int:
    """Count the instructions in an optimized program."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", compiled.as_text(), re.M))


def depth(rounds: int) -> None:
    """Print the sizes and compile times of the programs of 48 layers and of 2 layers."""
    mesh = ft.make_mesh(data=4, model=2)
    print(f"{machine('jax')}; medians of {rounds} rounds, a training step on data=4, model=2\n")
    print(
        "| remat | instructions, 2 layers | 48 | ratio | limit | seconds to compile, 2 | 48 | ratio | limit |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for remat in (False, True):
        found: dict[int, list[tuple[int, float]]] = {2: [], 48: []}
        for _ in range(rounds):
            for layers, seen in found.items():
                config = Config(512, 64, layers, 8, 4, 16, 192, remat=remat)
                state = ft.abstract(make_state)(transformer_config(config, 128), jax.random.key(0))
                jax.clear_caches()
                lowered = make_step(mesh, layout_of(config)).lower(
                    state, jax.ShapeDtypeStruct((8, 129), jnp.int32)
                )
                start = time.perf_counter()
                compiled = lowered.compile()
                seen.append((instructions(compiled), time.perf_counter() - start))
        (few, short), (many, long) = (
            map(statistics.median, zip(*seen, strict=True)) for seen in found.values()
        )
        sizes = f"{few:,.0f} | {many:,.0f} | {many / few:.3f} | 1.02"
        print(
            f"| {'full' if remat else 'none'} | {sizes} | {short:.2f} | {long:.2f} | {long / short:.2f} | 1.25 |"
        )


# --- A program for TPUs


class Found(NamedTuple):
    """The memory and the moved bytes of a compiled step per device, its size and compile time."""

    memory: dict[str, int]
    moved: Counter[tuple[str, str]]
    instructions: int
    seconds: float


def found(lowered: Any, mesh: Mesh) -> Found:
    """Compile a step of functree or of JAX, and measure the program."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    ledger = compiled.ledger() if hasattr(compiled, "ledger") else ledger_of_jax(compiled, mesh)
    parts = Counter[str]()
    for path, size in ledger.memory.arguments.items():
        kinds = {
            "mu": "first moments",
            "nu": "second moments",
            "count": "counters",
            "step": "counters",
        }
        parts[
            next((part for key, part in kinds.items() if key in path), "parameters and batch")
        ] += size
    memory = {**parts, "temporaries": ledger.memory.temporaries, "peak": ledger.memory.peak}
    moved = Counter(
        {(kind, "+".join(axes or ("?",))): size for (kind, axes), size in ledger.totals().items()}
    )
    return Found(memory, moved, instructions(compiled), seconds)


def ledger_of_jax(compiled: Any, mesh: Mesh) -> ft.Ledger:
    """Read the ledger of a program that JAX alone has compiled, without compiling it again."""
    trees = compiled.in_avals[0], compiled.out_info
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trees)
    inputs, outputs = ([leaf.path for leaf in read(tree).leaves] for tree in abstract)
    sizes = dict(mesh.shape)
    program = CompiledProgram(
        compiled.as_text(), compiled.memory_analysis, inputs, outputs, sizes, "tpu", None
    )
    return read_ledger(program)


def on_target(target: str, layers: int, data: int, model: int, batch: int, seq: int) -> None:
    """Print the costs of Llama 3 8B's training step on a target, in functree and by hand."""
    mesh = ft.make_mesh(target=target, data=data, model=model)
    config = Config(
        vocab=128256,
        embed=4096,
        layers=layers,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=14336,
        theta=500_000.0,
        dtype=jnp.bfloat16,
        remat=True,
    )
    state = ft.abstract(make_state)(transformer_config(config, seq), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch * data, seq + 1), jnp.int32)
    ours = found(make_step(mesh, layout_of(config)).lower(state, tokens), mesh)
    attend: Attend = lambda *arrays: attend_splash(mesh, *arrays)  # noqa: E731
    by_hand = found(Model(config, mesh, attend).compiled(TX, batch * data, seq), mesh)
    where = f"{layers} layers, {target}, data={data}, model={model}, sequence {seq:,}, {batch} per shard of the batch"
    print(f"Llama 3 8B, {where}; jax {jax.__version__}\n")
    print("| per device | functree | by hand | ratio |")
    print("|---|---|---|---|")
    for part, size in ours.memory.items():
        print(row(f"{part}, MiB", size / 2**20, by_hand.memory[part] / 2**20))
    for key in sorted(ours.moved | by_hand.moved):
        print(
            row(f"{' over '.join(key)}, MiB", ours.moved[key] / 2**20, by_hand.moved[key] / 2**20)
        )
    print(row("moved in total, MiB", ours.moved.total() / 2**20, by_hand.moved.total() / 2**20))
    print(row("instructions", ours.instructions, by_hand.instructions))
    print(row("seconds to compile", ours.seconds, by_hand.seconds))


# --- The memory of the backward pass

REMATS: dict[str, Any] = {
    "None": None,
    '"dots"': "dots",
    'save_only_these_names("attn_mixed", "mlp_gate")': jax.checkpoint_policies.save_only_these_names(
        "attn_mixed", "mlp_gate"
    ),
    '"full"': "full",
    'ft.offload("attn_mixed", "mlp_gate")': ft.offload("attn_mixed", "mlp_gate"),
    'ft.offload("block_input")': ft.offload("block_input"),
}


def remats(target: str | None, layers: int, seq: int) -> None:
    """Print the memory of a training step with each `remat=`.

    The model has 16 layers of width 2,048. It is compiled for a target or for simulated CPUs.
    """
    mesh = ft.make_mesh(target=target, data=4, model=2)
    config = Config(32768, 2048, layers, 16, 8, 128, 5632, dtype=jnp.bfloat16)
    where = f"{target or 'cpu'}, data=4, model=2; sequence {seq:,}, one per shard of the batch"
    print(f"{layers} layers of width 2,048, bfloat16, on {where}; jax {jax.__version__}\n")
    print("| remat | temporaries, MiB | on the host, MiB | moved, MiB | instructions |")
    print("|---|---|---|---|---|")
    for name, remat in REMATS.items():
        own = dataclasses.replace(transformer_config(config, seq), remat=remat)
        state = ft.abstract(make_state)(own, jax.random.key(0))
        compiled = (
            make_step(mesh, layout_of(config))
            .lower(state, jax.ShapeDtypeStruct((4, seq + 1), jnp.int32))
            .compile()
        )
        ledger, host = compiled.ledger(), compiled.memory_analysis().host_temp_size_in_bytes
        sizes = [ledger.memory.temporaries, host, sum(ledger.totals().values())]
        cells = [f"{size / 2**20:,.0f}" for size in sizes]
        print(f"| `{name}` | {' | '.join(cells)} | {instructions(compiled):,} |", flush=True)


def row(what: str, ours: float, by_hand: float) -> str:
    """Format a row of the table."""
    ratio = f"{ours / by_hand:.3f}" if by_hand else "-"
    return f"| {what} | {ours:,.0f} | {by_hand:,.0f} | {ratio} |"


def main() -> None:
    """Run the benchmark that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_subparsers(dest="what", required=True)
    step = kinds.add_parser("step", help="time a training step on this machine's CPU")
    step.add_argument("--rounds", type=int, default=30)
    deep = kinds.add_parser("depth", help="compare the programs of 48 layers and of 2 layers")
    deep.add_argument("--rounds", type=int, default=5)
    there = kinds.add_parser("target", help="compile Llama 3 8B for TPUs")
    there.add_argument("target", metavar="tpu:v5e:16x16")
    there.add_argument("--layers", type=int, default=32)
    there.add_argument("--data", type=int, default=32)
    there.add_argument("--model", type=int, default=8)
    there.add_argument("--batch", type=int, default=1, help="sequences per shard of the batch")
    there.add_argument("--seq", type=int, default=8192)
    kept = kinds.add_parser("remat", help="measure the memory of a training step with each remat=")
    kept.add_argument("--target", metavar="tpu:v5e:2x4", help="target; default: simulated CPUs")
    kept.add_argument("--layers", type=int, default=16)
    kept.add_argument("--seq", type=int, default=4096)
    options = vars(parser.parse_args())
    {"step": timed_step, "depth": depth, "target": on_target, "remat": remats}[options.pop("what")](
        **options
    )


if __name__ == "__main__":
    main()
