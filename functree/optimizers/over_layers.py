"""An optimizer's trace for single layers ─► its outputs for all layers of the stacks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType

from functree.optimizers.update_trace import UpdateTrace
from functree.tree.arrays import is_array

Level = tuple[int, int]
"""A dimension of stacks: how many stacks are around it, and its size. Stacks of equal size that are
in equally many others are mapped together."""


def over_layers(trace: UpdateTrace) -> list[jax.Array]:
    """The outputs of a traced optimizer, with the dimensions of their stacks.

    What belongs to a stack is mapped over it, and everything else is computed once. Each layer
    draws random numbers of its own: a key that is there once is split over the layers.
    """

    def run(*arrays: Any) -> list[Any]:
        # What a trace computes without its inputs may come out as a number of Python.
        outputs = jaxpr_as_fun(trace.program)(*arrays)
        types = trace.program.out_avals
        return [
            output if is_array(output) else jnp.asarray(output, type_.dtype)
            for output, type_ in zip(outputs, types, strict=True)
        ]

    stacks = [place.stack for place in trace.inputs]
    if not any(place.is_key for place in trace.inputs):
        of_outputs = [place.stack for place in trace.outputs]
        return _mapped(run, stacks, of_outputs)(*trace.arrays)
    found: dict[int, jax.Array] = {}
    for stack in dict.fromkeys(place.stack for place in trace.outputs):
        wanted = [i for i, place in enumerate(trace.outputs) if place.stack == stack]
        outputs = _with_keys(trace, run, stack, wanted)
        found.update(zip(wanted, outputs, strict=True))
    return [found[i] for i in range(len(trace.outputs))]


def _with_keys(
    trace: UpdateTrace, run: Callable[..., list[Any]], stack: tuple[int, ...], wanted: Sequence[int]
) -> list[jax.Array]:
    """The outputs that belong to stacks of these sizes, with a key for each layer.

    If all stacks were mapped in one run, as is done without keys, everything that is random would
    be computed for each layer of each stack, a table of embeddings too.
    """
    arrays: list[Any] = []
    stacks: list[tuple[int, ...]] = []
    given: list[Any] = [*trace.arrays]
    for place, array, type_ in zip(trace.inputs, given, trace.program.in_avals, strict=True):
        own: tuple[int, ...] = stack if place.is_key else place.stack
        if own not in ((), stack):
            # It belongs to other stacks. No output that is wanted depends on it, but an operation
            # such as a `cond` of all parameters takes it.
            array, own = _unused(type_), ()
        elif place.is_key and stack:
            array = jax.random.split(array, stack)
        arrays.append(array)
        stacks.append(own)

    def some(*arrays: Any) -> list[Any]:
        outputs = run(*arrays)
        return [outputs[i] for i in wanted]

    return _mapped(some, stacks, [stack] * len(wanted))(*arrays)


def _unused(type_: Any) -> Any:
    """An array of a type, in the place of one whose values make no difference."""
    if jnp.issubdtype(type_.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    sharding = type_.sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    zeros = jnp.zeros(type_.shape, type_.dtype, out_sharding=sharding if explicit else None)
    varying = type_.manual_axis_type.varying
    return jax.lax.pcast(zeros, tuple(varying), to="varying") if varying else zeros


def _mapped(
    run: Callable[..., list[Any]],
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
) -> Callable[..., list[Any]]:
    """A function mapped over the stacks of its inputs, the outermost stacks outermost."""
    levels = sorted({level for stack in inputs for level in enumerate(stack)})
    for level in reversed(levels):
        run = jax.vmap(
            run,
            in_axes=tuple(_axis(stack, level) for stack in inputs),
            out_axes=[_axis(stack, level) for stack in outputs],
            axis_size=level[1],
        )
    return run


def _axis(stack: tuple[int, ...], level: Level) -> int | None:
    """The dimension that is mapped. The stacks around it are mapped already."""
    return 0 if level in enumerate(stack) else None
