"""`ft.shard` places concrete arrays according to a layout.

If the mesh has devices of other processes, the processes first check that their plans and values
agree, and each process places its own arrays.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from functree.argument_checks import FLAG, check, check_tree
from functree.devices.meshes import (
    NO_MESH,
    MeshLike,
    agreed_mesh,
    current_mesh,
    mesh_axes,
    of_rank,
    spec_text,
    without_devices,
)
from functree.devices.placement import is_concrete, is_placed, refuse_deleted
from functree.errors import Problem, ShardingError, count, path_text
from functree.labels.leaves import Leaf, Leaves
from functree.layout.decide import plan_leaves
from functree.layout.fsdp import FSDP
from functree.layout.layout import Composition, LayoutTree, own_meshes, read_for
from functree.layout.plan.plan import Plan
from functree.layout.rules import AxisRules
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import checksum, facts_of
from functree.processes.digest import Bounds, compared
from functree.processes.exchange import processes_text
from functree.tree.arrays import (
    AnyArray,
    Tree,
    array_text,
    is_key,
    keys_of,
    on_device,
    with_sharding,
)
from functree.tree.axes import Axes
from functree.tree.nodes import PrefixOf, aligned
from functree.tree.paths import Keys, first_beginning

# Meshes of several processes

FAILURE = "the arrays cannot be placed"

Values = Sequence[Any]


Planner = Callable[..., tuple[Leaves, Plan]]
"""A function that reads a tree, and returns its leaves and their plan.

It takes `values`, arrays whose shapes are planned (by default the tree's arrays), and `check`,
whether an array that cannot be laid out raises an error.
"""


def place_across(planner: Planner, local: bool) -> Any:
    """Place the arrays of a tree on a mesh of all processes.

    Args:
        planner: the function that reads and plans the tree.
        local: whether each process passes only its own rows of each array.

    Raises:
        FunctreeError: if plans differ between processes.
        FunctreeError: if processes pass different values for one array.
        ShardingError: if processes with the same shards pass different rows.
    """
    rows = "if each process has its own rows, pass `local=True`; otherwise"
    if local:
        rows = "pass the same number of rows in each process, and"
    with Agreement(FAILURE, remedy=rows) as agreement:
        tree, shardings, facts = _prepared(planner, local)
        agreement.compare(lambda: facts)
    leaves = tree.leaves
    if local:
        _check_rows(leaves, shardings)
    make = _from_rows if local else _from_whole
    made: dict[int, jax.Array] = {}  # an array at two paths stays one array
    for value, sharding in zip(tree.values, shardings, strict=True):
        if id(value) not in made:
            made[id(value)] = make(value, sharding)
    return tree.skeleton.fill(made[id(value)] for value in tree.values)


def _prepared(planner: Planner, local: bool) -> tuple[Leaves, list[NamedSharding], Facts]:
    """Return the leaves, their shardings, and the facts that processes compare."""
    tree, planned = planner(check=not local)  # one process's rows do not have the whole shape
    leaves = tree.leaves
    _check_all_processes(planned)
    if local:
        _check_local(leaves)
        shapes = _whole_shapes(leaves, planned)
        _, planned = planner(values=shapes)
        _check_sizes(leaves, shapes, planned)
    values: list[str] = []
    for leaf in leaves:
        # With `local`, each process has its own rows, and `_check_rows` compares shared rows.
        if not local and _is_own(leaf.value):
            digest = f"{checksum(_host(leaf.value)):08x}"
            values.append(f"{path_text(leaf.path)}: {array_text(leaf.value)} {digest}")
    facts = {"plan": facts_of(planned), "values": values}
    return tree, list(map(planned.sharding, planned.rows)), facts


def _check_local(leaves: Sequence[Leaf]) -> None:
    """Raise ShardingError for arrays that cannot be this process's rows."""
    problems = []
    for leaf in leaves:
        if not _is_own(leaf.value):
            problems.append(leaf.problem(_ALL, "leave this array out, since it is already placed"))
        elif is_key(leaf.value.dtype):
            problems.append(
                leaf.problem(_KEYS, "create the same keys in all processes, and pass `local=False`")
            )
    _raise_local(problems)


_ALL = "has shards in other processes, so it cannot be the rows of this process"
_KEYS = "contains random keys, which `local=True` does not support"


def _check_sizes(leaves: Sequence[Leaf], shapes: Sequence[AnyArray], planned: Plan) -> None:
    """Raise ShardingError if an array's layout depends on its size, as with `ft.FSDP`."""
    problems = []
    for leaf, before, after in zip(leaves, shapes, _whole_shapes(leaves, planned), strict=True):
        if after.shape != before.shape:
            text = array_text(before)
            why = f"its layout depends on its size, so the processes' rows do not form {text}"
            problems.append(leaf.problem(why, "lay it out with a spec: `ft.P(...)`"))
    _raise_local(problems)


def _raise_local(problems: Sequence[Problem]) -> None:
    if problems:
        raise ShardingError(
            f"shard: {count(len(problems), 'leaf')} cannot be placed with `local=True`", problems
        )


def _check_all_processes(planned: Plan) -> None:
    """Raise ShardingError if some processes have no device in the mesh, since they would hang."""
    missing = set(range(jax.process_count()))
    if isinstance(planned.mesh, Mesh):
        missing.difference_update(device.process_index for device in planned.mesh.devices.flat)
    if missing:
        raise ShardingError(
            f"{FAILURE}: the mesh has no device of {processes_text(sorted(missing))}: "
            "build the mesh from all devices"
        )


def _from_whole(value: Any, sharding: NamedSharding) -> jax.Array:
    """Place an array that each process passes as a whole.

    Processes communicate only if the array already has shards in several processes.
    """
    if is_placed(value, sharding):
        return value
    if not _is_own(value):
        return with_sharding(jnp.asarray, sharding, on_device(value))
    array = _host(value)
    if not is_key(value.dtype):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    spec = of_rank(sharding.spec, array.ndim)
    words = jax.make_array_from_callback(
        array.shape, sharding.update(spec=spec), lambda index: array[index]
    )
    return with_sharding(keys_of(str(jax.random.key_impl(value))), sharding, words)


def _from_rows(value: Any, sharding: NamedSharding) -> jax.Array:
    """Place an array from the rows that each process passes."""
    whole = _whole_shape(value, sharding)
    return jax.make_array_from_process_local_data(sharding, _host(value), whole.shape)


def _is_own(value: Any) -> bool:
    """Return whether an array is from NumPy, or only on devices of this process."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _host(value: Any) -> np.ndarray:
    """Copy an array of this process to the host, with a JAX dtype. Random keys become words."""
    if is_key(value.dtype):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


# Rows


def _whole_shapes(leaves: Sequence[Leaf], planned: Plan) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the whole arrays, according to their shardings in a plan."""
    shardings = map(planned.sharding, planned.rows)
    pairs = zip(leaves, shardings, strict=True)
    return [_whole_shape(leaf.value, sharding) for leaf, sharding in pairs]


def _whole_shape(value: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the whole array, of which this process has its own rows."""
    parts = _parts(sharding, len(value.shape))
    own = _block(parts, sharding, jax.process_index())
    sizes = [size * n // len(mine) for size, n, mine in zip(value.shape, parts, own, strict=True)]
    return jax.ShapeDtypeStruct(tuple(sizes), jax.dtypes.canonicalize_dtype(value.dtype))


def _parts(sharding: NamedSharding, ndim: int) -> list[int]:
    """Return the number of shards of each dimension."""
    sizes = sharding.mesh.shape
    parts: list[int] = []
    for entry in of_rank(sharding.spec, ndim):
        parts.append(math.prod(map(sizes.__getitem__, mesh_axes(entry))))
    return parts


Block = tuple[tuple[int, ...], ...]
"""The indices of a process's shards in each dimension of an array."""


def _block(parts: Sequence[int], sharding: NamedSharding, process: int) -> Block:
    """Return the shards on the devices of a process.

    Raises:
        ShardingError: if the shards do not form a block of the array.
    """
    indices = sharding.devices_indices_map(tuple(parts))
    own: set[tuple[int, ...]] = set()
    for device, index in indices.items():
        if device.process_index == process:
            starts = [part.indices(n)[0] for part, n in zip(index, parts, strict=True)]
            own.add(tuple(starts))
    block = tuple(tuple(sorted(set(column))) for column in zip(*own, strict=True))
    if math.prod(map(len, block)) != len(own):
        raise ShardingError(
            f"{FAILURE}: with {spec_text(sharding.spec)}, the shards of process {process} do not "
            "form a block of the array, so it cannot pass them as rows: pass the whole array in "
            "all processes, with `local=False`"
        )
    return block


def _check_rows(leaves: Sequence[Leaf], shardings: Sequence[NamedSharding]) -> None:
    """Raise ShardingError if processes with the same rows pass different values."""
    mine: dict[str, list[tuple[Bounds, int]]] = {}
    for leaf, sharding in zip(leaves, shardings, strict=True):
        parts = _parts(sharding, leaf.value.ndim)
        blocks = [_block(parts, sharding, process) for process in range(jax.process_count())]
        if len(set(blocks)) < len(blocks):
            bounds = tuple((one[0], one[-1] + 1) for one in blocks[jax.process_index()])
            mine[str(leaf.path)] = [(bounds, checksum(_host(leaf.value)))]
    if not mine:  # equal in all processes, since it follows from the shardings
        return
    _, problems = compared(
        mine, "pass equal rows in processes with the same shards, or use a different layout"
    )
    if problems:
        raise ShardingError(FAILURE, problems)


# Meshes of one process

AxesTree = str | Axes | Mapping[Any, Any] | list[Any] | tuple[Any, ...] | None
"""The axes of a bare array, or a prefix tree of them. Arrays below `None` keep their own axes."""

T = TypeVar("T")


def shard(
    tree: T,
    layout: LayoutTree,
    mesh: MeshLike = None,
    *,
    axes: AxesTree = None,
    local: bool = False,
) -> T:
    """Place concrete arrays according to a layout.

    Args:
        tree: arrays in modules and containers. Values that are not arrays stay as they are.
        layout: a layout, or a prefix tree of layouts.
        mesh: a mesh; by default the layout's mesh, or otherwise the current mesh.
        axes: the axes of bare arrays, which have no annotations: a string for one array, or a
            prefix tree such as `{"tokens": "batch seq", "mask": "batch seq"}`.
        local: whether each of several processes passes only its own rows: the part of each array
            that the process's devices hold. Otherwise, each process passes whole arrays, which must
            be equal in all processes.

    Returns:
        The tree with placed arrays. An array that already has its sharding is returned as the same
            object. An array at two paths stays one array.

    Raises:
        ShardingError: if the layout or the axes do not fit the tree.
        ShardingError: if an array is traced or abstract.
        ShardingError: if there is no mesh.
        ShardingError: if the layout is for a different mesh.
        ShardingError: if the mesh has no devices.
        ShardingError: if the mesh's devices are compile-only.
        ShardingError: if a process has no device in the mesh.
        FunctreeError: if an array is deleted.
        FunctreeError: if arrays or layouts differ between processes.
        RuleError: if `layout` is not a layout.
        RuleError: if the structure of `layout` or `axes` is not a prefix of the tree's structure.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules({"batch": "data", "seq": None, "embed": None})
        >>> x = ft.shard(jnp.ones((4, 8)), rules, mesh, axes="batch embed")
        >>> x.sharding.spec
        P('data', None)
        >>> batch = {"tokens": np.ones((4, 16), int), "weight": np.ones(4)}
        >>> axes = {"tokens": "batch seq", "weight": "batch"}
        >>> ft.shard(batch, rules, mesh, axes=axes)["weight"].sharding.spec
        P('data',)
    """
    check_tree("shard", tree)
    check("shard: invalid arguments", local=(local, FLAG))
    if jax.process_count() > 1:
        return place_across(partial(_planned, tree, layout, mesh, axes), local)
    key = _batch_key(tree, layout, mesh, axes)
    shardings = None if key is None else _SHARDINGS.get(key)
    if shardings is not None:
        arrays, structure = tree_flatten(tree)
        return structure.unflatten(_moved(arrays, shardings))
    leaves, planned = _planned(tree, layout, mesh, axes)
    shardings = list(map(planned.sharding, planned.rows))
    if key is not None:
        if len(_SHARDINGS) >= _REMEMBERED:
            _SHARDINGS.clear()
        _SHARDINGS[key] = shardings
    return leaves.skeleton.fill(moved_once(leaves.values, shardings))


_SHARDINGS: dict[tuple[Any, ...], list[NamedSharding]] = {}
_REMEMBERED = 256  # batches


def _moved(arrays: Sequence[Any], targets: Sequence[NamedSharding]) -> list[Any]:
    """Move the arrays of a batch, which are different objects, to their shardings."""
    # Many loops place one NumPy array in each step, and `device_put` is faster for an array than
    # for a list.
    if len(arrays) == 1 and type(arrays[0]) is np.ndarray:
        return [jax.device_put(arrays[0], targets[0])]
    return moved_once(arrays, targets)


def _planned(
    tree: Any,
    layout: LayoutTree,
    mesh: MeshLike,
    axes: AxesTree,
    values: Values | None = None,
    check: bool = True,
) -> tuple[Leaves, Plan]:
    """Read the leaves of a tree, and plan them on a mesh with devices.

    If `values` are given, their shapes are planned instead of the leaves' shapes.
    """
    leaves, parts = read_for(tree, layout)
    if axes is not None:
        leaves = _named_arrays(leaves, tree, axes)
    _check_concrete(leaves)
    shaped = leaves
    if values is not None:
        pairs = zip(leaves.leaves, values, strict=True)
        shaped = replace(leaves, leaves=tuple(leaf._replace(value=value) for leaf, value in pairs))
    view = agreed_mesh(mesh, own_meshes(parts))
    planned = plan_leaves(shaped, parts, view, check=check)
    if planned.mesh is None:
        raise ShardingError(
            f"shard: arrays cannot be placed on mesh {planned.view}, which has no devices: "
            f"{NO_MESH}, where `mesh` is a `Mesh`"
        )
    missing = without_devices(planned.mesh)
    if missing is not None:
        raise ShardingError(f"shard: arrays cannot be placed, since {missing}")
    return leaves, planned


def moved_once(values: Sequence[Any], targets: Sequence[NamedSharding]) -> list[Any]:
    """Move arrays to their shardings. An array that occurs twice stays one array."""
    # One call of `device_put` moves all arrays.
    wanted = dict(zip(map(id, values), targets, strict=True))
    moving = {id(x): x for x in values if not is_placed(x, wanted[id(x)])}
    moved = jax.device_put(list(moving.values()), list(map(wanted.__getitem__, moving)))
    placed = dict(zip(moving, moved, strict=True))
    return [placed.get(id(x), x) for x in values]


# A union written with `|` in the loop would be created for each leaf.
_OF_NUMPY = (np.ndarray, np.generic)


def _check_concrete(leaves: Leaves) -> None:
    problems: list[Problem] = []
    for leaf in leaves.leaves:
        if isinstance(leaf.value, Tracer):
            why = "is traced, but `ft.shard` moves only concrete arrays"
            problems.append(leaf.problem(why, "inside jit, use `ft.constrain`"))
        elif isinstance(leaf.value, jax.ShapeDtypeStruct):
            why = "is abstract, but `ft.shard` moves only concrete arrays"
            problems.append(leaf.problem(why, "give it a sharding with `ft.abstract`"))
        # These checks take most of the time of a call that moves nothing, so they share one loop.
        elif not isinstance(leaf.value, _OF_NUMPY) and leaf.value.is_deleted():
            raise refuse_deleted("shard", leaves.paths, leaves.values)
    if problems:
        raise ShardingError(
            f"shard: {count(len(problems), 'leaf')} cannot be placed on devices", problems
        )


# Axes of bare arrays


def _named_arrays(leaves: Leaves, tree: Tree, axes: AxesTree) -> Leaves:
    """Name the axes of bare arrays.

    An error about axes that do not fit their arrays lists all such arrays by path.

    Args:
        leaves: the leaves of the tree.
        tree: bare arrays in containers. Modules have annotations instead.
        axes: the axes of each array, as a prefix tree. One string may cover all arrays below it.

    Raises:
        RuleError: if the structure of the axes does not match the tree.
        ShardingError: if the axes differ from an array's annotation.
        ShardingError: if the number of axes differs from an array's number of dimensions.
    """
    given: dict[Keys, Axes] = {}
    for written, path, _ in aligned(axes, tree, _AXES):
        if written is not None:
            given[path] = Axes.of(written)
    named_leaves, problems = list(leaves.leaves), list[Problem]()
    for i, leaf in enumerate(leaves.leaves):
        place = first_beginning(leaf.path, given)
        if place is None:
            continue
        new = given[place]
        if len(new) != len(leaf.shape) or (leaf.annotated and leaf.axes != new):
            why = f'its axes are "{leaf.axes}", but `axes=` gives it "{new}"'
            remedy = "name each dimension, or write `None` for an array with an annotation"
            problems.append(leaf.problem(why, remedy))
        named_leaves[i] = leaf._replace(axes=new, annotated=True, misfit=None)
    if problems:
        raise ShardingError("the axes do not fit their arrays", problems)
    return replace(leaves, leaves=tuple(named_leaves))


def _is_axes(value: object) -> bool:
    return value is None or isinstance(value, str | Axes)


_AXES = PrefixOf("axes", "string", _is_axes, 'is not a string such as `"batch embed"`')


# Batches

# A loop places a new batch in every step, and its batches usually have the same form. Planning each
# batch would take several times as long as placing it, so shardings are cached by form.


def _batch_key(
    tree: Any, layout: LayoutTree, mesh: MeshLike, axes: AxesTree
) -> tuple[Any, ...] | None:
    """Return the structure, types, layout, axes and mesh of a batch: everything it is planned by.

    Return None if the tree must be planned, because it contains a module, a leaf that is not a
    concrete array, or one array at two paths. It must also be planned if its layout may depend on
    more than shapes and names, which is possible for a layout function.
    """
    if not _is_batch(tree):
        return None
    arrays, structure = tree_flatten(tree)
    layouts, layout_structure = tree_flatten(layout, is_leaf=_is_plain_layout)
    texts, axes_structure = tree_flatten(axes)
    if len(set(map(id, arrays))) != len(arrays) or not all(map(_is_plain_layout, layouts)):
        return None
    where = current_mesh() if mesh is None else mesh
    if not isinstance(where, Mesh | None) or not all(isinstance(x, str | Axes) for x in texts):
        return None  # planning raises an error
    types = tuple([(x.shape, x.dtype) for x in arrays])
    return structure, types, tuple(layouts), layout_structure, tuple(texts), axes_structure, where


def _is_batch(tree: Any) -> bool:
    """Return whether a tree has only concrete arrays, in plain containers."""
    kind = type(tree)
    if kind is dict:
        return all(map(_is_batch, tree.values()))
    if kind is list or kind is tuple:
        return all(map(_is_batch, tree))
    return kind is np.ndarray or (is_concrete(tree) and not tree.is_deleted())


def _is_plain_layout(layout: Any) -> bool:
    """Return whether a layout depends only on the names and shapes of arrays."""
    if isinstance(layout, Composition):
        return all(map(_is_plain_layout, layout.parts))
    return isinstance(layout, PartitionSpec | NamedSharding | AxisRules | FSDP)
