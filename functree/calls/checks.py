"""A call and its program ─► an error or a warning, before the call is passed to JAX."""

from collections.abc import Hashable, Sequence
from operator import methodcaller

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.stages import Traced

from functree.calls.body import Arguments
from functree.calls.call_groups import FlatCall
from functree.calls.closures import closed_over, held, used_globals
from functree.calls.program import Program
from functree.calls.signature import AnyFunction
from functree.devices.meshes import current_mesh, mesh_view, tracing
from functree.devices.placement import first_mesh, is_concrete, is_deleted, mesh_of, refuse_deleted
from functree.errors import (
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    ShardingError,
    count,
    warn,
)
from functree.labels.leaf import array_problem
from functree.tree.arrays import AnyArray
from functree.tree.paths import Path

BIG_CONSTANT = 2**20  # bytes; there is a warning for a larger array that a function closes over


def check_call(program: Program, flat: FlatCall) -> None:
    """Raise an error if arguments have no values or are deleted, or if an array is donated
    twice."""
    arrays, arguments = flat.arrays, program.body.arguments
    if program.missing is not None or not flat.concrete:
        _refuse_abstract(program, arrays)
    # By a function in C where it can be, since on several devices this is a part of each call.
    is_gone = _IS_DELETED if flat.concrete else is_deleted
    # JAX 0.10 ends the process if an array on several devices is deleted, and to run a step again
    # on the old state is a mistake that is easily made.
    if any(map(is_gone, arrays)):
        raise refuse_deleted(program.name, program.group.paths, arrays)
    # Not by their buffers: on several devices it takes longer to read these than to make the call.
    if arguments.donated and twice_by_identity(arrays, arguments):
        check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=False)


_IS_DELETED = methodcaller("is_deleted")


def _refuse_abstract(program: Program, arrays: Sequence[AnyArray]) -> None:
    """Raise an error if an argument is abstract, or if nothing can be run on the mesh."""
    if program.missing is not None and not tracing():
        raise ShardingError(f"{program.name} cannot run: {program.missing}")
    for path, array in zip(program.group.paths, arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise FunctreeTypeError(
                f"{program.name}: `{path}` is abstract, so the function cannot run: use `.lower` "
                "or `.eval_shape`"
            )


def check_mesh(
    name: str, paths: Sequence[Path], arrays: Sequence[AnyArray], mesh: Mesh | AbstractMesh | None
) -> None:
    """Check that the arguments are on the function's mesh or, if it has none, on the mesh of the
    first argument.

    A traced array on Auto axes is not checked: it is placed nowhere yet, and the mesh of its type
    has no effect.

    Raises:
        ShardingError: arguments are on another mesh, or on different devices; the message has their
            paths.
    """
    mesh = mesh if mesh is not None else first_mesh(arrays)
    if mesh is None:
        _check_devices(name, paths, arrays)
        return
    if getattr(mesh, "manual_axes", ()):
        return
    _check_outer(name, mesh)
    problems: list[Problem] = []
    for path, array in zip(paths, arrays, strict=True):
        why = _other_devices(array, mesh) or _other_mesh(array, mesh)
        if why is not None:
            problems.append(array_problem(path, array, why, MOVE))
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        number = count(len(problems), "argument")
        headline = f"{name} runs on mesh {mesh_view(mesh)}, but {number} {verb} not on it"
        raise ShardingError(headline, problems)


def _check_devices(name: str, paths: Sequence[Path], arrays: Sequence[AnyArray]) -> None:
    """Check that arguments without a mesh are not on different devices."""
    # JAX checks it too, but its message has no paths.
    first: tuple[Path, jax.Array] | None = None
    problems: list[Problem] = []
    for path, array in zip(paths, arrays, strict=True):
        if not is_concrete(array) or not array.committed:
            continue
        if first is None:
            first = path, array
        first_path, other = first
        if array.sharding.device_set != other.sharding.device_set:
            devices, others = _devices_text(array), _devices_text(other)
            why = f"is committed to {devices}, but `{first_path}` to {others}"
            remedy = "move them to one device, or all to one mesh (`ft.shard`)"
            problems.append(array_problem(path, array, why, remedy))
    if problems:
        raise ShardingError(f"{name}: the arguments are on different devices", problems)


def _check_outer(name: str, mesh: Mesh | AbstractMesh) -> None:
    """Check that a function which is traced as a part of another one has the devices of the other
    one's mesh."""
    outer = current_mesh() if tracing() else None
    if not isinstance(outer, Mesh) or not isinstance(mesh, Mesh):
        return
    own, others = list(mesh.devices.flat), list(outer.devices.flat)
    if own == others:
        return
    what = "other devices"
    if set(own) == set(others):
        what = "the same devices in another order"
    raise ShardingError(
        f"{name} runs on mesh {mesh_view(mesh)}, but is called in a function that runs on "
        f"{mesh_view(outer)}, with {what}. JAX compiles both as one program, with one order of "
        "devices: use the devices of the outer mesh in the same order"
    )


def _devices_text(array: jax.Array) -> str:
    return ", ".join(sorted(map(str, array.sharding.device_set)))


MOVE = "move it to the function's mesh: `ft.shard(x, layout, mesh)`"


def _other_devices(array: AnyArray, mesh: Mesh | AbstractMesh) -> str | None:
    """Why an array without a mesh is not on the devices of a mesh; None if it is, or is on none."""
    if not isinstance(mesh, Mesh) or not is_concrete(array):
        return None
    if not array.committed or isinstance(array.sharding, NamedSharding):
        return None
    if array.sharding.device_set == set(mesh.devices.flat):
        return None
    return f"is committed to {_devices_text(array)} only"


def _other_mesh(array: AnyArray, mesh: Mesh | AbstractMesh) -> str | None:
    """Why the mesh that an array is on is not a function's mesh; None if it is, or is on none."""
    own = mesh_of(array)
    if own is None:
        return None
    explicit, explicit_here = (AxisType.Explicit in one.axis_types for one in (own, mesh))
    # A traced array on Auto axes is placed nowhere yet, and the mesh of its type has no effect.
    if isinstance(array, Tracer) and not explicit and not explicit_here:
        return None
    why = f"is on the mesh {mesh_view(own)}"
    if dict(own.shape) != dict(mesh.shape):
        return why
    if isinstance(own, Mesh) and isinstance(mesh, Mesh):
        if own.devices.tolist() != mesh.devices.tolist():
            return f"{why}, with other devices"
    # Inside `shard_map` the types of the axes change.
    if AxisType.Manual in (*own.axis_types, *mesh.axis_types) or explicit == explicit_here:
        return None
    return f"{why} with {'Explicit' if explicit else 'Auto'} axes"


def warn_constants(name: str, fun: AnyFunction, traced: Traced) -> None:
    """Warn of large arrays that the function closes over, since each becomes a constant of the
    program.

    Args:
        name: the name of the function.
        fun: the function.
        traced: JAX's `Traced` of a call.
    """
    for constant in traced.jaxpr.consts:
        size = getattr(constant, "nbytes", 0)
        # A traced array of an outer function is passed to the program, and is no constant of it.
        if isinstance(constant, Tracer) or size <= BIG_CONSTANT:
            continue
        # JAX does not tell where a constant is from, so it is looked for among these by identity.
        variables = {**used_globals(fun), **closed_over(fun)}
        path = next((path for path, value in held(variables) if value is constant), None)
        what = f"{constant.dtype}{list(constant.shape)}"
        if path is not None:
            what += f" (`{path}`)"
        warn(
            f"{name} closes over an array of {size / 2**20:.1f} MiB, {what}: it becomes a constant "
            "of the compiled program, on every device; pass it as an argument",
        )


# Donation
#
# If an array on several devices is donated twice, JAX 0.10 aborts the process. Later versions raise
# an error of XLA, which has no paths.


def twice_by_identity(arrays: Sequence[AnyArray], arguments: Arguments) -> bool:
    """Whether an array is donated twice, or donated and also passed without donation. Fast enough
    for each call."""
    # Most calls have no array twice at all, donated or not, which is seen faster.
    if len(set(map(id, arrays))) == len(arrays):
        return False
    donated = {id(arrays[i]) for i in arguments.donated}
    if len(donated) < len(arguments.donated):
        return True
    return any(id(arrays[i]) in donated for i in arguments.kept)


def check_donated(
    name: str,
    paths: Sequence[Path],
    arrays: Sequence[AnyArray],
    arguments: Arguments,
    by_buffer: bool,
) -> None:
    """Raise FunctreeError if an array is donated twice, or donated and also passed without
    donation.

    Args:
        name: the name of the function.
        paths: the paths of the arrays.
        arrays: the arrays of a call.
        arguments: which of them are donated.
        by_buffer: whether to find different arrays with one buffer too, as `jax.device_put` makes
            them.

    Raises:
        FunctreeError: such an array has two paths, which the error lists; or an array is deleted.
    """
    donated = set(arguments.donated)
    # The buffers of a deleted array cannot be read.
    if by_buffer and any(map(is_deleted, arrays)):
        raise refuse_deleted(name, paths, arrays)
    owners: dict[Hashable, int] = {}  # the index of the first array with an identity
    problems: list[Problem] = []
    # The donated arrays first: a kept array is a problem only if a donated one has the same buffer.
    for i in (*arguments.donated, *arguments.kept):
        for identity in _identities(arrays[i], by_buffer):
            owner = owners.setdefault(identity, i)
            if owner == i or owner not in donated:
                continue
            what = "buffer" if by_buffer else "array"
            how = "both are donated" if i in donated else "that one is donated"
            why = f"is the same {what} as `{paths[owner]}`, and {how}"
            # An untied copy, since the two may be in one argument.
            copy = f"`ft.copy({paths[i][0]}, untie=True)`"
            remedy = f"donate it once, or pass {copy}, where each place has an array of its own"
            problems.append(array_problem(paths[i], arrays[i], why, remedy))
            break
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        raise FunctreeValueError(
            f"{name}: {count(len(problems), 'array')} {verb} donated twice", problems
        )


def _identities(array: AnyArray, by_buffer: bool) -> Sequence[Hashable]:
    """What identifies an array: its id, or its buffers."""
    if not by_buffer:
        return [id(array)]
    # A traced array has no buffer, and neither has an array of keys by JAX's public functions.
    if not is_concrete(array) or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return []
    # Nothing of an empty shard is overwritten, so two arrays may share it.
    shards = [shard for shard in array.addressable_shards if shard.data.size]
    buffers = [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards]
    # On a CPU, `jax.device_put` of an aligned NumPy array copies nothing. JAX does not overwrite
    # such foreign memory, so two arrays may be over it. It is known by shards of one array that
    # share it: JAX's own is of one device.
    if len({pointer for _, pointer in buffers}) < len(buffers):
        return []
    return buffers
