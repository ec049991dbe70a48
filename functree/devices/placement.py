"""An array ─► its mesh, whether it is sharded as wanted, and the text of its sharding; or an
error if it is deleted."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.tree_util import tree_leaves

from functree.devices.meshes import current_mesh, mesh_view
from functree.devices.specs import spec_text
from functree.errors import FunctreeError, Problem, count
from functree.labels.leaf import array_problem
from functree.labels.leaves import read
from functree.tree.arrays import Tree
from functree.tree.paths import Path


def is_concrete(value: object) -> TypeGuard[jax.Array]:
    """Whether a value is a JAX array with values, and not traced, abstract or an array of numpy."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def mesh_of(array: Any) -> Mesh | AbstractMesh | None:
    """The mesh that an array is on, or None."""
    if isinstance(array, Tracer):
        # The type of a tracer has a mesh too, even if all mesh axes are Auto; a tracer itself has
        # no attribute `sharding`.
        sharding: object = jax.typeof(array).sharding
    else:
        sharding = getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return None
    return mesh


def first_mesh(arrays: Iterable[object]) -> Mesh | AbstractMesh | None:
    """The mesh of the first array that is on a mesh."""
    for array in arrays:
        mesh = mesh_of(array)
        if mesh is not None:
            return mesh
    return None


def explicit_mesh(arrays: Iterable[object]) -> Mesh | AbstractMesh | None:
    """The current mesh, else that of the arrays, if its axes are Explicit: JAX differentiates and
    loops eagerly on them only with a current mesh."""
    mesh = current_mesh()
    if mesh is None:
        mesh = first_mesh(arrays)
    return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def with_devices_of(mesh: AbstractMesh, arrays: Iterable[object]) -> Mesh | AbstractMesh:
    """An abstract mesh with the devices of the first array on such a mesh, if there is one."""
    for array in arrays:
        found = mesh_of(array)
        if isinstance(found, Mesh) and found.abstract_mesh == mesh:
            return found
    return mesh


def is_sharded_as(array: jax.Array, sharding: Sharding) -> bool:
    """Whether an array is sharded as wanted, in the wanted kind of memory."""
    # Not by `==`: P("data") and P("data", None) are one sharding of a matrix.
    here = array.sharding
    return memory_of(here) == memory_of(sharding) and here.is_equivalent_to(sharding, array.ndim)


def is_placed(value: Any, target: NamedSharding) -> bool:
    """Whether an array has its sharding already."""
    # One without a mesh may be uncommitted: JAX would move it beside another array. One on another
    # mesh is not placed either, though it be of the same devices: its axes have other names.
    if not is_concrete(value) or not isinstance(value.sharding, NamedSharding):
        return False
    if value.sharding.mesh != target.mesh:
        return False
    return is_sharded_as(value, target)


def memory_of(sharding: Sharding) -> str:
    """The memory kind of a sharding; the default kind may be written as None."""
    return sharding.memory_kind or "device"


def other_memory(sharding: Sharding) -> str | None:
    """The memory kind of a sharding; None if it is the default kind, the memory of the device."""
    kind = memory_of(sharding)
    if kind == "device":
        return None
    return kind


def sharding_text(sharding: Sharding | None) -> str:
    """The text of a sharding: `P('data') on (data=8)`."""
    if sharding is None:
        return "unspecified"
    if not isinstance(sharding, NamedSharding):
        devices = list(sharding.device_set)
        if len(devices) == 1:
            return f"on {devices[0]}"
        return f"on {len(devices)} devices"
    text = f"{spec_text(sharding.spec)} on {mesh_view(sharding.mesh)}"
    kind = other_memory(sharding)
    if kind is not None:
        text += f" in {kind}"
    return text


def is_deleted(array: object) -> bool:
    """Whether an array is deleted: it was donated to an earlier call, or by its method `delete`."""
    return is_concrete(array) and array.is_deleted()


def check_deleted(name: str, tree: Tree) -> None:
    """Raise FunctreeError if an array of a tree is deleted. To be called by what reads values.

    Args:
        name: what reads them, for the message.
        tree: any tree that JAX can flatten.
    """
    # The paths are read only for the error, since this is a part of each eager call.
    if any(map(is_deleted, tree_leaves(tree))):
        leaves = read(tree)
        raise refuse_deleted(name, leaves.paths, leaves.values)


# An array may also be deleted by its method `delete`, and JAX does not keep why it was.
_REMEDY = "if it was donated, use what that call returned, or donate a copy (`ft.copy`) to keep it"


def refuse_deleted(
    name: str,
    paths: Sequence[Path],
    arrays: Sequence[Any],
    what: str = "argument",
    *,
    whole: bool = True,
) -> FunctreeError:
    """The error for arrays that are deleted. It lists their paths, and one entry for an argument of
    which all are deleted, such as a training state that was donated.

    Args:
        name: what reads them, for the message.
        paths: the paths of arrays, which begin with the name of an argument or a key of a tree.
        arrays: all arrays, including those which are not deleted.
        what: what one that is deleted is.
        whole: whether the arrays of each argument are all there. If not, each path is listed.
    """
    given: dict[Path, list[tuple[Path, Any]]] = {}
    for path, array in zip(paths, arrays, strict=True):
        given.setdefault(Path(path[:1]), []).append((path, array))
    problems: list[Problem] = []
    for argument, several in given.items():
        gone = [(path, array) for path, array in several if is_deleted(array)]
        if whole and argument and len(gone) == len(several) > 1:
            number = count(len(gone), "array")
            problems.append(Problem(argument, None, number, "are all deleted", _REMEDY))
        else:
            problems += [array_problem(path, array, "is deleted", _REMEDY) for path, array in gone]
    verb = "is" if len(problems) == 1 else "are"
    noun, *rest = what.split(" ", 1)  # `array` of `array of like`
    subject = " ".join((count(len(problems), noun), *rest))
    return FunctreeError(f"{name}: {subject} {verb} deleted", problems)
