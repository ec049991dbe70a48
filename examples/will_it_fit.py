"""Will Llama 3 fit? Training steps of the 8B, 70B and 405B models, compiled for TPUs and GPUs that are not there.

    python examples/will_it_fit.py                                                    # the cases below
    python examples/will_it_fit.py --model 8b --target tpu:v5e:16x16 cuda:h100:8
    python examples/will_it_fit.py --model 70b --target tpu:v5p:4x4x8 --mesh data=8,model=16 --batch 2 --seq 4096

No accelerator is needed, but the compilers for them are: `pip install "functree[tpu]"`, or `"functree[cuda]"`. They say
how much memory a device needs, and functree's ledger says what is moved between devices, over which mesh axes.

The step: parameters and AdamW's moments in float32, computation in bfloat16, and each block is recomputed in the
backward pass. The attention has all its weights in memory, so that longer sequences need much more of it.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run, so any accelerator is left to others

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

import functree as ft

# --- The models, and the accelerators to compile them for by default ------------------------------------------------

MODELS: dict[str, dict[str, int]] = {
    "8b": {"embed": 4096, "layers": 32, "heads": 32, "hidden": 14336},
    "70b": {"embed": 8192, "layers": 80, "heads": 64, "hidden": 28672},
    "405b": {"embed": 16384, "layers": 126, "heads": 128, "hidden": 53248},
}
VOCAB, KV_HEADS, HEAD_DIM = 128256, 8, 128

TARGETS: dict[str, list[str]] = {
    "8b": ["tpu:v5e:4x4", "tpu:v5e:16x16", "cuda:h100:8", "cuda:h100:64"],
    "70b": ["tpu:v5e:16x16", "tpu:v5p:4x4x8", "cuda:h100:64"],
    "405b": ["tpu:v5e:16x16", "tpu:v5p:8x8x16", "cuda:h100:64", "cuda:b200:64"],
}

# GiB of a device that a program may use: where the compilers for TPUs refuse, and what drivers of GPUs report.
MEMORY = {"v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74, "a100": 79.3, "h100": 79.1, "h200": 139.8, "b200": 178.4}

# --- The training step ----------------------------------------------------------------------------------------------

Step = Callable[..., Any]


def make_config(model: str, seq: int) -> ft.nn.TransformerConfig:
    return ft.nn.TransformerConfig(
        VOCAB,
        **MODELS[model],
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_seq=seq,
        rope_theta=500_000,
        remat="full",
        compute_dtype=jnp.bfloat16,
    )


def make_rules(mesh: jax.sharding.Mesh) -> ft.Layout:
    """Tensor parallelism over `model`, and FSDP over `data`."""
    tensor = dict.fromkeys(["vocab", "heads", "hidden"], "model")
    if KV_HEADS % mesh.shape["model"] == 0:
        tensor["kv_heads"] = "model"
    return ft.AxisRules({"batch": "data", **tensor, ...: None}) | ft.FSDP("data")


def cross_entropy(model: ft.nn.Transformer, tokens: Int[Array, "batch seq+1"]) -> Float[Array, ""]:
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_step(rules: ft.Layout, mesh: jax.sharding.Mesh) -> Step:
    @ft.jit(in_shardings=(rules, ft.P("data")), out_shardings=(rules, None), mesh=mesh, rules=rules, donate="ts")
    def train_step(ts, tokens):
        loss, grads = ft.value_and_grad(cross_entropy)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), loss

    return train_step


# --- A case: one model on one target --------------------------------------------------------------------------------


@dataclass
class Case:
    """One model on one target.

    Attributes:
        fits: whether it fits into the memory of each device; None if nothing could be compiled.
        seconds: the time that the compiler took.
        error: why it does not fit, or could not be compiled.
    """

    model: str
    target: str
    mesh: dict[str, int]
    fits: bool | None = None
    seconds: float = 0.0
    error: str = ""
    ledger: ft.Ledger | None = field(default=None, repr=False)


def compile_case(case: Case, batch: int, seq: int) -> None:
    """Compile the training step, and note in the case what came of it."""
    try:
        mesh = ft.make_mesh(target=case.target, **case.mesh)
        make_state = ft.abstract(
            lambda key: ft.TrainState.create(
                ft.nn.Transformer.create(make_config(case.model, seq), key=key), optax.adamw(1e-4)
            )
        )
        tokens = jax.ShapeDtypeStruct((batch * case.mesh["data"], seq + 1), jnp.int32)
        lowered = make_step(make_rules(mesh), mesh).lower(make_state(jax.random.key(0)), tokens)
    except ft.FunctreeError as error:
        case.error = str(error)
        return
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
        case.seconds = time.perf_counter() - start
        case.ledger, case.fits = compiled.ledger(), True
    except ft.FunctreeError as error:
        case.error, case.fits = str(error), False


def default_mesh(target: str) -> dict[str, int]:
    """Tensor parallelism over 8 devices, which are a host of GPUs, and over 16 of a larger slice of TPUs."""
    _, _, shape = target.rpartition(":")
    devices = math.prod(map(int, re.findall(r"\d+", shape)))
    if "tpu7x" in target:
        devices *= 2  # to JAX a chip is two devices
    model = math.gcd(devices, 8)
    return {"data": devices // model, "model": model}


# --- What is told of it ---------------------------------------------------------------------------------------------


def memory(ledger: ft.Ledger) -> dict[str, int]:
    """The bytes on each device by part. The gradients are temporaries, and donated arguments hold the result."""
    found = Counter[str]()
    for path, size in ledger.memory.arguments.items():
        if path[0] == "tokens":
            found["batch"] += size
        elif path[1] == "model":
            found["parameters"] += size
        elif "mu" in path:
            found["first moments"] += size
        elif "nu" in path:
            found["second moments"] += size
        else:
            found["counters"] += size
    return {**found, "temporaries": ledger.memory.temporaries, "peak": ledger.memory.peak}


def moved(ledger: ft.Ledger) -> dict[str, int]:
    """The bytes that each device receives in one step, by the mesh axes that they are moved over."""
    found = Counter[str]()
    for (_, axes), size in ledger.totals().items():
        found["unknown" if axes is None else " × ".join(axes)] += size
    return dict(found)


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"


def describe(case: Case) -> str:
    """What the compiler said, in a few lines."""
    if case.ledger is None:
        return f"{case.error}\n\nIt does not fit." if case.fits is False else f"Not compiled: {case.error}"
    parts = ", ".join(f"{name} {gib(size)}" for name, size in memory(case.ledger).items())
    warnings = [f"The compiler warns: {text}" for text in case.ledger.warnings]
    return "\n".join([*warnings, case.ledger.summary(), f"GiB of it by part: {parts}", "It fits."])


def table(cases: Sequence[Case]) -> str:
    """A line for each case."""
    results = [moved(case.ledger) if case.ledger else {} for case in cases]
    axes = sorted({name for result in results for name in result}, key=lambda name: (len(name), name))
    rows = [["model", "target", "mesh", "fits", "peak", "of", *(f"over {name}" for name in axes), "seconds"]]
    for case, result in zip(cases, results, strict=True):
        mesh = " × ".join(f"{name} {size}" for name, size in case.mesh.items())
        peak = gib(case.ledger.memory.peak) if case.ledger else "–"
        there = MEMORY.get(case.target.split(":")[1])
        bytes_moved = [gib(result[name]) if name in result else "–" for name in axes]
        fits = {True: "yes", False: "no", None: "?"}[case.fits]
        rows.append([case.model, case.target, mesh, fits, peak, str(there or "–"), *bytes_moved, f"{case.seconds:.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)) for row in rows)


def record(case: Case) -> dict[str, Any]:
    """The same as values of JSON, in bytes."""
    known = {"model": case.model, "target": case.target, "mesh": case.mesh, "fits": case.fits}
    if case.ledger is None:
        return {**known, "error": case.error}
    totals = [{"kind": kind, "mesh_axes": axes, "bytes": size} for (kind, axes), size in case.ledger.totals().items()]
    return {**known, "seconds": case.seconds, "memory": memory(case.ledger), "moved": totals}


# --- The command line -----------------------------------------------------------------------------------------------


def mesh_sizes(text: str) -> dict[str, int]:
    """`data=16,model=16` ─► `{"data": 16, "model": 16}`."""
    found = re.fullmatch(r"data=(\d+),model=(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh of both axes, as in data=16,model=16")
    return {"data": int(found[1]), "model": int(found[2])}


def command_line() -> argparse.ArgumentParser:
    about = "Compile training steps of Llama 3 for TPUs and GPUs that are not there: what fits, and what is moved."
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS), help="sizes of Llama 3")
    parser.add_argument("--target", nargs="+", metavar="tpu:v5e:16x16", help="accelerators; None: some for each model")
    parser.add_argument("--mesh", type=mesh_sizes, metavar="data=16,model=16", help="None: model=8")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences on each shard of `data`")
    parser.add_argument("--seq", type=int, default=2048, metavar="N", help="tokens of a sequence")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, in bytes")
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="write the page of each ledger")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    cases: list[Case] = []
    for model in options.model:
        for target in options.target or TARGETS[model]:
            case = Case(model, target, options.mesh or default_mesh(target))
            print(f"--- Llama 3 {model} on {target}, mesh {case.mesh}: compiling ...\n", flush=True)
            compile_case(case, options.batch, options.seq)
            print(describe(case), end="\n\n", flush=True)
            cases.append(case)
            if options.html and case.ledger:
                options.html.mkdir(parents=True, exist_ok=True)
                page = options.html / f"{model}-{target.replace(':', '-')}.html"
                page.write_text(case.ledger.html())
    print(f"Per device in GiB, with {options.batch} × {options.seq:,} tokens for each shard of `data`\n\n{table(cases)}")
    if options.json:
        options.json.write_text(json.dumps([record(case) for case in cases], indent=2))
    return 1 if any(case.fits is None for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
