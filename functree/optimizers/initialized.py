"""An optimizer's `init`, traced for single layers ─► the state, sharded like the parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Sharding

from functree.devices.placement import is_concrete
from functree.optimizers.over_layers import over_layers
from functree.optimizers.update_trace import UpdateTrace


def initialized(trace: UpdateTrace) -> list[jax.Array]:
    """The arrays of the state.

    `jnp.zeros_like` gives zeros that are sharded as a concrete array is. In the trace of one layer
    there are no concrete arrays. So if the parameters are on several devices, the state is made in
    one program, and what has the shape of its parameter gets the sharding of it.
    """
    if not _on_several_devices(trace.arrays):
        return over_layers(trace)
    parameters = {
        place.path: array for place, array in zip(trace.inputs, trace.arrays, strict=True)
    }
    shardings: list[Sharding | None] = []
    for place, type_ in zip(trace.outputs, trace.program.out_avals, strict=True):
        sharding = None
        if place.owner is not None:
            like: Any = parameters[place.owner]
            if like.shape == (*place.stack, *type_.shape):
                sharding = like.sharding
        shardings.append(sharding)

    def run(arrays: Sequence[Any]) -> list[jax.Array]:
        return over_layers(replace(trace, arrays=tuple(arrays)))

    return jax.jit(run, out_shardings=shardings)(list(trace.arrays))


def _on_several_devices(arrays: Sequence[Any]) -> bool:
    """Whether arrays are placed on the same several devices."""
    if not all(map(is_concrete, arrays)):
        return False
    devices = {frozenset(array.sharding.device_set) for array in arrays if array.committed}
    return len(devices) == 1 and len(next(iter(devices))) > 1
