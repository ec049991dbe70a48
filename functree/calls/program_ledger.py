"""`ledger_of` reads the ledger of a function that JAX compiled."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.stages import Compiled
from jax.tree_util import tree_leaves

from functree.calls.compilations import compile_events
from functree.compiled.diagnostics import CompilerOutput, listening
from functree.compiled.layouts import Layouts
from functree.compiled.ledger import CompiledProgram, Ledger, read_ledger
from functree.compiled.provenance import Shape, Shapes
from functree.devices.meshes import backend_text, named_axes
from functree.errors import FunctreeError, FunctreeValueError, count
from functree.tree.paths import Path


@contextmanager
def heard_compiling() -> Iterator[CompilerOutput]:
    """Collect the compiler's warnings. They are unknown if JAX found the program in a cache."""
    # JAX does not report whether it compiled, so count the compiled programs.
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
    """Read the ledger of a compiled function.

    Args:
        compiled: JAX's compiled function.
        name: the name of the function.
        parameters: the path of each array of its arguments, in JAX's order. A path begins with the
            name of an argument.
        outputs: the path of each array of its result.
        mesh: the mesh that the function was compiled for; None to use the mesh of the function's
            shardings.
        warnings: the compiler's warnings; None if they are unknown.
        layouts: a function that makes the layouts of the lowered program.
        of_program: whether the function is known to be compiled for `mesh`. Otherwise, the mesh of
            its shardings takes precedence.

    Raises:
        FunctreeError: if the compiler returns no program text.
        FunctreeError: if the mesh and the program have different numbers of devices.
    """
    # For a large program, XLA's memory analysis takes as long as reading the text. The
    # analysis runs in a thread, since other threads can run meanwhile.
    with ThreadPoolExecutor(1) as pool:
        memory = pool.submit(compiled.memory_analysis)
        text = compiled.as_text()
        if text is None:
            platform = jax.default_backend()
            raise FunctreeError(
                f"{name} has no ledger: the {platform} compiler returned no program text to read"
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
    """Return the paths and the shardings of the arrays that a program uses."""
    used: list[Path] = []
    shardings: list[Sharding] = []
    given = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    for path, sharding in zip(parameters, given, strict=True):
        # An unused array has no sharding, and is not a parameter of the program.
        if sharding is not None:
            used.append(path)
            shardings.append(sharding)
    return used, shardings


def _mesh_of(
    shardings: Sequence[Sharding], given: Mesh | AbstractMesh | None, devices: int
) -> Mesh | AbstractMesh | None:
    """Find the mesh of a program from its shardings and its number of devices.

    The result is the largest mesh, since some arrays may be on a mesh of only some devices. The
    given mesh is used if no sharding has a mesh, or if several largest meshes of its size have
    different axes.

    Raises:
        FunctreeError: if a mesh is given, and the chosen mesh does not have `devices` devices.
    """
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    mesh = max(meshes, key=lambda each: each.size, default=given)
    axes = {tuple(each.shape.items()) for each in meshes if mesh and each.size == mesh.size}
    if given is not None and mesh is not None and len(axes) > 1 and given.size == mesh.size:
        mesh = given
    if given is not None and mesh is not None and mesh.size != devices:
        raise FunctreeValueError(
            f"ledger: the program was compiled for {count(devices, 'device')}, but `mesh=` "
            f"has {mesh.size}: shard the arguments over the mesh in `mesh=`"
        )
    return mesh


def _global_shapes(shardings: Sequence[Sharding], shapes: Sequence[Shape]) -> list[Shape]:
    """Compute global shapes from the shapes on one device."""
    whole: list[Shape] = []
    for sharding, shape in zip(shardings, shapes, strict=True):
        # A dimension with one element per device divides evenly under any sharding. JAX itself
        # does not report a result's global shape if the program has ordered effects.
        devices = sharding.num_devices
        parts = sharding.shard_shape((devices,) * len(shape))
        whole.append(tuple(size * devices // part for size, part in zip(shape, parts, strict=True)))
    return whole


def _sharded(shardings: Iterable[Sharding], sizes: Mapping[str, int]) -> frozenset[str] | None:
    """Return the mesh axes that shard any array, or None if a sharding is on a different mesh."""
    used: set[str] = set()
    for sharding in shardings:
        if sharding.is_fully_replicated:
            continue
        if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(sizes):
            return None
        used |= named_axes(sharding.spec)
    return frozenset(used)
