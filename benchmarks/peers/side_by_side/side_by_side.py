"""This module runs one program in five libraries.

It returns their results, their messages about five mistakes, and the times of their calls.
"""

import functools
import gc
import importlib
import random
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

HERE = Path(__file__).parent
LIBRARIES = {
    "functree": "functree",
    "nnx": "Flax NNX",
    "linen": "Flax Linen",
    "haliax": "haliax",
    "equinox": "Equinox by hand",
}
MISTAKES = {
    "misspelled": "a misspelled name, `hiden`",
    "indivisible": "250 hidden units over 4 devices",
    "missing": "no rule for `hidden`",
    "wrong_path": "a path that matches nothing, `upp`",
    "number": "a new Python number in each of 3 calls",
}
CACHED = "Flax NNX, `nnx.cached_partial`"
FLOOR = "`jax.jit` on a flat list"
SIZES = {(64, 256), (256, 16)}  # the shapes of the two parameters


class Run(NamedTuple):
    """The results of a program.

    Attributes:
        losses: the losses of the first steps.
        shards: the shape of each parameter on one device.
    """

    losses: list[float]
    shards: dict[tuple[int, ...], tuple[int, ...]]


def mesh() -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    return Mesh(
        devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )


@contextmanager
def as_a_program() -> Iterator[Mesh]:
    """Set JAX's default settings and the mesh, as in a user's program."""
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.set_mesh(mesh()),
    ):
        warnings.simplefilter("ignore")
        yield mesh()


@functools.cache
def program(library: str) -> ModuleType:
    with warnings.catch_warnings():
        # The libraries themselves raise warnings.
        warnings.simplefilter("ignore")
        return importlib.import_module(f"with_{library}")


def lines(library: str) -> int:
    """Count a program's lines after `ruff format`, without empty lines and comments."""
    text = (HERE / f"with_{library}.py").read_text(encoding="utf-8")
    shown = re.search(r"(?s)\[start:program\](.*?)# --8<-- \[end", text)
    assert shown is not None
    return sum(
        bool(line.strip()) and "#" != line.strip()[0]
        for line in shown[1].splitlines()
    )


def batch() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    return x, x[:, :16].argmax(axis=1).astype(np.int32)


def from_the_same(state: Any) -> Any:
    """Replace a state's parameters with values that all libraries share."""

    def of(leaf: Any) -> Any:
        if getattr(leaf, "shape", None) not in SIZES or not jnp.any(
            leaf != 0
        ):
            return leaf
        values = np.random.default_rng(leaf.shape[0]).normal(
            size=leaf.shape, scale=0.1
        )
        return jax.device_put(values.astype(np.float32), leaf.sharding)

    return jax.tree.map(of, state)


def trained(library: str, steps: int = 4) -> Run:
    """Train with a library's program, and return its results."""
    module, losses = program(library), []
    with as_a_program() as devices:
        state = from_the_same(module.create(devices, jax.random.key(0)))
        x, labels = module.place(devices, *batch())
        for _ in range(steps):
            state, loss = module.step(state, x, labels)
            losses.append(float(loss))
    return Run(losses, shards(state))


def shards(tree: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of each matrix on one device."""
    arrays = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if getattr(leaf, "ndim", 0) == 2
    ]
    return {
        array.shape: array.sharding.shard_shape(array.shape)
        for array in arrays
    }


def said(library: str, mistake: str) -> str:
    """Return a library's message about a mistake.

    It is an error's class and text, or a warning. Without a message, it describes the behavior.
    """
    if mistake == "number":
        return _of_a_number(program(library))
    with as_a_program() as devices:
        call = functools.partial(
            _make, program(library), mistake, devices, jax.random.key(0)
        )
        try:
            result = call()
        # functree raises subclasses of ValueError here.
        except (ValueError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
    return _in_silence(shards(result), mistake)


def _make(
    module: ModuleType, mistake: str, devices: Mesh, key: jax.Array
) -> Any:
    if mistake == "indivisible":
        return module.create(devices, key, hidden=250)
    return getattr(module, mistake)(devices, key)


def _in_silence(
    found: dict[tuple[int, ...], tuple[int, ...]], mistake: str
) -> str:
    if mistake == "wrong_path":
        return "no message: all parameters are trained"
    whole = [shape for shape, shard in found.items() if shape == shard]
    return f"no message: {len(whole)} of {len(found)} matrices replicated"


def _of_a_number(module: ModuleType) -> str:
    """Count the compilations for three Python numbers, and return the count and the warning."""
    with as_a_program(), warnings.catch_warnings(record=True) as caught:
        x = jnp.ones(2)
        warnings.simplefilter("always")
        with compilations() as counted:
            for by in (1.5, 2.5, 3.5):
                module.scaled(x, by)
    words = [
        str(one.message)
        for one in caught
        if "compiles" in str(one.message)
    ]
    often = f"{len(counted)} compilation{'s' if len(counted) > 1 else ''}"
    return f"{often}; {words[0] if words else 'no message'}"


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Collect the compile time, in seconds, of each program compiled in this context."""
    found: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def times(rounds: int) -> dict[str, float]:
    """Return the microseconds until a step's call returns, as the lower quartile of all rounds.

    Each program has its own state. All run in turn, in a new order each round, so that a busy
    machine slows all of them. The clock stops before the devices finish.
    """
    with as_a_program() as devices:
        calls = {
            name: _stepper(program(name), devices) for name in LIBRARIES
        }
        calls[CACHED] = _cached(devices)
        calls[FLOOR] = _floor(devices)
        found: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            for _ in range(5):
                jax.block_until_ready(call())
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            for name in random.sample(list(calls), len(calls)):
                before = time.perf_counter()
                result = calls[name]()
                found[name].append(time.perf_counter() - before)
                jax.block_until_ready(result)
        gc.enable()
    return {
        name: 1e6 * statistics.quantiles(all_, n=4)[0]
        for name, all_ in found.items()
    }


def _stepper(module: ModuleType, devices: Mesh) -> Callable[[], Any]:
    """Return a function that runs the next step and returns its loss."""
    state = module.create(devices, jax.random.key(0))
    placed = module.place(devices, *batch())

    def call() -> Any:
        nonlocal state
        state, loss = module.step(state, *placed)
        return loss

    return call


def _cached(devices: Mesh) -> Callable[[], Any]:
    """Return NNX's step with its arguments bound once, as its guide recommends for loops."""
    module = program("nnx")
    state = module.create(devices, jax.random.key(0))
    bound = module.nnx.cached_partial(module.update, *state)
    return functools.partial(bound, *module.place(devices, *batch()))


def _floor(devices: Mesh) -> Callable[[], Any]:
    """Return the step compiled by `jax.jit` alone, on a flat list of donated arrays."""
    module = program("equinox")
    placed = module.place(devices, *batch())
    leaves, treedef = jax.tree.flatten(
        module.create(devices, jax.random.key(0))
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        leaves: list[jax.Array], x: jax.Array, labels: jax.Array
    ) -> Any:
        state, loss = module.step(
            jax.tree.unflatten(treedef, leaves), x, labels
        )
        return jax.tree.leaves(state), loss

    def call() -> Any:
        nonlocal leaves
        leaves, loss = step(leaves, *placed)
        return loss

    return call
