"""A `shard_map` in a traced function ─► the same, some of whose results are in parts: it does not
sum them over the batch."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

from functree.devices.specs import entry, mesh_axes, named_axes
from functree.transforms.accumulate.equations import Equation, closed, inner
from functree.transforms.accumulate.parts.dimensions import Dimension
from functree.transforms.accumulate.parts.held import Devices, Held

# What a sum over mesh axes is called in a traced function: the second one is that of an array that
# varies along them by its type.
_SUMS = ("psum", "psum_invariant")


def sums_over(equation: Equation, axes: tuple[str, ...]) -> list[bool]:
    """For each result of a shard_map, whether the last thing it does is to sum it over all these
    mesh axes."""
    if AxisType.Explicit in equation.params["mesh"].axis_types:
        return [False] * len(equation.outvars)
    found: list[bool] = []
    made = _made(equation)
    for result, spec in zip(_body(equation).outvars, equation.params["out_specs"], strict=True):
        last = None if isinstance(result, Literal) else made.get(result)
        summed = last is not None and _is_sum(last) and set(axes) <= _axes(last)
        found.append(summed and named_axes(spec).isdisjoint(axes))
    return found


def _is_sum(equation: Equation) -> bool:
    """Whether an equation sums over mesh axes, and not over groups of their devices."""
    groups = equation.params.get("axis_index_groups")
    return equation.primitive.name in _SUMS and groups is None


def sharded_dimensions(equation: Equation, axes: tuple[str, ...]) -> list[Dimension]:
    """The dimension of each result of a shard_map that is sharded over these mesh axes."""
    found: list[Dimension] = []
    for spec in equation.params["out_specs"]:
        own: Dimension = None
        for dim, one in enumerate(spec.partitions):
            if axes[0] in mesh_axes(one):
                own = dim
        found.append(own)
    return found


def mapped_in_parts(
    equation: Equation, devices: Devices, wanted: Sequence[bool], arrays: Sequence[Any]
) -> list[Held]:
    """The results of a shard_map, some of them in parts.

    Args:
        equation: the shard_map.
        devices: the devices that have the parts.
        wanted: for each result, whether it is wanted in parts.
        arrays: the operands.
    """
    body, made, params = _body(equation), _made(equation), equation.params
    axes = devices.axes
    outputs: list[Any] = []
    specs: list[PartitionSpec] = []
    rest: list[tuple[str, ...]] = []
    for result, spec, want in zip(body.outvars, params["out_specs"], wanted, strict=True):
        outputs.append(_summed(made[result], result) if want else result)
        specs.append(PartitionSpec(entry(axes), *spec.partitions) if want else spec)
        rest.append(tuple(sorted(_axes(made[result]) - set(axes))) if want else ())
    function = body.replace(outvars=outputs)
    run = jaxpr_as_fun(closed(function))

    def local(*blocks: Any) -> list[Any]:
        new = list(run(*blocks))
        for i, want in enumerate(wanted):
            if rest[i]:
                new[i] = jax.lax.psum(new[i], rest[i])
            if want:
                new[i] = new[i][None]
        return new

    mapped = jax.shard_map(
        local,
        mesh=devices.mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=specs,
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(map(Held, mapped(*arrays), wanted))


def _body(equation: Equation) -> Any:
    return inner(equation.params["jaxpr"])


def _made(equation: Equation) -> dict[Any, Equation]:
    """The equation that each value of a shard_map is the result of."""
    return {result: one for one in _body(equation).eqns for result in one.outvars}


def _summed(equation: Equation, result: Any) -> Any:
    """What a collective of one or several values has made a result of."""
    return equation.invars[equation.outvars.index(result)]


def _axes(equation: Equation) -> set[str]:
    """The mesh axes that a collective is over."""
    return set(equation.params["axes"])
