"""This benchmark measures the host time of one call of a compiled function, for each wrapper.

It exits with 1 if functree's time exceeds a limit. The arguments are a model and its Adam state.
Every wrapper calls the same function on its own copy of the state. The function adds one to each
array.

All wrappers run in turn in one process, in a new order each round, so that a busy machine slows all
of them. A wrapper's result is the lower quartile of its rounds, and its ratio to the floor. The
floor is `jax.jit` on a flat list, donated for wrappers that donate.

The clock stops when the call returns, not when the device is done. Waiting for the device, and
freeing results and replaced arrays, come after that. Freeing the last results within the clock
would make a call 1.5 times as long.
"""

import argparse
import dataclasses
import functools
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads both variables once, when it starts
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machine import machine

import functree as ft

try:
    from flax import nnx
except ImportError:
    sys.exit(
        "this benchmark needs flax, which is not installed; try: pip install 'functree[bench]'"
    )

FLOOR = "jax.jit, flat list"
DONATED_FLOOR = "jax.jit, flat list, donated"
# A donated state may return with an equivalent but unequal layout, and compile once more.
WARM_UP = 3  # calls
SLOW_EVERY = 10  # nnx runs in one of ten rounds, since it takes as long as all other rows together
NOISE = 1.03  # the ratio of two equal wrappers on a quiet machine

# For each number of devices: a row, the largest ratio allowed, and the row it is compared with.
LIMITS = {
    1: (
        ("ft.jit, modules", NOISE, "jax.jit, modules"),
        ("ft.jit, StateSharding", NOISE, "jax.jit, modules"),
        ("ft.jit, packed", 1.1, FLOOR),
        ("ft.jit, packed, donated", 1.3, DONATED_FLOOR),
        ("ft.jit, modules, rules", 1.05, "ft.jit, modules"),
        ("ft.jit, packed, rules", 1.05, "ft.jit, packed"),
        ("ft.jit, modules", 1 / 2, "eqx.filter_jit"),
        ("ft.jit, StateSharding", 1 / 20, "nnx.jit, StateSharding"),
    ),
    8: (
        ("ft.jit, modules", 1.25, FLOOR),
        ("ft.jit, packed", 1.1, FLOOR),
        ("ft.jit, modules, rules", 1.05, "ft.jit, modules"),
        ("ft.jit, packed, rules", 1.05, "ft.jit, packed"),
    ),
}

WIDTH = 8
TX = optax.adam(1e-3)
ARRAYS_PER_BLOCK = 16
# The layouts of the model and of the Adam state, one for each parameter of `step`.
RULES = ft.FSDP("data", min_size=0)
LAYOUTS = (
    ft.StateSharding({...: P("data")}),
    ft.StateSharding({ft.has_ndim(0): P(), ...: P("data")}),
)


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    heads: int = eqx.field(static=True, default=2)


class MLP(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[..., Any] = eqx.field(static=True, default=jax.nn.relu)


class Block(eqx.Module):
    attn: Attention
    mlp: MLP
    attn_norm: eqx.nn.LayerNorm
    mlp_norm: eqx.nn.LayerNorm


class Model(eqx.Module):
    """A model whose leaves are all arrays, so that `jax.jit` accepts it."""

    blocks: list[Block]
    norm: eqx.nn.LayerNorm


def modules(blocks: int, mesh: Mesh) -> tuple[Any, Any]:
    linear = functools.partial(eqx.nn.Linear, WIDTH, WIDTH, key=jax.random.key(0))
    norm = functools.partial(eqx.nn.LayerNorm, WIDTH)

    def block() -> Block:
        return Block(
            Attention(linear(), linear(), linear(), linear()),
            MLP(linear(), linear()),
            norm(),
            norm(),
        )

    model = Model([block() for _ in range(blocks)], norm())
    return ft.shard((model, TX.init(model)), LAYOUTS, mesh)


class NnxParts(nnx.Module):
    def __init__(self, **parts: Any):
        for name, part in parts.items():
            setattr(self, name, part)


def nnx_modules(blocks: int, mesh: Mesh) -> tuple[Any, Any]:
    """Build the same model with flax, whose optimizer has one more array, the step."""
    linear = functools.partial(nnx.Linear, WIDTH, WIDTH, rngs=nnx.Rngs(0))
    norm = functools.partial(nnx.LayerNorm, WIDTH, rngs=nnx.Rngs(0))

    def block() -> Any:
        attn = NnxParts(query=linear(), key=linear(), value=linear(), output=linear(), heads=2)
        mlp = NnxParts(up=linear(), down=linear(), activation=jax.nn.relu)
        return NnxParts(attn=attn, mlp=mlp, attn_norm=norm(), mlp_norm=norm())

    def put(array: Any) -> Any:
        return jax.device_put(array, NamedSharding(mesh, P("data") if array.ndim else P()))

    model = NnxParts(blocks=nnx.List([block() for _ in range(blocks)]), norm=norm())
    state = (model, nnx.Optimizer(model, TX, wrt=nnx.Param))
    nnx.update(state, jax.tree.map(put, nnx.state(state)))
    return state


def add_one(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, tree)


def flat_step(arrays: list[Any]) -> Any:
    return (add_one(arrays),)


def step(model: Any, adam: Any) -> Any:
    return add_one((model, adam))


def nnx_step(model: Any, adam: Any) -> Any:
    """Update the modules in place, as flax does.

    If this returned new modules, flax would return the old ones too.
    """
    nnx.update((model, adam), add_one(nnx.state((model, adam))))
    return model, adam


@dataclasses.dataclass
class Row:
    """A wrapped function that returns its next arguments, with the seconds of its calls."""

    name: str
    function: Callable[..., Any]
    args: Any
    donates: bool = False
    in_place: bool = False
    times: list[float] = dataclasses.field(default_factory=list)


def is_scalar(path: Any, variable: Any) -> bool:
    return variable.ndim == 0


def make_rows(blocks: int, mesh: Mesh) -> list[Row]:
    """Make every wrapper, each with its own state."""
    tree = functools.partial(modules, blocks, mesh)
    nnx_tree = functools.partial(nnx_modules, blocks, mesh)

    def flat() -> Any:
        return (jax.tree.leaves(tree()),)

    def packed() -> Any:
        return tuple(map(ft.pack, tree()))

    specs = ft.plan(tree(), LAYOUTS, mesh).specs
    in_and_out = {"in_shardings": LAYOUTS, "out_shardings": LAYOUTS}
    nnx_layout = nnx.StateSharding(
        {is_scalar: NamedSharding(mesh, P()), ...: NamedSharding(mesh, P("data"))}
    )
    nnx_in_and_out = {
        "in_shardings": (nnx_layout, nnx_layout),
        "out_shardings": (nnx_layout, nnx_layout),
    }
    by_jax = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs)
    by_functree = ft.shard_map(step, mesh=mesh, in_specs=LAYOUTS, out_specs=LAYOUTS)
    return [
        Row(FLOOR, jax.jit(flat_step), flat()),
        Row("jax.jit, modules", jax.jit(step), tree()),
        Row("ft.jit, modules", ft.jit(step), tree()),
        Row("ft.jit, StateSharding", ft.jit(step, **in_and_out), tree()),
        Row("ft.jit, packed", ft.jit(step), packed()),
        # With rules, each call checks whether its arrays are committed.
        Row("ft.jit, modules, rules", ft.jit(step, rules=RULES), tree()),
        Row("ft.jit, packed, rules", ft.jit(step, rules=RULES), packed()),
        Row("eqx.filter_jit", eqx.filter_jit(step), tree()),
        Row("nnx.jit", nnx.jit(nnx_step), nnx_tree(), in_place=True),
        Row(
            "nnx.jit, StateSharding", nnx.jit(nnx_step, **nnx_in_and_out), nnx_tree(), in_place=True
        ),
        Row(DONATED_FLOOR, jax.jit(flat_step, donate_argnums=0), flat(), donates=True),
        Row("ft.jit, modules, donated", ft.jit(step, donate=...), tree(), donates=True),
        Row("ft.jit, packed, donated", ft.jit(step, donate=...), packed(), donates=True),
        Row("jax.jit of jax.shard_map, modules", jax.jit(by_jax), tree()),
        Row("ft.shard_map, StateSharding", by_functree, tree()),
    ]


def call(row: Row) -> tuple[float, Any]:
    """Time a call, and return the seconds and the result.

    The caller frees the result, so that all new and replaced arrays outlive the clock.
    """
    function, args = row.function, row.args
    replaced = jax.tree.leaves(args) if row.in_place else args
    start = time.perf_counter()
    result = function(*args)
    took = time.perf_counter() - start
    jax.block_until_ready(result)
    if row.donates:
        row.args = result
    del replaced
    return took, result


def warm_up(row: Row) -> None:
    """Compile the function, and check that a call can take the previous call's result.

    The result must have the structure of the arguments, and be packed if they are.
    """
    structure = jax.tree.structure(row.args)
    for _ in range(WARM_UP):
        if jax.tree.structure(call(row)[1]) != structure:
            sys.exit(f"{row.name}: the result does not have the structure of the arguments")


def measure(rows: list[Row], rounds: int, title: str) -> dict[str, float]:
    """Return the lower quartile of the call times of each row, in µs."""
    for row in rows:
        print(f"{title}: compiling {row.name}", file=sys.stderr)
        warm_up(row)
    print(f"{title}: timing {rounds} rounds", file=sys.stderr)
    gc.collect()
    gc.freeze()  # collections between rounds then walk only over objects that calls have created
    gc.disable()
    for number in range(rounds):
        for row in random.sample(rows, len(rows)):
            if not row.in_place or number % SLOW_EVERY == 0:
                row.times.append(call(row)[0])
        gc.collect()
    gc.enable()
    gc.unfreeze()
    return {row.name: 1e6 * statistics.quantiles(row.times, n=4)[0] for row in rows}


def show(results: dict[int, dict[str, float]], markdown: bool) -> None:
    """Print a table of times and of their ratios to the floor.

    It has two columns for each number of arrays.
    """
    cells = [["", *(head for arrays in results for head in (f"{arrays:,} arrays, µs", "× floor"))]]
    for name in next(iter(results.values())):
        floor = DONATED_FLOOR if name.endswith("donated") else FLOOR
        pairs = ((f"{us[name]:,.0f}", f"{us[name] / us[floor]:.2f}") for us in results.values())
        cells.append(
            [f"`{name}`" if markdown else name, *(cell for pair in pairs for cell in pair)]
        )
    if markdown:
        cells.insert(1, ["---", *("--:" for _ in cells[0][1:])])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        line = [
            first.ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True)),
        ]
        print(f"| {' | '.join(line)} |" if markdown else "  ".join(line).rstrip())
    print()


def missed(results: dict[int, dict[str, float]], devices: int) -> list[str]:
    return [
        f"MISSED, devices: {devices}, arrays: {arrays:,}: {row} takes {us[row] / us[of]:.3f} × {of}, above {factor:g}"
        for arrays, us in results.items()
        for row, factor, of in LIMITS[devices]
        if us[row] > factor * us[of]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help="measurements per row; a tenth of them for nnx"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[150, 600, 1_200],
        help="approximate numbers of arrays",
    )
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        choices=LIMITS,
        default=[*LIMITS],
        help="numbers of simulated devices",
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--no-limits", action="store_true", help="only print the tables, and always exit with 0"
    )
    options = parser.parse_args()
    if options.rounds <= SLOW_EVERY:
        parser.error(
            f"--rounds must exceed {SLOW_EVERY}: rows of nnx run in one of {SLOW_EVERY} rounds, and a "
            "quartile needs two measurements"
        )
    print(f"{machine('jax', 'equinox', 'flax')}; lower quartiles of {options.rounds} rounds\n")
    failures = []
    for devices in options.devices:
        mesh = ft.make_mesh(data=devices, devices=jax.devices()[:devices])
        results = {}
        for size in options.sizes:
            # Adam has two arrays for each array of the model, and a count. The model has two arrays
            # outside its blocks.
            blocks = max(1, round(((size - 1) / 3 - 2) / ARRAYS_PER_BLOCK))
            rows = make_rows(blocks, mesh)
            arrays = len(jax.tree.leaves(rows[0].args))
            results[arrays] = measure(
                rows, options.rounds, f"devices: {devices}, arrays: {arrays:,}"
            )
        print(f"Devices: {devices}\n")
        show(results, options.markdown)
        failures += [] if options.no_limits else missed(results, devices)
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
