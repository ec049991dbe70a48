"""A call and its program ─► an error or a warning, before the call is passed to JAX."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh
from jax.tree_util import tree_flatten_with_path

from functree.calls.call_groups import FoundCall
from functree.calls.donation import check_donated, is_deleted, refuse_deleted, twice_by_identity
from functree.calls.program import Program
from functree.errors import FunctreeError, ShardingError
from functree.layout.meshes import NO_MESH, MeshView, tracing
from functree.tree.paths import Path

BIG_CONSTANT = 2**20  # bytes; there is a warning for a larger array that a function closes over


def check_call(program: Program, found: FoundCall) -> None:
    """Raise an error if arguments have no values or are deleted, or if an array is donated twice."""
    arrays, arguments = found.arrays, program.body.arguments
    if not found.concrete or isinstance(program.mesh, AbstractMesh):
        _refuse_abstract(program, arrays)
    gone = [x.is_deleted() for x in arrays] if found.concrete else map(is_deleted, arrays)
    if True in gone:
        raise refuse_deleted(program.name, program.group.paths, arrays)
    if arguments.donated and twice_by_identity(arguments.take_donated(arrays), arguments.take_kept(arrays)):
        check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=False)


def _refuse_abstract(program: Program, arrays: Sequence[Any]) -> None:
    """Raise an error if an argument or the mesh is abstract."""
    for path, array in zip(program.group.paths, arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise FunctreeError(
                f"{program.name}: `{path}` is abstract, so the function cannot run: use `.lower` or `.eval_shape`"
            )
    if isinstance(program.mesh, AbstractMesh) and not tracing():
        view = MeshView(dict(program.mesh.shape))
        raise ShardingError(f"{program.name}: {view} has no devices to run on: {NO_MESH} with a `Mesh`")


def warn_moved(program: Program) -> None:
    """Warn of arguments that each call moves to the shardings of `in_shardings`."""
    paths = ", ".join(f"`{program.group.paths[i]}`" for i in program.moved[:4])
    if len(program.moved) > 4:
        paths += f" and {len(program.moved) - 4} more"
    warnings.warn(
        f"{program.name}: each call moves {paths} to the sharding of in_shardings: use `ft.shard` once, before the "
        "calls",
        stacklevel=3,
    )


def warn_constants(name: str, fun: Callable[..., Any], traced: Any) -> None:
    """Warn of large arrays that the function closes over, since each becomes a constant of the program."""
    for constant in getattr(traced.jaxpr, "consts", ()):
        size = getattr(constant, "nbytes", 0)
        if isinstance(constant, Tracer) or size <= BIG_CONSTANT:
            continue
        path = next((path for path, value in _closed_over(fun) if value is constant), None)
        what = f"{constant.dtype}{list(constant.shape)}"
        if path is not None:
            what += f" (`{path}`)"
        warnings.warn(
            f"{name} closes over an array of {size / 2**20:.1f} MiB, {what}: it becomes a constant of "
            "the compiled program, on every device; pass it as an argument",
            stacklevel=5,
        )


def _closed_over(fun: Any) -> Iterator[tuple[Path, Any]]:
    """The leaves of all variables that a function closes over, and of the globals that it uses, with their paths."""
    if not inspect.isfunction(fun):
        return
    found = inspect.getclosurevars(fun)
    for name, value in {**found.globals, **found.nonlocals}.items():
        yield from ((Path((name, *Path.of(keys))), leaf) for keys, leaf in tree_flatten_with_path(value)[0])
