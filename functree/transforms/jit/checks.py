"""A call and its program ─► an error or a warning, before JAX sees the call."""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh
from jax.tree_util import tree_flatten_with_path

from functree.errors import FunctreeError, ShardingError
from functree.layout.meshes import NO_MESH, MeshView, tracing
from functree.transforms.jit.donation import is_gone, refuse_deleted, refuse_twice, twice_by_identity
from functree.transforms.jit.program import Program
from functree.transforms.signature import Signature
from functree.transforms.structures import Found
from functree.tree.paths import Path

BIG_CONSTANT = 2**20  # bytes: a closed-over array above this is worth a word


def check_call(program: Program, found: Found) -> None:
    """That arguments have values, are still there, and none is donated twice."""
    arrays, groups = found.arrays, program.groups
    if not found.concrete or isinstance(program.where.mesh, AbstractMesh):
        _refuse_abstract(program, arrays)
    if True in ([x.is_deleted() for x in arrays] if found.concrete else map(is_gone, arrays)):
        refuse_deleted(program, arrays)
    if groups.donated and twice_by_identity(groups.take_donated(arrays), groups.take_kept(arrays)):
        refuse_twice(program, arrays, by_buffer=False)


def _refuse_abstract(program: Program, arrays: Sequence[Any]) -> None:
    name = program.signature.name
    for path, array in zip(program.structure.paths, arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise FunctreeError(
                f"{name}: `{path}` is abstract, so there is nothing to run: use `.lower`, `.eval_shape`"
            )
    if isinstance(program.where.mesh, AbstractMesh) and not tracing():
        view = MeshView(dict(program.where.mesh.shape))
        raise ShardingError(f"{name}: {view} has no devices to run on: {NO_MESH} with a `Mesh`")


def warn_moved(program: Program) -> None:
    program.calls += 1
    if program.calls == 2:
        paths = ", ".join(f"`{program.structure.paths[i]}`" for i in program.moved[:4])
        more = f" and {len(program.moved) - 4} more" if len(program.moved) > 4 else ""
        warnings.warn(
            f"{program.signature.name}: {paths}{more} moved to where in_shardings says on each call: put it there once "
            "with `ft.shard`",
            stacklevel=3,
        )


def warn_constants(signature: Signature, traced: Any) -> None:
    """Arrays that the function closes over are copied into the program, however large they are."""
    for constant in getattr(traced.jaxpr, "consts", ()):
        size = getattr(constant, "nbytes", 0)
        if not isinstance(constant, Tracer) and size > BIG_CONSTANT:
            path = next((path for path, value in _closed_over(signature.fun) if value is constant), None)
            what = f"{constant.dtype}{list(constant.shape)}" + (f" (`{path}`)" if path is not None else "")
            warnings.warn(
                f"{signature.name} closes over an array of {size / 2**20:.1f} MiB, {what}: it becomes a constant of "
                "the compiled program, on every device; hand it over as an argument",
                stacklevel=5,
            )


def _closed_over(fun: Any) -> Iterator[tuple[Path, Any]]:
    """The leaves of what a function closes over, globals that it names among them, by path."""
    if not inspect.isfunction(fun):
        return
    found = inspect.getclosurevars(fun)
    for name, value in {**found.globals, **found.nonlocals}.items():
        yield from ((Path((name, *Path.of(keys))), leaf) for keys, leaf in tree_flatten_with_path(value)[0])
