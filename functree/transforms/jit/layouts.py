"""`in_shardings` and `out_shardings` ─► a sharding for each array, checked by path before JAX sees it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from functree.errors import Problem, ShardingError, count
from functree.layout.layouts import spec_text
from functree.layout.meshes import MeshView
from functree.layout.plan import Plan, plan_tree
from functree.transforms.signature import Signature
from functree.tree.leaf import array_text
from functree.tree.paths import Path

Shardings = Sequence[NamedSharding | None]  # None for an array that goes as it comes


class Inputs(NamedTuple):
    """Where the arguments have to lie.

    Attributes:
        mesh: the mesh of the layouts.
        shardings: for each array.
        moved: the places of those that JAX will put there on every call.
    """

    mesh: Mesh | AbstractMesh | None
    shardings: Shardings
    moved: tuple[int, ...]


def inputs(name: str, call: Any, arrays: Sequence[Any], layouts: Any, mesh: Mesh | AbstractMesh | None) -> Inputs:
    """Resolve `in_shardings`, and check that the arguments lie so.

    Raises:
        ShardingError: what cannot be laid out so, and arrays that lie otherwise.
    """
    planned = plan_tree(call, layouts, _planning(mesh), check=False, leave=True)
    shardings = _shardings(planned) if not planned.problems else [None] * len(arrays)
    problems = list(planned.problems)
    moved = []
    for i, (row, array, wanted) in enumerate(zip(planned.rows, arrays, shardings, strict=True)):
        if wanted is None or isinstance(array, Tracer | jax.ShapeDtypeStruct):
            continue
        if isinstance(wanted.mesh, AbstractMesh):
            continue  # nothing will run there
        if isinstance(array, jax.Array) and array.committed:
            problems += _mislaid(row.path, array, wanted)
        elif AxisType.Explicit in wanted.mesh.axis_types:
            problems.append(_untyped(row.path, array))
        else:
            moved.append(i)
    if problems:
        at_fault = count(len({problem.path for problem in problems}), "leaf")
        raise ShardingError(f"{name}: {at_fault} cannot go where in_shardings says, on mesh {planned.view}", problems)
    return Inputs(planned.mesh, shardings, tuple(moved))


def _shardings(planned: Plan) -> list[NamedSharding | None]:
    return [None if row.spec is None else planned.sharding(row) for row in planned.rows]


def _mislaid(path: Path, array: jax.Array, wanted: NamedSharding) -> list[Problem]:
    """An array that would have to be moved first: that is for the user to say, since it costs."""
    here = array.sharding
    kinds = {here.memory_kind or "device", wanted.memory_kind or "device"}
    typed = AxisType.Explicit in wanted.mesh.axis_types and getattr(here, "mesh", None) != wanted.mesh
    if len(kinds) == 1 and here.is_equivalent_to(wanted, array.ndim) and not typed:
        return []
    lies, says = sharding_text(here), sharding_text(wanted)
    if isinstance(here, NamedSharding) and here.mesh == wanted.mesh and len(kinds) == 1:
        lies, says = spec_text(here.spec), spec_text(wanted.spec)
    why = f"lies {lies}, and in_shardings says {says}: jit moves nothing in silence"
    return [Problem(path, tuple(array.shape), array_text(array), why, "put it there once: `ft.shard(x, layout, mesh)`")]


def _untyped(path: Path, array: Any) -> Problem:
    numpy = isinstance(array, np.ndarray | np.generic)
    what = "is numpy's" if numpy else "is on no mesh yet"
    why = f"{what}: on Explicit axes its type would be unsharded inside, whatever in_shardings says"
    return Problem(path, tuple(array.shape), array_text(array), why, "put it there first: `ft.shard(x, layout, mesh)`")


def sharding_text(sharding: Any) -> str:
    """Where an array lies, for a person."""
    if sharding is None:
        return "anywhere"
    if not isinstance(sharding, NamedSharding):
        devices = sorted(str(device) for device in sharding.device_set)
        return f"on {devices[0]}" if len(devices) == 1 else f"on {len(devices)} devices"
    kind = f" in {sharding.memory_kind}" if sharding.memory_kind not in (None, "device") else ""
    return f"{spec_text(sharding.spec)} on {MeshView(dict(sharding.mesh.shape))}{kind}"


def outputs(signature: Signature, result: Any, layouts: Any, mesh: Mesh | AbstractMesh | None) -> Shardings:
    """Resolve `out_shardings`, a prefix of the result; rules read the annotation of what the function returns.

    Raises:
        ShardingError: what cannot be laid out so. RuleError: the prefix has another structure than the result.
    """
    record = signature.result
    planned = plan_tree(record(result), record(layouts), _planning(mesh), check=False, leave=True)
    if planned.problems:
        at_fault = count(len({problem.path for problem in planned.problems}), "leaf")
        headline = f"{signature.name}: {at_fault} cannot go where out_shardings says, on mesh {planned.view}"
        raise ShardingError(headline, planned.problems)
    return _shardings(planned)


def _planning(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """The mesh for a plan; inside shard_map none, so that the plan says what is wrong there."""
    return None if getattr(mesh, "manual_axes", ()) else mesh


def elsewhere(
    name: str, paths: Sequence[Path], arrays: Sequence[Any], mesh: Mesh | AbstractMesh | None
) -> ShardingError | None:
    """The error for arguments that lie on another mesh than the function's, or, if it has none, than the first's."""
    mesh = mesh if mesh is not None else mesh_of(arrays)
    if mesh is None or getattr(mesh, "manual_axes", ()):
        return None
    problems = []
    for path, array in zip(paths, arrays, strict=True):
        if (lone := _lone(array, mesh)) is not None:
            problems.append(Problem(path, tuple(array.shape), array_text(array), f"lies on {lone} alone", PUT))
        other = _mesh_of(array)
        odd = None if other is None else _other(other, mesh)
        if odd is None:
            continue
        why = f"lies on the mesh {odd}"
        problems.append(Problem(path, tuple(array.shape), array_text(array), why, PUT))
    if not problems:
        return None
    number = count(len(problems), "argument")
    return ShardingError(f"{name} runs on mesh {MeshView(dict(mesh.shape))}, and {number} elsewhere", problems)


PUT = "put it on the function's mesh: `ft.shard(x, layout, mesh)`"


def _lone(array: Any, mesh: Mesh | AbstractMesh) -> str | None:
    """The device on which somebody has put an array that the function's mesh does not consist of, or None."""
    if not isinstance(mesh, Mesh) or not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return None
    if not array.committed or isinstance(array.sharding, NamedSharding):
        return None
    here = array.sharding.device_set
    return None if here == set(mesh.devices.flat) else ", ".join(sorted(map(str, here)))


def _mesh_of(array: Any) -> Mesh | AbstractMesh | None:
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def _other(one: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> str | None:
    """What a mesh is that is another one."""
    text = str(MeshView(dict(one.shape)))
    if dict(one.shape) != dict(other.shape):
        return text
    if isinstance(one, Mesh) and isinstance(other, Mesh) and one.devices.tolist() != other.devices.tolist():
        return f"{text}, of other devices"
    if AxisType.Manual in (*one.axis_types, *other.axis_types):  # inside `shard_map`
        return None
    kinds = [AxisType.Explicit in mesh.axis_types for mesh in (one, other)]
    return f"{text} with {'Explicit' if kinds[0] else 'Auto'} axes" if kinds[0] != kinds[1] else None


def mesh_of(arrays: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """The mesh on which some arrays lie."""
    return next((mesh for mesh in map(_mesh_of, arrays) if mesh is not None), None)
