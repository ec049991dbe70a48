"""This benchmark compares the explorer's score with measured and published times.

    python benchmarks/explore.py order [--rounds 40] [--model mlp] [--optimizer adamw]
    python benchmarks/explore.py recipes [--recipe 8b-8 70b-32]
    python benchmarks/explore.py layouts

`order` runs eight layouts each of an MLP, a transformer and a convolutional model on eight
simulated devices. It compares the order of their times with the order of their scores. The rank
correlation must be at least 0.85, and the chosen layout at most 1.2 times as slow as the best. The
same run measures the flops and the bandwidth of the devices. The optimizer is SGD, because the
update of a larger optimizer takes time on CPUs, which the score ignores.

`recipes` compiles training steps of published recipes for TPU v6e, and compares the scores with the
published times. `layouts` ranks twelve layouts of one recipe with FSDP and tensor parallelism. The
recipe's own layout, FSDP, must rank first. Both need `functree[tpu]`, a few GiB of memory, and one
to three minutes for each program.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from machine import machine

import functree as ft

DEVICES = 8
CORRELATION, REGRET, RATIO = 0.85, 1.2, 0.15
REPEATED = 10
P = ft.P

# --- Three models


class Dense(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    @classmethod
    def create(cls, embed: int, hidden: int, key: Any) -> "Dense":
        up, down = jax.random.split(key)
        return cls(
            jax.random.normal(up, (embed, hidden)) / embed**0.5,
            jax.random.normal(down, (hidden, embed)) / hidden**0.5,
        )


class MLP(eqx.Module):
    layers: list[Dense]

    def loss(self, x: Float[Array, "batch embed"]) -> Float[Array, ""]:
        y = x
        for layer in self.layers:
            y = y + ft.constrain(jnp.tanh(y @ layer.up), "batch hidden") @ layer.down
        return jnp.mean((y - x) ** 2)


class Conv(eqx.Module):
    kernel: Float[Array, "_ _ channels hidden"]
    back: Float[Array, "_ _ hidden channels"]

    @classmethod
    def create(cls, channels: int, hidden: int, key: Any) -> "Conv":
        kernel, back = jax.random.split(key)
        return cls(
            jax.random.normal(kernel, (3, 3, channels, hidden)) / (9 * channels) ** 0.5,
            jax.random.normal(back, (3, 3, hidden, channels)) / (9 * hidden) ** 0.5,
        )


class ConvNet(eqx.Module):
    layers: list[Conv]

    def loss(self, x: Float[Array, "batch _ _ channels"]) -> Float[Array, ""]:
        y = x
        for layer in self.layers:
            inner = ft.constrain(jnp.tanh(convolve(y, layer.kernel)), "batch _ _ hidden")
            y = y + convolve(inner, layer.back)
        return jnp.mean((y - x) ** 2)


def convolve(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


class LM(eqx.Module):
    model: ft.nn.Transformer

    def loss(self, tokens: Int[Array, "batch _"]) -> Float[Array, ""]:
        return ft.nn.cross_entropy(self.model, tokens[:, :-1], tokens[:, 1:])


def make_mlp(key: Any) -> MLP:
    return MLP([Dense.create(256, 1024, one) for one in jax.random.split(key, 2)])


def make_conv(key: Any) -> ConvNet:
    return ConvNet([Conv.create(128, 256, one) for one in jax.random.split(key, 3)])


def make_lm(key: Any) -> LM:
    config = ft.nn.TransformerConfig(1024, 128, 2, 8, 8, 16, 512, 16, remat="full", attention="xla")
    return LM(ft.nn.Transformer.create(config, key=key))


class Model(NamedTuple):
    """A model, its batch, and the axes that are sharded over `model`."""

    make: Callable[[Any], Any]
    batch: jax.ShapeDtypeStruct
    tensor: Sequence[str]


MODELS = {
    "mlp": Model(make_mlp, jax.ShapeDtypeStruct((128, 256), "float32"), ("hidden",)),
    "transformer": Model(
        make_lm,
        jax.ShapeDtypeStruct((8, 17), "int32"),
        ("vocab", "heads", "kv_heads", "hidden"),
    ),
    "convolutional": Model(
        make_conv, jax.ShapeDtypeStruct((16, 4, 4, 128), "float32"), ("hidden",)
    ),
}


def layouts_of(model: Model) -> dict[str, ft.Layout]:
    """Return data parallelism, FSDP, tensor parallelism, and FSDP with tensor parallelism."""
    tensor = dict.fromkeys(model.tensor, "model")
    data = ft.AxisRules({"batch": "data", ...: None})
    both = ft.AxisRules({"batch": "data", **tensor, ...: None})
    fsdp = ft.FSDP("data", min_size=2**12)
    return {"data": data, "fsdp": data | fsdp, "tensor": both, "fsdp+tensor": both | fsdp}


# Eight pairs of a mesh and a layout.
PAIRS = {
    "data": [(8, 1)],
    "fsdp": [(8, 1)],
    "tensor": [(1, 8), (2, 4), (4, 2)],
    "fsdp+tensor": [(2, 4), (4, 2)],
    # All devices along `model` do the same work.
    "idle": [(4, 2)],
}


@ft.jit(donate="state")
def train(state: Any, batch: Any) -> Any:
    loss, grads = ft.value_and_grad(lambda model: model.loss(batch))(state.model)
    return ft.apply_gradients(state, grads), loss


OPTIMIZERS = {"sgd": optax.sgd(1e-3), "adamw": optax.adamw(1e-4)}


# --- The order of measured times

# Placeholders, because `order` measures the figures of the devices together with the programs.
UNIT = ft.Hardware(flops=1.0, memory=2**40, links=1.0)


class Measured(NamedTuple):
    """A layout's row, a function that runs a step, and the seconds of the rounds."""

    row: ft.Candidate
    run: Callable[[], Any]
    seconds: list[float]


def probes() -> tuple[Callable[[], Any], Callable[[], Any], float, float]:
    """Return two functions for all simulated devices, and the flops and bytes of each device.

    The functions compute products and all-reduces.
    """
    mesh = ft.make_mesh(data=DEVICES)
    size, rows = 256, 64
    whole = jax.device_put(jnp.ones((DEVICES, rows, size)), jax.NamedSharding(mesh, P("data")))
    weight = jax.device_put(jnp.ones((size, size)), jax.NamedSharding(mesh, P()))
    part = jax.device_put(jnp.ones((DEVICES, 2**18)), jax.NamedSharding(mesh, P("data")))

    def products(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x @ w / size, None), x, length=REPEATED)[0]

    def sums(x: Any) -> Any:
        def add(x: Any, _: None) -> Any:
            return jax.lax.psum(x, "data") / DEVICES, None

        return jax.lax.scan(add, x, length=REPEATED)[0]

    def mapped(fun: Any, *specs: Any) -> Any:
        return jax.jit(
            jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
        )

    product, reduce = mapped(products, P("data"), P()), mapped(sums, P("data"))
    sent = 2 * part.nbytes / DEVICES * (DEVICES - 1) / DEVICES
    flops = 2 * rows * size * size
    return (
        lambda: product(whole, weight),
        lambda: reduce(part),
        REPEATED * flops,
        REPEATED * sent,
    )


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def typical(seconds: Sequence[float]) -> float:
    """Return the median of the fastest quarter, because the machine may be shared."""
    return statistics.median(sorted(seconds)[: (len(seconds) + 3) // 4])


def order(names: Sequence[str], rounds: int, optimizer: str) -> bool:
    good = True
    for name in names:
        layouts = layouts_of(MODELS[name])
        layouts["idle"] = layouts["data"]
        found: dict[tuple[str, tuple[int, int]], Measured] = {}
        for layout, meshes in PAIRS.items():
            for sizes in meshes:
                mesh: dict[str, int] = {"data": sizes[0], "model": sizes[1]}
                found[layout, sizes] = prepared(MODELS[name], layouts[layout], mesh, optimizer)
        product, reduce, flops, sent = probes()
        runs = {"product": product, "reduce": reduce}
        others: dict[str, list[float]] = {"product": [], "reduce": []}
        # All run in turn, so that other work on the machine disturbs each of them.
        for round_ in range(rounds + 1):
            for one in found.values():
                one.seconds.append(timed(one.run))
            for probe, run in runs.items():
                others[probe].append(timed(run))
            if not round_:  # the first round compiles
                for seconds in [*others.values(), *(one.seconds for one in found.values())]:
                    seconds.clear()
        speed, bandwidth = flops / typical(others["product"]), sent / typical(others["reduce"])
        good &= compared(name, found, speed, bandwidth)
    return good


def compared(
    name: str,
    found: Mapping[tuple[str, tuple[int, int]], Measured],
    speed: float,
    bandwidth: float,
) -> bool:
    """Print the table of a model, and return whether the order is good."""
    print(f"{speed / 1e9:.0f} GF/s and {bandwidth / 1e9:.2g} GB/s per device\n")
    print(f"| {name} | mesh | compute | wire | score | measured |\n|---|---|---|---|---|---|")
    scores: list[tuple[float, float]] = []
    for (layout, sizes), one in found.items():
        compute, wire = (
            (one.row.compute_seconds or 0) / speed,
            (one.row.wire_seconds or 0) / bandwidth,
        )
        scores.append((compute + wire, typical(one.seconds)))
        numbers = " | ".join(f"{1e3 * each:.0f} ms" for each in (compute, wire, *scores[-1]))
        print(f"| {layout} | {sizes[0]} × {sizes[1]} | {numbers} |")
    predicted, times = map(np.asarray, zip(*scores, strict=True))
    correlation, regret = spearman(predicted, times), times[predicted.argmin()] / times.min()
    print(f"\nrank correlation {correlation:.2f}, regret {regret:.2f}\n", flush=True)
    return bool(correlation >= CORRELATION and regret <= REGRET)


def prepared(model: Model, layout: ft.Layout, mesh: Mapping[str, int], optimizer: str) -> Measured:
    """Return the explorer's row, and a function that runs the same program."""

    def make(key: Any) -> Any:
        return ft.TrainState.create(model.make(key), OPTIMIZERS[optimizer])

    args = (ft.abstract(make)(jax.random.key(0)), model.batch)
    layouts = {"one": (layout, P("data"))}
    ranking = ft.explore(train, args, meshes=mesh, layouts=layouts, hardware=UNIT, progress=False)
    if ranking[0].problems:
        sys.exit(str(ranking))
    there = ft.make_mesh(**mesh)  # pyright: ignore[reportArgumentType]
    placed = [ft.init(make, layout, there)(jax.random.key(0))]
    whole = jnp.ones(model.batch.shape, model.batch.dtype)
    batch = jax.device_put(whole, jax.NamedSharding(there, P("data")))
    step = ft.jit(train.__wrapped__, donate="state", mesh=there, rules=layout)

    def run() -> Any:
        placed[0], loss = step(placed[0], batch)
        return placed[0], loss

    return Measured(ranking[0], run, [])


def spearman(a: Any, b: Any) -> float:
    """Return the rank correlation of values without ties."""
    ranks = [np.argsort(np.argsort(one)) for one in (a, b)]
    table: Any = np.corrcoef(np.stack(ranks))
    return float(table[0, 1])


# --- Published times


class Recipe(NamedTuple):
    """A published recipe, with the seconds of a step in its log.

    Recipes come from AI-Hypercomputer/tpu-recipes at c8cfe2f, `training/trillium/NAME/README.md`.
    All use FSDP over one slice.

    405B was trained on two slices. Here it is compiled for one slice, with the same number of
    sequences per device. Its parameters have 2 bytes, so that they fit. Its score excludes the
    traffic between slices (1.6 GB per device and pass, at 12.5 GB/s).

    Attributes:
        model: one of `SIZES`.
        slice: the slice of TPU v6e.
        batch: the sequences per device.
        seconds: the seconds of a step.
        where: the folder.
        dtype: the dtype of the parameters.
    """

    model: str
    slice: str
    batch: int
    seconds: float
    where: str
    dtype: str = "float32"


SEQ = 8192
RECIPES = {
    "8b-8": Recipe("8b", "2x4", 3, 3.443, "Llama3.1-8B-MaxText/v6e-8"),
    "8b-16": Recipe("8b", "4x4", 3, 3.393, "Llama3.1-8B-MaxText/v6e-16"),
    "8b-32": Recipe("8b", "4x8", 3, 3.495, "Llama3.1-8B-MaxText/v6e-32"),
    "8b-64": Recipe("8b", "8x8", 5, 5.652, "Llama3.1-8B-MaxText/v6e-64"),
    "8b-128": Recipe("8b", "8x16", 4, 4.602, "Llama3.1-8B-MaxText/v6e-128"),
    "8b-256": Recipe("8b", "16x16", 4, 4.546, "Llama3.1-8B-MaxText/v6e-256"),
    "70b-32": Recipe("70b", "4x8", 2, 17.790, "Llama3.1-70B-MaxText/v6e-32", "bfloat16"),
    "70b-64": Recipe("70b", "8x8", 2, 18.688, "Llama3.1-70B-MaxText/v6e-64"),
    "70b-128": Recipe("70b", "8x16", 4, 34.786, "Llama3.1-70B-MaxText/v6e-128"),
    "70b-256": Recipe("70b", "16x16", 5, 42.656, "Llama3.1-70B-MaxText/v6e-256"),
    "405b-512": Recipe("405b", "16x16", 1, 54.803, "Llama3.1-405B-MaxText", "bfloat16"),
    "7b-8": Recipe("7b", "2x4", 6, 6.320, "Mistral-7B-MaxText"),
}

SIZES: dict[str, dict[str, Any]] = {
    "8b": {"vocab_size": 128256, "embed": 4096, "layers": 32, "heads": 32, "hidden": 14336},
    "70b": {"vocab_size": 128256, "embed": 8192, "layers": 80, "heads": 64, "hidden": 28672},
    "405b": {"vocab_size": 128256, "embed": 16384, "layers": 126, "heads": 128, "hidden": 53248},
    "7b": {"vocab_size": 32000, "embed": 4096, "layers": 32, "heads": 32, "hidden": 14336},
}
# The activations that the recipes keep in host memory instead of recomputing them.
QUERIES = ("attn_query", "attn_key", "attn_value")
OFFLOADED = {
    "8b": ("block_input", *QUERIES, "attn_out"),
    "7b": ("block_input", *QUERIES, "attn_out"),
    "70b": ("block_input", *QUERIES),
    "405b": ("block_input",),
}

FSDP = ft.AxisRules({"batch": "data", ...: None}) | ft.FSDP("data")
TENSOR = ft.AxisRules(
    {
        "batch": "data",
        "vocab": "model",
        "heads": "model",
        "kv_heads": "model",
        "hidden": "model",
        ...: None,
    }
)


def recipe_step(recipe: Recipe) -> tuple[Any, tuple[Any, Any]]:
    """Return a recipe's training step and its abstract arguments."""
    config = ft.nn.TransformerConfig(
        **SIZES[recipe.model],
        kv_heads=8,
        head_dim=128,
        max_seq=SEQ,
        remat=ft.offload(*OFFLOADED[recipe.model]),
        param_dtype=recipe.dtype,
        compute_dtype=jnp.bfloat16,
    )

    @ft.jit(donate="state")
    def step(state: Any, tokens: Int[Array, "batch _"]) -> Any:
        loss, grads = ft.value_and_grad(
            lambda model: ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])
        )(state.model)
        return ft.apply_gradients(state, grads), loss

    def make(key: Any) -> Any:
        return ft.TrainState.create(ft.nn.Transformer.create(config, key=key), optax.adamw(1e-4))

    devices = int(np.prod([int(one) for one in recipe.slice.split("x")]))
    tokens = jax.ShapeDtypeStruct((recipe.batch * devices, SEQ + 1), jnp.int32)
    return step, (ft.abstract(make)(jax.random.key(0)), tokens)


def recipes(names: Sequence[str]) -> bool:
    print("| recipe | published | compute | wire | score | score / published | compiled in |")
    print("|---|---|---|---|---|---|---|")
    good = True
    for name in names:
        recipe = RECIPES[name]
        step, args = recipe_step(recipe)
        start = time.perf_counter()
        ranking = ft.explore(
            step, args, meshes={"data": args[1].shape[0] // recipe.batch}, layouts={"fsdp": FSDP},
            target=f"tpu:v6e:{recipe.slice}", progress=False,
        )  # fmt: skip
        row, taken = ranking[0], time.perf_counter() - start
        if row.problems:
            print(
                f"| {name} | {recipe.seconds} s | {row.problems[0].why} | | | | {taken:.0f} s |",
                flush=True,
            )
            good = False
            continue
        ratio = (row.score or 0) / recipe.seconds
        good &= abs(ratio - 1) <= RATIO
        print(
            f"| {name} | {recipe.seconds:.2f} s | {row.compute_seconds:.2f} s | {row.wire_seconds:.2f} s "
            f"| {row.score:.2f} s | {ratio:.2f} | {taken:.0f} s |",
            flush=True,
        )
    return good


def compare_layouts() -> bool:
    """Rank twelve layouts of 8B on eight chips, and return whether FSDP is first.

    The recipe uses FSDP.
    """
    step, args = recipe_step(RECIPES["8b-8"])
    layouts = {"fsdp": FSDP, "fsdp+tensor": TENSOR | ft.FSDP("data"), "tensor": TENSOR}
    meshes = [{"data": 8 // size, "model": size} for size in (1, 2, 4, 8)]
    start, computed = time.perf_counter(), time.process_time()
    ranking = ft.explore(step, args, meshes=meshes, layouts=layouts, target="tpu:v6e:2x4")
    taken, computed = time.perf_counter() - start, time.process_time() - computed
    print(ranking, f"{taken:.0f} s, with {computed:.0f} s of processor time", sep="\n\n")
    # With one device along `model`, `fsdp+tensor` is the same program as `fsdp`.
    return ranking[0].mesh["model"] == 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=["order", "recipes", "layouts"])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=["8b-8"])
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print(machine("jax"), "\n")
    if options.part == "order":
        good = order(options.model, options.rounds, options.optimizer)
    elif options.part == "recipes":
        good = recipes(options.recipe)
    else:
        good = compare_layouts()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
