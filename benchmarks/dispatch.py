"""The host time of one call of a compiled function on (model, adam state), wrapped in each way
there is; exits 1 where functree's is too long.

Every wrapper calls the same function, which adds one to each array, on its own copy of the state.
All run in turn in one process, in another order each round, so that a busy machine slows all of
them; the lower quartile of a wrapper's rounds counts, and its ratio to that of the floor: `jax.jit`
on a flat list, donated for the wrappers that donate.

The clock stops when the call returns, not when the device is done. Waiting for the device, and
freeing what the call made and what it replaced, comes behind it: freed inside the clock, the last
results make a call half as long again.
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
os.environ["JAX_PLATFORMS"] = "cpu"  # both are read when jax starts
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
        "this benchmark compares with flax, which is not installed: pip install 'functree[bench]'"
    )

FLOOR = "jax.jit, flat list"
DONATED_FLOOR = "jax.jit, flat list, donated"
WARM_UP = 3  # calls: a donated state may come back laid out equivalently, but not equally, and compile once more
SLOW_EVERY = 10  # rounds for each one of nnx, which takes as long as all the others together
NOISE = 1.03  # what two equal wrappers differ by on a quiet machine

# On so many devices, a row takes at most so many times what another one does.
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
# The model's layout, and the adam state's: one stands for each parameter of `step`.
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
    """All its leaves are arrays, so that `jax.jit` takes it."""

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
    """The same by flax; its optimizer has one array more, the step."""
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
    """In place, as flax has it: returning new modules would make it return the old ones too."""
    nnx.update((model, adam), add_one(nnx.state((model, adam))))
    return model, adam


@dataclasses.dataclass
class Row:
    """A wrapped function, which returns its arguments' successors, and how long its calls took, in
    seconds."""

    name: str
    function: Callable[..., Any]
    args: Any
    donates: bool = False
    in_place: bool = False
    times: list[float] = dataclasses.field(default_factory=list)


def is_scalar(path: Any, variable: Any) -> bool:
    return variable.ndim == 0


def make_rows(blocks: int, mesh: Mesh) -> list[Row]:
    """Every wrapper, each with a state of its own."""
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
        # With rules, each call looks whether somebody has placed its arrays.
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
    """The time of a call, and its result, which the caller frees: all that it made or replaced
    outlives the clock."""
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
    """Compile, and see that what comes back is what the next call takes: packed if packed, of the
    same structure."""
    structure = jax.tree.structure(row.args)
    for _ in range(WARM_UP):
        if jax.tree.structure(call(row)[1]) != structure:
            sys.exit(f"{row.name}: what it returns does not have the structure of what it takes")


def measure(rows: list[Row], rounds: int, title: str) -> dict[str, float]:
    """The lower quartile of the time of a call for each row, in µs."""
    for row in rows:
        print(f"{title}: compiling {row.name}", file=sys.stderr)
        warm_up(row)
    print(f"{title}: timing {rounds} rounds", file=sys.stderr)
    gc.collect()
    gc.freeze()  # so that the collections between the rounds walk over what the calls left, and nothing else
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
    """A table of times and of their ratios to the floor, with two columns for each number of
    arrays."""
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
        f"MISSED, devices: {devices}, arrays: {arrays:,}: {row} takes {us[row] / us[of]:.3f} × {of}, over {factor:g}"
        for arrays, us in results.items()
        for row, factor, of in LIMITS[devices]
        if us[row] > factor * us[of]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help="measurements of each; a tenth of them for nnx"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[150, 600, 1_200], help="arrays in all, about"
    )
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        choices=LIMITS,
        default=[*LIMITS],
        help="simulated devices",
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--no-limits", action="store_true", help="print the tables only, and always exit with 0"
    )
    options = parser.parse_args()
    if options.rounds <= SLOW_EVERY:
        parser.error(
            f"--rounds: more than {SLOW_EVERY}, for a quartile of the rows that run in one of so many"
        )
    print(f"{machine('jax', 'equinox', 'flax')}; lower quartiles of {options.rounds} rounds\n")
    failures = []
    for devices in options.devices:
        mesh = ft.make_mesh(data=devices, devices=jax.devices()[:devices])
        results = {}
        for size in options.sizes:
            # Adam holds two arrays for each of the model's, and a count; the model two outside of
            # its blocks.
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
