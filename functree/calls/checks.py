"""A call and its program ─► an error or a warning, before the call is passed to JAX."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from functree.calls.call_groups import FoundCall
from functree.calls.closures import closed_over, held, used_globals
from functree.calls.donation import check_donated, is_deleted, refuse_deleted, twice_by_identity
from functree.calls.program import Program
from functree.errors import FunctreeError, Problem, ShardingError, count, listed, warn
from functree.layout.meshes import current_mesh, mesh_view, tracing
from functree.layout.placement import first_mesh, is_concrete, mesh_of
from functree.tree.leaf import array_problem
from functree.tree.paths import Path

BIG_CONSTANT = 2**20  # bytes; there is a warning for a larger array that a function closes over


def check_call(program: Program, found: FoundCall) -> None:
    """Raise an error if arguments have no values or are deleted, or if an array is donated twice."""
    arrays, arguments = found.arrays, program.body.arguments
    if program.missing is not None or not found.concrete:
        _refuse_abstract(program, arrays)
    gone = [x.is_deleted() for x in arrays] if found.concrete else map(is_deleted, arrays)
    if True in gone:
        raise refuse_deleted(program.name, program.group.paths, arrays)
    if arguments.donated and twice_by_identity(arrays, arguments):
        check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=False)


def _refuse_abstract(program: Program, arrays: Sequence[Any]) -> None:
    """Raise an error if an argument is abstract, or if nothing can be run on the mesh."""
    if program.missing is not None and not tracing():
        raise ShardingError(f"{program.name} cannot run: {program.missing}")
    for path, array in zip(program.group.paths, arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise FunctreeError(
                f"{program.name}: `{path}` is abstract, so the function cannot run: use `.lower` or `.eval_shape`"
            )


def check_mesh(name: str, paths: Sequence[Path], arrays: Sequence[Any], mesh: Mesh | AbstractMesh | None) -> None:
    """Check that the arguments are on the function's mesh or, if it has none, on the mesh of the first argument.

    A traced array on Auto axes is not checked: it is placed nowhere yet, and the mesh of its type has no effect.

    Raises:
        ShardingError: arguments are on another mesh, or on different devices; the message has their paths.
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
        devices, own_mesh = _other_devices(array, mesh), mesh_of(array)
        if devices is not None:
            problems.append(array_problem(path, array, f"is committed to {devices} only", MOVE))
        elif own_mesh is None or (isinstance(array, Tracer) and not _is_explicit(own_mesh, mesh)):
            continue
        elif (difference := _other_mesh(own_mesh, mesh)) is not None:
            problems.append(array_problem(path, array, f"is on the mesh {difference}", MOVE))
    if problems:
        number = f"{count(len(problems), 'argument')} {'is' if len(problems) == 1 else 'are'}"
        raise ShardingError(f"{name} runs on mesh {mesh_view(mesh)}, but {number} not on it", problems)


def _is_explicit(*meshes: Mesh | AbstractMesh) -> bool:
    """Whether one of the meshes has Explicit axes."""
    return any(AxisType.Explicit in mesh.axis_types for mesh in meshes)


def _check_devices(name: str, paths: Sequence[Path], arrays: Sequence[Any]) -> None:
    """Check that arguments without a mesh are not on different devices."""
    committed = [(path, x) for path, x in zip(paths, arrays, strict=True) if is_concrete(x) and x.committed]
    if not committed:
        return
    first_path, first = committed[0]
    problems: list[Problem] = []
    for path, array in committed:
        if array.sharding.device_set != first.sharding.device_set:
            why = f"is committed to {_devices_text(array)}, but `{first_path}` to {_devices_text(first)}"
            problems.append(array_problem(path, array, why, "move them to one device, or all to one mesh (`ft.shard`)"))
    if problems:
        raise ShardingError(f"{name}: the arguments are on different devices", problems)


def _check_outer(name: str, mesh: Mesh | AbstractMesh) -> None:
    """Check that a function which is traced as a part of another one has the devices of the other one's mesh."""
    outer = current_mesh() if tracing() else None
    if not isinstance(outer, Mesh) or not isinstance(mesh, Mesh):
        return
    own, others = list(mesh.devices.flat), list(outer.devices.flat)
    if own == others:
        return
    what = "the same devices in another order" if set(own) == set(others) else "other devices"
    raise ShardingError(
        f"{name} runs on mesh {mesh_view(mesh)}, but is called in a function that runs on "
        f"{mesh_view(outer)}, with {what}. JAX compiles both as one program, with one order of devices: "
        "use the devices of the outer mesh in the same order"
    )


def _devices_text(array: jax.Array) -> str:
    return ", ".join(sorted(map(str, array.sharding.device_set)))


MOVE = "move it to the function's mesh: `ft.shard(x, layout, mesh)`"


def _other_devices(array: Any, mesh: Mesh | AbstractMesh) -> str | None:
    """The devices that an array without a mesh is committed to; None if they are those of the function's mesh."""
    if not isinstance(mesh, Mesh) or not is_concrete(array):
        return None
    if not array.committed or isinstance(array.sharding, NamedSharding):
        return None
    return None if array.sharding.device_set == set(mesh.devices.flat) else _devices_text(array)


def _other_mesh(one: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> str | None:
    """A text of a mesh that differs from another, with the difference; None if they agree."""
    text = str(mesh_view(one))
    if dict(one.shape) != dict(other.shape):
        return text
    if isinstance(one, Mesh) and isinstance(other, Mesh) and one.devices.tolist() != other.devices.tolist():
        return f"{text}, with other devices"
    if AxisType.Manual in (*one.axis_types, *other.axis_types):  # inside `shard_map`, where the types change
        return None
    explicit = AxisType.Explicit in one.axis_types
    if explicit == (AxisType.Explicit in other.axis_types):
        return None
    return f"{text} with {'Explicit' if explicit else 'Auto'} axes"


def warn_moved(program: Program) -> None:
    """Warn of arguments that each call moves to the shardings of `in_shardings`."""
    paths = listed([f"`{program.group.paths[i]}`" for i in program.moved])
    text = f"each call moves {paths} to the sharding of in_shardings: use `ft.shard` once, before the calls"
    warn(f"{program.name}: {text}")


def warn_placed(name: str, placed: Sequence[Path], known: Counter[Path]) -> None:
    """Warn of arrays that nobody has placed and that a second call of a function places again.

    Args:
        name: the name of the function.
        placed: the paths of the JAX arrays that this call places.
        known: how often the function has placed the array at a path.
    """
    known.update(placed)
    again = [path for path in placed if known[path] == 2]
    if again:
        paths = listed([f"`{path}`" for path in again])
        warn(f"{name}: each call places {paths} by the rules: use `ft.shard` once, before the calls")


def warn_constants(name: str, fun: Callable[..., Any], traced: Any) -> None:
    """Warn of large arrays that the function closes over, since each becomes a constant of the program.

    Args:
        name: the name of the function.
        fun: the function.
        traced: JAX's `Traced` of a call; None under `jax.disable_jit()`.
    """
    if traced is None:
        return
    for constant in traced.jaxpr.consts:
        size = getattr(constant, "nbytes", 0)
        if isinstance(constant, Tracer) or size <= BIG_CONSTANT:
            continue
        variables = {**used_globals(fun), **closed_over(fun)}
        path = next((path for path, value in held(variables) if value is constant), None)
        what = f"{constant.dtype}{list(constant.shape)}"
        if path is not None:
            what += f" (`{path}`)"
        warn(
            f"{name} closes over an array of {size / 2**20:.1f} MiB, {what}: it becomes a constant of "
            "the compiled program, on every device; pass it as an argument",
        )
