"""These functions check a call before it runs.

A call and its program ─► an error, a warning, or nothing.
"""

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
from functree.devices.meshes import mesh_view, tracing
from functree.devices.placement import first_mesh, is_concrete, is_deleted, mesh_of, refuse_deleted
from functree.errors import (
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    ShardingError,
    count,
    warn,
)
from functree.labels.leaves import array_problem
from functree.tree.arrays import AnyArray
from functree.tree.jaxprs import all_equations
from functree.tree.paths import Path

BIG_CONSTANT = 2**20  # bytes; closing over a larger array gives a warning


def check_call(program: Program, flat: FlatCall) -> None:
    """Refuse abstract or deleted arguments, a donated array passed twice, and absent devices."""
    arrays, arguments = flat.arrays, program.body.arguments
    if program.missing is not None or not flat.concrete:
        _refuse_abstract(program, arrays)
    # Use a function written in C if possible, since each call on several devices runs this check.
    is_gone = _IS_DELETED if flat.concrete else is_deleted
    # JAX 0.10 aborts the process if a deleted array on several devices is used. Running a step
    # again on the old state is an easy mistake.
    if any(map(is_gone, arrays)):
        raise refuse_deleted(program.name, program.group.paths, arrays)
    # Buffers are not compared: on several devices, reading them takes longer than the call itself.
    # Most calls pass no array twice.
    if arguments.donated and len(set(map(id, arrays))) < len(arrays):
        check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=False)


_IS_DELETED = methodcaller("is_deleted")


def _refuse_abstract(program: Program, arrays: Sequence[AnyArray]) -> None:
    """Raise an error if an argument is abstract, or if the mesh has no devices to run on."""
    if program.missing is not None and not tracing():
        raise ShardingError(f"{program.name} cannot run: {program.missing}")
    for path, array in zip(program.group.paths, arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise FunctreeTypeError(
                f"{program.name}: `{path}` is abstract, so the function cannot run: pass an array, "
                "or use `.lower` or `.eval_shape`"
            )


def check_mesh(
    name: str, paths: Sequence[Path], arrays: Sequence[AnyArray], mesh: Mesh | AbstractMesh | None
) -> None:
    """Check that the arguments are on the function's mesh.

    A function without a mesh uses the mesh of the first argument that has one. A traced array on
    Auto axes is not checked, since it is not placed yet and the mesh in its type has no effect.

    Raises:
        ShardingError: if arguments are on a different mesh; the message lists their paths.
    """
    mesh = mesh if mesh is not None else first_mesh(arrays)
    # Without a mesh, JAX itself refuses arguments on different devices, and names them.
    if mesh is None or getattr(mesh, "manual_axes", ()):
        return
    problems: list[Problem] = []
    for path, array in zip(paths, arrays, strict=True):
        its = mesh_of(array)
        if its == mesh:
            continue
        why = _other_devices(array, mesh) if its is None else _other_mesh(array, its, mesh)
        if why is not None:
            remedy = "move the argument to the function's mesh: `ft.shard(x, layout, mesh)`"
            problems.append(array_problem(path, array, why, remedy))
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        number = count(len(problems), "argument")
        headline = f"{name} runs on mesh {mesh_view(mesh)}, but {number} {verb} not on it"
        raise ShardingError(headline, problems)


def _other_devices(array: AnyArray, mesh: Mesh | AbstractMesh) -> str | None:
    """Explain why an array without a mesh is not on a mesh's devices; return None if it is."""
    if not isinstance(mesh, Mesh) or not is_concrete(array):
        return None
    if not array.committed or isinstance(array.sharding, NamedSharding):
        return None
    if array.sharding.device_set == set(mesh.devices.flat):
        return None
    return f"is committed to {', '.join(sorted(map(str, array.sharding.device_set)))} only"


def _other_mesh(
    array: AnyArray, array_mesh: Mesh | AbstractMesh, mesh: Mesh | AbstractMesh
) -> str | None:
    """Explain how an array's mesh differs from a function's mesh; return None if it does not."""
    explicit, explicit_here = (AxisType.Explicit in m.axis_types for m in (array_mesh, mesh))
    # A traced array on Auto axes is not placed yet, and the mesh in its type has no effect.
    if isinstance(array, Tracer) and not explicit and not explicit_here:
        return None
    why = f"is on the mesh {mesh_view(array_mesh)}"
    if dict(array_mesh.shape) != dict(mesh.shape):
        return why
    if isinstance(array_mesh, Mesh) and isinstance(mesh, Mesh):
        if array_mesh.devices.tolist() != mesh.devices.tolist():
            return f"{why}, which has different devices"
    # Inside `shard_map`, the types of the axes change.
    if AxisType.Manual in (*array_mesh.axis_types, *mesh.axis_types) or explicit == explicit_here:
        return None
    return f"{why} with {'Explicit' if explicit else 'Auto'} axes"


def warn_constants(name: str, fun: AnyFunction, traced: Traced) -> None:
    """Warn about large arrays that a function closes over.

    These arrays become constants of the compiled program.

    Args:
        name: the name of the function.
        fun: the function.
        traced: JAX's `Traced` of a call.
    """
    for constant in traced.jaxpr.consts:
        size = getattr(constant, "nbytes", 0)
        # A traced array from an outer function is passed to the program, so it is not a constant.
        if isinstance(constant, Tracer) or size <= BIG_CONSTANT:
            continue
        # JAX does not record a constant's origin, so search the function's variables by identity.
        variables = {**used_globals(fun), **closed_over(fun)}
        path = next((path for path, value in held(variables) if value is constant), None)
        description = f"{constant.dtype}{list(constant.shape)}"
        if path is not None:
            description += f" (`{path}`)"
        warn(
            f"{name} closes over an array of {size / 2**20:.1f} MiB, {description}, which becomes "
            "a constant of the compiled program on every device: pass it as an argument",
        )


def warn_grouped_convolutions(name: str, traced: Traced, mesh: Mesh | AbstractMesh | None) -> None:
    """Warn about gradients of grouped convolutions, which XLA's partitioner may compute wrongly.

    If some mesh axes shard the convolution's input, the partitioner sums the gradient over the
    other mesh axes, too. The gradient is then multiplied by their sizes.

    Args:
        name: the name of the function.
        traced: JAX's `Traced` of a call.
        mesh: the mesh of the program.
    """
    axes = [axis for axis, size in mesh.shape.items() if size > 1] if mesh is not None else []
    if len(axes) < 2:
        return
    # The partitioner does not partition the operations in a `shard_map`.
    partitioned = all_equations(traced.jaxpr, shard_maps=False)
    # Only the gradient of a grouped convolution's kernel has such groups.
    groups = [equation.params.get("batch_group_count", 1) for equation in partitioned]
    if max(groups, default=1) > 1:
        warn(
            f"{name}: the gradient of a grouped convolution's kernel may be too large. If some "
            "mesh axes shard the convolution's input, XLA multiplies the gradient by the sizes of "
            "the other mesh axes: shard the input, for example its batch, over all of the axes "
            f"{', '.join(axes)}"
        )


# Donation
#
# If an array on several devices is donated twice, JAX 0.10 aborts the process. Later versions raise
# an XLA error without paths.


def check_donated(
    name: str,
    paths: Sequence[Path],
    arrays: Sequence[AnyArray],
    arguments: Arguments,
    by_buffer: bool,
) -> None:
    """Check that no donated array is passed twice, even if it is donated only once.

    Args:
        name: the name of the function.
        paths: the paths of the arrays.
        arrays: the arrays of a call.
        arguments: the arguments, which record the donated arrays.
        by_buffer: whether to also find different arrays that share a buffer, such as results of
            `jax.device_put`.

    Raises:
        FunctreeError: if a donated array has a second path; the error lists both paths.
        FunctreeError: if an array is deleted.
    """
    donated = set(arguments.donated)
    # The buffers of a deleted array cannot be read.
    if by_buffer and any(map(is_deleted, arrays)):
        raise refuse_deleted(name, paths, arrays)
    owners: dict[Hashable, int] = {}  # the index of the first array with an identity
    problems: list[Problem] = []
    # Donated arrays come first, since a kept array is a problem only if a donated array shares its
    # identity.
    for i in (*arguments.donated, *arguments.kept):
        for identity in _identities(arrays[i], by_buffer):
            owner = owners.setdefault(identity, i)
            if owner == i or owner not in donated:
                continue
            shared = "has the same buffer as" if by_buffer else "is the same array as"
            how = "and both are donated" if i in donated else "which is donated"
            why = f"{shared} `{paths[owner]}`, {how}"
            # The copy is untied, since both paths may be in one argument.
            copy = f"`ft.copy({paths[i][0]}, untie=True)`"
            remedy = f"pass the array once, or pass {copy}, which gives each path its own array"
            problems.append(array_problem(paths[i], arrays[i], why, remedy))
            break
    if problems:
        verb = "shares" if len(problems) == 1 else "share"
        raise FunctreeValueError(
            f"{name}: {count(len(problems), 'array')} {verb} memory with a donated array", problems
        )


def _identities(array: AnyArray, by_buffer: bool) -> Sequence[Hashable]:
    """Return the identities of an array: its id, or its buffers."""
    if not by_buffer:
        return [id(array)]
    # A traced array has no buffer, and JAX's public API exposes none for an array of keys.
    if not is_concrete(array) or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return []
    # An empty shard has nothing to overwrite, so two arrays may share it.
    shards = [shard for shard in array.addressable_shards if shard.data.size]
    buffers = [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards]
    # On a CPU, `jax.device_put` of an aligned NumPy array copies nothing. JAX never overwrites this
    # foreign memory, so two arrays may share it. Shards of one array that share memory reveal
    # this case, since JAX's own memory belongs to one device.
    if len({pointer for _, pointer in buffers}) < len(buffers):
        return []
    return buffers
