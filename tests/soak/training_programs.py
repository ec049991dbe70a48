"""A seed ─► a random training step: the layout of its state and how that is given, the order of its
results, its micro-batches, or a population under `vmap`. Three steps are run, and compared with the
same steps of plain JAX on one device.

The state has to keep its shardings, and the steps one compilation. A population exchanges nothing.
"""

import dataclasses
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import functree as ft

MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4})
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
WHOLE = ft.AxisRules({"batch": "data", ...: None})
FSDP = ft.FSDP("data", min_size=0, otherwise=P())
LAYOUTS: dict[str, Any] = {
    "replicated": P(),
    "FSDP": FSDP,
    "TP": RULES,
    "FSDP and TP": RULES | FSDP,
    "StateSharding": ft.StateSharding({"up": P(None, "model"), ...: P()}),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=8),
}
RESULTS = ("loss", "gradients", "state", "seen")
SIZE, BATCH, AGENTS, STEPS = 16, 32, 8, 3


class Net(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    bias: Float[Array, "embed"]
    name: str = eqx.field(static=True, default="net")

    def __call__(self, x: Array) -> Array:
        return jnp.tanh(x @ self.up) @ self.down + self.bias


def make_net(seed: int) -> Net:
    rng = np.random.default_rng(seed)
    up, down = rng.normal(0, 0.3, (2, SIZE, SIZE)).astype(np.float32)
    return Net(jnp.asarray(up), jnp.asarray(down), jnp.zeros(SIZE))


@dataclasses.dataclass
class Program:
    """One random program, in plain values."""

    seed: int
    mesh: dict[str, int]
    explicit: bool
    layout: str
    optimizer: str
    order: tuple[str, ...]  # of what the step returns
    donated: tuple[str, ...]
    population: str | None  # the transform over the agents
    micro: int
    over: bool
    weighted: bool
    rules: bool  # whether the step has `rules=`
    given: bool  # whether the gradient has `layout=`
    kept: bool  # whether the gradients are returned

    def __str__(self) -> str:
        fields = dataclasses.asdict(self)
        seed = fields.pop("seed")
        return f"seed {seed}: {', '.join(f'{name}={value}' for name, value in fields.items())}"


def make(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    mesh, population = rng.choice(MESHES), None
    if rng.random() < 0.35:
        population = rng.choice(["vmap", "vmap with a name", "filter_vmap"])
    layouts = [one for one in LAYOUTS if "model" in mesh or one in ("replicated", "FSDP")]
    micro = rng.choice([0, 1, 2, 4])
    explicit = rng.random() < 0.25
    if explicit and population is None:
        layouts = ["replicated"]  # JAX asks for the sharding of each product otherwise
    over = micro > 0 and population is None and rng.random() < 0.5
    return Program(
        seed,
        mesh,
        explicit,
        rng.choice(layouts),
        rng.choice(list(OPTIMIZERS)),
        tuple(rng.sample(RESULTS, len(RESULTS))),
        rng.choice([("state",), ("state", "seen")]),
        population,
        micro,
        over,
        micro > 0 and rng.random() < 0.5,
        over or rng.random() < 0.7,  # `over=` has to know how the parameters are sharded
        population is None and rng.random() < 0.3,
        rng.random() < 0.7,
    )


# The losses, of functree's step and of the oracle


def total(net: Net, seen: Array, x: Array, y: Array, mask: Array) -> Any:
    """The sum of the losses of the examples that are not masked, and their number."""
    losses = jnp.mean((net(x) - y) ** 2, axis=1) * mask
    return losses.sum(), (mask.sum(), seen + 1)


def mean(net: Net, seen: Array, x: Array, y: Array, mask: Array) -> Any:
    """The mean over all examples."""
    value, (_, seen) = total(net, seen, x, y, mask)
    return value / len(x), seen


def step_of(program: Program) -> Any:
    """The training step of functree."""

    def step(state: Any, seen: Array, x: Array, y: Array, mask: Array) -> Any:
        weighted = program.weighted
        gradient = ft.value_and_grad(
            total if weighted else mean,
            has_aux=True,
            layout=LAYOUTS[program.layout] if program.given else None,
        )
        if program.micro:
            over = "data" if program.over else None
            gradient = ft.accumulate(
                gradient, program.micro, carry="seen", weighted=weighted, over=over
            )
        (value, aux), gradients = gradient(state.model, seen, x, y, mask)
        result = {
            "loss": value,
            "gradients": gradients if program.kept else None,
            "state": ft.apply_gradients(state, gradients),
            "seen": aux[1] if weighted else aux,
        }
        return tuple(result[name] for name in program.order)

    return step


def oracle(program: Program, net: Net, batches: Any) -> tuple[Net, list[float]]:
    """The model after the steps, and the losses, by plain JAX on the whole batch."""
    tx = OPTIMIZERS[program.optimizer]()
    params, static = eqx.partition(net, eqx.is_inexact_array)
    opt_state, losses = tx.init(params), list[float]()

    def loss(params: Any, x: Array, y: Array, mask: Array) -> Array:
        squares = jnp.mean((eqx.combine(params, static)(x) - y) ** 2, axis=1) * mask
        count = mask.sum() if program.weighted and program.micro else len(x)
        return squares.sum() / count

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for batch in batches:
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    return eqx.combine(params, static), losses


def make_batches(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    batches: list[Any] = []
    for _ in range(STEPS):
        x, y = rng.normal(size=(2, BATCH, SIZE)).astype(np.float32)
        batches.append((x, y, (rng.random(BATCH) < 0.7).astype(np.float32)))
    return batches


# Running


def run(program: Program) -> None:
    """Run a program, and compare. Raises whatever is wrong."""
    mesh = ft.make_mesh(**program.mesh, explicit=program.explicit)
    # Without micro-batches the sum of the losses would be another loss.
    program = dataclasses.replace(program, weighted=program.weighted and program.micro > 0)
    with jax.set_mesh(mesh):
        if program.population is None:
            run_one(program, mesh)
        else:
            run_population(program, mesh)


def run_one(program: Program, mesh: Any) -> None:
    layout, batches = LAYOUTS[program.layout], make_batches(program.seed)
    net, tx = make_net(program.seed), OPTIMIZERS[program.optimizer]()
    state = ft.TrainState.create(net, tx, layout=layout, mesh=mesh)
    options: dict[str, Any] = {"mesh": mesh, "donate": program.donated}
    if program.rules:
        options["rules"] = WHOLE if program.layout == "replicated" else layout
    step = ft.jit(step_of(program), **options)
    seen = jax.device_put(jnp.float32(0), NamedSharding(mesh, P()))
    before, losses = shardings(state), list[float]()
    for batch in batches:
        placed = [jax.device_put(one, NamedSharding(mesh, P("data"))) for one in batch]
        result = dict(zip(program.order, step(state, seen, *placed), strict=True))
        state, seen = result["state"], result["seen"]
        losses.append(float(result["loss"]))
        assert_kept(before, state)
        # Without rules and `layout=` a gradient is JAX's own.
        if program.kept and (program.rules or program.given):
            assert_kept(shardings(state.model), result["gradients"])
    assert len(step.compilations) == 1, "\n".join(map(str, step.compilations))
    assert float(seen) == STEPS * max(program.micro, 1), seen
    # Of a new model: where an array is replicated, `device_put` shares the given buffer, which was
    # donated.
    wanted, wanted_losses = oracle(program, make_net(program.seed), batches)
    assert_equal(state.model, wanted)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-4)


def run_population(program: Program, mesh: Any) -> None:
    nets = [make_net(program.seed + i) for i in range(AGENTS)]
    tx, axis = OPTIMIZERS[program.optimizer](), "data"
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *nets)
    by_agent = NamedSharding(mesh, P(axis))
    state = jax.vmap(lambda net: ft.TrainState.create(net, tx))(stacked)
    state = jax.device_put(state, by_agent)
    inner = step_of(program)
    if program.population == "filter_vmap":
        mapped: Any = eqx.filter_vmap(inner)
    elif program.population == "vmap":
        mapped = jax.vmap(inner)
    else:
        mapped = jax.vmap(inner, spmd_axis_name=axis)

    # With names: what `eqx.filter_vmap` returns takes `*args`, all of which would be donated.
    def of_all(state: Any, seen: Array, x: Array, y: Array, mask: Array) -> Any:
        return mapped(state, seen, x, y, mask)

    options: dict[str, Any] = {"mesh": mesh, "donate": program.donated}
    if program.rules:
        options["rules"] = P(axis)
    step = ft.jit(of_all, **options)
    seen = jax.device_put(jnp.zeros(AGENTS), by_agent)
    before, batches = shardings(state), [make_batches(program.seed + i) for i in range(AGENTS)]
    for i in range(STEPS):
        each = [jnp.stack(one) for one in zip(*[own[i] for own in batches], strict=True)]
        placed = [jax.device_put(one, by_agent) for one in each]
        if i == 0:
            moved = step.lower(state, seen, *placed).compile().ledger().collectives
            assert not moved, f"{moved[0]} is moved"
        result = dict(zip(program.order, step(state, seen, *placed), strict=True))
        state, seen = result["state"], result["seen"]
        assert_kept(before, state)
    assert len(step.compilations) == 1, "\n".join(map(str, step.compilations))
    for i in range(AGENTS):
        wanted, _ = oracle(program, make_net(program.seed + i), batches[i])
        found: Any = jax.tree.map(lambda x, i=i: np.asarray(x)[i], state.model)
        assert_equal(found, wanted)


def shardings(tree: Any) -> list[Any]:
    return [x.sharding for x in jax.tree.leaves(tree)]


def assert_kept(before: list[Any], tree: Any) -> None:
    for wanted, x in zip(before, jax.tree.leaves(tree), strict=True):
        assert x.sharding.is_equivalent_to(wanted, x.ndim), f"{x.sharding} for {wanted}"


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-4, atol=3e-5)
