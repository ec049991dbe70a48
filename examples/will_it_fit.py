"""This example compiles training steps of large models for TPUs and GPUs that you don't have.

    # Eleven cases of Llama 3, in three minutes:
    python examples/will_it_fit.py

    # One model, two targets:
    python examples/will_it_fit.py --model 8b --target tpu:v5e:4x4 cuda:h100:8

    # Mixtral and Qwen 3, with experts sharded over the mesh axis `model`:
    python examples/will_it_fit.py --model 8x7b 30b-a3b

    # Another mesh and batch:
    python examples/will_it_fit.py --model 70b --target tpu:v5p:4x4x8 --mesh data=8,model=16 --batch 2 --seq 4096

    # A long sequence, sharded over 32 devices:
    python examples/will_it_fit.py --model 8b --target tpu:v5p:4x4x8 --mesh data=4,model=1,context=32 --seq 1048576

It needs no accelerator, only the compilers: `pip install "functree[tpu]"` or
`pip install "functree[cuda]"`. They compute how much memory each device needs. The ledger shows
what is moved over which mesh axes.

The parameters and AdamW's moments are float32, and the computation is bfloat16. The backward pass
recomputes each block. On TPUs, attention uses JAX's TPU kernel. For GPUs, it is computed in chunks,
because JAX cannot predict cuDNN's memory without a GPU. `--sequence-parallel` also shards the
activations between the products.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs, so no accelerator is occupied

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import functree as ft

MODELS: dict[str, dict[str, Any]] = {
    "8b": {"embed": 4096, "layers": 32, "heads": 32, "hidden": 14336},
    "70b": {"embed": 8192, "layers": 80, "heads": 64, "hidden": 28672},
    "405b": {"embed": 16384, "layers": 126, "heads": 128, "hidden": 53248},
    # Mixtral 8x7B and Qwen3-30B-A3B.
    "8x7b": {
        "embed": 4096,
        "layers": 32,
        "heads": 32,
        "hidden": 14336,
        "vocab_size": 32000,
        "experts": 8,
        "top_k": 2,
    },
    "30b-a3b": {
        "embed": 2048,
        "layers": 48,
        "heads": 32,
        "hidden": 6144,
        "kv_heads": 4,
        "vocab_size": 151936,
        "qk_norm": True,
        "experts": 128,
        "top_k": 8,
        "expert_hidden": 768,
    },
}
DENSE = ["8b", "70b", "405b"]
# Sizes of models that do not set them.
COMMON = {"vocab_size": 128256, "kv_heads": 8, "head_dim": 128}
CAPACITY = 1.25

TARGETS = {
    "8b": ["tpu:v5e:2x4", "tpu:v5e:16x16", "cuda:h100:8", "cuda:h100:64"],
    "70b": ["tpu:v5e:16x16", "tpu:v5p:4x4x8", "cuda:h100:64"],
    "8x7b": ["tpu:v5e:8x8", "tpu:v5e:16x16"],
    "30b-a3b": ["tpu:v5e:8x8", "tpu:v5e:16x16"],
    "405b": ["tpu:v5e:16x16", "tpu:v5p:8x8x16", "cuda:h100:64", "cuda:b200:64"],
}

# The GiB that a program may use on a device, as reported by the TPU compiler and the GPU drivers.
MEMORY = {"v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}
MEMORY |= {"a100": 79.3, "h100": 79.1, "h200": 139.8, "b200": 178.4}

# --- The training step


def loss_of(model: ft.nn.Transformer, tokens: Int[Array, "batch seq+1"]) -> Float[Array, ""]:
    balance = 0.0 if model.config.experts is None else 0.01
    return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:], balance=balance)


def lower(model: str, mesh: Mesh, batch: int, seq: int, sequence_parallel: bool) -> Any:
    """Lower the training step for a mesh, without creating an array."""
    sizes = COMMON | MODELS[model]
    has_experts = "experts" in sizes
    config = ft.nn.TransformerConfig(
        **sizes,
        capacity=CAPACITY if has_experts else None,
        max_seq=seq,
        rope_theta=500_000,
        remat="full",
        compute_dtype=jnp.bfloat16,
    )
    tensor = {"vocab": "model", "heads": "model", "hidden": "model"}
    if has_experts:
        # Each device along `model` has whole experts and a shard of the tokens, so `model` also
        # shards the sequence between the products.
        del tensor["hidden"]
        tensor |= {"experts": "model", "seq": "model"}
    if config.kv_heads % mesh.shape["model"] == 0:
        tensor["kv_heads"] = "model"  # otherwise each device has all key and value heads
    shards = ("data",)
    if "context" in mesh.shape:
        tensor["seq"] = "context"  # even in attention, which shards no heads over `context`
        shards = ("data", "context")
    if sequence_parallel:
        tensor["seq"] = "model"  # for arrays in which `model` shards no other axis
    rules = ft.AxisRules({"batch": "data", **tensor, ...: None}) | ft.FSDP(shards)

    @ft.abstract
    def make_state(key):
        return ft.TrainState.create(ft.nn.Transformer.create(config, key=key), optax.adamw(1e-4))

    @ft.jit(
        in_shardings=(rules, ft.P("data")),
        out_shardings=(rules, None),
        mesh=mesh,
        rules=rules,
        donate="ts",
    )
    def train_step(ts, tokens):
        loss, grads = ft.value_and_grad(loss_of)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), loss

    tokens = jax.ShapeDtypeStruct((batch * mesh.shape["data"], seq + 1), jnp.int32)
    return train_step.lower(make_state(jax.random.key(0)), tokens)


# --- A case


@dataclass
class Case:
    """A model on a target, with the compiler's results in bytes per device.

    `fits` is None if the step could not be compiled at all. `moved` has tuples of kind, mesh axes
    and bytes.
    """

    model: str
    target: str
    mesh: dict[str, int]
    fits: bool | None = None
    error: str = ""
    seconds: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    moved: list[tuple[str, tuple[str, ...] | None, int]] = field(default_factory=list)


def compile_case(case: Case, batch: int, seq: int, sequence_parallel: bool) -> ft.Ledger | None:
    """Compile the training step of a case, and record the compiler's results in the case."""
    try:
        mesh = ft.make_mesh(target=case.target, **case.mesh)
        lowered = lower(case.model, mesh, batch, seq, sequence_parallel)
    except ft.FunctreeError as error:
        # The compiler is not installed, or the mesh does not divide a size.
        case.error = str(error)
        return None
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except ft.FunctreeError as error:  # the program is too large
        case.fits, case.error = False, str(error)
        return None
    finally:
        case.seconds = time.perf_counter() - start
    ledger = compiled.ledger()
    case.fits, case.memory = True, memory_by_part(ledger.memory)
    case.moved = [(*key, size) for key, size in ledger.totals().items()]
    return ledger


# A key in the path of an argument, and what the argument is.
PARTS = {"tokens": "batch", "mu": "first moments", "nu": "second moments", "model": "parameters"}


def memory_by_part(memory: ft.Memory) -> dict[str, int]:
    """Return the bytes of each part.

    Gradients are temporaries. The results reuse the arguments' memory.
    """
    parts = Counter({"parameters": 0})  # printed first
    for path, size in memory.arguments.items():
        parts[next((part for key, part in PARTS.items() if key in path), "counters")] += size
    return {**parts, "temporaries": memory.temporaries, "peak": memory.peak}


# --- The output


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"


def mesh_text(mesh: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def describe(case: Case, ledger: ft.Ledger | None) -> str:
    """Describe the compiler's results for a case, in several lines."""
    if ledger is None:
        return case.error if case.fits is False else f"Not compiled: {case.error}"
    warnings = [f"The compiler warns: {warning}" for warning in ledger.warnings]
    parts = ", ".join(f"{name} {gib(size)}" for name, size in case.memory.items())
    return "\n".join([*warnings, ledger.summary(), f"in GiB: {parts}", "It fits."])


def row(case: Case) -> dict[str, str]:
    """Return a case's row of the table, as a dict from column titles to cells."""
    over = Counter[str]()
    for _, axes, size in case.moved:
        over["over ?" if axes is None else f"over {'+'.join(axes)}"] += size
    cells = {"model": case.model, "target": case.target, "mesh": mesh_text(case.mesh)}
    cells["fits"] = {True: "yes", False: "no", None: "?"}[case.fits]
    cells["seconds"] = f"{case.seconds:.0f}"
    cells["peak"] = gib(case.memory["peak"]) if case.memory else "-"
    cells["of"] = next(
        (str(size) for kind, size in MEMORY.items() if f":{kind}:" in case.target), "-"
    )
    return cells | {axes: gib(size) for axes, size in sorted(over.items())}


def table(rows: Sequence[dict[str, str]]) -> str:
    titles = list(dict.fromkeys(title for cells in rows for title in cells))
    lines = [titles, *([cells.get(title, "-") for title in titles] for cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


# --- The command line


def default_mesh(target: str) -> dict[str, int]:
    """Return a mesh with tensor parallelism over 8 devices.

    They are one host of GPUs, or neighbors in a slice of TPUs.
    """
    devices = math.prod(map(int, re.findall(r"\d+", target.split(":")[-1])))
    if target.startswith("tpu:tpu7x:"):
        devices *= 2  # a chip is two devices
    model = math.gcd(devices, 8)
    return {"data": devices // model, "model": model}


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse `data=16,model=16` into `{"data": 16, "model": 16}`."""
    match = re.fullmatch(r"data=(\d+),model=(\d+)(?:,context=(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh: write both mesh axes, as in data=16,model=16"
        )
    sizes = {"data": int(match[1]), "model": int(match[2])}
    return sizes if match[3] is None else {**sizes, "context": int(match[3])}


def command_line() -> argparse.ArgumentParser:
    described = "Compile training steps of Llama 3, Mixtral and Qwen 3 for TPUs and GPUs that you don't have. Show which steps fit, and what they move."
    parser = argparse.ArgumentParser(
        description=described, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    targets = "TPU slices, or GPUs such as cuda:h100:8; None: a selection for each model"
    parser.add_argument(
        "--model",
        nargs="+",
        choices=list(MODELS),
        default=DENSE,
        help="sizes of Llama 3; Mixtral 8x7B; Qwen3-30B-A3B",
    )
    parser.add_argument("--target", nargs="+", metavar="tpu:v5e:16x16", help=targets)
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="data=16,model=16",
        help="mesh axes; add context=8 to shard a sequence; None: model=8",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences per shard of the batch"
    )
    parser.add_argument("--seq", type=int, default=8192, metavar="N", help="tokens per sequence")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="also shard the sequence over `model`"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures, in bytes per device"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FOLDER", help="write a page for each case, with its ledger"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = command_line()
    options = parser.parse_args(arguments)
    if min(options.batch, options.seq) < 1:
        parser.error("--batch and --seq must be at least 1")
    if options.sequence_parallel and "context" in (options.mesh or {}):
        parser.error(
            "--sequence-parallel: `context` already shards the sequence; drop one of the two"
        )
    cases: list[Case] = []
    for model in options.model:
        for target in options.target or TARGETS[model]:
            case = Case(model, target, options.mesh or default_mesh(target))
            print(
                f"--- {model} on {target}, {mesh_text(case.mesh)}, sequence {options.seq:,}\n",
                flush=True,
            )
            ledger = compile_case(case, options.batch, options.seq, options.sequence_parallel)
            print(describe(case, ledger), end="\n\n", flush=True)
            cases.append(case)
            if options.json:
                options.json.write_text(json.dumps([asdict(case) for case in cases], indent=1))
            if options.html and ledger:
                options.html.mkdir(parents=True, exist_ok=True)
                (options.html / f"{model}-{target.replace(':', '-')}.html").write_text(
                    ledger.html()
                )
    shard = f"{options.batch} × {options.seq:,} tokens per shard of the batch"
    print(
        f"A step has {shard}. Compile times are in seconds.\n"
        "Peak memory, its limit, and what a step moves over mesh axes are in GiB per device.\n"
    )
    print(table([row(case) for case in cases]))
    return 1 if any(case.fits is None for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
