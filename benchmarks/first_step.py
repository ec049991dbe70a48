"""This benchmark measures a program's host work besides its steps.

It times first traces, planning, placing batches, imports and a training loop. It exits with 1 if a
time exceeds its limit.

The compared functions run in turn in one process. The garbage collector is on, and runs before each
measurement. Results are freed outside the clock. Times are medians. Ratios are medians of the
ratios within a round, which a busy machine disturbs less. Caches are empty in each round, except in
rows that measure a cache.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads both variables once, when it starts
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from machine import machine

import functree as ft

WIDTH = 16


class Row(NamedTuple):
    """One comparison.

    Attributes:
        name: the name of the measurement.
        ours: the seconds of each round.
        floor: the seconds of the compared function in each round.
        limit: the largest ratio to the floor that is allowed; None if there is no limit.
        against: the name of the compared function.
    """

    name: str
    ours: list[float]
    floor: list[float]
    limit: float | None
    against: str

    @property
    def ratio(self) -> float:
        return statistics.median(
            one / other for one, other in zip(self.ours, self.floor, strict=True)
        )


def timed(run: Callable[[], Any]) -> float:
    """Time one call, and free its result after the clock has stopped."""
    gc.collect()
    start = time.perf_counter()
    result = run()
    taken = time.perf_counter() - start
    del result
    return taken


def compared(
    name: str,
    ours: Callable[[], Any],
    floor: Callable[[], Any],
    limit: float | None,
    against: str,
    rounds: int,
) -> Row:
    """Time two functions in turn."""
    row = Row(name, [], [], limit, against)
    for _ in range(rounds):
        row.floor.append(timed(floor))
        row.ours.append(timed(ours))
    return row


# The first trace


class Block(eqx.Module):
    attn: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        biases = {f"use_{part}_bias": True for part in ("query", "key", "value", "output")}
        self.attn = eqx.nn.MultiheadAttention(2, WIDTH, **biases, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=keys[1])
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attn(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


def loss(model: Any, x: Any) -> Any:
    for block in model:
        x = block(x)
    return jnp.mean(x**2)


TX = optax.adam(1e-3)


def update(model: Any, opt_state: Any, x: Any) -> tuple[Any, Any, Any]:
    """Run a training step in plain JAX, Equinox and optax."""
    value, grads = eqx.filter_value_and_grad(loss)(model, x)
    updates, opt_state = TX.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, value


def traces(rounds: int) -> Iterator[Row]:
    """Trace a step over 24 blocks with Adam's state, and time three calls of a step that adds."""
    model = [Block(key) for key in jax.random.split(jax.random.key(0), 24)]
    state = model, TX.init(eqx.filter(model, eqx.is_inexact_array))
    x = jnp.ones((8, WIDTH))
    arrays, static = eqx.partition(state, eqx.is_array)
    flat, treedef = jax.tree.flatten(arrays)

    def by_hand(flat: Any, x: Any) -> Any:
        model, opt_state = eqx.combine(treedef.unflatten(flat), static)
        return jax.tree.leaves(eqx.filter(update(model, opt_state, x), eqx.is_array))

    def ours() -> Any:
        return ft.jit(lambda model, opt_state, x: update(model, opt_state, x)).trace(*state, x)

    def floor() -> Any:
        return jax.jit(lambda flat, x: by_hand(flat, x)).trace(flat, x)

    for run in (ours, floor):
        run()
    name = f"trace of 24 blocks, {len(flat):,} arrays"
    yield compared(name, ours, floor, 1.15, "`jax.jit` on flat arrays", rounds)

    def inner(wrap: Callable[[Any], Any]) -> Any:
        """Make ten new functions that are called in the trace of another function."""
        return wrap(
            lambda x: [wrap(lambda x, i=float(i): jnp.tanh(x) * x + i)(x) for i in range(10)]
        )

    yield compared(
        "trace of ten functions in another, ten times",
        lambda: [inner(ft.jit).trace(x) for _ in range(10)],
        lambda: [inner(jax.jit).trace(x) for _ in range(10)],
        2.3,
        "`jax.jit`",
        rounds,
    )

    def three_calls(wrap: Callable[[Any], Any], *args: Any) -> Any:
        f = wrap(
            lambda *args: jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, args)
        )
        return [f(*args) for _ in range(3)]

    yield compared(
        "its first three calls", lambda: three_calls(ft.jit, *state), lambda: three_calls(jax.jit, flat), None,
        "`jax.jit` on flat arrays, compiled anew", max(3, rounds // 2),
    )  # fmt: skip


# Planning


SHAPES = [(8, 16), (16, 8), (16,), (8,), (16, 16), (4, 128), (128,)]


def optimizers(rounds: int) -> Iterator[Row]:
    """Time the first and a later `plan_optimizer`, for two optimizers and two model sizes."""
    mesh = {"data": 2, "model": 4}
    for make in (optax.adam, optax.adafactor):
        for size in (1_000, 10_000):
            model = {
                f"w{i}": jax.ShapeDtypeStruct(SHAPES[i % len(SHAPES)], jnp.float32)
                for i in range(size)
            }
            known = make(1e-3)
            ft.plan_optimizer(known, model, ft.FSDP("data"), mesh)

            def first() -> Any:
                return ft.plan_optimizer(make(1e-3), model, ft.FSDP("data"), mesh)  # noqa: B023

            def again() -> Any:
                return ft.plan_optimizer(known, model, ft.FSDP("data"), mesh)  # noqa: B023

            def trace() -> Any:
                return jax.eval_shape(make(1e-3).init, model)  # noqa: B023

            name = f"`plan_optimizer`, {make.__name__}, {size:,} parameters"
            few = rounds if size < 5_000 else max(2, rounds // 3)
            yield compared(f"{name}, first", first, trace, 2.2, "a trace of `tx.init`", few)
            yield compared(f"{name}, again", again, trace, 0.2, "a trace of `tx.init`", few)


def batches(rounds: int) -> Iterator[Row]:
    """Place the batches of a loop, two hundred in each round."""
    mesh = ft.make_mesh(data=2, model=4)
    rules = ft.AxisRules({"batch": "data", "seq": None})
    sharding = NamedSharding(mesh, P("data", None))
    many = [np.full((16, 64), i, np.int32) for i in range(200)]
    trees = [{"tokens": batch, "weight": np.ones(16, np.float32)} for batch in many]
    shardings = {"tokens": sharding, "weight": NamedSharding(mesh, P("data"))}
    axes = {"tokens": "batch seq", "weight": "batch"}
    yield compared(
        "placing an array", lambda: [ft.shard(batch, rules, mesh, axes="batch seq") for batch in many],
        lambda: [jax.device_put(batch, sharding) for batch in many], 1.5, "`device_put`", rounds,
    )  # fmt: skip
    yield compared(
        "placing a dict of two", lambda: [ft.shard(tree, rules, mesh, axes=axes) for tree in trees],
        lambda: [jax.device_put(tree, shardings) for tree in trees], 1.5, "`device_put`", rounds,
    )  # fmt: skip


# Large numbers of structures, nodes, rows and compilations


class Named(eqx.Module):
    layers: list[eqx.nn.Linear]
    name: str = eqx.field(static=True)


def structures(rounds: int) -> Iterator[Row]:
    """Call one function with sixty structures in turn, compared with one structure sixty times."""
    linear = [eqx.nn.Linear(4, 4, key=jax.random.key(0)) for _ in range(100)]
    models = [Named(linear, f"model {i}") for i in range(60)]

    def run(f: Any, models: list[Any]) -> Any:
        return [f(model) for model in models]

    for wrap, limit in ((ft.jit, 1.5), (jax.jit, None)):
        f = wrap(lambda model: jax.tree.map(lambda leaf: leaf + 1, model))
        for _ in range(3):
            run(f, models)
        name = f"60 structures of 200 arrays in turn, `{'ft' if wrap is ft.jit else 'jax'}.jit`"
        yield compared(
            name,
            lambda: run(f, models),  # noqa: B023
            lambda: run(f, models[:1] * 60),  # noqa: B023
            limit,
            "one of them",
            rounds,
        )


def selections(rounds: int) -> Iterator[Row]:
    """Select in 10,000 nodes, compared with ten selections in 1,000 nodes."""
    few, many = ([Named([], str(i)) for i in range(size)] for size in (1_000, 10_000))

    def chosen(tree: Any) -> Any:
        return ft.select(tree).under(Named).at("layers").set([])

    yield compared(
        "`select` in 10,000 nodes", lambda: chosen(many), lambda: [chosen(few) for _ in range(10)], 1.5,
        "ten times 1,000 nodes", rounds,
    )  # fmt: skip


def texts(rounds: int) -> Iterator[Row]:
    """Format a plan with 30,000 different rows."""
    tree = {f"w{i}": {"a": jax.ShapeDtypeStruct((8, 16 + i), jnp.float32)} for i in range(30_000)}
    plan = ft.plan(tree, ft.FSDP("data"), {"data": 8})
    yield compared(
        "`str(plan)`, 30,000 rows",
        lambda: str(plan),
        lambda: time.sleep(1),
        2.0,
        "a second",
        rounds,
    )


def compilations(rounds: int) -> Iterator[Row]:
    """Time the 10th and the 600th call that compiles for a new static value.

    The time of JAX's calls grows too.
    """
    tree = {f"w{i}": jnp.ones(1) for i in range(200)}
    f = ft.jit(lambda tree, name: tree["w0"])
    g = jax.jit(lambda tree, name: tree["w0"], static_argnames="name")
    for start in (10, 600):
        row = Row(f"a call that compiles, the {start}th", [], [], 1.5, "`jax.jit`")
        for i in range(len(f.compilations), start):
            for fun in (f, g):
                fun(tree, str(i))
        for i in range(start, start + rounds):
            row.floor.append(timed(lambda: g(tree, str(i))))  # noqa: B023
            row.ours.append(timed(lambda: f(tree, str(i))))  # noqa: B023
        yield row


def imports(rounds: int) -> Iterator[Row]:
    """Import functree after jax, equinox and optax."""
    clock = "time.perf_counter()"
    code = f"import time, jax, equinox, optax; start = {clock}; import functree; print({clock} - start)"
    row = Row("`import functree`", [], [], 0.25, "a second")
    for _ in range(rounds):
        out = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            cwd=Path(__file__).parents[1],
        )
        row.ours.append(float(out.stdout))
        row.floor.append(1.0)
    yield row


# A training loop


def loops(rounds: int) -> Iterator[Row]:
    """Run a training loop with a new NumPy batch in each step, compared with plain JAX.

    A measurement has ten steps. It takes 50 ms, and two consecutive measurements differ by 5 % on a
    quiet machine, so there are many.
    """
    mesh, parts, steps = ft.make_mesh(data=8), 20 * rounds, 10
    key = jax.random.key(0)
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(64, 256)).astype(np.float32) for _ in range(20 * steps)]

    def error(model: eqx.nn.MLP, x: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - x) ** 2)

    # The hand-written loop uses the shardings of `ft.FSDP`.
    model = eqx.nn.MLP(256, 256, 512, 2, key=key)
    arrays, static = eqx.partition(model, eqx.is_array)
    rows = ft.FSDP("data", min_size=0)
    specs = ft.plan(model, rows, mesh).shardings
    arrays = jax.device_put(arrays, eqx.filter(specs, lambda one: one is not None))
    opt_state = TX.init(arrays)
    whole = NamedSharding(mesh, P())
    in_place = jax.tree.map(lambda leaf: leaf.sharding if leaf.ndim else whole, (arrays, opt_state))
    arrays, opt_state = jax.device_put((arrays, opt_state), in_place)
    batch_sharding = NamedSharding(mesh, P("data", None))

    def by_hand(arrays: Any, opt_state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda arrays: error(eqx.combine(arrays, static), x))(
            arrays
        )
        updates, opt_state = TX.update(grads, opt_state, arrays)
        return optax.apply_updates(arrays, updates), opt_state, value

    stepped = jax.jit(by_hand, donate_argnums=(0, 1), out_shardings=(*in_place, None))

    @ft.jit(donate="ts")
    def step(ts: Any, x: Any) -> Any:
        value, grads = ft.value_and_grad(error)(ts.model, x)
        return ft.apply_gradients(ts, grads), value

    ts = ft.TrainState.create(eqx.nn.MLP(256, 256, 512, 2, key=key), TX, layout=rows, mesh=mesh)
    hand, ours = (arrays, opt_state), ts
    rules = ft.AxisRules({"batch": "data", "features": None})
    row = Row("a training loop, ten steps", [], [], 1.02, "the same by hand")
    losses: tuple[list[Any], list[Any]] = [], []
    for part in range(parts):
        start = part % 20 * steps
        now = data[start : start + steps]

        def run_by_hand(now: list[Any] = now) -> None:
            nonlocal hand
            for batch in now:
                *hand, value = stepped(*hand, jax.device_put(batch, batch_sharding))
                losses[0].append(value)
            jax.block_until_ready(hand)

        def run_ours(now: list[Any] = now) -> None:
            nonlocal ours
            for batch in now:
                ours, value = step(ours, ft.shard(batch, rules, mesh, axes="batch features"))
                losses[1].append(value)
            jax.block_until_ready(ours)

        taken = [
            timed(run) for run in ((run_by_hand, run_ours) if part % 2 else (run_ours, run_by_hand))
        ]
        if part:  # the first measurement compiles
            row.floor.append(taken[0 if part % 2 else 1])
            row.ours.append(taken[1 if part % 2 else 0])
    if list(map(float, losses[0])) != list(map(float, losses[1])):
        sys.exit("the losses of the two loops differ")
    if len(step.compilations) != 1:
        sys.exit(f"the loop compiled {len(step.compilations)} times")
    yield row


MEASUREMENTS = (
    traces,
    optimizers,
    batches,
    structures,
    selections,
    texts,
    compilations,
    imports,
    loops,
)


def text_of(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.0f} µs"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="measurements per row; a third of them for the longest rows",
    )
    parser.add_argument(
        "--only", choices=[one.__name__ for one in MEASUREMENTS], nargs="+", help="run only these"
    )
    parser.add_argument(
        "--no-limits", action="store_true", help="only print the table, and always exit with 0"
    )
    options = parser.parse_args()
    print(f"{machine('jax', 'equinox', 'optax')}; medians of {options.rounds} rounds\n")
    print("| | time | compared with | ratio | limit |\n|---|--:|---|--:|--:|")
    missed = 0
    for measure in MEASUREMENTS:
        if options.only and measure.__name__ not in options.only:
            continue
        for row in measure(options.rounds):
            limit = "" if row.limit is None else f"{row.limit:g}"
            over = row.limit is not None and row.ratio > row.limit
            missed += over
            taken = text_of(statistics.median(row.ours))
            mark = " MISSED" if over else ""
            print(
                f"| {row.name} | {taken} | {row.against} | {row.ratio:.2f}{mark} | {limit} |",
                flush=True,
            )
    return 1 if missed and not options.no_limits else 0


if __name__ == "__main__":
    sys.exit(main())
