"""A loop over micro-batches ─► the same on each shard of the batch by itself, and the gradients of
all shards reduced once after it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.devices.constraint import with_constraint
from functree.devices.meshes import agreed_mesh, mesh_view
from functree.devices.specs import Entry, entry, mesh_axes, named_axes, of_rank, without
from functree.devices.varying import varying_axes
from functree.errors import FunctreeValueError, Problem, ShardingError, count, did_you_mean
from functree.layout.decide import decide_parts
from functree.layout.layout import LayoutTree, as_partial, own_meshes
from functree.layout.plan.make_plan import read_for
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import find_mesh, local_view
from functree.transforms.accumulate.micro_batch import MicroBatch, operands_of, summed
from functree.transforms.accumulate.roles import Call, Role
from functree.transforms.grad.parameters import BACKWARD


@dataclass(frozen=True)
class BatchShards:
    """The shards of a batch.

    Attributes:
        mesh: the mesh.
        axes: the mesh axes over which the batch is sharded.
        specs: the spec of each parameter, by its index among the arrays of the call.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    specs: dict[int, PartitionSpec]

    @classmethod
    def of(cls, call: Call, over: Sequence[str], steps: int) -> "BatchShards | None":
        """The shards of a call; None without a mesh of several devices along these mesh axes.

        Raises:
            FunctreeError: if the mesh has no such axes, or they do not divide the batch.
            ShardingError: if it is not known how the parameters are sharded.
        """
        gradient = call.arguments.gradient
        layouts = () if gradient is None else gradient.layouts
        mesh = find_mesh([m for one in layouts for m in _own_meshes(call, one)], call.leaves.values)
        if mesh is None:
            return None
        _check_axes(mesh, over)
        axes = tuple(axis for axis in mesh.axis_names if axis in over and mesh.shape[axis] > 1)
        if not axes:
            return None
        shards = cls(mesh, axes, {})
        shards._check_batch(call, steps)
        return cls(mesh, axes, _specs(call, mesh))

    @property
    def number(self) -> int:
        """The number of shards."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def _check_batch(self, call: Call, steps: int) -> None:
        """Raise for arrays of the batch that the shards cannot divide."""
        problems: list[Problem] = []
        for leaf in call.having(Role.BATCH):
            if leaf.shape[0] % (steps * self.number):
                why = f"its leading dimension of size {leaf.shape[0]} cannot be split into {steps} "
                why += f"micro-batches on each of {self.number} shards"
                problems.append(leaf.problem(why, "use a batch whose size both divide"))
        if problems:
            raise FunctreeValueError(
                f"accumulate: {count(len(problems), 'array')} cannot be split into micro-batches",
                problems,
            )

    def summed(
        self,
        call: Call,
        steps: int,
        trace: Callable[[Sequence[Any]], MicroBatch],
    ) -> tuple[MicroBatch, list[jax.Array]]:
        """The traced micro-batch of a shard, and the arrays of the result, summed over the
        micro-batches of all shards.

        Args:
            call: the call.
            steps: the number of micro-batches.
            trace: a function from operands to the traced micro-batch.
        """
        traced: list[MicroBatch] = []

        def local(*operands: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            given = [self._local(one, role) for one, role in zip(operands, call.roles, strict=True)]
            micro_batch = trace(given)
            traced[:] = [micro_batch]
            totals = summed(micro_batch, given, steps)
            self._check_equal(micro_batch, totals)
            partial: list[jax.Array] = []
            whole: list[jax.Array] = []
            for k, total in enumerate(totals):
                if self._is_scattered(micro_batch, k):
                    partial.append(total[None])
                elif micro_batch.is_summed(k):
                    with _scope(micro_batch, k):
                        whole.append(jax.lax.psum(total, self.axes))
                else:
                    whole.append(total)
            return partial, whole

        operands = self._split_keys(call, operands_of(call, steps), steps)
        dims: list[int | None] = []
        for role in call.roles:
            dims.append({Role.BATCH: 0, Role.KEY: 1}.get(role))
        partial, whole = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(map(self._split, dims)),
            out_specs=(self._split(0), PartitionSpec()),
            axis_names=set(self.axes),
        )(*map(self._typed, operands, dims))
        (micro_batch,) = traced
        totals: list[jax.Array] = []
        for k in range(len(micro_batch.types)):
            if self._is_scattered(micro_batch, k):
                with _scope(micro_batch, k):
                    spec = self.specs[micro_batch.parameters[k]]
                    totals.append(self._scattered_sum(partial.pop(0), spec))
            else:
                totals.append(whole.pop(0))
        return micro_batch, totals

    def _split_keys(self, call: Call, operands: list[Any], steps: int) -> list[Any]:
        """The operands, with a key of its own for each shard."""
        for i in call.indices(Role.KEY):
            operands[i] = jax.random.split(call.leaves.leaves[i].value, (steps, self.number))
        return operands

    def _local(self, operand: jax.Array, role: Role) -> jax.Array:
        """An operand on one shard."""
        if role is Role.KEY:
            return operand[:, 0]
        # Otherwise JAX would sum the gradients over the shards in each micro-batch.
        if role is Role.SAME and jnp.issubdtype(operand.dtype, jnp.inexact):
            return jax.lax.pcast(operand, self.axes, to="varying")
        return operand

    def _is_scattered(self, micro_batch: MicroBatch, index: int) -> bool:
        """Whether an array of the result is the gradient of a parameter that is sharded over the
        mesh axes of the batch."""
        parameter = micro_batch.parameters.get(index)
        if parameter is None or not micro_batch.is_summed(index):
            return False
        return bool(named_axes(self.specs.get(parameter, PartitionSpec())) & set(self.axes))

    def _check_equal(self, micro_batch: MicroBatch, totals: Sequence[jax.Array]) -> None:
        """Raise for results of the last micro-batch that differ between the shards."""
        axes = ", ".join(f'"{axis}"' for axis in self.axes)
        problems: list[Problem] = []
        for k, total in enumerate(totals):
            if not micro_batch.is_summed(k) and varying_axes(total) & set(self.axes):
                why = f"differs between the shards over {axes}"
                remedy = "make it a float, which is averaged, or leave out `over=`"
                problems.append(Problem(None, None, f"aux: {total.dtype}", why, remedy))
        if problems:
            arrays = count(len(problems), "array")
            raise ShardingError(f"accumulate: {arrays} cannot be returned with `over=`", problems)

    # The sum over shards

    def _scattered_sum(self, parts: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The sum of the parts of all shards, sharded by a spec: over the mesh axes by which it
        shards, each device gets its block of the sum only.

        Args:
            parts: one array for each shard, along a leading dimension.
            spec: the spec of the sum.
        """
        kind = jax.typeof(parts)
        ndim = len(kind.shape) - 1
        blocks = _blocks(of_rank(spec, ndim), self.axes)
        rest = tuple(axis for axis in self.axes if axis not in {*sum(blocks, ())})

        def local(part: jax.Array) -> jax.Array:
            own = part[0]
            for dim, axes in enumerate(blocks):
                if axes:
                    own = self._scattered(own, axes, dim)
            return jax.lax.psum(own, rest) if rest else own

        # How the dimensions are sharded over the other mesh axes.
        others: list[Entry] = list(of_rank(without(spec, self.axes), ndim).partitions)
        if self._is_explicit:
            typed = of_rank(without(kind.sharding.spec, self.axes), ndim + 1)
            others = list(typed.partitions[1:])
        pairs = list(zip(blocks, map(mesh_axes, others), strict=True))
        total = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=PartitionSpec(entry(self.axes), *others),
            out_specs=PartitionSpec(*[entry((*axes, *other)) for axes, other in pairs]),
            # All are Manual. JAX scatters no array beside Explicit mesh axes, and beside Auto ones
            # the compiler would gather the array over these first.
            axis_names=set(self.mesh.axis_names),
            check_vma=False,
        )(self._typed(parts, 0))
        return with_constraint(total, self.mesh, spec)

    def _scattered(self, part: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        """The sum of parts over mesh axes, of which each device gets its block of a dimension.

        The blocks are along a dimension of their own, before two others. The compiler for TPUs
        cannot scatter every array of more dimensions, such as one with few heads: it moves all of
        the sum, or does not compile the program.
        """
        number = math.prod(self.mesh.shape[axis] for axis in axes)
        before, size, after = part.shape[:dim], part.shape[dim] // number, part.shape[dim + 1 :]
        apart = jnp.reshape(part, (math.prod(before), number, size, math.prod(after)))
        blocks = jnp.moveaxis(apart, 1, 0)
        if after:
            blocks = jnp.reshape(blocks, (number, -1, math.prod(after)))
        else:
            blocks = jnp.reshape(blocks, (number, -1, size))
        own = jax.lax.psum_scatter(blocks, axes, scatter_dimension=0, tiled=True)
        return jnp.reshape(own, (*before, size, *after))

    # Specs

    @property
    def _is_explicit(self) -> bool:
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(types[axis] == AxisType.Explicit for axis in self.axes)

    def _split(self, dim: int | None) -> PartitionSpec:
        """The spec of an array of which each shard has its own block of a dimension."""
        if dim is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * dim, entry(self.axes))

    def _typed(self, array: Any, dim: int | None) -> Any:
        """An array whose type says so: on Explicit axes JAX reshards nothing for a shard_map."""
        if not self._is_explicit:
            return array
        kind = jax.typeof(array)
        before = of_rank(kind.sharding.spec, len(kind.shape))
        entries: list[Entry] = list(without(before, self.axes).partitions)
        if dim is not None:
            entries[dim] = entry((*self.axes, *mesh_axes(entries[dim])))
        wanted = PartitionSpec(*entries)
        if not kind.sharding.mesh.empty and before == wanted:
            return array
        return jax.sharding.reshard(array, NamedSharding(self.mesh, wanted))


def _scope(micro_batch: MicroBatch, index: int) -> Any:
    """The sum of a gradient is a part of the backward pass."""
    return jax.named_scope(BACKWARD if index in micro_batch.parameters else "accumulate")


def _blocks(spec: PartitionSpec, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """For each dimension, the mesh axes among these that shard it, as far as they come first: a
    device then has a block, of which the other mesh axes have parts."""
    found: list[tuple[str, ...]] = []
    for one in spec.partitions:
        first: tuple[str, ...] = ()
        for axis in mesh_axes(one):
            if axis not in axes:
                break
            first = (*first, axis)
        found.append(first)
    return found


def _check_axes(mesh: Mesh | AbstractMesh, over: Sequence[str]) -> None:
    """Raise for mesh axes that the mesh does not have, or that are mapped by a shard_map."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for axis in over:
        what = f"over={axis!r}"
        if axis not in mesh.axis_names:
            near = did_you_mean(axis, mesh.axis_names)
            why = f"mesh {mesh_view(mesh)} has no such axis{near}"
            problem = Problem(None, None, what, why, "name one of its axes")
        elif axis in manual:
            why = "is an axis of the shard_map around it"
            remedy = f'leave it out, and sum the gradients by `jax.lax.pmean(g, "{axis}")`'
            problem = Problem(None, None, what, why, remedy)
        else:
            continue
        raise ShardingError("accumulate cannot divide the batch", [problem])


def _own_meshes(call: Call, layout: LayoutTree) -> list[Mesh | AbstractMesh]:
    """The meshes that the layout of a gradient has of its own."""
    if layout is None:
        return []
    (value, *_) = call.values_at(call.arguments.differentiated).values()
    return [mesh for mesh in own_meshes(read_for(value, layout)[1]) if mesh is not None]


def _specs(call: Call, mesh: Mesh | AbstractMesh) -> dict[int, PartitionSpec]:
    """The spec of each parameter.

    Raises:
        ShardingError: if they are not known.
    """
    found: dict[int, PartitionSpec] = {}
    gradient, arguments = call.arguments.gradient, call.arguments.differentiated
    layouts = [None] * len(arguments) if gradient is None else gradient.layouts
    for argument, layout in zip(arguments, layouts, strict=True):
        indices = [
            i for i, leaf in enumerate(call.leaves.leaves) if leaf.path[: len(argument)] == argument
        ]
        kinds = [jax.typeof(call.leaves.leaves[i].value) for i in indices]
        if AxisType.Auto not in mesh.axis_types and layout is None:
            # The types tell it.
            found.update((i, kind.sharding.spec) for i, kind in zip(indices, kinds, strict=True))
            continue
        chosen = layout if layout is not None else ambient_rules()
        if chosen is None:
            raise ShardingError(
                f"accumulate: over= does not know how the parameters in `{argument}` are sharded "
                f"on mesh {mesh_view(mesh)}: pass `layout=` to the gradient function, or use rules "
                "(`ft.jit(rules=...)`, `with ft.axis_rules(...):`)"
            )
        leaves, parts = read_for(call.values_at([argument])[argument], chosen)
        view = local_view(agreed_mesh(mesh, own_meshes(parts)))
        # What is wrong with it is said where the gradient is laid out.
        decided = decide_parts(leaves, as_partial(parts), view, allow_unspecified=True)
        for i, decision in zip(indices, decided.decisions, strict=True):
            found[i] = decision.spec if decision.specified else PartitionSpec()
    return found
