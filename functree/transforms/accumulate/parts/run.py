"""A plan and arrays ─► the results of its function, those in parts that the plan keeps so."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun
from jax.extend.source_info_util import current_name_stack, new_name_stack, user_context
from jax.sharding import AxisType, NamedSharding

from functree.transforms.accumulate.equations import Atom, Equation, closed, constants, inner
from functree.transforms.accumulate.parts.held import Devices, Held, once
from functree.transforms.accumulate.parts.mapped import mapped_in_parts
from functree.transforms.accumulate.parts.plan import Plan, Step
from functree.transforms.accumulate.parts.uses import Kind, Use
from functree.tree.jaxprs import scan_sizes


def run_plan(plan: Plan, devices: Devices, operands: Sequence[Held]) -> list[Held]:
    """The results of a plan's function.

    Args:
        plan: the plan.
        devices: the devices that have the parts.
        operands: the operands.
    """
    return _Runner(devices).run(plan, operands)


@dataclass(frozen=True)
class _Runner:
    """What runs a plan on a mesh.

    Attributes:
        devices: the devices that have the parts.
    """

    devices: Devices

    def run(self, plan: Plan, operands: Sequence[Held]) -> list[Held]:
        """The results of a function."""
        own = inner(plan.function)
        values = _Values(self.devices, own)
        values.set(own.constvars, [Held(one) for one in constants(plan.function)])
        values.set(own.invars, operands)
        waiting: list[Equation] = []
        for index, equation in enumerate(own.eqns):
            step = plan.steps.get(index)
            if step is None:
                waiting.append(equation)
                continue
            values.run(waiting, own.eqns[index:])
            waiting = []
            with _described(equation):
                results = self._step(equation, step, values)
            values.set(equation.outvars, results)
        values.run(waiting, [])
        results = map(values.held, own.outvars)
        return [self._as(one, want) for one, want in zip(results, plan.results, strict=True)]

    def _as(self, held: Held, in_parts: bool) -> Held:
        """A value, in parts or whole."""
        if in_parts and not held.in_parts:
            return self.devices.parts_of(held.array)
        return held if in_parts else Held(self.devices.whole(held))

    def _step(self, equation: Equation, step: Step, values: "_Values") -> list[Held]:
        """The results of an equation."""
        if equation.primitive.name == "shard_map":
            arrays = list(map(values.whole, equation.invars))
            return mapped_in_parts(equation, self.devices, step.results, arrays)
        if not step.plans:
            return [self._local(equation, step.uses, values)]
        operands = list(map(values.held, equation.invars))
        match equation.primitive.name:
            case "scan":
                return self._scan(equation, step, operands)
            case "cond":
                return self._cond(step, values.whole(equation.invars[0]), operands[1:])
        return self.run(step.plans[0], _apart_from_forward(equation, operands))

    def _local(self, equation: Equation, uses: Sequence[Use], values: "_Values") -> Held:
        """The result of an equation, of which each device computes its own part."""
        arrays: list[Any] = [self.devices.numbers]
        dims: list[int | None] = [0]
        kinds: list[Kind] = []
        for operand, use in zip(equation.invars, uses, strict=True):
            held = values.held(operand)
            kind = use.kind
            # What could be in parts is whole if nothing else that is made of it is wanted so.
            if kind is Kind.PART and not held.in_parts:
                kind = Kind.ONCE
            kinds.append(kind)
            arrays.append(held.array if kind is Kind.PART else values.whole(operand))
            dims.append({Kind.PART: 0, Kind.OWN: use.dim}.get(kind))

        def local(number: jax.Array, *blocks: jax.Array) -> jax.Array:
            given: list[jax.Array] = []
            for block, kind in zip(blocks, kinds, strict=True):
                if kind is Kind.PART:
                    block = block[0]
                if kind is Kind.ONCE:
                    block = once(block, number)
                given.append(block)
            return self._bound(equation, given)[None]

        return Held(self.devices.each(local, arrays, dims), True)

    def _bound(self, equation: Equation, given: Sequence[jax.Array]) -> jax.Array:
        """The result of an equation for other operands, on one device."""
        name, params = equation.primitive.name, equation.params
        if name in ("sharding_constraint", "reshard"):
            target = params["sharding" if name == "sharding_constraint" else "dst_sharding"]
            return self._constrained(given[0], target)
        new: dict[str, Any] = {}
        for key, value in params.items():
            local = isinstance(value, NamedSharding)
            new[key] = self.devices.local_sharding(value) if local else value
        return equation.primitive.bind(*given, **new)

    def _constrained(self, array: jax.Array, target: Any) -> jax.Array:
        """A part, sharded as the whole value is along the other mesh axes."""
        if not isinstance(target, NamedSharding):
            return array
        local = self.devices.local_sharding(target)
        others = {kind for kind in local.mesh.axis_types if kind != AxisType.Manual}
        if others == {AxisType.Explicit}:
            return jax.sharding.reshard(array, local)
        if others == {AxisType.Auto}:
            return jax.lax.with_sharding_constraint(array, local)
        return array

    def _scan(self, equation: Equation, step: Step, operands: Sequence[Held]) -> list[Held]:
        """The results of a loop."""
        scan, (plan,) = scan_sizes(equation), step.plans
        first, last = scan.constants, scan.constants + scan.carried
        same, each = operands[:first], operands[last:]
        carried = list(plan.results[: scan.carried])
        start = [self._as(*one) for one in zip(operands[first:last], carried, strict=True)]

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            before = map(Held, carry, carried)
            own = map(Held, slices, [held.in_parts for held in each])
            arrays = [held.array for held in self.run(plan, [*same, *before, *own])]
            return arrays[: scan.carried], arrays[scan.carried :]

        # A slice of all iterations has its parts in front.
        slices = [jnp.moveaxis(x, 0, 1) if in_parts else x for x, in_parts in each]
        params = equation.params
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        end, outputs = jax.lax.scan(body, [held.array for held in start], slices, **options)
        found = list(map(Held, end, carried))
        for x, in_parts in zip(outputs, plan.results[scan.carried :], strict=True):
            found.append(Held(jnp.moveaxis(x, 1, 0) if in_parts else x, in_parts))
        return found

    def _cond(self, step: Step, index: Any, operands: Sequence[Held]) -> list[Held]:
        """The results of one of several branches."""
        in_parts = [held.in_parts for held in operands]

        def branch(plan: Plan) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                return [held.array for held in self.run(plan, list(map(Held, arrays, in_parts)))]

            return run

        arrays = [held.array for held in operands]
        found = jax.lax.switch(index, list(map(branch, step.plans)), *arrays)
        return list(map(Held, found, step.results))


class _Values:
    """The values of a function while it runs."""

    def __init__(self, devices: Devices, function: Any):
        self._devices = devices
        self._function = function
        self._held: dict[Atom, Held] = {}
        self._whole: dict[Atom, Any] = {}

    def set(self, variables: Sequence[Atom], values: Sequence[Held]) -> None:
        """Note the values of variables."""
        self._held.update(zip(variables, values, strict=True))

    def held(self, atom: Atom) -> Held:
        """The value of a variable or literal."""
        if isinstance(atom, Literal):
            kind: Any = atom.aval
            return Held(jnp.asarray(atom.val, kind.dtype))
        return self._held[atom]

    def whole(self, atom: Atom) -> Any:
        """The same, whole."""
        held = self.held(atom)
        if not held.in_parts:
            return held.array
        # It is summed up once for all that need it whole.
        if atom not in self._whole:
            self._whole[atom] = self._devices.whole(held)
        return self._whole[atom]

    def run(self, equations: Sequence[Equation], later: Sequence[Equation]) -> None:
        """Run equations as they are, all together.

        Args:
            equations: the equations.
            later: those that come after them.
        """
        if not equations:
            return
        # In the order of the program, which has to be that of other processes too.
        made = dict.fromkeys(result for one in equations for result in one.outvars)
        needed = dict.fromkeys(one for one in _variables(equations) if one not in made)
        asked = {*_variables(later)}
        asked.update(one for one in self._function.outvars if not isinstance(one, Literal))
        results = [one for one in made if one in asked]
        function = self._function.replace(
            constvars=(), invars=list(needed), outvars=results, eqns=list(equations)
        )
        found = jaxpr_as_fun(closed(function))(*map(self.whole, needed))
        self.set(results, list(map(Held, found)))


def _variables(equations: Sequence[Equation]) -> Iterator[Atom]:
    """The operands of equations that are no literals."""
    for equation in equations:
        for operand in equation.invars:
            if not isinstance(operand, Literal):
                yield operand


def _described(equation: Equation) -> Any:
    """A context in which what is traced has the line of source and the name of an equation."""
    info = equation.source_info
    stack = current_name_stack() + info.name_stack
    if equation.primitive.name in ("remat2", "checkpoint"):
        stack = stack + new_name_stack("checkpoint")
    return user_context(info.traceback, name_stack=stack)


def _apart_from_forward(equation: Equation, operands: Sequence[Held]) -> list[Held]:
    """The operands of an inner function. Those of a recomputation are kept apart from what the
    forward pass has computed, as JAX does: the compiler would join the two and keep the values."""
    prevented = equation.params.get("prevent_cse", False)
    if not prevented or not equation.params.get("differentiated", False):
        return list(operands)
    arrays = [held.array for held in operands]
    if prevented is True:
        prevented = (True,) * len(arrays)
    own = [array for array, apart in zip(arrays, prevented, strict=True) if apart]
    new = iter(jax.lax.optimization_barrier(own))
    pairs = zip(operands, prevented, strict=True)
    return [held._replace(array=next(new)) if apart else held for held, apart in pairs]
