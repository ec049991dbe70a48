"""This script trains a small byte-level transformer on Python's own source code, on all devices.

    python examples/train_lm.py                                        # 8 simulated devices on a CPU, two minutes.
    python examples/train_lm.py --rules fsdp --mesh data=8             # FSDP alone.
    python examples/train_lm.py --layers 8 --embed 512 --steps 5000    # For larger devices.
    python examples/train_lm.py --batch 64 --accumulate 4              # A large batch in four micro-batches.
    python examples/train_lm.py --rules fsdp+ep --experts 8            # Experts, sharded over the mesh axis `model`.
    python examples/train_lm.py --generate "class Stack:" --sample 500 # A prompt and a length for the sample.
    python examples/train_lm.py --checkpoint run                       # Stop it: the same command resumes it.
    python examples/train_lm.py --checkpoint run --processes 2         # Resume in two processes, or on another mesh.

Read it from top to bottom: the rules, the text, the training step, the run, several processes.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import gcd, log
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# Simulate 8 devices on the CPU, unless their number is already set. JAX reads the flags once, when
# it creates its devices.
if not re.search(
    "device_count|_cpu_devices", " ".join([os.environ.get("XLA_FLAGS", ""), *os.environ])
):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import functree as ft

# --- The rules: over which mesh axis each axis is sharded

# FSDP: each device keeps a shard of every large array, and gathers the other shards to use it.
FSDP = ft.FSDP("data", min_size=1024)

# Tensor parallelism: the heads, the hidden units, the vocabulary and their computation are sharded.
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}

RULES: dict[str, ft.Layout] = {
    "fsdp": ft.AxisRules({"batch": "data", ...: None}) | FSDP,
    "tp": ft.AxisRules({"batch": "data", **TENSOR, ...: None}),
    "fsdp+tp": ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | FSDP,
    # Expert parallelism: each device along `model` has whole experts and its own shard of the batch.
    "fsdp+ep": ft.AxisRules({"batch": ("data", "model"), "experts": "model", ...: None}) | FSDP,
    # Sequence parallelism: between the products, the sequence is sharded too.
    "fsdp+tp+sp": ft.AxisRules({"batch": "data", **TENSOR, "seq": "model", ...: None}) | FSDP,
}


# A pipeline: each device along `pipe` keeps the layers of one stage.
STAGES = ft.AxisRules({"layers": "pipe"})


def default_mesh(rules: str, pipe: int) -> dict[str, int]:
    """Return the sizes of a mesh of all devices.

    FSDP alone has only `data`. Other rules also have `model`, of size 4 if that divides. A pipeline
    also has `pipe`, with one device per stage.
    """
    stages = {"pipe": pipe} if pipe > 1 else {}
    devices = jax.device_count() // pipe
    if rules == "fsdp":
        return {**stages, "data": devices}
    model = gcd(4, devices)
    return {**stages, "data": devices // model, "model": model}


# --- The text: a token is a byte

VOCAB = 256
END_OF_FILE = b"\0"
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}  # other packages, tests and data


def read_text(megabytes: float) -> tuple[np.ndarray, np.ndarray]:
    """Read the standard library's source files as bytes.

    Nine tenths of the files are for training. Every tenth file is held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    files = [
        (root / path).read_bytes() + END_OF_FILE for path in paths if SKIPPED.isdisjoint(path.parts)
    ]
    ends = np.cumsum([len(file) for file in files])
    files = files[: max(20, int(np.searchsorted(ends, megabytes * 1e6)))]
    held_out = b"".join(files[::10])
    train = b"".join(file for i, file in enumerate(files) if i % 10)
    return np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8)


def starts_of(step: int, options: argparse.Namespace, length: int) -> np.ndarray:
    """Return where the sequences of a step begin.

    They depend only on the seed and the step, so a resumed run draws the same sequences.
    """
    rng = np.random.default_rng((options.seed, step))
    return rng.integers(0, length - options.seq, options.batch)


def windows(text: np.ndarray, starts: np.ndarray, seq: int) -> Int[np.ndarray, "batch seq+1"]:
    """Return windows of the text that are one byte longer than a sequence.

    Each byte predicts the next byte.
    """
    return text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)


# --- The training step


def bits_per_byte(model: ft.nn.Transformer, tokens: Int[Array, "batch seq+1"]) -> Float[Array, ""]:
    return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:]) / log(2)


def trained_loss(model: ft.nn.Transformer, tokens: Int[Array, "batch seq+1"]) -> Float[Array, ""]:
    """Return bits per byte, plus a balancing loss if the model has experts."""
    balance = 0.0 if model.config.experts is None else 0.01
    loss = ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:], balance=balance)
    return loss / log(2)


def make_optimizer(lr: float, steps: int) -> optax.GradientTransformation:
    """Make an AdamW optimizer with gradient clipping.

    The learning rate rises over the first tenth of the steps, then falls along a cosine.
    """
    rate = optax.warmup_cosine_decay_schedule(lr / 10, lr, steps // 10, steps, end_value=lr / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.1))


def make_train_step(tx: optax.GradientTransformation, accumulate: int) -> Callable[..., Any]:
    """Make the training step.

    It compiles only once, because the donated model and state keep their shardings.
    """
    gradient = ft.accumulate(ft.value_and_grad(trained_loss), accumulate)

    @ft.jit(donate=("model", "state"))
    def train_step(model, state, tokens):
        loss, grads = gradient(model, tokens)
        updates, state = tx.update(grads, state, model)
        return optax.apply_updates(model, updates), state, loss

    return train_step


def write(
    model: ft.nn.Transformer, prompt: bytes, length: int, temperature: float, seed: int
) -> str:
    """Continue a prompt byte by byte, up to the end of a file.

    One program does this, with a cache of keys and values.
    """
    rows = ft.axis_shards("batch").parts  # one row per shard of the batch
    prompts = np.frombuffer(prompt, np.uint8)[None].repeat(rows, axis=0)
    key, end = jax.random.key(seed), END_OF_FILE[0]
    tokens = ft.nn.generate(
        model, prompts, length, temperature=temperature, key=key, stop=end, pad=end
    )
    # Tokens are int32, because uint8 has no value left for "no token" besides 256 bytes.
    written = process_allgather(tokens, tiled=True)[0].astype(np.uint8).tobytes()
    return written.rstrip(END_OF_FILE).decode(errors="replace")


# --- The run


@dataclass
class Curve:
    """The progress of a run.

    Attributes:
        train: the bits per byte of each training batch.
        held_out: the bits per byte of the held-out text, by step.
        seconds: the seconds of each step.
    """

    train: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Load the values that `to_json` returned."""
        self.train += saved["train"]
        self.held_out |= {int(step): value for step, value in saved["held_out"].items()}

    def to_json(self) -> dict[str, Any]:
        # Without the seconds: each process measures its own, and all must save equal values.
        return {
            "train": self.train,
            "held_out": {str(step): value for step, value in self.held_out.items()},
        }


def train(
    options: argparse.Namespace,
    rules: ft.Layout,
    text: np.ndarray,
    held_out: np.ndarray,
    curve: Curve,
) -> None:
    """Plan, create or restore, train, and sample, under the ambient mesh and rules set by `main`."""
    # The plan finds mistakes before any array is allocated or any program is compiled.
    config, key = model_config(options), jax.random.key(options.seed)
    tx = make_optimizer(options.lr, options.steps)

    def make(key):
        model = ft.nn.Transformer.create(config, key=key)
        return model, tx.init(model)

    model, state = ft.abstract(make, rules)(key)
    model_plan, state_plan = ft.plan(model, rules), ft.plan_optimizer(tx, model, rules)
    print(f"The model\n\n{model_plan}\n")
    print(
        f"The optimizer\n\n{state_plan}\n"
        if options.verbose
        else f"The optimizer: {first_line(state_plan)}"
    )
    print(
        f"The text: {len(text) / 1e6:.1f} MB for training, {len(held_out) / 1e6:.1f} MB in held-out files\n"
    )

    def batch(text: np.ndarray, starts: np.ndarray) -> Int[Array, "batch seq+1"]:
        # These sequences are one byte longer than the `seq` that rules shard, so the dimension has
        # no name.
        return ft.shard(windows(text, starts, options.seq), rules, axes="batch _")

    places = np.linspace(0, len(held_out) - options.seq - 1, 8 * options.batch, dtype=int)
    tests = [batch(held_out, starts) for starts in np.split(places, 8)]

    # From here on there are arrays. Each is created sharded as planned, or restored with this
    # sharding from the latest checkpoint.
    first = 1
    checkpoints = (
        None
        if options.checkpoint is None
        else ft.Checkpoints(options.checkpoint, every=options.save_every)
    )
    if checkpoints is None or (latest := checkpoints.latest) is None:
        model, state = ft.init(make, rules)(key)
    else:
        saved = ft.inspect(checkpoints.folder / str(latest)).meta
        check_same(options, saved["options"])
        model, state = checkpoints.restore((model, state), latest)
        curve.go_on(saved["curve"])
        first = latest + 1
        print(f"Resuming after step {latest} of {checkpoints.folder}.\n")
    train_step, measure = make_train_step(tx, options.accumulate), ft.jit(bits_per_byte)
    # Compile before the first step, to print what the step moves between devices.
    ledger = train_step.lower(model, state, tests[0]).compile().ledger()
    print(f"The training step: {ledger.summary()}\n")

    def test(step: int) -> None:
        curve.held_out[step] = float(np.mean([measure(model, tokens) for tokens in tests]))
        console.print(f"step {step:>5}: {curve.held_out[step]:.3f} bits per byte of held-out text")

    console, speed = Console(), Speed.of(model, options)
    if first == 1:
        test(0)
    with checkpoints or nullcontext():  # its exit waits for checkpoints still being written
        for step in progress(options, first, curve, speed, console):
            tokens = batch(text, starts_of(step, options, len(text)))
            start = time.perf_counter()
            model, state, loss = train_step(model, state, tokens)
            # This waits for the devices. On fast devices, read only every tenth loss.
            curve.train.append(float(loss))
            curve.seconds.append(time.perf_counter() - start)
            if step % max(1, options.steps // 10) == 0 or step == options.steps:
                test(step)
            # True if any of the processes received SIGTERM.
            stop = checkpoints is not None and ft.preempted(step)
            if checkpoints is not None:
                meta = {"curve": curve.to_json(), "options": kept(options)}
                checkpoints.save(step, (model, state), meta, force=stop or step == options.steps)
            if stop:
                raise Stopped(
                    f"Stopped after step {step}, which is saved. The same command resumes from there."
                )
    before, after = curve.held_out[0], curve.held_out[options.steps]
    print(f"\nHeld-out text: {before:.2f} bits per byte before training, {after:.2f} after.")
    print(
        f"The speed: {speed.text(float(np.median(curve.seconds)))}, on {jax.device_count()} × {speed.kind}."
    )
    if options.sample:
        # Generation uses no stages, because all layers read their caches for each token.
        whole = RULES[options.rules]
        if options.pipe > 1:
            model = ft.shard(model, whole)
        given = options.generate, options.sample, options.temperature, options.seed
        with ft.axis_rules(whole):
            sample = write(model, *given)
        print(f"\nA sample:\n\n{sample}\n")


# The options that a resumed run must keep. With other values, its losses would change.
SAME = (
    "layers",
    "embed",
    "hidden",
    "heads",
    "kv_heads",
    "experts",
    "top_k",
    "capacity",
    "steps",
    "batch",
    "accumulate",
    "seq",
    "dtype",
    "lr",
    "seed",
)
STOPPED = 143  # the exit status of a process stopped by SIGTERM


class Stopped(Exception):
    """A run that was stopped by SIGTERM, with its last step saved."""


def kept(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in (*SAME, "megabytes")}


def check_same(options: argparse.Namespace, saved: Mapping[str, Any]) -> None:
    """Raise an error if a run would resume with different options."""
    now = kept(options)
    if changed := [name for name in now if saved[name] != now[name]]:
        given = " ".join(f"--{name.replace('_', '-')} {saved[name]}" for name in changed)
        raise ft.FunctreeError(
            f"--checkpoint {options.checkpoint} has a run with {given}: pass the same options, "
            "or another folder"
        )


def model_config(options: argparse.Namespace) -> ft.nn.TransformerConfig:
    return ft.nn.TransformerConfig(
        vocab_size=VOCAB,
        embed=options.embed,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.embed // options.heads,
        hidden=options.hidden or 3 * options.embed,
        # A sample may be longer than the sequences, because each byte attends to at most `window`
        # bytes, as in training.
        max_seq=max(options.seq, len(options.generate) + options.sample),
        window=options.seq,
        experts=options.experts,
        top_k=options.top_k if options.experts else None,
        capacity=options.capacity if options.experts else None,
        microbatches=options.microbatches if options.pipe > 1 else None,
        compute_dtype=compute_dtype(options.dtype),
    )


def compute_dtype(asked: str) -> str:
    """Return the dtype of the computation: bfloat16 if the devices have units for it.

    Parameters and moments are float32.
    """
    if asked != "auto":
        return asked
    device = jax.devices()[0]
    old = device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) < 8.0
    return "float32" if device.platform == "cpu" or old else "bfloat16"


# The peak of dense bfloat16 operations per second and device, as published by the makers.
PEAKS = {"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12}
PEAKS |= {"TPU v6 lite": 918e12, "TPU v6e": 918e12, "TPU7x": 1153e12}
PEAKS |= {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


class Speed(NamedTuple):
    """The speed of the training.

    Attributes:
        kind: the kind of the devices.
        tokens: the tokens of a step.
        operations: the floating-point operations that the model needs for a step, forward and
            backward.
        peak: the peak of operations per second on all devices; None if it is unknown.
    """

    kind: str
    tokens: int
    operations: float
    peak: float | None

    @classmethod
    def of(cls, model: ft.nn.Transformer, options: argparse.Namespace) -> "Speed":
        """Count the tokens and operations of a model's step, and look up the devices' peak.

        The backward pass uses each matrix twice. A token attends to half of its sequence, on
        average.
        """
        weights = sum(leaf.size for leaf in jax.tree.leaves(model)) - model.embed.weight.size
        if model.config.experts is not None:  # only `top_k` of them compute a token
            mlp = model.blocks.layer.mlp
            idle = 1 - model.config.top_k / model.config.experts
            weights -= idle * (mlp.gate.size + mlp.up.size + mlp.down.size)
        config, kind, tokens = (
            model.config,
            jax.devices()[0].device_kind,
            options.batch * options.seq,
        )
        attention = 2 * config.layers * config.heads * config.head_dim * options.seq
        known = [
            peak
            for name, peak in PEAKS.items()
            if name in kind and config.compute_dtype == "bfloat16"
        ]
        peak = known[0] * jax.device_count() if known else None
        return cls(kind, tokens, 3 * tokens * (2 * weights + attention), peak)

    def text(self, seconds: float) -> str:
        """Format the speed of a step that takes these seconds."""
        share = f", {self.operations / seconds / self.peak:.1%} of the peak" if self.peak else ""
        return f"{self.tokens / seconds:,.0f} tokens/s{share}"


def first_line(plan: ft.Plan) -> str:
    return plan.summary().splitlines()[0]


def progress(
    options: argparse.Namespace, first: int, curve: Curve, speed: Speed, console: Console
) -> Iterator[int]:
    """Yield the number of each step, starting with `first`, and show a progress bar."""
    text = TextColumn("loss {task.fields[loss]:.2f} · {task.fields[speed]}")
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), text, TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(
            "", total=options.steps, completed=first - 1, loss=float("nan"), speed=""
        )
        for step in range(first, options.steps + 1):
            yield step
            recent = speed.text(float(np.median(curve.seconds[-20:])))
            bar.update(task, completed=step, loss=curve.train[-1], speed=recent)


def draw(curve: Curve, options: argparse.Namespace) -> None:
    """Draw the loss curves into a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(
            "The loss curve is not drawn: matplotlib is not installed. "
            "Try: pip install functree[examples]"
        )
        return
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(curve.train) + 1)
    axes.plot(steps, curve.train, color="#9db8e8", linewidth=1, label="training batches")
    axes.plot(
        *zip(*curve.held_out.items(), strict=True),
        "o-",
        color="#c2410c",
        markersize=4,
        label="held-out files",
    )
    axes.set(
        xlabel="step",
        ylabel="bits per byte",
        ylim=(0, None),
        title=f"train_lm.py --rules {options.rules}",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(options.out, format="png")
    print(f"The loss over the steps: {options.out}")


# --- Several processes

# Environment variables for each process that `--processes` starts.
COORDINATOR, COUNT, NUMBER = "TRAIN_LM_COORDINATOR", "TRAIN_LM_PROCESSES", "TRAIN_LM_PROCESS"


def start_processes(number: int) -> int:
    """Run this command in several processes on this machine, as if on several machines.

    The processes share the machine's devices. If one of them fails, the others are killed. SIGTERM
    is passed on to all of them.
    """
    with socket.socket() as opened:  # a free port
        opened.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{opened.getsockname()[1]}"

    def share(devices: re.Match[str]) -> str:
        return str(max(1, int(devices[0]) // number))

    flags = re.sub(r"(?<=device_count=)\d+", share, os.environ.get("XLA_FLAGS", ""))
    base = {**os.environ, "XLA_FLAGS": flags, COORDINATOR: address, COUNT: str(number)}
    running = [
        subprocess.Popen([sys.executable, *sys.argv], env={**base, NUMBER: str(process)})
        for process in range(number)
    ]

    def stop(signum: int, _: object) -> None:
        for process in running:
            process.send_signal(signum)

    signal.signal(signal.SIGTERM, stop)
    failed: int | None = None
    while any(process.poll() is None for process in running):
        time.sleep(0.1)
        bad = [i for i, process in enumerate(running) if process.poll() not in (None, 0, STOPPED)]
        if bad and failed is None:
            failed = bad[0]
            print(
                f"process {failed} of {number} ended with status {running[failed].poll()}",
                file=sys.stderr,
            )
            stop(signal.SIGKILL, None)
    return (
        next((code for process in running if (code := process.wait())), 0) if failed is None else 1
    )


def join_processes(options: argparse.Namespace) -> None:
    """Join the processes that `--processes` has started, or the processes of a cluster."""
    if COORDINATOR in os.environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        numbers = int(os.environ[COUNT]), int(os.environ[NUMBER])
        limits = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 30}
        jax.distributed.initialize(os.environ[COORDINATOR], *numbers, **limits)
    elif options.distributed:
        jax.distributed.initialize(heartbeat_timeout_seconds=30, shutdown_timeout_seconds=60)
    if jax.process_index() > 0:  # only the first process prints
        sys.stdout = open(os.devnull, "w")


# --- The command line


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def one_line(error: ft.FunctreeError) -> str:
    """Return an error's headline, its first problem and the remedy.

    The error's full text lists all problems.
    """
    headline, first = str(error).splitlines()[0], error.problems[0]
    text = headline
    if first.why != headline:
        where = " ".join(filter(None, (str(first.path or ""), first.what)))
        text += f": {where}: {first.why}"
    if first.remedy:
        text += f"; try: {first.remedy}"
    return text


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse `data=2,model=4` into `{"data": 2, "model": 4}`."""
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name: int(size) for name, _, size in pairs if name.isidentifier() and size.isdecimal()}
    if len(sizes) < len(pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh: write mesh axes and their sizes, as in data=2,model=4"
        )
    return sizes


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive integer")
    return int(text)


def amount(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?|\d+\.", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number that is at least 0")
    return float(text)


def prompt(text: str) -> bytes:
    if not text:
        raise argparse.ArgumentTypeError("the prompt is empty: write at least one character")
    return text.encode()


def picture(text: str) -> Path:
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(text).parent)!r}")
    return Path(text)


def command_line() -> Parser:
    described = "Train a small byte-level transformer on Python's own source code, sharded over all devices."
    parser = Parser(description=described, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="data=2,model=4",
        help="mesh axes and sizes; None: a mesh of all devices",
    )
    parser.add_argument(
        "--rules", choices=list(RULES), default="fsdp+tp", help="the layout of model and batches"
    )
    parser.add_argument(
        "--pipe", type=positive, default=1, metavar="N", help="stages of a pipeline; 1: no pipeline"
    )
    parser.add_argument(
        "--microbatches",
        type=positive,
        default=4,
        metavar="N",
        help="micro-batches of a batch in the pipeline",
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--layers", type=positive, default=2, metavar="N", help="blocks")
    sizes.add_argument(
        "--embed", type=positive, default=128, metavar="N", help="size of the residual stream"
    )
    sizes.add_argument(
        "--hidden", type=positive, metavar="N", help="size of the MLPs; None: 3 × embed"
    )
    sizes.add_argument("--heads", type=positive, default=8, metavar="N", help="attention heads")
    sizes.add_argument(
        "--kv-heads", type=positive, metavar="N", help="key and value heads; None: as many as heads"
    )
    sizes.add_argument(
        "--experts", type=positive, metavar="N", help="experts in each block; None: no experts"
    )
    sizes.add_argument(
        "--top-k", type=positive, default=2, metavar="N", help="experts that compute a byte"
    )
    sizes.add_argument(
        "--capacity", type=amount, metavar="X", help="capacity of an expert; None: drops no token"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=300, metavar="N", help="training steps")
    training.add_argument(
        "--batch", type=positive, default=16, metavar="N", help="sequences per step"
    )
    training.add_argument(
        "--accumulate",
        type=positive,
        default=1,
        metavar="N",
        help="micro-batches per step, one after another",
    )
    training.add_argument(
        "--seq", type=positive, default=128, metavar="N", help="bytes per sequence"
    )
    dtypes = ["auto", "float32", "bfloat16"]
    training.add_argument(
        "--dtype",
        choices=dtypes,
        default="auto",
        help="dtype of the computation; auto: chosen for the devices",
    )
    training.add_argument(
        "--lr", type=amount, default=3e-3, metavar="X", help="highest learning rate"
    )
    training.add_argument(
        "--seed", type=count, default=0, metavar="N", help="seed of weights, batches and sample"
    )
    training.add_argument(
        "--megabytes",
        type=amount,
        default=4.0,
        metavar="X",
        help="megabytes of text, but at least 20 files",
    )
    running = parser.add_argument_group("running")
    running.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder for checkpoints; resumes from its latest one",
    )
    running.add_argument(
        "--save-every",
        type=positive,
        metavar="N",
        help="steps between checkpoints; None: a tenth of the steps",
    )
    running.add_argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="processes to start on this machine, for a trial",
    )
    running.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes of a cluster: Slurm, Kubernetes, TPUs",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--generate",
        type=prompt,
        default="def ",
        metavar="TEXT",
        help="prompt of the sample",
    )
    output.add_argument(
        "--sample", type=count, default=300, metavar="N", help="bytes to sample at the end; 0: none"
    )
    output.add_argument(
        "--temperature",
        type=amount,
        default=0.5,
        metavar="X",
        help="temperature of the sample; 0: greedy",
    )
    output.add_argument(
        "--out", type=picture, default="train_lm.png", metavar="FILE", help="PNG of the loss curve"
    )
    output.add_argument(
        "--verbose", action="store_true", help="print the full plan of the optimizer"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = command_line()
    options = parser.parse_args(arguments)
    options.save_every = options.save_every or max(1, options.steps // 10)
    if options.processes > 1 and COORDINATOR not in os.environ:
        return start_processes(options.processes)
    join_processes(options)
    text, held_out = read_text(options.megabytes)
    if options.seq >= len(held_out):
        parser.error(
            f"argument --seq: {options.seq} is longer than the {len(held_out)} bytes of held-out text"
        )
    curve, status = Curve(), 0
    try:
        sizes: dict[str, Any] = options.mesh or default_mesh(options.rules, options.pipe)
        rules = RULES[options.rules]
        if options.pipe > 1:
            rules = STAGES | rules
        with jax.set_mesh(ft.make_mesh(**sizes)), ft.axis_rules(rules):
            train(options, rules, text, held_out, curve)
    except ft.FunctreeError as error:
        parser.error(one_line(error))
    except KeyboardInterrupt:
        status = 130
        print(f"\nStopped after {len(curve.train)} of {options.steps} steps.")
    except Stopped as stopped:
        status = STOPPED
        print(f"\n{stopped}")
    if curve.held_out and jax.process_index() == 0:
        draw(curve, options)
    return status


if __name__ == "__main__":
    sys.exit(main())
