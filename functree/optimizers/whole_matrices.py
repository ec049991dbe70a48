"""`on_whole_matrices` applies a function to whole matrices, spreading layers over devices."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.argument_checks import FUNCTION, check
from functree.devices.meshes import agreed_mesh, mesh_view
from functree.devices.specs import of_rank, typed_spec
from functree.errors import FunctreeTypeError, Problem, ShardingError, count
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves, read
from functree.labels.optimizer.layers import stack_sizes
from functree.layout.decide import decide_parts
from functree.layout.layout import LayoutTree, as_partial, own_meshes
from functree.layout.plan.make_plan import read_for
from functree.optimizers.exchange import Exchange
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import find_mesh, local_view
from functree.transforms.accumulate.accumulate import NAMES, check_axes, names
from functree.tree.arrays import AnyArray, Tree, value_text
from functree.tree.paths import Path

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
    view = local_view(agreed_mesh(mesh, own_meshes(parts)))
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
