"""`accumulate` runs a gradient function over a batch in micro-batches, and averages the results.

A gradient function ─► the same function, with one `lax.scan` over micro-batches. With `over=`, the
scan runs on each shard of the batch, and the gradients are reduced over the shards afterwards.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.argument_checks import FUNCTION, TEXT, TEXTS, Flag, Size, Takes, checked
from functree.calls.signature import RESULT, check_wrapped
from functree.devices.constraint import with_constraint
from functree.devices.meshes import (
    entry,
    local_view,
    mesh_axes,
    mesh_view,
    named_axes,
    of_rank,
    without,
)
from functree.devices.varying import varying_axes, varying_over
from functree.errors import FunctreeTypeError, Problem, ShardingError, did_you_mean
from functree.labels.leaves import array_problem
from functree.layout.decide import decide_parts
from functree.layout.layout import as_partial, broadcast, own_meshes, read_for
from functree.placing.constrain import ambient_rules, find_mesh
from functree.transforms.accumulate.call import Call, GradientFunction, Role, below, refuse
from functree.transforms.compiled_once import compiled_once
from functree.transforms.grad.grad import BACKWARD, laid_out_as
from functree.transforms.jit.jit import jit
from functree.tree.arrays import Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

_P = ParamSpec("_P")
_T = TypeVar("_T")


_Names = str | Iterable[str]
NAMES = Takes("a name, or a tuple of names", lambda value: TEXT.fits(value) or TEXTS.fits(value))


@checked("accumulate: invalid arguments")
def accumulate(
    fn: Annotated[Callable[_P, _T], FUNCTION],
    steps: Size,
    *,
    batch: Annotated[_Names, NAMES] | None = None,
    keys: Annotated[_Names, NAMES] = (),
    carry: Annotated[_Names, NAMES] = (),
    weighted: Flag = False,
    over: Annotated[_Names, NAMES] | None = None,
) -> Callable[_P, _T]:
    """Run a gradient function over a batch in micro-batches, and average the results.

    One `lax.scan` runs all micro-batches, so memory is needed for only one micro-batch at a time.
    If the loss is a mean over the batch, the result equals the result for the whole batch.
    Micro-batch `i` contains the examples `i`, `i + steps`, …, so examples stay on their devices.

    Without `over=`, gradients are reduced over devices in every micro-batch. With `over=`, they are
    reduced once.

    Args:
        fn: a gradient function: `ft.value_and_grad(loss)` or `ft.grad(loss)`. It is traced once. If
            `fn` comes from another library, its first parameter is assumed to be differentiated.
            The name of a `**kwargs` parameter stands for all arguments in it.
        steps: the number of micro-batches.
        batch: the names of the parameters to divide. The batch is the leading dimension of each of
            their arrays. The default is every parameter that is neither differentiated
            (`argnums=`) nor named in `keys` or `carry`.
        keys: the names of parameters whose random keys, typed or raw, are split. Micro-batch `i`
            gets `jax.random.split(key, steps)[i]`. With `over=`, each shard gets its own key. An
            array with one key for each example is part of the batch.
        carry: the names of parameters, such as `state`, whose values each micro-batch takes from
            the previous one. `fn` returns the next value as its aux, or a tuple of values for
            several names. The result contains the last value.
        weighted: whether `fn` returns sums, and the micro-batch's weight as its aux, a scalar
            array. For example, the weight is the number of tokens. With `carry`, the aux is
            `(weight, carried)`. The sums are divided by the sum of the weights, so a masked mean is
            exact for every `steps` and on every mesh. The result contains the sum of the weights.
        over: the mesh axes of the batch. The loop runs separately on each shard along these mesh
            axes. Parameters that are sharded over these mesh axes are gathered once, before the
            loop. Gradients are reduced once, after the loop, and scattered where the parameter is
            sharded. Each device therefore needs memory for the gathered parameters and their
            gradients. The loss must be a mean over examples, or `weighted`. In the function, these
            mesh axes are Manual, as in a `shard_map`. Without a mesh, `over` has no effect.

    Returns:
        A function with the same parameters. Inexact arrays of its result are averaged, in float32
            or wider. Everything else is the value from the last micro-batch.

    Raises:
        FunctreeError: if `steps` is not a positive integer.
        FunctreeError: if a name is not the name of a parameter.
        FunctreeError: if a named parameter is differentiated.
        FunctreeError: if a parameter is named in two of `batch`, `keys` and `carry`.
        FunctreeError: if `weighted`, `carry` or `over` is used, but `fn` is not a gradient function
            of functree.
        FunctreeError: (when called) if a leading dimension cannot be divided evenly into the
            micro-batches of all shards.
        FunctreeError: (when called) if no array is divided into micro-batches.
        FunctreeError: (when called) if an array is deleted.
        FunctreeError: (when called) if a value in `keys` is not a random key.
        FunctreeError: (when called) if `fn` does not return the weight or carried values as aux.
        FunctreeError: (when called) if a carried value changes its type between micro-batches.
        ShardingError: (when called) if the mesh lacks a mesh axis in `over`.
        ShardingError: (when called) if a mesh axis in `over` is already Manual, or named twice.
        ShardingError: (when called) if `over` is used, but the parameters' sharding is unknown.
        ShardingError: (when called) if a result that is not averaged differs between shards.

    Warns:
        FunctreeWarning: if all micro-batches draw the same numbers from a random key.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> value, gradient = ft.accumulate(ft.value_and_grad(loss), 2)(
        ...     jnp.ones(3), x
        ... )
        >>> bool(jnp.allclose(gradient, ft.grad(loss)(jnp.ones(3), x)))
        True

        A mean over unmasked tokens:

        >>> def total(w, x, mask):
        ...     return jnp.sum((x @ w) ** 2 * mask), jnp.sum(mask)
        >>> step = ft.accumulate(
        ...     ft.grad(total, has_aux=True), 2, weighted=True
        ... )
        >>> gradient, tokens = step(
        ...     jnp.ones(3), x, jnp.array([1.0, 0.0, 1.0, 1.0])
        ... )
        >>> print(tokens)
        3.0

        A layer with state, and dropout with a different mask in each micro-batch:

        >>> layer, state = ft.make_state(ft.nn.BatchNorm(3))
        >>> def loss(layer, state, x, key):
        ...     y, state = layer(x, state)
        ...     return jnp.mean(ft.nn.Dropout(0.5)(y, key=key) ** 2), state
        >>> step = ft.accumulate(
        ...     ft.grad(loss, has_aux=True), 2, keys="key", carry="state"
        ... )
        >>> gradient, state = step(layer, state, x, jax.random.key(0))
        >>> print(state[layer.mean].round(4))
        [0.0897 0.1096 0.1295]
    """
    number, axes = int(steps), () if over is None else names(over)
    check_wrapped("accumulate", fn)
    divided = None if batch is None else names(batch)
    by_role = {Role.BATCH: divided, Role.KEY: names(keys), Role.CARRIED: names(carry)}
    function = GradientFunction.of(fn, by_role, bool(weighted))
    if axes and not function.is_known:
        raise FunctreeTypeError(
            "accumulate: `over=` cannot find the gradients in the result of "
            f"{function.signature.name}: use `ft.grad` or `ft.value_and_grad`"
        )

    @functools.wraps(fn)
    def accumulated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return averaged(Call.of(function, args, kwargs), number, axes)

    # `ft.jit` warns about replicated arrays.
    return compiled_once(accumulated, jit)


def names(given: _Names) -> tuple[str, ...]:
    """Return the names in an option, which may be a single name."""
    return (given,) if isinstance(given, str) else tuple(given)


ArrayType = Any
"""The type of a traced array, as `jax.typeof` returns it. JAX has no public name for it."""


def averaged(call: Call, steps: int, over: Sequence[str]) -> Tree:
    """Compute the result of a gradient function over the batch of a call.

    Args:
        call: the call, with the whole batch.
        steps: the number of micro-batches.
        over: the mesh axes over whose shards the loop runs; empty for a single loop.
    """
    shards = Shards.of(call, over) if over else None
    sizes = {} if shards is None else shards.sizes
    call.check(steps, sizes)
    if shards is None:
        micro_batch, totals = summed(call, _operands(call, steps, 1), steps)
    else:
        micro_batch, totals = shards.summed(call, steps)
    _lay_out(call, micro_batch, totals)
    weight, divisor = micro_batch.weight, jnp.asarray(steps * math.prod(sizes.values()))
    if weight is not None:
        divisor = totals[weight]
    for k, kind in enumerate(micro_batch.types):
        if k in micro_batch.summed and k != weight:
            totals[k] = totals[k] / divisor.astype(totals[k].dtype)
        totals[k] = totals[k].astype(kind.dtype)
    return micro_batch.skeleton.fill(totals)


def _lay_out(call: Call, micro_batch: "MicroBatch", totals: list[jax.Array]) -> None:
    """Shard the summed gradients like their parameters, under ambient rules."""
    if ambient_rules() is None:
        return
    function = call.function
    for argument, layout in zip(function.differentiated, function.gradient.layouts, strict=True):
        free = set(below([argument], call.leaves.paths)) if layout is None else ()
        for k, parameter in micro_batch.parameters.items():
            if parameter in free:
                totals[k] = laid_out_as(call.leaves.leaves[parameter].value, totals[k])


# One loop


class MicroBatch(NamedTuple):
    """A gradient function, traced for one micro-batch.

    Attributes:
        run: a function of a micro-batch's number and the operands.
        types: the types of the arrays in the result.
        skeleton: the result without its arrays.
        parameters: a map from each gradient's index among the result's arrays to its parameter's
            index among the operands.
        carried: a map from each carried array's index in the result to its operand's index.
        weight: the index of the weight in the result, or None.
        summed: the indices of the result's arrays that are summed over the micro-batches. All
            other arrays are carried, or have the value of the last micro-batch.
    """

    run: Callable[..., Sequence[Any]]
    types: Sequence[ArrayType]
    skeleton: Skeleton
    parameters: dict[int, int]
    carried: dict[int, int]
    weight: int | None
    summed: set[int]


def _operands(call: Call, steps: int, shards: int) -> list[Any]:
    """Return the arrays of a call as operands of the loop.

    The operands are the whole batch, the keys of all micro-batches and shards, and the initial
    carried values.
    """
    operands: list[Any] = []
    for leaf, role in zip(call.leaves.leaves, call.roles, strict=True):
        value = leaf.value
        if role is Role.KEY:
            value = jax.random.split(value, (steps, shards))
        elif role is Role.CARRIED:
            # An array that was made from a Python number has a weak type, which adding another
            # array would change.
            value = jnp.asarray(value)
            value = jax.lax.convert_element_type(value, value.dtype)
        operands.append(value)
    return operands


def summed(call: Call, operands: Sequence[Any], steps: int) -> tuple[MicroBatch, list[jax.Array]]:
    """Trace one micro-batch, and run the loop over all micro-batches.

    Returns:
        The traced micro-batch, and the arrays of the result. Each array is the sum over all
            micro-batches, the last carried value, or the value of the last micro-batch.

    Raises:
        FunctreeError: if the function does not return the carried values.
        FunctreeError: if a carried value changes its type.
    """
    micro_batch = _traced(call, operands, steps)

    def add(totals: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], None]:
        given = [i, *operands]
        for k, operand in micro_batch.carried.items():
            given[1 + operand] = totals[k]
        new = list(micro_batch.run(*given))
        for k, array in enumerate(new):
            new[k] = jnp.asarray(array).astype(totals[k].dtype)  # a literal is a plain number
            if k in micro_batch.summed:
                new[k] += totals[k]
        return new, None

    # The loop carries the sums, since stacked outputs would hold all micro-batches' gradients.
    start = list(map(_zeros, micro_batch.types))
    for k, operand in micro_batch.carried.items():
        start[k] = operands[operand]
    totals, _ = jax.lax.scan(add, start, jnp.arange(steps, dtype=jnp.int32))
    return micro_batch, totals


def _traced(call: Call, operands: Sequence[Any], steps: int) -> MicroBatch:
    """Trace the gradient function for one micro-batch."""
    skeletons: list[Skeleton] = []

    def compute(i: jax.Array, *operands: jax.Array) -> Sequence[Any]:
        values: list[Any] = []
        for value, role in zip(operands, call.roles, strict=True):
            if role is Role.BATCH:
                value = _examples(value, i, steps)
            elif role is Role.KEY:
                value = jax.lax.dynamic_index_in_dim(value, i, keepdims=False)[0]
            values.append(value)
        result = call.run(values)
        skeleton, arrays = Skeleton.apart(result)
        skeletons.append(skeleton.learn(result))
        return arrays

    traced = jax.make_jaxpr(compute)(jnp.zeros((), jnp.int32), *operands)
    skeleton, function = skeletons[-1], call.function
    run, types = jaxpr_as_fun(traced), traced.out_avals
    # The aux contains the weight first, then the carried arrays.
    aux, weight = list[int](), None
    if function.uses_aux:
        aux = below([function.gradient.aux_place], skeleton.paths)
    if function.weighted:
        weight = aux.pop(0)
    carried = dict(zip(aux, below(function.named[Role.CARRIED], call.leaves.paths), strict=True))
    parameters: dict[int, int] = {}
    if function.is_known:
        parameters = _parameters(call, skeleton)
    inexact = {k for k, kind in enumerate(types) if jnp.issubdtype(kind.dtype, jnp.inexact)}
    sums = inexact - carried.keys()
    if weight is not None:
        sums.add(weight)
    micro_batch = MicroBatch(run, types, skeleton, parameters, carried, weight, sums)
    _check_carried(call, operands, micro_batch)
    return micro_batch


def _parameters(call: Call, result: Skeleton) -> dict[int, int]:
    """Map each gradient's index in a result to its parameter's index in the call."""
    gradient, indices = call.function.gradient, dict[int, int]()
    parameters = {path: i for i, path in enumerate(call.leaves.paths)}
    for index, argument in enumerate(call.function.differentiated):
        place = gradient.place_of(index)
        for k in below([place], result.paths):
            indices[k] = parameters[Path((*argument, *result.paths[k][len(place) :]))]
    return indices


def _examples(x: jax.Array, i: jax.Array, steps: int) -> jax.Array:
    """Return every `steps`-th example, starting with example `i`.

    Contiguous examples of a sharded batch would be on only a few devices. Strided examples are on
    every device, so they are sharded like the batch, and no data moves.
    """
    apart = jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:]))
    return jax.lax.dynamic_index_in_dim(apart, i, axis=1, keepdims=False)


def _check_carried(call: Call, operands: Sequence[Any], micro_batch: MicroBatch) -> None:
    """Raise FunctreeError for carried arrays that change their type."""
    problems: list[Problem] = []
    for result, operand in micro_batch.carried.items():
        before, after = (
            str(kind).removeprefix("~")  # JAX marks a weak type with a tilde
            for kind in (jax.typeof(operands[operand]), micro_batch.types[result])
        )
        if before != after:
            why = f"is {before} in the first micro-batch, but {after} in the next"
            problems.append(call.leaves.leaves[operand].problem(why, _SAME_TYPE))
    refuse(problems, "array", "in `carry` would change type between micro-batches")


_SAME_TYPE = (
    "return it with its old shape and dtype, for example with `.astype(old.dtype)`, and average it "
    "over the shards if it differs between them (`jax.lax.pmean`)"
)


def _zeros(kind: ArrayType) -> jax.Array:
    """Return zeros of an array's type, as the sum before the first micro-batch.

    The carry of a scan must keep its type, including its sharding and the mesh axes of a shard_map
    along which it varies.
    """
    dtype = kind.dtype
    # In a dtype narrower than float32, small terms would be lost in rounding.
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32:
        dtype = np.dtype(np.float32)
    is_explicit = AxisType.Explicit in kind.sharding.mesh.axis_types
    zeros = jnp.zeros(kind.shape, dtype, out_sharding=kind.sharding if is_explicit else None)
    return varying_over(zeros, varying_axes(kind))


# A loop for each shard


@dataclass(frozen=True)
class Shards:
    """The shards of a batch.

    Attributes:
        mesh: the mesh of the batch and the parameters.
        sizes: the mesh axes over which the batch is sharded, with their sizes.
        specs: the spec of each parameter that is sharded over these mesh axes, by its index among
            the arrays of the call.
    """

    mesh: Mesh | AbstractMesh
    sizes: Mapping[str, int]
    specs: dict[int, PartitionSpec]

    @classmethod
    def of(cls, call: Call, over: Sequence[str]) -> "Shards | None":
        """Find the shards of a call, or return None if the batch has only one shard.

        Raises:
            ShardingError: if the mesh lacks a mesh axis in `over`.
            ShardingError: if the parameters' sharding is unknown.
        """
        function, layouts = call.function, tuple(call.function.gradient.layouts)
        values = tuple(map(call.value_at, function.differentiated))
        mesh = find_mesh(own_meshes(broadcast(layouts, values)), call.leaves.values)
        if mesh is None:
            return None
        check_axes("accumulate", over, mesh)
        sizes = {axis: size for axis, size in mesh.shape.items() if axis in over and size > 1}
        if not sizes:
            return None
        view = local_view(mesh)
        # Without Auto axes, the types contain the parameters' shardings.
        if AxisType.Auto in mesh.axis_types:
            rules = ambient_rules()
            layouts = tuple(rules if layout is None else layout for layout in layouts)
            if any(layout is None for layout in layouts):
                raise ShardingError(
                    f"accumulate: `over=` needs the sharding of the parameters on mesh {view}: "
                    "pass `layout=` to the gradient function, or use rules "
                    "(`ft.jit(rules=...)`, `with ft.axis_rules(...):`)"
                )
        leaves, parts = read_for(values, layouts)
        # Problems of the layouts are raised when the gradient is laid out.
        decided = decide_parts(leaves, as_partial(parts), view, allow_unspecified=True)
        indices = below(function.differentiated, call.leaves.paths)
        specs: dict[int, PartitionSpec] = {}
        for i, decision in zip(indices, decided.decisions, strict=True):
            typed = jax.typeof(call.leaves.leaves[i].value).sharding.spec
            spec = decision.spec if decision.specified else typed
            if named_axes(spec) & sizes.keys():
                specs[i] = spec
        return cls(mesh, sizes, specs)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the batch is sharded."""
        return tuple(self.sizes)

    def summed(self, call: Call, steps: int) -> tuple[MicroBatch, list[jax.Array]]:
        """Run the loop on each shard, and sum the results over the shards.

        Returns:
            The traced micro-batch of a shard, and the arrays of the result.
        """
        traced: list[MicroBatch] = []

        def local(*operands: jax.Array) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
            given = list(operands)
            for i, role in enumerate(call.roles):
                # JAX would sum the gradients of invariant parameters over shards in each
                # micro-batch.
                if role is Role.SAME and jnp.issubdtype(given[i].dtype, jnp.inexact):
                    given[i] = varying_over(given[i], self.axes)
            micro_batch, totals = summed(call, given, steps)
            traced[:] = [micro_batch]
            self._check_equal(micro_batch)
            parts: dict[int, jax.Array] = {}
            whole: dict[int, jax.Array] = {}
            for k, total in enumerate(totals):
                if micro_batch.parameters.get(k) in self.specs:
                    parts[k] = total[None]
                elif k in micro_batch.summed:
                    # A gradient's sum belongs to the backward pass.
                    scope = BACKWARD if k in micro_batch.parameters else "accumulate"
                    with jax.named_scope(scope):
                        whole[k] = jax.lax.psum(total, self.axes)
                else:
                    whole[k] = total
            return parts, whole

        axes = entry(self.axes)
        by_role = {Role.BATCH: PartitionSpec(axes), Role.KEY: PartitionSpec(None, axes)}
        in_specs = tuple(by_role.get(role, PartitionSpec()) for role in call.roles)
        operands = _operands(call, steps, math.prod(self.sizes.values()))
        parts, totals = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=(PartitionSpec(axes), PartitionSpec()),
            axis_names=set(self.axes),
        )(*map(self._typed, operands, in_specs))
        (micro_batch,) = traced
        for k, part in parts.items():
            with jax.named_scope(BACKWARD):
                spec = self.specs[micro_batch.parameters[k]]
                totals[k] = self._scattered_sum(part, spec)
        return micro_batch, [totals[k] for k in sorted(totals)]

    def _typed(self, array: Any, spec: PartitionSpec) -> Any:
        """Reshard an array on Explicit axes, where a shard_map does not reshard its operands."""
        if not set(self.axes) <= set(self.mesh.explicit_axes):
            return array
        others = without(jax.typeof(array).sharding.spec, self.axes)
        wanted = _joined(spec, others, jnp.ndim(array))
        return jax.sharding.reshard(array, NamedSharding(self.mesh, wanted))

    def _check_equal(self, micro_batch: MicroBatch) -> None:
        """Raise ShardingError for results that are not averaged but differ between shards."""
        axes = ", ".join(f'"{axis}"' for axis in self.axes)
        why = f"differs between shards along {axes}"
        remedy = "return a float, which is averaged, or remove `over=`"
        problems: list[Problem] = []
        for k, path in enumerate(micro_batch.skeleton.paths):
            kind = micro_batch.types[k]
            if k not in micro_batch.summed and varying_axes(kind) & set(self.axes):
                problems.append(array_problem(Path((RESULT, *path)), kind, why, remedy))
        refuse(problems, "array", "cannot be returned with `over=`", ShardingError)

    # The sum over shards

    def _scattered_sum(self, parts: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Sum the parts of all shards, and shard the sum with a spec.

        Each device receives only its block of the sum.

        Args:
            parts: one array for each shard, along a leading dimension.
            spec: the spec of the sum.
        """
        # For each dimension, `blocks` lists its leading mesh axes that belong to the batch. These
        # mesh axes split the dimension into blocks, which the dimension's other mesh axes split
        # further.
        blocks: list[tuple[str, ...]] = []
        for partition in spec.partitions:
            blocks.append(tuple(takewhile(self.axes.__contains__, mesh_axes(partition))))
        rest = tuple(axis for axis in self.axes if axis not in sum(blocks, ()))

        def local(part: jax.Array) -> jax.Array:
            block = part[0]
            for dim, axes in enumerate(blocks):
                if axes:
                    block = self._scattered(block, axes, dim)
            return jax.lax.psum(block, rest)

        others = without(spec, self.axes)
        of_parts = PartitionSpec(entry(self.axes), *others.partitions)
        total = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=of_parts,
            out_specs=_joined(PartitionSpec(*map(entry, blocks)), others, parts.ndim - 1),
            # All mesh axes are Manual: JAX would refuse to scatter with Explicit axes left, and the
            # compiler would first gather the array over Auto axes.
            axis_names=set(self.mesh.axis_names),
            check_vma=False,
        )(with_constraint(parts, self.mesh, of_parts))
        return with_constraint(total, self.mesh, spec)

    def _scattered(self, part: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        """Sum parts over mesh axes, and return each device's block of a dimension.

        The array is reshaped to three dimensions, with the blocks along the first. The TPU compiler
        cannot scatter some arrays with more dimensions, such as arrays with few heads. The compiler
        then moves the whole sum, or fails.
        """
        number = math.prod(self.mesh.shape[axis] for axis in axes)
        before, size, after = part.shape[:dim], part.shape[dim] // number, part.shape[dim + 1 :]
        apart = jnp.reshape(part, (math.prod(before), number, size, math.prod(after)))
        blocks = jnp.moveaxis(apart, 1, 0)
        rows = (-1, size)
        if after:
            rows = (-1, math.prod(after))
        blocks = jnp.reshape(blocks, (number, *rows))
        own = jax.lax.psum_scatter(blocks, axes, scatter_dimension=0, tiled=True)
        return jnp.reshape(own, (*before, size, *after))


def _joined(first: PartitionSpec, then: PartitionSpec, ndim: int) -> PartitionSpec:
    """Build a spec that shards each dimension with `first`, and its blocks with `then`."""
    pairs = zip(of_rank(first, ndim).partitions, of_rank(then, ndim).partitions, strict=True)
    return PartitionSpec(*[entry((*mesh_axes(a), *mesh_axes(b))) for a, b in pairs])


def check_axes(name: str, over: Sequence[str], mesh: Mesh | AbstractMesh) -> None:
    """Raise ShardingError for mesh axes that the mesh lacks, that are Manual, or named twice.

    Args:
        name: the name of the function that has the option `over=`, for the message.
        over: the mesh axes.
        mesh: the mesh.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for axis in over:
        if axis in manual:
            why = "is a mesh axis of the shard_map around this call"
            remedy = f'remove it from `over=`, and apply `jax.lax.pmean(g, "{axis}")` to gradients'
        elif axis not in mesh.axis_names:
            near = did_you_mean(axis, mesh.axis_names)
            why = f"the mesh {mesh_view(mesh)} has no such axis{near}"
            remedy = "use an axis that the mesh has"
        elif over.count(axis) > 1:
            why, remedy = "is named twice", "name the mesh axis once"
        else:
            continue
        problem = Problem(None, None, f"over={axis!r}", why, remedy)
        raise ShardingError(f"{name}: invalid arguments", [problem])
