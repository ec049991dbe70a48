"""Arrays that each process has ─► arrays on a mesh of all processes, once these have been found to
say the same."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from functree.devices.placement import is_placed
from functree.devices.specs import mesh_axes, of_rank, spec_text
from functree.errors import Problem, ShardingError, count, path_text
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves
from functree.layout.plan.plan import Plan
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import checksum, facts_of
from functree.processes.digest import Bounds, compared
from functree.processes.exchange import processes_text
from functree.tree.arrays import AnyArray, array_text, is_key, keys_of, on_device, with_sharding

FAILURE = "the arrays cannot be placed"

Values = Sequence[Any]


class Planner(Protocol):
    """Reads a tree and plans it."""

    def __call__(self, values: Values | None = None, check: bool = True) -> tuple[Leaves, Plan]:
        """The leaves of the tree, and their plan.

        Args:
            values: the arrays by whose shapes it is planned; by default those of the tree.
            check: whether an array that cannot be laid out is an error.
        """
        ...


def place_across(planner: Planner, local: bool) -> Any:
    """A tree with its arrays on a mesh of all processes.

    Args:
        planner: reads and plans the tree.
        local: whether each process has its own rows of each array; else each has all of it.

    Raises:
        FunctreeError: the processes have other plans, or other values for what several of them
            have.
    """
    rows = "if each process has rows of its own, say `local=True`; else"
    if local:
        rows = "each process has to hand in as many rows as the others, and"
    with Agreement(FAILURE, remedy=rows) as agreement:
        tree, shardings, facts = _prepared(planner, local)
        agreement.compare(lambda: facts)
    leaves = tree.leaves
    if local:
        _check_rows(leaves, shardings)
    make = _from_rows if local else _from_whole
    made: dict[int, jax.Array] = {}  # an array at two paths of the tree stays one array
    for value, sharding in zip(tree.values, shardings, strict=True):
        if id(value) not in made:
            made[id(value)] = make(value, sharding)
    return tree.skeleton.fill(made[id(value)] for value in tree.values)


def _prepared(planner: Planner, local: bool) -> tuple[Leaves, list[NamedSharding], Facts]:
    """What is placed, and where; and the facts about it."""
    tree, planned = planner(check=not local)  # by the shapes of rows nothing can be said yet
    leaves = tree.leaves
    _check_all_processes(planned)
    if local:
        _check_local(leaves)
        shapes = _whole_shapes(leaves, planned)
        _, planned = planner(shapes)
        _check_sizes(leaves, shapes, planned)
    values: list[str] = []
    for leaf in leaves:
        # With `local`, each process has other rows; `_check_rows` compares those of several.
        if not local and _is_own(leaf.value):
            digest = f"{checksum(_host(leaf.value)):08x}"
            values.append(f"{path_text(leaf.path)}: {array_text(leaf.value)} {digest}")
    facts = {"plan": facts_of(planned), "values": values}
    return tree, list(map(planned.sharding, planned.rows)), facts


def _check_local(leaves: Sequence[Leaf]) -> None:
    """Raise ShardingError for arrays that are no rows of this process."""
    problems = []
    for leaf in leaves:
        if not _is_own(leaf.value):
            problems.append(leaf.problem(_ALL, "leave it out: it is placed already"))
        elif is_key(leaf.value.dtype):
            problems.append(leaf.problem(_KEYS, "make them in all processes, with `local=False`"))
    _raise_local(problems)


_ALL = "is an array of all processes, and not the rows of this one"
_KEYS = "has random keys, of which a process has no rows"


def _check_sizes(leaves: Sequence[Leaf], shapes: Sequence[AnyArray], planned: Plan) -> None:
    """Raise ShardingError if the layout of an array changes with the size of the whole, as that of
    `ft.FSDP` may."""
    problems = []
    for leaf, before, after in zip(leaves, shapes, _whole_shapes(leaves, planned), strict=True):
        if after.shape != before.shape:
            why = f"its rows are those of another array than {array_text(before)}"
            problems.append(leaf.problem(why, "write its spec: `ft.P(...)`"))
    _raise_local(problems)


def _raise_local(problems: Sequence[Problem]) -> None:
    if problems:
        raise ShardingError(
            f"{count(len(problems), 'leaf')} cannot be placed with `local=True`", problems
        )


def _check_all_processes(planned: Plan) -> None:
    """Raise ShardingError for a mesh without devices of some processes: they would wait for the
    others for ever."""
    missing = set(range(jax.process_count()))
    if isinstance(planned.mesh, Mesh):
        missing.difference_update(device.process_index for device in planned.mesh.devices.flat)
    if missing:
        raise ShardingError(
            f"{FAILURE}: the mesh has no device of {processes_text(sorted(missing))}: "
            "make a mesh of all devices"
        )


def _from_whole(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array of which each process has all values. No process talks to another one."""
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
    """An array of which each process has its own rows."""
    whole = _whole_shape(value, sharding)
    return jax.make_array_from_process_local_data(sharding, _host(value), whole.shape)


def _is_own(value: Any) -> bool:
    """Whether an array is this process' alone: of numpy, or on devices of this process."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _host(value: Any) -> np.ndarray:
    """An array of this process in the memory of the host, with a dtype that JAX has; the words of
    random keys."""
    if is_key(value.dtype):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


# Rows


def _whole_shapes(leaves: Sequence[Leaf], planned: Plan) -> list[jax.ShapeDtypeStruct]:
    """The whole arrays by their shardings in a plan."""
    shardings = map(planned.sharding, planned.rows)
    return [_whole_shape(leaf.value, one) for leaf, one in zip(leaves, shardings, strict=True)]


def _whole_shape(value: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """The whole array, as an abstract one, of which this process has its own rows."""
    parts = _parts(sharding, len(value.shape))
    own = _block(parts, sharding, jax.process_index())
    sizes = [size * n // len(mine) for size, n, mine in zip(value.shape, parts, own, strict=True)]
    return jax.ShapeDtypeStruct(tuple(sizes), jax.dtypes.canonicalize_dtype(value.dtype))


def _parts(sharding: NamedSharding, ndim: int) -> list[int]:
    """The number of parts of each dimension."""
    sizes = sharding.mesh.shape
    parts: list[int] = []
    for entry in of_rank(sharding.spec, ndim):
        parts.append(math.prod(map(sizes.__getitem__, mesh_axes(entry))))
    return parts


Block = tuple[tuple[int, ...], ...]
"""What a process has of an array: in each dimension, which of its parts."""


def _block(parts: Sequence[int], sharding: NamedSharding, process: int) -> Block:
    """The parts that the devices of a process keep.

    Raises:
        ShardingError: they are not all combinations of parts of each dimension.
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
            f"{FAILURE}: by {spec_text(sharding.spec)} the devices of process {process} do not "
            "keep a block of the array, so it has no rows of its own: give all processes the whole "
            "array, with `local=False`"
        )
    return block


def _check_rows(leaves: Sequence[Leaf], shardings: Sequence[NamedSharding]) -> None:
    """Raise ShardingError if processes that keep the same rows have different ones."""
    mine: dict[str, list[tuple[Bounds, int]]] = {}
    for leaf, sharding in zip(leaves, shardings, strict=True):
        parts = _parts(sharding, leaf.value.ndim)
        blocks = [_block(parts, sharding, process) for process in range(jax.process_count())]
        if len(set(blocks)) < len(blocks):
            bounds = tuple((one[0], one[-1] + 1) for one in blocks[jax.process_index()])
            mine[str(leaf.path)] = [(bounds, checksum(_host(leaf.value)))]
    if not mine:  # in all processes: it follows from the shardings
        return
    _, problems = compared(
        mine, "give the same rows to processes that keep the same part, or another layout"
    )
    if problems:
        raise ShardingError(FAILURE, problems)
