"""This benchmark compares planning a tree with flattening it with paths, in one process.

It also compares `ft.constrain` with JAX's constraint while a program is traced. The benchmark exits
with 1 if a ratio exceeds its limit. Each measurement makes a new layout, so that no cache
of an earlier plan applies. The compared functions run in turn. The garbage collector is on, and
runs before each measurement. Times are medians. Ratios are medians of the ratios within a round,
which a busy machine disturbs less.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_flatten_with_path
from jaxtyping import Array, Float

import functree as ft

SIZES = {"data": 2, "model": 4}
PLAN_LIMIT = 20.0  # times flattening with paths
FILTERS_LIMIT = 3.0  # times planning without filters
CONSTRAIN_LIMIT = 1.5  # times JAX's constraint
LEAVES_PER_BLOCK = 10


class Attention(eqx.Module):
    query: Float[Array, "embed heads"]
    key: Float[Array, "embed heads"]
    value: Float[Array, "embed heads"]
    output: Float[Array, "heads embed"]
    bias: Float[Array, "embed"]


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    bias: Float[Array, "embed"]


class Block(eqx.Module):
    attn: Attention
    mlp: MLP
    norm: Float[Array, "embed"]
    scale: Float[Array, "embed"]


class Model(eqx.Module):
    blocks: list[Block]


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def block() -> Block:
    attention = Attention(array(64, 32), array(64, 32), array(64, 32), array(32, 64), array(64))
    return Block(attention, MLP(array(64, 256), array(256, 64), array(64)), array(64), array(64))


def modules(leaves: int) -> Any:
    return Model([block() for _ in range(leaves // LEAVES_PER_BLOCK)])


def dicts(leaves: int) -> Any:
    """Return the same tree as dicts, without names of axes."""

    def plain(node: Any) -> Any:
        return (
            {k: plain(v) for k, v in vars(node).items()} if isinstance(node, eqx.Module) else node
        )

    return {"blocks": [plain(block()) for _ in range(leaves // LEAVES_PER_BLOCK)]}


def rules() -> Any:
    names = {"heads": "model", "hidden": "model", "embed": None}
    return ft.AxisRules(names) | ft.FSDP("data", min_size=2**10)


def fsdp() -> Any:
    return ft.FSDP("data", min_size=2**10)


def filtered(layout: Callable[[], Any]) -> Callable[[], Any]:
    """Add fifty filters that match nothing, and a last filter that matches everything."""
    globs = [
        *(f"**.bias_{i}" for i in range(15)),
        *(f"blocks.*.attn.query_{i}" for i in range(15)),
        *(f"blocks.{i}.**.gate_*" for i in range(10)),
        *(f"**.mlp_{i}.**" for i in range(5)),
        *(f"blocks.{i}.mlp.other" for i in range(5)),
    ]
    assert len(globs) == 50
    return lambda: ft.StateSharding({**dict.fromkeys(globs, P()), ...: layout()}, unused="ignore")


class Times(NamedTuple):
    """The medians of times, in seconds, and of their ratios."""

    flatten: float
    plan: float
    filters: float
    plan_by_flatten: float
    filters_by_plan: float
    filters_by_flatten: float


def timed(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    result = function()
    took = time.perf_counter() - start
    del result
    return took


def measure(tree: Any, layout: Callable[[], Any], repeats: int) -> Times:
    behind = filtered(layout)
    work: tuple[Callable[[], Any], ...] = (
        lambda: tree_flatten_with_path(tree),
        lambda: ft.plan(tree, layout(), SIZES),
        lambda: ft.plan(tree, behind(), SIZES),
    )
    for function in work:  # imports modules, and warms up Python
        function()
    rounds = []
    for _ in range(repeats):
        flatten, plan, filters = (timed(function) for function in work)
        rounds.append((flatten, plan, filters, plan / flatten, filters / plan, filters / flatten))
    return Times(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def constrained(repeats: int) -> float:
    """Return the time of `ft.constrain` in a trace, compared with JAX's constraint."""
    mesh = ft.make_mesh(**SIZES)
    sharding = jax.sharding.NamedSharding(mesh, P("data", "model"))
    rules = ft.AxisRules({"batch": "data", "embed": "model", ...: None})

    def traced(constrain: Callable[[jax.Array], jax.Array]) -> None:
        def program(x: jax.Array) -> jax.Array:
            for _ in range(200):
                x = constrain(x)
            return x

        jax.jit(program).trace(array(8, 8))

    work = (
        lambda: traced(lambda x: ft.constrain(x, "batch embed")),
        lambda: traced(lambda x: jax.lax.with_sharding_constraint(x, sharding)),
    )
    ratios: list[float] = []
    with jax.set_mesh(mesh), ft.axis_rules(rules):
        for function in work:
            function()
        for _ in range(repeats):
            own, jaxs = (timed(function) for function in work)
            ratios.append(own / jaxs)
    return statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--leaves", type=int, nargs="+", default=[1_000, 30_000], help="sizes of the trees"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="measurements per figure, which is their median"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="only print the table, and always exit with 0"
    )
    options = parser.parse_args()
    print(
        f"Python {sys.version.split()[0]}, jax {jax.__version__}; medians of {options.repeats}, in ms"
    )
    print(
        f"targets for modules: plan at most {PLAN_LIMIT:g} x flatten, with filters {FILTERS_LIMIT:g} x plan\n"
    )
    heads = (
        "tree",
        "leaves",
        "flatten",
        "plan",
        "x flatten",
        "50 filters",
        "x plan",
        "x flatten",
        "",
    )
    line = "{:8}{:>8}{:>10}{:>10}{:>11}{:>12}{:>8}{:>11}  {}".format
    print(line(*heads))
    missed = 0
    for leaves in options.leaves:
        for name, make, layout in (("modules", modules, rules), ("dicts", dicts, fsdp)):
            t = measure(make(leaves), layout, options.repeats)
            bad = name == "modules" and (
                t.plan_by_flatten > PLAN_LIMIT or t.filters_by_plan > FILTERS_LIMIT
            )
            missed += bad
            ms = [f"{1e3 * x:.2f}" for x in t[:3]]
            ratios = [f"{x:.1f}" for x in t[3:]]
            print(
                line(
                    name,
                    leaves,
                    ms[0],
                    ms[1],
                    ratios[0],
                    ms[2],
                    ratios[1],
                    ratios[2],
                    "MISSED" if bad else "",
                )
            )
    ratio = constrained(options.repeats)
    missed += ratio > CONSTRAIN_LIMIT
    print(f"\nft.constrain in a trace: {ratio:.2f} x JAX's constraint, at most {CONSTRAIN_LIMIT:g}")
    return 1 if missed and not options.no_check else 0


if __name__ == "__main__":
    sys.exit(main())
