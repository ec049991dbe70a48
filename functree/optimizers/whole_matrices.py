"""A function of one matrix ─► a transform that applies it to whole matrices, with the layers of
stacks spread over devices."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from functree.argument_checks import FUNCTION, Takes, check
from functree.devices.meshes import mesh_view
from functree.errors import FunctreeTypeError, FunctreeValueError, Problem, did_you_mean
from functree.labels.leaf import Leaf
from functree.labels.leaves import read
from functree.labels.optimizer.layers import stack_sizes
from functree.layout.layout import LayoutTree
from functree.optimizers.exchange import Exchange
from functree.optimizers.parameter_specs import ParameterSpecs
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path

MatrixFunction = Callable[[jax.Array], jax.Array]
"""A function of one matrix, which returns a matrix of the same shape and dtype."""


def on_whole_matrices(
    fn: MatrixFunction, over: str | Sequence[str] | None = None, layout: LayoutTree = None
) -> optax.GradientTransformation:
    """Apply a function to each matrix of the updates, as a whole.

    An optimizer such as Muon multiplies each matrix with itself, several times in each update. If
    the matrices are sharded, as under FSDP and tensor parallelism, each product moves partial sums
    between the devices. Here the layers of a stack, and matrices of one shape, are spread over the
    devices instead, so that each device has whole matrices: they are exchanged once before `fn`,
    and once after it.

    The transform has no state. In an optimizer it stands between transforms that compute element
    by element, such as moments and decay, which stay sharded as they are. `ft.muon` is made with
    it.

    If the matrices do not fill the devices, some devices have nothing to do. A single matrix is
    gathered by all devices, and each of them computes the same. On one device nothing moves.

    Args:
        fn: a function of one matrix: of the array of a parameter, for a stack of one layer's array.
            It returns an array of the same shape and dtype.
        over: the mesh axes over which the matrices are spread; by default all that shard the
            parameter. Along others they are gathered.
        layout: the layout of the model; by default the ambient one. On Explicit axes none is
            needed.

    Returns:
        A transform of optax. Arrays with fewer than two dimensions, without those of their stacks,
            are no matrices: leave them out by `optax.masked` or `optax.partition`.

    Raises:
        FunctreeError: if `fn` is not a function, or `over` names no mesh axes; (when called) if an
            array is no matrix; if `fn` returns another shape or dtype; if the mesh does not have
            the axes in `over`; inside of `ft.layerwise`, which shows one layer of each stack.
        ShardingError: (when called) if there is a mesh with Auto axes and no layout; if the layout
            does not fit; inside of a `shard_map`.

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
    check("there is no such transform", fn=(fn, FUNCTION))

    def choose(updates: Tree) -> Chosen:
        return lambda leaf: (None, fn)

    return of_each_matrix(choose, over, layout, "on_whole_matrices")


Chosen = Callable[[Leaf], tuple[Hashable, MatrixFunction]]
"""A function from a leaf to what tells its function from those of others, and the function."""


def of_each_matrix(
    choose: Callable[[Tree], Chosen],
    over: str | Sequence[str] | None,
    layout: LayoutTree,
    name: str,
) -> optax.GradientTransformation:
    """The same, with a function for each leaf.

    Args:
        choose: a function from the updates to the choice of a function for each leaf.
        over: as in `on_whole_matrices`, and so is `layout`.
        layout: the layout of the model.
        name: the name of the public function, for messages.
    """
    check("there is no such transform", over=(over, OVER))
    axes: tuple[str, ...] | None = None
    if over is not None:
        axes = (over,) if isinstance(over, str) else tuple(over)

    def init(params: Tree) -> Tree:
        return optax.EmptyState()

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        chosen = choose(updates)
        matrices: list[_Matrix] = []
        leaves = read(updates)
        for leaf in leaves.leaves:
            key, fn = chosen(leaf)
            matrices.append(_Matrix(leaf, key, fn))
        _check_matrices(matrices, name)
        where = ParameterSpecs.of(updates, layout, name)
        if where is None:
            found = [one.alone() for one in matrices]
        else:
            _check_axes(axes or (), where, name)
            found = _exchanged(matrices, where, axes)
        return leaves.skeleton.fill(found), state

    return optax.GradientTransformation(init, update)


OVER = Takes(
    "a mesh axis, or several in a tuple",
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, tuple | list) and all(isinstance(one, str) for one in value))
    ),
    lambda value: isinstance(value, str) or len(set(value)) == len(value),
).or_none()


class _Matrix(NamedTuple):
    """A leaf of the updates: one matrix, or those of the layers of a stack.

    Attributes:
        leaf: the leaf.
        key: what tells its function from those of others.
        fn: its function.
    """

    leaf: Leaf
    key: Hashable
    fn: MatrixFunction

    @property
    def stack(self) -> tuple[int, ...]:
        """The sizes of the stacks that it is in."""
        return stack_sizes(self.leaf)

    def alone(self) -> jax.Array:
        """The result, on one device."""
        fn = self.fn
        for _ in self.stack:
            fn = jax.vmap(fn)
        return fn(self.leaf.value)


def _exchanged(
    matrices: Sequence[_Matrix], where: ParameterSpecs, over: tuple[str, ...] | None
) -> list[AnyArray]:
    """The result for each matrix, on the devices of a mesh."""
    specs, sizes = where.specs(), dict(where.mesh.shape)
    exchanges: list[Exchange] = []
    # Matrices that can be computed together.
    alike: dict[Hashable, list[int]] = {}
    for i, (leaf, key, _) in enumerate(matrices):
        stacked = len(stack_sizes(leaf))
        exchange = Exchange.of(sizes, leaf.shape, specs[leaf.path], stacked, over)
        exchanges.append(exchange)
        alike.setdefault((key, leaf.value.dtype, exchange.kind), []).append(i)
    found: dict[int, AnyArray] = {}
    for indices in alike.values():
        for together, exchange in _groups(exchanges, indices):
            group = [matrices[i] for i in together]
            found.update(zip(together, _on_devices(group, exchange, specs, where), strict=True))
    return [found[i] for i in range(len(matrices))]


def _groups(
    exchanges: Sequence[Exchange], indices: Sequence[int]
) -> list[tuple[Sequence[int], Exchange]]:
    """Matrices of one kind together, if that leaves fewer of them to each device: the layers of one
    stack alone do not fill the devices."""
    own = [exchanges[i] for i in indices]
    joined = own[0].joined_with(own[1:])
    if joined.own < sum(one.own for one in own):
        return [(indices, joined)]
    return [([i], exchanges[i].of_one()) for i in indices]


def _on_devices(
    group: Sequence[_Matrix],
    exchange: Exchange,
    specs: Mapping[Path, PartitionSpec],
    where: ParameterSpecs,
) -> Sequence[jax.Array]:
    """The results for matrices that are made whole together."""
    compute = jax.vmap(group[0].fn)

    def local(*shards: jax.Array) -> list[jax.Array]:
        x = exchange.whole(shards)
        idle = exchange.idle()
        if idle is None:
            return exchange.shards(compute(x))
        return exchange.shards(jax.lax.cond(idle, jnp.zeros_like, compute, x))

    own = [specs[one.leaf.path] for one in group]
    # JAX' types do not know that what is gathered is the same on all devices.
    mapped: Any = jax.shard_map(
        local, mesh=where.mesh, in_specs=tuple(own), out_specs=own, check_vma=False
    )
    return mapped(*[one.leaf.value for one in group])


# Checks


def _check_matrices(matrices: Sequence[_Matrix], name: str) -> None:
    """Raise FunctreeError for arrays that are no matrices, or whose function changes the shape."""
    problems: list[Problem] = []
    known: dict[Hashable, str | None] = {}
    for leaf, key, fn in matrices:
        stack = stack_sizes(leaf)
        if leaf.stacked and not stack:
            problems.append(leaf.problem("is one layer of a stack", _NOT_INSIDE.format(name=name)))
            continue
        shape = tuple(leaf.shape[len(stack) :])
        if len(shape) < 2:
            why = f"is no matrix: it has the shape {list(shape)}"
            why += ", without the dimension of its stack" if stack else ""
            problems.append(leaf.problem(why, _LEAVE_OUT))
            continue
        kind = key, shape, leaf.value.dtype
        if kind not in known:
            known[kind] = _change(fn, jax.ShapeDtypeStruct(shape, leaf.value.dtype))
        if known[kind] is not None:
            remedy = "return a matrix of the same shape and dtype"
            problems.append(leaf.problem(f"the function returns {known[kind]} for it", remedy))
    if problems:
        raise FunctreeTypeError(f"`ft.{name}` cannot be applied", problems)


_NOT_INSIDE = "leave `ft.layerwise` away, since `ft.{name}` takes each layer by itself too"
_LEAVE_OUT = "leave it out, by `optax.masked` or `optax.partition`"


def _change(fn: MatrixFunction, matrix: jax.ShapeDtypeStruct) -> str | None:
    """What a function returns for a matrix, if that is something else; else None."""
    result: Any = jax.eval_shape(fn, matrix)
    if not hasattr(result, "shape"):
        return f"a {type(result).__name__}"
    if (result.shape, result.dtype) == (matrix.shape, matrix.dtype):
        return None
    return f"{result.dtype}{list(result.shape)}"


def _check_axes(axes: Sequence[str], where: ParameterSpecs, name: str) -> None:
    """Raise FunctreeError for mesh axes that the mesh does not have."""
    problems: list[Problem] = []
    for axis in axes:
        if axis not in where.mesh.axis_names:
            why = f"mesh {mesh_view(where.mesh)} has no such axis"
            why += did_you_mean(axis, where.mesh.axis_names)
            problems.append(Problem(None, None, f"over={axis!r}", why))
    if problems:
        raise FunctreeValueError(f"`ft.{name}` cannot spread matrices", problems)
