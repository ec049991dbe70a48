"""An `Exchange` turns shards of stacked matrices into whole matrices, and back.

Normally, each device holds a shard of every layer's matrix. For a computation on whole matrices,
each device gets the whole matrices of some layers instead.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from functree.devices.specs import mesh_axes, of_rank

_Axes = tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """An exchange of the matrices in stacks with the same layer shape and sharding.

    Call `whole` and `shards` in the body of a `shard_map`.

    Attributes:
        sizes: the number of devices along each mesh axis.
        stacks: the sizes of each stack's leading dimensions on a device. They equal the global
            sizes, unless mesh axes shard the layers. A single matrix has the entry `()`.
        layer: the shape of one layer.
        dims: the mesh axes that shard each dimension of a layer.
        exchanged: the mesh axes over which shards of matrices are exchanged for whole layers.
        sliced: the mesh axes along which matrices are replicated, so each device just selects some
            of the layers.
    """

    sizes: Mapping[str, int]
    stacks: tuple[tuple[int, ...], ...]
    layer: tuple[int, ...]
    dims: tuple[_Axes, ...]
    exchanged: _Axes
    sliced: _Axes

    @staticmethod
    def of(
        sizes: Mapping[str, int],
        shape: Sequence[int],
        spec: PartitionSpec,
        stacked: int,
        over: Sequence[str] | None = None,
    ) -> "Exchange":
        """Create the exchange for one parameter.

        Args:
            sizes: the size of each mesh axis.
            shape: the shape of the parameter, including the dimensions of its stacks.
            spec: the spec of the parameter.
            stacked: the number of leading dimensions that belong to stacks.
            over: the mesh axes over which the layers are spread, or None for all mesh axes that
                shard the parameter.
        """
        entries: list[_Axes] = []
        for dim_entry in of_rank(spec, len(shape)).partitions:
            # XLA's partitioner refuses a collective over a mesh axis of size 1 (jax 0.12).
            entries.append(tuple(axis for axis in mesh_axes(dim_entry) if sizes[axis] > 1))
        stack: list[int] = []
        for size, axes in zip(shape[:stacked], entries[:stacked], strict=True):
            stack.append(size // _product(sizes, axes))
        sharding = sum(entries[stacked:], ())
        # Mesh axes that shard the stack's leading dimensions already spread the layers.
        of_stack = sum(entries[:stacked], ())
        exchanged = sharding
        if over is not None:
            exchanged = tuple(axis for axis in sharding if axis in over)
        sliced: list[str] = []
        for axis, size in sizes.items():
            if axis in (over or ()) and axis not in (*sharding, *of_stack) and size > 1:
                sliced.append(axis)
        return Exchange(
            sizes,
            (tuple(stack),),
            tuple(shape[stacked:]),
            tuple(entries[stacked:]),
            exchanged,
            tuple(sliced),
        )

    @property
    def kind(self) -> Hashable:
        """A value that is equal for exchanges that differ only in their stacks."""
        return self.layer, self.dims, self.exchanged, self.sliced

    @property
    def gathered(self) -> _Axes:
        """The mesh axes that shard the matrices but do not spread layers."""
        return tuple(axis for axis in sum(self.dims, ()) if axis not in self.exchanged)

    def joined_with(self, others: Sequence["Exchange"]) -> "Exchange":
        """Return one exchange for the stacks of this exchange and of others of the same kind."""
        return replace(self, stacks=sum((other.stacks for other in others), self.stacks))

    def of_one(self) -> "Exchange":
        """Return this exchange, changed so that all devices gather the layer if there is only one.

        Sending the layer to one device, and its result back, would move twice as much data.
        """
        if self.layers > 1:
            return self
        return replace(self, exchanged=(), sliced=())

    @property
    def layers(self) -> int:
        """The number of layers that have shards on a device."""
        return sum(map(math.prod, self.stacks))

    @property
    def own(self) -> int:
        """The number of whole layers on a device."""
        return -(-self.layers // self._devices)

    @property
    def _devices(self) -> int:
        """The number of devices over which the layers are spread."""
        return _product(self.sizes, (*self.sliced, *self.exchanged))

    def whole(self, shards: Sequence[Shaped[Array, "..."]]) -> Shaped[Array, "own ..."]:
        """Turn this device's shards of each stack into its own whole layers."""
        x = self._taken(shards)
        shard = x.shape[1:]
        x = x.reshape(-1, self.own, *shard)
        if self.exchanged:
            x = jax.lax.all_to_all(x, self.exchanged, split_axis=0, concat_axis=0)
        if self.gathered:
            x = jax.lax.all_gather(x, self.gathered)
        # The leading dimensions index shards. Each dimension of a matrix is joined from the
        # dimensions of its mesh axes and its own shard.
        counted = (*self.gathered, *self.exchanged)
        x = x.reshape(*(self.sizes[axis] for axis in counted), self.own, *shard)
        order = [len(counted)]
        for dim, axes in enumerate(self.dims, start=len(counted) + 1):
            order += [*map(counted.index, axes), dim]
        return x.transpose(order).reshape(self.own, *self.layer)

    def shards(self, x: Shaped[Array, "own ..."]) -> list[Shaped[Array, "..."]]:
        """Turn this device's whole layers into its shards of each stack."""
        counted = (*self.gathered, *self.exchanged)
        split = [self.own]
        places: dict[str, int] = {}
        kept: list[int] = []
        for size, axes in zip(self.layer, self.dims, strict=True):
            for axis in axes:
                places[axis] = len(split)
                split.append(self.sizes[axis])
            kept.append(len(split))
            split.append(size // _product(self.sizes, axes))
        x = x.reshape(split).transpose(*(places[axis] for axis in counted), 0, *kept)
        shard = x.shape[len(counted) + 1 :]
        x = x.reshape(_product(self.sizes, self.gathered), -1, self.own, *shard)
        x = jax.lax.dynamic_index_in_dim(x, _index(self.gathered), keepdims=False)
        if self.exchanged:
            x = jax.lax.all_to_all(x, self.exchanged, split_axis=0, concat_axis=0)
        return self._given(x.reshape(-1, *shard))

    def _taken(self, arrays: Sequence[Array]) -> Array:
        """Join all layers along one dimension, and take this device's slice along `sliced`."""
        layers: list[Array] = []
        for stack, array in zip(self.stacks, arrays, strict=True):
            layers.append(array.reshape(math.prod(stack), *array.shape[len(stack) :]))
        # Copies of layers serve as padding: matrices of zeros would have no inverse.
        missing = self._devices * self.own - self.layers
        layers *= 1 + -(-missing // self.layers)
        x = layers[0] if len(layers) == 1 else jnp.concatenate(layers)
        x = x[: self.layers + missing]
        size = x.shape[0] // _product(self.sizes, self.sliced)
        return jax.lax.dynamic_slice_in_dim(x, _index(self.sliced) * size, size)

    def _given(self, x: Array) -> list[Array]:
        """Gather all layers and return them in their stacks: the inverse of `_taken`."""
        if self.sliced:
            x = jax.lax.all_gather(x, self.sliced, tiled=True)
        arrays: list[Array] = []
        start = 0
        for stack in self.stacks:
            end = start + math.prod(stack)
            arrays.append(x[start:end].reshape(*stack, *x.shape[1:]))
            start = end
        return arrays


def _product(sizes: Mapping[str, int], axes: _Axes) -> int:
    """Return the number of devices along mesh axes."""
    return math.prod(sizes[axis] for axis in axes)


def _index(axes: _Axes) -> Any:
    """Return the index of this device along mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0
