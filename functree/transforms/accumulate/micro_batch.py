"""A call of a gradient function ─► the function, traced for one micro-batch; and its results summed
over all micro-batches by a loop."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType

from functree.devices.specs import spec_text
from functree.devices.varying import varying_axes
from functree.errors import FunctreeTypeError, Problem, count
from functree.labels.leaf import Leaf
from functree.transforms.accumulate.results import GradientParts, Results
from functree.transforms.accumulate.roles import Call, Role
from functree.tree.arrays import AnyArray, array_text, value_text
from functree.tree.jaxprs import AnyJaxpr
from functree.tree.skeleton.skeleton import Skeleton

ArrayType = Any
"""The type of an array in a trace, as `jax.typeof` returns it, for which JAX has no public name."""


class MicroBatch(NamedTuple):
    """A gradient function, traced for one micro-batch.

    Attributes:
        function: the traced function of the number of a micro-batch and of the operands.
        skeletons: those of the parts of the result.
        parameters: for the index of each gradient among the arrays of the result, the index of its
            parameter among the operands.
        carried: for the index of each carried array of the result, the index of its operand.
    """

    function: AnyJaxpr
    skeletons: tuple[Skeleton, Skeleton, Skeleton]
    parameters: dict[int, int]
    carried: dict[int, int]

    @property
    def types(self) -> Sequence[ArrayType]:
        """The types of the arrays in the result."""
        return self.function.out_avals

    @property
    def weight(self) -> int | None:
        """The index of the weight; None if there is none."""
        averaged, weight, _ = map(len, self.skeletons)
        return averaged if weight else None

    def is_summed(self, index: int) -> bool:
        """Whether an array of the result is summed over the micro-batches. The others are carried,
        or those of the last micro-batch."""
        if index in self.carried:
            return False
        return index == self.weight or jnp.issubdtype(self.types[index].dtype, jnp.inexact)

    def parts(self, arrays: Sequence[AnyArray]) -> GradientParts:
        """The parts of a result with these arrays."""
        rest = list(arrays)
        found: list[Any] = []
        for skeleton in self.skeletons:
            found.append(skeleton.fill(rest[: len(skeleton)]))
            rest = rest[len(skeleton) :]
        return GradientParts(*found)


def operands_of(call: Call, steps: int) -> list[Any]:
    """The arrays of a call as operands of the loop: the whole batch, all keys, the first carried
    values."""
    operands: list[Any] = []
    for leaf, role in zip(call.leaves.leaves, call.roles, strict=True):
        match role:
            case Role.KEY:
                operands.append(jax.random.split(leaf.value, steps))
            case Role.CARRIED:
                # An array that was made of a Python number has a weak type, which a sum with
                # another array would change.
                array = jnp.asarray(leaf.value)
                operands.append(jax.lax.convert_element_type(array, array.dtype))
            case _:
                operands.append(leaf.value)
    return operands


def trace(
    fn: Callable[..., Any], call: Call, operands: Sequence[Any], steps: int, results: Results
) -> MicroBatch:
    """A gradient function, traced for one micro-batch.

    Raises:
        FunctreeError: if it does not return what is carried, or returns it with another type.
    """
    found: list[tuple[tuple[Skeleton, Skeleton, Skeleton], dict[int, int]]] = []

    def compute(i: jax.Array, *operands: jax.Array) -> list[AnyArray]:
        values: list[Any] = []
        for value, role in zip(operands, call.roles, strict=True):
            match role:
                case Role.BATCH:
                    values.append(_examples(value, i, steps))
                case Role.KEY:
                    values.append(jax.lax.dynamic_index_in_dim(value, i, keepdims=False))
                case _:
                    values.append(value)
        parts = results.split(call.run(fn, values))
        if parts.weight is not None:
            parts = parts._replace(weight=_as_weight(results.name, parts.weight))
        (averaged, first), (weight, second), (carried, third) = map(Skeleton.apart, parts)
        found.append(((averaged, weight, carried), call.parameters_of(parts.averaged)))
        return [*first, *second, *third]

    function = jax.make_jaxpr(compute)(jnp.zeros((), jnp.int32), *operands)
    skeletons, parameters = found[-1]
    start = len(skeletons[0]) + len(skeletons[1])
    carried = {start + k: operand for k, operand in enumerate(call.carried)}
    micro_batch = MicroBatch(function, skeletons, parameters, carried)
    _check_carried(call, operands, micro_batch)
    return micro_batch


def _as_weight(name: str, weight: Any) -> jax.Array:
    """A weight as an array."""
    if isinstance(weight, int | float | np.ndarray | np.generic | jax.Array):
        array = jnp.asarray(weight)
        if array.shape == () and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return array
    raise FunctreeTypeError(
        f"accumulate: the weight that {name} returns as aux is {value_text(weight)}, not a scalar"
    )


def _examples(x: jax.Array, i: jax.Array, steps: int) -> jax.Array:
    """Every `steps`-th example from the i-th on.

    Contiguous examples of a sharded batch would be on a few devices only. These are on every
    device, so they are sharded like the batch and no data moves.
    """
    apart = jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:]))
    return jax.lax.dynamic_index_in_dim(apart, i, axis=1, keepdims=False)


def _check_carried(call: Call, operands: Sequence[Any], micro_batch: MicroBatch) -> None:
    """Raise for carried arrays whose types are not those of the next values."""
    problems: list[Problem] = []
    for result, operand in micro_batch.carried.items():
        leaf: Leaf = call.leaves.leaves[operand]
        was = _type_text(jax.typeof(operands[operand]))
        becomes = _type_text(micro_batch.types[result])
        if was != becomes:
            why = f"is {was} in the first micro-batch, and {becomes} in the next"
            varies = _varying(micro_batch.types[result]) - varying_axes(operands[operand])
            problems.append(leaf.problem(why, _remedy(varies) if varies else _SAME_TYPE))
    if problems:
        arrays = count(len(problems), "array")
        raise FunctreeTypeError(
            f"accumulate: {arrays} in `carry` would change between micro-batches", problems
        )


_SAME_TYPE = "return it with the shape and dtype that it had, such as by `.astype(old.dtype)`"


def _remedy(axes: frozenset[str]) -> str:
    """What to do with a carried value that differs between the shards over these mesh axes."""
    names = ", ".join(f'"{axis}"' for axis in sorted(axes))
    names = f"({names})" if len(axes) > 1 else names
    return (
        f"average it over the shards in the function (`jax.lax.pmean(x, {names})`); or pass one "
        f'that differs too (`jax.lax.pcast(x, {names}, to="varying")`)'
    )


def _type_text(array: ArrayType) -> str:
    """What of the type of an array a loop keeps: dtype, shape, on Explicit axes its sharding, and
    inside a shard_map the mesh axes along which it varies."""
    text = array_text(array)
    if AxisType.Explicit in array.sharding.mesh.axis_types:
        text += f" {spec_text(array.sharding.spec)}"
    varying = _varying(array)
    if varying:
        text += f" varying over {', '.join(sorted(varying))}"
    return text


def _varying(kind: ArrayType) -> frozenset[str]:
    """The mesh axes along which an array of a type varies."""
    manual = kind.manual_axis_type  # None outside of shard_map
    return frozenset() if manual is None else frozenset(manual.varying)


def summed(micro_batch: MicroBatch, operands: Sequence[Any], steps: int) -> list[jax.Array]:
    """The arrays of the result: the sum over all micro-batches, the last carried value, or the
    value of the last micro-batch."""
    run = jaxpr_as_fun(micro_batch.function)

    def add(total: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], None]:
        given = [i, *operands]
        for k, operand in micro_batch.carried.items():
            given[1 + operand] = total[k]
        new = list(run(*given))
        for k, one in enumerate(new):
            new[k] = jnp.asarray(one).astype(total[k].dtype)  # JAX returns a literal as a number
            if micro_batch.is_summed(k):
                new[k] += total[k]
        return new, None

    # The loop carries the sums: stacked outputs would need the memory of all gradients.
    start: list[jax.Array] = []
    for k, kind in enumerate(micro_batch.types):
        operand = micro_batch.carried.get(k)
        start.append(_zeros(kind) if operand is None else operands[operand])
    total, _ = jax.lax.scan(add, start, jnp.arange(steps, dtype=jnp.int32))
    return total


def _zeros(kind: ArrayType) -> jax.Array:
    """The sum of no micro-batches. The carry of a scan must keep its type, with its sharding, and
    the mesh axes of a shard_map along which it varies."""
    dtype = _wide(kind.dtype)
    if AxisType.Explicit in kind.sharding.mesh.axis_types:
        zeros = jnp.zeros(kind.shape, dtype, out_sharding=kind.sharding)
    else:
        zeros = jnp.zeros(kind.shape, dtype)
    along = tuple(sorted(_varying(kind) - varying_axes(zeros)))
    return jax.lax.pcast(zeros, along, to="varying") if along else zeros


def _wide(dtype: np.dtype) -> np.dtype:
    """The dtype of a sum, float32 or wider: in a narrower one, small terms would be lost in
    rounding."""
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)
    return dtype


def averaged(micro_batch: MicroBatch, totals: Sequence[jax.Array], number: int) -> list[jax.Array]:
    """The arrays of the result: the mean of those that are summed, over this number of terms or by
    the sum of the weights. The weight is that sum."""
    weight = micro_batch.weight
    divisor = jnp.asarray(number) if weight is None else totals[weight]
    found: list[jax.Array] = []
    for k, (total, kind) in enumerate(zip(totals, micro_batch.types, strict=True)):
        if micro_batch.is_summed(k) and k != weight:
            total = total / divisor.astype(total.dtype)
        found.append(total.astype(kind.dtype))
    return found
