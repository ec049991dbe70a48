"""A value that is whole or in parts, on the devices of a mesh ─► the one from the other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.devices.constraint import with_constraint
from functree.devices.specs import Entry, entry, mesh_axes, of_rank, without


class Held(NamedTuple):
    """A value, whole or in parts.

    Attributes:
        array: the value; or its parts, along a leading dimension that is sharded over devices.
        in_parts: whether it is in parts.
    """

    array: Any
    in_parts: bool = False


@dataclass(frozen=True)
class Devices:
    """The mesh axes over whose devices values are in parts.

    Attributes:
        mesh: the mesh.
        axes: the mesh axes of the batch.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def number(self) -> int:
        """The number of parts."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def numbers(self) -> jax.Array:
        """The number of each device, as an array with one for each of them.

        `jax.lax.axis_index` cannot be compiled beside Auto axes for every backend.
        """
        return jnp.arange(self.number, dtype=jnp.int32)

    def each(
        self,
        local: Callable[..., jax.Array],
        arrays: Sequence[Any],
        dims: Sequence[int | None],
        in_parts: bool = True,
    ) -> Any:
        """The results of a function on each device.

        Args:
            local: the function.
            arrays: its arguments.
            dims: for each of them, the dimension of which a device gets its own block; None if it
                gets the whole array.
            in_parts: whether the results are parts; else they are equal.
        """
        typed = [self._typed(array, dim) for array, dim in zip(arrays, dims, strict=True)]
        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(map(self._split, dims)),
            out_specs=self._split(0 if in_parts else None),
            axis_names=set(self.axes),
            check_vma=False,
        )
        return mapped(*typed)

    def parts_of(self, array: Any) -> Held:
        """A whole value in parts: it is the part of the first device, and zeros are the others."""

        def local(array: jax.Array, number: jax.Array) -> jax.Array:
            return once(array, number)[None]

        return Held(self.each(local, [array, self.numbers], [None, 0]), True)

    def whole(self, held: Held) -> Any:
        """A value that is whole: its parts are summed up."""
        if not held.in_parts:
            return held.array

        def local(part: jax.Array) -> jax.Array:
            return jax.lax.psum(part[0], self.axes)

        return self.each(local, [held.array], [0], in_parts=False)

    def sharded(self, held: Held, spec: PartitionSpec) -> Any:
        """The same, sharded by a spec: over the mesh axes by which it shards, each device gets its
        block of the sum only."""
        if not held.in_parts:
            return held.array
        kind = jax.typeof(held.array)
        blocks = _blocks(of_rank(spec, len(kind.shape) - 1), self.axes)
        rest = tuple(axis for axis in self.axes if axis not in {*sum(blocks, ())})

        def local(part: jax.Array) -> jax.Array:
            own = part[0]
            for dim, axes in enumerate(blocks):
                if axes:
                    own = self._scattered(own, axes, dim)
            return jax.lax.psum(own, rest) if rest else own

        others = self._others(kind.sharding.spec, spec, len(blocks))
        pairs = list(zip(blocks, map(mesh_axes, others), strict=True))
        found = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=PartitionSpec(entry(self.axes), *others),
            out_specs=PartitionSpec(*[entry((*axes, *other)) for axes, other in pairs]),
            # All are Manual. JAX scatters no array beside Explicit mesh axes, and beside Auto ones
            # the compiler would make the array whole over these first.
            axis_names=set(self.mesh.axis_names),
            check_vma=False,
        )(self._typed(held.array, 0))
        return with_constraint(found, self.mesh, spec)

    def _scattered(self, part: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        """The sum of parts over mesh axes, of which each device gets its block of a dimension.

        The blocks are along a dimension of their own, in front of two others. The compiler for TPUs
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

    def zeros(self, like: Any, dtype: np.dtype, spec: PartitionSpec) -> jax.Array:
        """The parts of zero.

        Args:
            like: the type of the whole value.
            dtype: the dtype.
            spec: the spec of the value.
        """
        others = self._others(PartitionSpec(None, *like.sharding.spec), spec, len(like.shape))
        target = NamedSharding(self.mesh, PartitionSpec(entry(self.axes), *others))
        shape = (self.number, *like.shape)
        if self._is_explicit:
            return jnp.zeros(shape, dtype, out_sharding=target)
        return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), target)

    def _others(self, typed: PartitionSpec, spec: PartitionSpec, ndim: int) -> list[Entry]:
        """How the dimensions of a value in parts are sharded over the other mesh axes.

        Args:
            typed: the spec of the type of the parts.
            spec: the spec of the value.
            ndim: the number of dimensions of the value.
        """
        if self._is_explicit:
            return list(of_rank(without(typed, self.axes), ndim + 1).partitions[1:])
        return list(of_rank(without(spec, self.axes), ndim).partitions)

    def local_sharding(self, sharding: NamedSharding) -> NamedSharding:
        """A sharding as it is on each device, where arrays are local along the mesh axes of the
        batch."""
        mesh = jax.sharding.get_abstract_mesh()
        return NamedSharding(mesh, without(sharding.spec, self.axes))

    @property
    def _explicit(self) -> set[str]:
        """The Explicit mesh axes."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {name for name, kind in types if kind == AxisType.Explicit}

    @property
    def _is_explicit(self) -> bool:
        return self._explicit.issuperset(self.axes)

    def _split(self, dim: int | None) -> PartitionSpec:
        """The spec of an array of which each device has its own block of a dimension."""
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


def once(array: jax.Array, number: jax.Array) -> jax.Array:
    """An array on the device with the number 0, and zeros on the others."""
    return jax.lax.select(number[0] == 0, array, jnp.zeros_like(array))


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
