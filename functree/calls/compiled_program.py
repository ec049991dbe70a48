"""A function that JAX has compiled ─► the ledger of its program."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import tree_leaves

from functree.calls.compile_events import compile_events
from functree.compiled.backend import backend_text
from functree.compiled.diagnostics import Said, listening
from functree.compiled.ledger import Ledger
from functree.compiled.read import CompiledProgram, read_ledger
from functree.errors import FunctreeError, count
from functree.tree.paths import Path


@contextmanager
def heard_compiling() -> Iterator[Said]:
    """Listen to the compiler. What it has said is not known if JAX found the program in one of its caches."""
    before = compile_events.by_compiler
    with listening() as said:
        yield said
    if compile_events.by_compiler == before:
        said.warnings = None


def ledger_of(
    compiled: Any,
    name: str,
    parameters: Sequence[Path],
    outputs: Sequence[Path],
    mesh: Mesh | AbstractMesh | None,
    warnings: tuple[str, ...] | None,
    *,
    of_program: bool = True,
) -> Ledger:
    """The ledger of a compiled function.

    Args:
        compiled: JAX's compiled function.
        name: the name of the function.
        parameters: the path of each of its arrays, in JAX's order; it begins with the name of an argument.
        outputs: the path of each array of its result.
        mesh: the mesh that it was compiled for; None for that of its shardings.
        of_program: whether that is known; else the mesh is taken only if no sharding is on one.
        warnings: what the compiler has said; None if it is not known.

    Raises:
        FunctreeError: the compiler gives no text of the program; the mesh has another number of devices.
    """
    # For a large program XLA takes as long for this as we do for the text, and it lets other threads run meanwhile.
    with ThreadPoolExecutor(1) as pool:
        memory = pool.submit(compiled.memory_analysis)
        text = compiled.as_text()
        if text is None:
            platform = jax.default_backend()
            raise FunctreeError(f"{name}: the compiler for {platform} gives no text of the program to read")
        used, sizes, backend = _described(compiled, parameters, mesh, of_program)
        return read_ledger(CompiledProgram(text, memory.result, used, outputs, sizes, backend, warnings))


def _described(
    compiled: Any, parameters: Sequence[Path], mesh: Mesh | AbstractMesh | None, of_program: bool
) -> tuple[list[Path], dict[str, int], str]:
    """The arrays that a program uses, the sizes of its mesh, and the name of what it is compiled for."""
    # An array that the program does not use has no sharding, and is none of its parameters.
    given = tree_leaves(compiled.input_shardings, is_leaf=lambda one: one is None)
    used = [path for path, sharding in zip(parameters, given, strict=True) if sharding is not None]
    shardings = [one for one in [*given, *tree_leaves(compiled.output_shardings)] if one is not None]
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    devices = next((one.device_set for one in shardings), jax.devices()[:1])
    if mesh is None or (meshes and not of_program):
        mesh = max(meshes, key=lambda one: one.size, default=mesh)
    if mesh is not None and not of_program and mesh.size != len(devices):
        raise FunctreeError(
            f"ledger: the program was compiled for {count(len(devices), 'device')}, and `mesh=` has {mesh.size}: "
            "give its arguments shardings on the mesh"
        )
    sizes = {} if mesh is None else dict(mesh.shape)
    return used, sizes, backend_text(next(iter(devices)))
