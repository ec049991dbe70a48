"""`on_whole_matrices` applies a function to whole matrices, spreading layers over devices.

Normally, each device holds a shard of every layer's matrix. For a computation on whole matrices,
an `Exchange` gives each device the whole matrices of some layers instead.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Shaped

from functree.argument_checks import FUNCTION, check
from functree.devices.meshes import (
    local_view,
    mesh_axes,
    mesh_view,
    of_rank,
    parts_over,
    typed_spec,
)
from functree.errors import FunctreeTypeError, Problem, ShardingError, count
from functree.labels.leaves import Leaf, Leaves, read
from functree.labels.optimizer.layers import stack_sizes
from functree.layout.decide import decide_parts
from functree.layout.layout import LayoutTree, as_partial, own_meshes, read_for
from functree.placing.constrain import ambient_rules, find_mesh
from functree.transforms.accumulate.accumulate import NAMES, check_axes, names
from functree.tree.arrays import AnyArray, Tree, value_text
from functree.tree.paths import Path

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
            stack.append(size // parts_over(axes, sizes))
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
        return parts_over((*self.sliced, *self.exchanged), self.sizes)

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
            split.append(size // parts_over(axes, self.sizes))
        x = x.reshape(split).transpose(*(places[axis] for axis in counted), 0, *kept)
        shard = x.shape[len(counted) + 1 :]
        x = x.reshape(parts_over(self.gathered, self.sizes), -1, self.own, *shard)
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
        size = x.shape[0] // parts_over(self.sliced, self.sizes)
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


def _index(axes: _Axes) -> Any:
    """Return the index of this device along mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0


MatrixFunction = Callable[[jax.Array], jax.Array]
"""A function of one matrix that returns a matrix of the same shape and dtype."""


def on_whole_matrices(
    fn: MatrixFunction, over: str | Sequence[str] | None = None, layout: LayoutTree = None
) -> optax.GradientTransformation:
    """Create an optax transform that applies a function to each whole matrix of the updates.

    An optimizer such as Muon multiplies each matrix by itself, several times in each update. If the
    matrices are sharded, as under FSDP and tensor parallelism, each product moves partial sums
    between devices. This transform instead spreads the layers of stacks, and matrices with the same
    shape, over the devices, so that each device has whole matrices. Shards are exchanged once
    before `fn`, and once after it.

    The transform has no state. Place it between an optimizer's elementwise transforms, such as
    moments and weight decay, whose arrays stay sharded. `ft.muon` is built on `on_whole_matrices`.

    If there are fewer matrices than devices, some devices compute copies. A single matrix is
    gathered on all devices, and each device computes the same result. On one device, nothing moves.

    Args:
        fn: a function of one matrix: a parameter's array or, for a stack, one layer's array. It
            returns an array of the same shape and dtype.
        over: the mesh axes over which the matrices are spread; by default all mesh axes that shard
            the parameter. Matrices are gathered along the other mesh axes.
        layout: the layout of the model; by default the ambient one. On Explicit axes, no layout is
            needed.

    Returns:
        An optax transform. Arrays with fewer than two dimensions, not counting stacks, are not
            matrices: exclude them with `optax.masked` or `optax.partition`.

    Raises:
        FunctreeError: if `fn` is not a function.
        FunctreeError: if `over` does not name mesh axes.
        FunctreeError: (when called) if an array is not a matrix.
        FunctreeError: (when called) if `fn` returns a different shape or dtype.
        ShardingError: (when called) if the mesh does not have the axes in `over`.
        FunctreeError: (when called) if the transform runs inside `ft.layerwise`.
        ShardingError: (when called) if the mesh has Auto axes and there is no layout.
        ShardingError: (when called) if the layout does not fit the parameters.
        ShardingError: (when called) if the transform runs inside a `shard_map`.

    Examples:
        >>> import optax
        >>> layers = ft.stack(
        ...     lambda key: ft.nn.Linear(4, 6, use_bias=False, key=key),
        ...     3,
        ...     jax.random.key(0),
        ... )
        >>> def whiten(matrix):
        ...     u, _, v = jnp.linalg.svd(matrix, full_matrices=False)
        ...     return u @ v
        >>> tx = optax.chain(
        ...     optax.trace(0.9), ft.on_whole_matrices(whiten), optax.scale(-0.1)
        ... )
        >>> updates, state = tx.update(layers, tx.init(layers))
        >>> weight = updates.layer.weight  # of 3 layers
        >>> products = 100 * weight @ weight.swapaxes(1, 2)
        >>> bool(jnp.allclose(products, jnp.eye(4)[None], atol=1e-4))
        True
    """
    check("on_whole_matrices: invalid arguments", fn=(fn, FUNCTION))

    def functions(_: Tree, leaves: Leaves) -> Sequence[MatrixFunction]:
        return [fn] * len(leaves.leaves)

    return of_each_matrix(functions, over, layout, "on_whole_matrices")


def of_each_matrix(
    functions: Callable[[Tree, Leaves], Sequence[MatrixFunction]],
    over: str | Sequence[str] | None,
    layout: LayoutTree,
    name: str,
) -> optax.GradientTransformation:
    """Create a transform like `on_whole_matrices`, with a function for each leaf.

    Args:
        functions: a function from the updates and their leaves to the function for each leaf.
            Matrices with the same function may be computed together.
        over: as in `on_whole_matrices`.
        layout: as in `on_whole_matrices`.
        name: the name of the public function, for messages.
    """
    check(f"{name}: invalid arguments", over=(over, NAMES.or_none()))
    axes = None if over is None else names(over)

    def init(params: Tree) -> Tree:
        return optax.EmptyState()

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        leaves = read(updates)
        matrices = list(zip(leaves.leaves, functions(updates, leaves), strict=True))
        _check_matrices(matrices, name)
        mesh, specs = _specs(updates, layout, name)
        if mesh is None:
            results = [_alone(leaf, fn) for leaf, fn in matrices]
        else:
            check_axes(name, axes or (), mesh)
            results = _exchanged(matrices, mesh, specs, axes)
        return leaves.skeleton.fill(results), state

    return optax.GradientTransformation(init, update)


def _alone(leaf: Leaf, fn: MatrixFunction) -> jax.Array:
    """Compute the result for a matrix, or for the layers of a stack, on one device."""
    for _ in stack_sizes(leaf):
        fn = jax.vmap(fn)
    return fn(leaf.value)


def _exchanged(
    matrices: Sequence[tuple[Leaf, MatrixFunction]],
    mesh: Mesh | AbstractMesh,
    specs: Mapping[Path, PartitionSpec],
    over: Sequence[str] | None,
) -> list[AnyArray]:
    """Compute the result for each matrix on the devices of a mesh."""
    sizes = dict(mesh.shape)
    # Groups of matrices that can be computed together.
    alike: dict[Hashable, dict[int, Exchange]] = {}
    for i, (leaf, fn) in enumerate(matrices):
        stacked = len(stack_sizes(leaf))
        exchange = Exchange.of(sizes, leaf.shape, specs[leaf.path], stacked, over)
        alike.setdefault((id(fn), leaf.value.dtype, exchange.kind), {})[i] = exchange
    results: dict[int, AnyArray] = {}
    for exchanges in alike.values():
        own = list(exchanges.values())
        joined = own[0].joined_with(own[1:])
        # Parameters of one kind are computed together if each device then has fewer matrices. The
        # layers of a single stack may be too few for all devices.
        groups = [(list(exchanges), joined)]
        if joined.own == sum(exchange.own for exchange in own):
            groups = [([i], exchange.of_one()) for i, exchange in exchanges.items()]
        for indices, exchange in groups:
            leaves = [matrices[i][0] for i in indices]
            of_group = _on_devices(leaves, matrices[indices[0]][1], exchange, mesh, specs)
            results.update(zip(indices, of_group, strict=True))
    return [results[i] for i in range(len(matrices))]


def _on_devices(
    leaves: Sequence[Leaf],
    fn: MatrixFunction,
    exchange: Exchange,
    mesh: Mesh | AbstractMesh,
    specs: Mapping[Path, PartitionSpec],
) -> Sequence[jax.Array]:
    """Compute the results for matrices that are exchanged together."""
    compute = jax.vmap(fn)

    def local(*shards: jax.Array) -> list[jax.Array]:
        return exchange.shards(compute(exchange.whole(shards)))

    own = [specs[leaf.path] for leaf in leaves]
    # JAX's types do not express that a gathered value is equal on all devices.
    mapped: Any = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(own), out_specs=own, check_vma=False
    )
    return mapped(*[leaf.value for leaf in leaves])


# How the parameters are sharded


def _specs(
    tree: Tree, layout: LayoutTree, name: str
) -> tuple[Mesh | AbstractMesh | None, dict[Path, PartitionSpec]]:
    """Return the parameters' mesh and specs, from their types or the layout.

    The mesh is None if the parameters are on one device.

    Args:
        tree: the parameters, or gradients.
        layout: the parameters' layout, or None for the ambient rules.
        name: the name of the public function, for messages.

    Raises:
        ShardingError: if neither types nor a layout determines the specs.
        ShardingError: if the layout does not fit the parameters.
        ShardingError: if this function is called inside a `shard_map`.
    """
    given = ambient_rules() if layout is None else layout
    leaves, parts = (read(tree), []) if given is None else read_for(tree, given)
    mesh = find_mesh(own_meshes(parts), leaves.values)
    if mesh is None or mesh.size == 1:
        return None, {}
    if manual := getattr(mesh, "manual_axes", ()):
        raise _unknown(leaves, name, f"inside shard_map ({', '.join(manual)})", _OUTSIDE)
    if AxisType.Auto not in mesh.axis_types:
        specs = {leaf.path: typed_spec(leaf.value) or PartitionSpec() for leaf in leaves.leaves}
        return mesh, specs
    if given is None:
        raise _unknown(leaves, name, f"on mesh {mesh_view(mesh)}", _GIVE_LAYOUT.format(name=name))
    view = local_view(mesh, own_meshes(parts))
    # The tree has only trained parameters, so a filter may match nothing in it.
    decided = decide_parts(leaves, as_partial(parts), view)
    if decided.problems:
        raise ShardingError(
            f"`ft.{name}`: the layout, from `layout=` or the ambient rules, does not fit the "
            f"parameters on mesh {view}",
            decided.problems,
        )
    pairs = zip(decided.leaves, decided.decisions, strict=True)
    return mesh, {leaf.path: of_rank(decision.spec, len(leaf.shape)) for leaf, decision in pairs}


def _unknown(leaves: Leaves, name: str, where: str, remedy: str) -> ShardingError:
    """Return the error for parameters whose sharding is unknown."""
    problems = [leaf.problem("its sharding is unknown", remedy) for leaf in leaves.leaves]
    matrices = count(len(problems), "parameter")
    return ShardingError(f"`ft.{name}` cannot gather the matrices of {matrices} {where}", problems)


_OUTSIDE = "update the parameters outside of shard_map, where they have their full shapes"
_GIVE_LAYOUT = (
    "pass the layout of the model, `ft.{name}(..., layout=...)`, or update under ambient rules, "
    "with `ft.jit(rules=...)` or `ft.axis_rules`"
)


# Checks


def _check_matrices(matrices: Sequence[tuple[Leaf, MatrixFunction]], name: str) -> None:
    """Raise a FunctreeError for arrays that are not matrices, or whose type a function changes."""
    problems: list[Problem] = []
    for leaf, fn in matrices:
        stack = stack_sizes(leaf)
        if leaf.stacked and not stack:
            problems.append(leaf.problem("is one layer of a stack", _NOT_INSIDE.format(name=name)))
            continue
        shape = tuple(leaf.shape[len(stack) :])
        if len(shape) < 2:
            why = f"is not a matrix: its shape is {list(shape)}"
            why += ", not counting its stack" if stack else ""
            problems.append(leaf.problem(why, _LEAVE_OUT))
            continue
        matrix = jax.ShapeDtypeStruct(shape, leaf.value.dtype)
        # JAX traces a function once for matrices of the same type.
        result = value_text(jax.eval_shape(fn, matrix))
        if result != value_text(matrix):
            remedy = "return a matrix of the same shape and dtype"
            problems.append(leaf.problem(f"the function returns {result} for it", remedy))
    if problems:
        arrays = count(len(problems), "array")
        raise FunctreeTypeError(f"`ft.{name}` cannot be applied to {arrays}", problems)


_NOT_INSIDE = "remove `ft.layerwise`, since `ft.{name}` already treats each layer separately"
_LEAVE_OUT = "exclude the array with `optax.masked` or `optax.partition`"
