"""A function that JAX has compiled ─► the ledger of its program."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.stages import Compiled
from jax.tree_util import tree_leaves

from functree.calls.compile_events import compile_events
from functree.compiled.diagnostics import CompilerOutput, listening
from functree.compiled.layouts import Layouts
from functree.compiled.ledger import Ledger
from functree.compiled.provenance import Shape, Shapes
from functree.compiled.read import CompiledProgram, read_ledger
from functree.devices.meshes import backend_text
from functree.devices.specs import named_axes
from functree.errors import FunctreeError, FunctreeValueError, count
from functree.tree.paths import Path


@contextmanager
def heard_compiling() -> Iterator[CompilerOutput]:
    """Listen to the compiler. What it has said is not known if JAX found the program in one of its
    caches."""
    # By the number of programs that were compiled, since JAX does not tell whether it has done so.
    before = compile_events.by_compiler
    with listening() as said:
        yield said
    if compile_events.by_compiler == before:
        said.warnings = None


def ledger_of(
    compiled: Compiled,
    name: str,
    parameters: Sequence[Path],
    outputs: Sequence[Path],
    mesh: Mesh | AbstractMesh | None,
    warnings: tuple[str, ...] | None,
    *,
    layouts: Callable[[], Layouts] | None = None,
    of_program: bool = True,
) -> Ledger:
    """The ledger of a compiled function.

    Args:
        compiled: JAX's compiled function.
        name: the name of the function.
        parameters: the path of each of its arrays, in JAX's order; it begins with the name of an
            argument.
        outputs: the path of each array of its result.
        mesh: the mesh that it was compiled for; None for that of its shardings.
        layouts: makes the layouts of its lowered program.
        of_program: whether that is known; else the mesh is taken only if no sharding is on one.
        warnings: what the compiler has said; None if it is not known.

    Raises:
        FunctreeError: the compiler gives no text of the program; the mesh has another number of
            devices.
    """
    # For a large program XLA takes as long for this as we do for the text, and it lets other
    # threads run meanwhile.
    with ThreadPoolExecutor(1) as pool:
        memory = pool.submit(compiled.memory_analysis)
        text = compiled.as_text()
        if text is None:
            platform = jax.default_backend()
            raise FunctreeError(
                f"{name}: the compiler for {platform} gives no text of the program to read"
            )
        used, inputs = _used(compiled, parameters)
        results: list[Sharding] = tree_leaves(compiled.output_shardings)
        shardings = [*results, *inputs]
        devices = list(shardings[0].device_set) if shardings else jax.devices()[:1]
        if mesh is None or not of_program:
            mesh = _mesh_of(shardings, mesh, len(devices))
        sizes = {} if mesh is None else dict(mesh.shape)
        return read_ledger(
            CompiledProgram(
                text,
                memory.result,
                used,
                outputs,
                sizes,
                backend_text(devices[0]),
                warnings,
                _sharded(shardings, sizes),
                lambda *given: Shapes(*map(_global_shapes, (inputs, results), given)),
                layouts,
            )
        )


def _used(compiled: Compiled, parameters: Sequence[Path]) -> tuple[list[Path], list[Sharding]]:
    """The paths and the shardings of the arrays that a program uses."""
    used: list[Path] = []
    shardings: list[Sharding] = []
    given = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    for path, sharding in zip(parameters, given, strict=True):
        # An array that the program does not use has no sharding, and is none of its parameters.
        if sharding is not None:
            used.append(path)
            shardings.append(sharding)
    return used, shardings


def _mesh_of(
    shardings: Sequence[Sharding], given: Mesh | AbstractMesh | None, devices: int
) -> Mesh | AbstractMesh | None:
    """The mesh of a program for a number of devices, by its shardings.

    It is the largest, since a part of the arrays may be on a mesh of some of the devices. If there
    are several of its size with other axes, or none, the one that is given decides.

    Raises:
        FunctreeError: the one that is given has another number of devices.
    """
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    mesh = max(meshes, key=lambda one: one.size, default=given)
    axes = {tuple(one.shape.items()) for one in meshes if mesh and one.size == mesh.size}
    if given is not None and mesh is not None and len(axes) > 1 and given.size == mesh.size:
        mesh = given
    if given is not None and mesh is not None and mesh.size != devices:
        raise FunctreeValueError(
            f"ledger: the program was compiled for {count(devices, 'device')}, and `mesh=` "
            f"has {mesh.size}: give its arguments shardings on the mesh"
        )
    return mesh


def _global_shapes(shardings: Sequence[Sharding], shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes on all devices of arrays of these shapes on each of them."""
    found: list[Shape] = []
    for sharding, shape in zip(shardings, shapes, strict=True):
        # As many elements along each dimension as there are devices can be cut in any way. JAX
        # does not say it of a result itself if the program has effects in order.
        devices = sharding.num_devices
        parts = sharding.shard_shape((devices,) * len(shape))
        found.append(tuple(size * devices // part for size, part in zip(shape, parts, strict=True)))
    return found


def _sharded(shardings: Iterable[Sharding], sizes: Mapping[str, int]) -> frozenset[str] | None:
    """The mesh axes by which some of the shardings shard; None if one of them has other axes."""
    found: set[str] = set()
    for sharding in shardings:
        if sharding.is_fully_replicated:
            continue
        if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(sizes):
            return None
        found |= named_axes(sharding.spec)
    return frozenset(found)
