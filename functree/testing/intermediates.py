"""`run` evaluates a traced body, and also returns records of its values."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from functree.devices.varying import varying_over
from functree.testing.steps import Body, Step

Site = tuple[int, ...]
"""The position of a value: the index of its step, and the value's index among the step's results.

For a value inside a step's body, the index of that step and the index of the body come first.
"""

Record = jax.Array


class Watch(NamedTuple):
    """A description of the values to record.

    Attributes:
        sites: the sites of the recorded values.
        record: a function that computes a value's record, a small array.
        until: a function that returns whether recording stops after an iteration of a `while`. The
            function receives the iteration's records.
    """

    sites: Collection[Site]
    record: Callable[[Site, Any], Record]
    until: Callable[[Sequence[Record]], Record] = lambda records: jnp.zeros((), bool)


RAN = -1
"""The last index in the site of the record that counts a body's runs.

It replaces a result's index.
"""

KEPT_ITERATIONS = 128
"""The number of iterations of a `while` that have separate records. Later ones share one."""


_Found = tuple[Sequence[Any], dict[Site, Record]]
"""The outputs of a body or step, with the records from inside it."""


def run(body: Body, arrays: Sequence[Any], watch: Watch, at: Site = ()) -> _Found:
    """Run a body on arrays, in the trace of another function.

    A record inside a loop has a leading dimension for the iterations. A record inside a shard_map
    has leading dimensions for the shard_map's mesh axes, with one record per device. Records
    are not summed over devices.

    Args:
        body: the body.
        arrays: the inputs of the body.
        watch: the values to record.
        at: the site of the body, if it belongs to a step.

    Returns:
        The outputs, and the records.
    """
    values = {**body.constants, **dict(zip(body.inputs, arrays, strict=True))}
    records: dict[Site, Record] = {}
    for index, step in enumerate(body.steps):
        rule = _RULES.get(step.name, _operation)
        outs, inner = rule(step, list(map(values.get, step.ins)), watch, (*at, index))
        records.update(inner)
        for result, (value, out) in enumerate(zip(step.outs, outs, strict=True)):
            values[value] = out
            site = (*at, index, result)
            if site in watch.sites:
                records[site] = _varying(watch.record(site, out))
    return list(map(values.get, body.outputs)), records


def _operation(step: Step, ins: Sequence[Any], watch: Watch, at: Site) -> _Found:
    return step.run(*ins), {}


def _scan(step: Step, ins: Sequence[Any], watch: Watch, at: Site) -> _Found:
    constants, start, xs = step.body_operands(ins)
    (body,) = step.bodies

    def iteration(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        outs, records = run(body, [*constants, *carry, *x], watch, (*at, 0))
        return outs[: len(start)], (outs[len(start) :], records)

    carry, (stacked, recorded) = lax.scan(
        iteration,
        start,
        xs,
        length=step.params["length"],
        reverse=step.params["reverse"],
        unroll=step.params["unroll"],
    )
    return [*carry, *stacked], recorded


def _while(step: Step, ins: Sequence[Any], watch: Watch, at: Site) -> _Found:
    of_condition = ins[: step.params["cond_nconsts"]]
    constants, start, _ = step.body_operands(ins)
    (body,) = step.bodies
    goes_on = jaxpr_as_fun(step.params["cond_jaxpr"])

    def iteration(carry: Sequence[Any]) -> _Found:
        return run(body, [*constants, *carry], watch, (*at, 0))

    def iteration_and_slots(state: _Slots) -> _Slots:
        outs, records = iteration(state.carry)
        # All iterations beyond the separate slots share the last slot.
        slot = jnp.minimum(state.count, KEPT_ITERATIONS)

        def updated(before: Record, record: Record) -> Record:
            return jnp.where(state.done, before, before.at[slot].set(record))

        kept = jax.tree.map(updated, state.kept, records)
        count = jnp.where(state.done, state.count, state.count + 1)
        done = state.done | _varying(watch.until(list(records.values())))
        return _Slots(outs, kept, count, done)

    _, shapes = jax.eval_shape(iteration, start)
    kept: dict[Site, Record] = {}
    for site, one in shapes.items():
        kept[site] = _varying(jnp.zeros((KEPT_ITERATIONS + 1, *one.shape), one.dtype))
    zero, no = _varying(jnp.zeros((), jnp.int32)), _varying(jnp.zeros((), bool))
    last = lax.while_loop(
        lambda state: goes_on(*of_condition, *state.carry)[0],
        iteration_and_slots,
        _Slots(start, kept, zero, no),
    )
    return last.carry, {**last.kept, (*at, 0, RAN): last.count}


class _Slots(NamedTuple):
    """The state of a `while` that records its iterations.

    Attributes:
        carry: the state of the original loop.
        kept: the records, with a leading dimension for the iterations.
        count: the number of recorded iterations.
        done: whether recording has stopped.
    """

    carry: Sequence[Any]
    kept: Mapping[Site, Record]
    count: Any
    done: Any


def _cond(step: Step, ins: Sequence[Any], watch: Watch, at: Site) -> _Found:
    which, *operands = ins
    branches = [functools.partial(_branch, step, watch, at, i) for i in range(len(step.bodies))]
    # Each branch must return the records of all branches.
    blank: dict[Site, jax.ShapeDtypeStruct] = {}
    for branch in branches:
        blank |= jax.eval_shape(branch, *operands)[1]

    def padded(branch: Callable[..., _Found], *operands: Any) -> _Found:
        outs, records = branch(*operands)
        zeros = {site: _varying(jnp.zeros(one.shape, one.dtype)) for site, one in blank.items()}
        return outs, zeros | records

    return lax.switch(which, [functools.partial(padded, one) for one in branches], *operands)


def _branch(step: Step, watch: Watch, at: Site, index: int, *operands: Any) -> _Found:
    outs, records = run(step.bodies[index], operands, watch, (*at, index))
    return outs, {**records, (*at, index, RAN): _varying(jnp.ones((), jnp.int32))}


def _shard_map(step: Step, ins: Sequence[Any], watch: Watch, at: Site) -> _Found:
    axes = manual_axes(step)
    (body,) = step.bodies

    def on_device(*local: Any) -> _Found:
        outs, records = run(body, local, watch, (*at, 0))
        ones = (1,) * len(axes)
        return outs, {site: one.reshape(*ones, *one.shape) for site, one in records.items()}

    return jax.shard_map(
        on_device,
        mesh=step.params["mesh"],
        in_specs=tuple(step.params["in_specs"]),
        out_specs=(list(step.params["out_specs"]), PartitionSpec(*axes)),
        axis_names=set(axes),
        check_vma=step.params["check_vma"],
    )(*ins)


def manual_axes(step: Step) -> tuple[str, ...]:
    """Return the mesh axes that a shard_map makes Manual, in the order of the mesh."""
    new = step.params["newly_manual_axes"]
    return tuple(axis for axis in step.params["mesh"].axis_names if axis in new)


_RULES: Mapping[str, Callable[[Step, Sequence[Any], Watch, Site], _Found]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


def _varying(record: Record) -> Record:
    """Give a record a type that varies along all Manual axes.

    In a shard_map that checks types, all branches of a conditional and all iterations of a loop
    must have the same type.
    """
    return varying_over(record, jax.sharding.get_abstract_mesh().manual_axes)
