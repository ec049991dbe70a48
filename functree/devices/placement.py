"""This module reads, compares and formats arrays' shardings, and refuses deleted arrays."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.tree_util import tree_leaves

from functree.devices.meshes import current_mesh, mesh_view, spec_text
from functree.errors import FunctreeError, Problem, count
from functree.labels.leaves import array_problem, read
from functree.tree.arrays import Tree
from functree.tree.paths import Path


def is_concrete(value: object) -> TypeGuard[jax.Array]:
    """Return whether a value is a concrete JAX array, not a tracer or a NumPy array."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def mesh_of(array: Any) -> Mesh | AbstractMesh | None:
    """Return the mesh that an array is on, or None if there is no mesh."""
    if isinstance(array, Tracer):
        # A tracer has no attribute `sharding`, but its type has a mesh, even if all mesh axes are
        # Auto.
        sharding: object = jax.typeof(array).sharding
    else:
        sharding = getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return None
    return mesh


def first_mesh(arrays: Iterable[object]) -> Mesh | AbstractMesh | None:
    """Return the mesh of the first array that is on a mesh, or None."""
    for array in arrays:
        mesh = mesh_of(array)
        if mesh is not None:
            return mesh
    return None


def explicit_mesh(arrays: Iterable[object]) -> Mesh | AbstractMesh | None:
    """Return the current mesh or otherwise the arrays' mesh, or None if it has no Explicit axes.

    Outside a trace, JAX runs derivatives and loops on Explicit mesh axes only under a current mesh.
    """
    mesh = current_mesh()
    if mesh is None:
        mesh = first_mesh(arrays)
    return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def with_devices_of(mesh: AbstractMesh, arrays: Iterable[object]) -> Mesh | AbstractMesh:
    """Return an abstract mesh with its devices, which come from the first array on that mesh.

    If no array with devices is on that mesh, return the abstract mesh.
    """
    for array in arrays:
        found = mesh_of(array)
        if isinstance(found, Mesh) and found.abstract_mesh == mesh:
            return found
    return mesh


def is_sharded_as(array: jax.Array, sharding: Sharding) -> bool:
    """Return whether an array's sharding is equivalent to another, with the same memory kind."""
    # `==` is too strict: P("data") and P("data", None) shard a matrix equally.
    here = array.sharding
    return memory_of(here) == memory_of(sharding) and here.is_equivalent_to(sharding, array.ndim)


def is_placed(value: Any, target: NamedSharding) -> bool:
    """Return whether an array already has its target sharding, on the same mesh."""
    # An array without a mesh may be uncommitted, so JAX could move it. An array on a different mesh
    # is not placed even if the devices are equal, because the names of mesh axes may differ.
    if not is_concrete(value) or not isinstance(value.sharding, NamedSharding):
        return False
    if value.sharding.mesh != target.mesh:
        return False
    return is_sharded_as(value, target)


def memory_of(sharding: Sharding) -> str:
    """Return the memory kind of a sharding, or `device` if the memory kind is None."""
    return sharding.memory_kind or "device"


def other_memory(sharding: Sharding) -> str | None:
    """Return the memory kind of a sharding, or None for device memory, the default."""
    kind = memory_of(sharding)
    if kind == "device":
        return None
    return kind


def sharding_text(sharding: Sharding | None) -> str:
    """Format a sharding: `P('data') on (data=8)`."""
    if sharding is None:
        return "unspecified"
    if isinstance(sharding, NamedSharding):
        text = f"{spec_text(sharding.spec)} on {mesh_view(sharding.mesh)}"
    else:
        first, *others = sharding.device_set
        text = f"on {len(others) + 1} devices" if others else f"on {first}"
    kind = other_memory(sharding)
    if kind is not None:
        text += f" in {kind}"
    return text


def is_deleted(array: object) -> bool:
    """Return whether an array was deleted, by donation or by its method `delete`."""
    return is_concrete(array) and array.is_deleted()


def check_deleted(name: str, tree: Tree) -> None:
    """Raise FunctreeError if an array of a tree is deleted. Functions that read values call this.

    Args:
        name: the function that reads the values, for the message.
        tree: any tree that JAX can flatten.
    """
    # Paths are read only for the error, since every eager call runs this check.
    if any(map(is_deleted, tree_leaves(tree))):
        leaves = read(tree)
        raise refuse_deleted(name, leaves.paths, leaves.values)


# The method `delete` also deletes an array, and JAX does not record the cause.
_REMEDY = (
    "if an array was donated, use the result of the call that donated it, or donate a copy "
    "(`ft.copy`) instead"
)


def refuse_deleted(
    name: str,
    paths: Sequence[Path],
    arrays: Sequence[Any],
) -> FunctreeError:
    """Build the error that lists the paths of deleted arrays.

    An argument whose arrays are all deleted, such as a donated training state, is listed once.

    Args:
        name: the function that reads the values, for the message.
        paths: the paths of the arrays. Each begins with an argument's name or a tree's key.
        arrays: all arrays, including arrays that are not deleted.
    """
    given: dict[Path, list[tuple[Path, Any]]] = {}
    for path, array in zip(paths, arrays, strict=True):
        given.setdefault(Path(path[:1]), []).append((path, array))
    problems: list[Problem] = []
    for argument, several in given.items():
        gone = [(path, array) for path, array in several if is_deleted(array)]
        if argument and len(gone) == len(several) > 1:
            number = count(len(gone), "array")
            problems.append(Problem(argument, None, number, "are all deleted", _REMEDY))
        else:
            problems += [array_problem(path, array, "is deleted", _REMEDY) for path, array in gone]
    verb = "is" if len(problems) == 1 else "are"
    return FunctreeError(f"{name}: {count(len(problems), 'argument')} {verb} deleted", problems)
