"""`Traced`, `Lowered` and `Compiled` are the stages of compiling a call with trees of modules.

`compile_for` compiles a program for a target, and refuses a program that does not fit there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_structure

from functree.argument_checks import TEXTS, check
from functree.calls.body import Output
from functree.calls.call_groups import FlatCall
from functree.calls.checks import check_call, check_donated
from functree.calls.compilations import Log, Situation, compile_events, differences
from functree.calls.program import Program, around
from functree.calls.program_ledger import heard_compiling, ledger_of
from functree.calls.signature import Args, Kwargs, Signature
from functree.compiled.layouts import Layouts, layouts_of
from functree.compiled.ledger import Ledger
from functree.devices.meshes import backend_text
from functree.devices.placement import is_placed, other_memory, sharding_text
from functree.devices.targets import device_memory
from functree.errors import FunctreeError, FunctreeTypeError, Problem
from functree.labels.leaves import array_problem
from functree.report.table import bytes_text
from functree.tree.arrays import AnyArray, Tree, abstract
from functree.tree.paths import Path

LARGEST = 5
"""The number of arguments that the error lists."""

SMALLER = (
    "shard the largest arguments over more mesh axes or devices, donate arguments that are not "
    "needed afterwards (`donate=`), recompute activations in the backward pass (`remat=`), or use "
    "smaller micro-batches (`ft.accumulate`)"
)
"""The remedy for a program that does not fit."""


def compile_for(
    name: str,
    mesh: Mesh,
    arguments: Mapping[Path, jax.ShapeDtypeStruct],
    compile: Callable[[], jax.stages.Compiled],
) -> jax.stages.Compiled:
    """Compile a program for a target, and check that it fits in the target's memory.

    Args:
        name: the name of the function.
        mesh: the mesh of the target.
        arguments: the program's arguments, with their shardings where these are known.
        compile: the function that compiles the program.

    Raises:
        FunctreeError: if the program does not fit; the error lists the largest arguments.
    """
    try:
        compiled = compile()
    except jax.errors.JaxRuntimeError as error:
        code, _, text = str(error).partition(": ")
        if code != "RESOURCE_EXHAUSTED":
            raise
        raise _too_large(name, mesh, text.splitlines()[0], arguments) from error
    # The GPU compiler does not check the memory.
    available, stats = device_memory(mesh.devices.flat[0]), compiled.memory_analysis()
    if available is not None and stats is not None and stats.peak_memory_in_bytes > available:
        needed = bytes_text(stats.peak_memory_in_bytes)
        figures = f"it needs {needed}, but the device has {bytes_text(available)}"
        raise _too_large(name, mesh, figures, arguments)
    return compiled


def _too_large(
    name: str, mesh: Mesh, figures: str, arguments: Mapping[Path, jax.ShapeDtypeStruct]
) -> FunctreeError:
    sizes: dict[Path, int] = {}
    for path, array in arguments.items():
        # Arrays in host memory use no device memory.
        if array.sharding is None or other_memory(array.sharding) is None:
            sizes[path] = _local_bytes(array)
    problems: list[Problem] = []
    for path in sorted(sizes, key=lambda path: -sizes[path])[:LARGEST]:
        array = arguments[path]
        why = f"takes {bytes_text(sizes[path])} on each device, {sharding_text(array.sharding)}"
        problems.append(array_problem(path, array, why, SMALLER))
    kind, total = backend_text(mesh.devices.flat[0]), bytes_text(sum(sizes.values()))
    headline = f"{name} does not fit in the memory of a {kind}: {figures}"
    if not problems:
        return FunctreeError(f"{headline}: {SMALLER}")
    headline += f"\nThe arguments take {total} on each device; the largest:"
    return FunctreeError(headline, problems)


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array on one device, or all its bytes if its sharding is unknown."""
    # Without a sharding, the array is uncommitted, and the compiler may replicate it.
    shape = array.shape
    if array.sharding is not None:
        shape = array.sharding.shard_shape(shape)
    return math.prod(shape) * array.dtype.itemsize


# Stages


class StagedCall(NamedTuple):
    """The call that a stage belongs to, without its arrays.

    Attributes:
        program: the program of the call.
        signature: the signature of the function.
        find: a function that flattens a call and finds its group, from the call's arguments.
        positional: the number of arguments that are passed by position, including bound arguments.
        arrays: the call's abstract arrays, with their shardings where these are known.
        log: the compilations of the function.
    """

    program: Program
    signature: Signature
    find: Callable[[Args, Kwargs], FlatCall]
    positional: int
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    log: Log

    def values(self, tree: Tree) -> list[Any]:
        """Return one value per array from a JAX tree with the structure of the arguments."""
        arguments, _ = tree
        return self.program.body.arguments.join(arguments)

    def arguments(self, values: Sequence[object]) -> tuple[Args, dict[str, Tree]]:
        """Return `(args, kwargs)` with one value per array, and None for static values."""
        args, kwargs = self.signature.arguments(self.program.group.skeleton.spread(values))
        names = self.signature.parameters[self.positional :]
        named = dict(zip(names, args[self.positional :], strict=False))
        return args[: self.positional], {**named, **kwargs}

    def situation(self) -> Situation:
        """Return everything that a compilation of the call depends on."""
        return Situation.of(self.program.group, self.arrays, self.program.mesh, self.program.rules)


_Stage = TypeVar("_Stage", jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)


class Stage(Generic[_Stage]):
    """The base class of the three stages.

    Trees have the structure of the function's result, or of its arguments `(args, kwargs)`. In
    arguments, None replaces the leaves that are not arrays.

    Attributes:
        jax: JAX's own stage for the function of arrays, with its jaxpr, memory layouts and
            executable.
    """

    def __init__(self, stage: _Stage, call: StagedCall):
        self.jax: _Stage = stage
        self._call, self._program = call, call.program

    @property
    def args_info(self) -> tuple[Args, dict[str, Tree]]:
        """`(args, kwargs)` of `jax.stages.ArgInfo`: shapes, dtypes and donation."""
        return self._arguments(self.jax.args_info)

    @property
    def in_avals(self) -> tuple[Args, dict[str, Tree]]:
        """`(args, kwargs)` of abstract values."""
        return self._arguments(self.jax.in_avals)

    @property
    def in_tree(self) -> Any:
        """The structure of `(args, kwargs)`."""
        return tree_structure(self.args_info)

    @property
    def out_info(self) -> Tree:
        """The result, with an abstract value in place of each array."""
        return self.jax.out_info.tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_structure(self.out_info)

    def _arguments(self, tree: Tree) -> tuple[Args, dict[str, Tree]]:
        """Convert JAX's tree to the function's `(args, kwargs)`."""
        return self._call.arguments(self._call.values(tree))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._program.name}>"


class Traced(Stage[jax.stages.Traced]):
    """A function traced for one call, like `jax.stages.Traced` but for functions of modules.

    Examples:
        >>> traced = ft.jit(lambda x: {"y": 2 * x}).trace(
        ...     jax.ShapeDtypeStruct((3,), "float32")
        ... )
        >>> traced.out_info["y"].shape
        (3,)
    """

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path of each array of the arguments, in JAX's order."""
        return self._program.group.paths

    @property
    def donated(self) -> tuple[Path, ...]:
        """The paths of the donated arrays."""
        return tuple(self.paths[i] for i in self._program.body.arguments.donated)

    def arrays(self, args: Args, kwargs: Kwargs) -> list[AnyArray]:
        """Return the arrays of a similar call in JAX's order, placed as in the traced call.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
        """
        arrays = list(self._call.find(args, kwargs).arrays)
        for i, kind in enumerate(self._call.arrays):
            sharding = kind.sharding
            if isinstance(sharding, NamedSharding) and not is_placed(arrays[i], sharding):
                arrays[i] = jax.device_put(arrays[i], sharding)
        return arrays

    def of_arrays(self) -> tuple[jax.stages.Wrapped, list[jax.ShapeDtypeStruct]]:
        """Return the program as a `jax.jit` function for `jax.export`, and its abstract arrays.

        Raises:
            FunctreeError: if the function closes over a `jax.Ref`.
        """
        self._check_refs()
        arrays = list(self._call.arrays)
        for i, array in enumerate(arrays):
            # JAX puts an uncommitted array on a single device. An exported function must not depend
            # on that device.
            if not isinstance(array.sharding, NamedSharding):
                arrays[i] = array.update(sharding=None)
        return self._program.of_arrays(), arrays

    @property
    def entered(self) -> Mesh | None:
        """The mesh to set around a call, unless it is the current mesh."""
        return self._program.entered

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None) -> "Lowered":
        """Lower the function for this platform, or for other platforms such as `("tpu",)`.

        Raises:
            FunctreeError: if `lowering_platforms` is not a tuple of names.
            FunctreeError: if the function closes over a `jax.Ref`.
        """
        self._check_refs()
        program = self._program
        # JAX accepts the string "tpu", and lowers for the platforms "t", "p" and "u".
        check(
            f"{program.name}: invalid options for `lower()`",
            lowering_platforms=(lowering_platforms, TEXTS.or_none()),
        )
        # Lower on the mesh that calls use. Otherwise, a call would lower and compile again.
        with around(program.entered):
            lowered = self.jax.lower(lowering_platforms=lowering_platforms)
        return Lowered(lowered, self._call)

    def _check_refs(self) -> None:
        # JAX calls such a function, but cannot describe its program, whose results include the ref.
        if any(isinstance(constant, jax.Ref) for constant in self.jax.jaxpr.consts):
            raise FunctreeError(
                f"{self._program.name} closes over a `jax.Ref`, so it can be called, but neither "
                "lowered nor exported: pass the ref's value, and return the new value"
            )


class Lowered(Stage[jax.stages.Lowered]):
    """A function lowered for one call, like `jax.stages.Lowered` but for functions of modules.

    Examples:
        >>> lowered = ft.jit(lambda x: 2 * x).lower(jnp.ones(3))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def __init__(self, stage: jax.stages.Lowered, call: StagedCall):
        super().__init__(stage, call)
        # A ledger calls this function when its first verdict is read. Until then, the ledger keeps
        # the lowered program.
        module, output = stage.compiler_ir("stablehlo"), stage.out_info
        self._layouts = cache(lambda: layouts_of(module, output.paths()))

    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        device_assignment: tuple[Any, ...] | None = None,
    ) -> "Compiled":
        """Compile the program.

        Args:
            compiler_options: the compiler options, as in `jax.jit`.
            device_assignment: the devices for a program that was traced on an abstract mesh, in the
                order of that mesh.

        Raises:
            FunctreeError: if the program does not fit in the memory of a target.
        """
        program, mesh = self._program, self._program.mesh
        options = None if compiler_options is None else dict(compiler_options)
        compile = partial(self.jax.compile, options, device_assignment=device_assignment)
        # On available devices, JAX raises its own error when a program that is too large runs.
        if program.missing is not None and isinstance(mesh, Mesh):
            arguments = dict(zip(program.group.paths, self._call.arrays, strict=True))
            compile = partial(compile_for, program.name, mesh, arguments, compile)
        before = compile_events.count
        with heard_compiling() as heard, around(program.entered):
            compiled = compile()
        # Otherwise, JAX had already compiled the program, for a call or in an earlier `compile()`.
        if compile_events.have(program.body.__name__, before):
            pairs = tuple(sorted((options or {}).items()))
            self._call.log.add(self._call.situation()._replace(options=pairs))
        return Compiled(compiled, self._call, self.jax.out_info, heard.warnings, self._layouts)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the program as text in a dialect, `"stablehlo"` or `"hlo"`."""
        return self.jax.as_text(dialect=dialect, debug_info=debug_info)

    def layouts(self) -> Layouts:
        """Return the layout and the origin of each operation, without compiling the program.

        Raises:
            FunctreeError: if this version of JAX does not have Shardy's passes.

        Examples:
            >>> mesh = ft.make_mesh(data=8)
            >>> scale = ft.jit(
            ...     lambda x: 2 * x, in_shardings=ft.P("data"), mesh=mesh
            ... )
            >>> print(scale.lower(jnp.ones((16, 4))).layouts().rows[-1].array)
            f32[16/data, 4]
        """
        return self._layouts()

    def cost_analysis(self) -> Any | None:
        """Return the compiler's cost estimate, before compilation."""
        return self.jax.cost_analysis()


class Compiled(Stage[jax.stages.Compiled]):
    """A function compiled for one call, like `jax.stages.Compiled` but for functions of modules.

    Call it with arguments that match the compiled program.

    Examples:
        >>> scale = ft.jit(lambda m, x: m["w"] * x)
        >>> compiled = scale.lower({"w": jnp.ones(3)}, jnp.ones(3)).compile()
        >>> compiled({"w": jnp.ones(3)}, jnp.ones(4))
        Traceback (most recent call last):
            ...
        TypeError: Argument types differ from the types for which this computation was
        compiled. ... The mismatches are:
        Argument 'x' compiled with float32[3] and called with float32[4]
    """

    def __init__(
        self,
        stage: jax.stages.Compiled,
        call: StagedCall,
        output: Output,
        warnings: tuple[str, ...] | None,
        layouts: Callable[[], Layouts],
    ):
        super().__init__(stage, call)
        # JAX's compiled stage has the output's structure too, except for a function with ordered
        # effects.
        self._output: Output = output
        self._warnings, self._layouts = warnings, layouts
        self._was_called: bool = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Tree:
        """Run the compiled program.

        Arguments must have the structure, shapes, dtypes and shardings that the program was
        compiled for. As in `jax.jit`, uncommitted arrays are moved.

        Raises:
            FunctreeError: if the structure or a static value differs from the compiled call.
            FunctreeError: if an array is abstract or deleted.
            TypeError: if an array has a different shape or dtype, or is traced.
            ValueError: if a committed array is sharded differently.
            FunctreeError: if a donated array is passed twice.
            ShardingError: if the program was compiled for a target without devices.
        """
        program, flat = self._program, self._call.find(args, kwargs)
        if flat.group.skeleton != program.group.skeleton:
            raise self._other(flat)
        check_call(program, flat)
        # Buffers are compared only once, as in a function's first call.
        if not self._was_called and program.body.arguments.donated:
            check_donated(
                program.name,
                program.group.paths,
                flat.arrays,
                program.body.arguments,
                by_buffer=True,
            )
        self._was_called = True
        return program.run(self.jax, flat.arrays)

    def _other(self, flat: FlatCall) -> FunctreeError:
        """Return the error for a call with a different structure or different static values."""
        before = self._call.situation()
        now = Situation.of(flat.group, flat.arrays, before.mesh, before.rules)
        remedy = "call the function itself, which compiles a program for each structure"
        problems: list[Problem] = []
        for difference in differences(before, now):
            if difference.kind in ("static", "structure"):
                problems.append(Problem(difference.path, None, "", difference.change, remedy))
        return FunctreeTypeError(
            f"{self._program.name}: the arguments do not have the structure and the static values "
            "that the program was compiled for",
            problems,
        )

    @property
    def abstract_call(self) -> Any:
        """The call as a named tuple with `jax.ShapeDtypeStruct`s, with shardings."""
        types = self._call.values(self.jax.in_avals)
        shardings = self._call.values(self.jax.input_shardings)
        # Weak types are kept, since a step that returns a Python number where it took an array is
        # recompiled.
        return self._program.group.skeleton.fill(list(map(abstract, types, shardings)))

    def abstract_result(self, types: Sequence[Any]) -> Tree:
        """Return the result as `jax.ShapeDtypeStruct`s, with its shardings.

        Args:
            types: the JAX type of each array of the program's result. Types from the jaxpr may be
                weak.
        """
        shardings: Output = self.jax.output_shardings
        return self._output.like(list(map(abstract, types, shardings.values)))

    @property
    def input_shardings(self) -> tuple[Args, dict[str, Tree]]:
        """`(args, kwargs)` of the shardings that the program was compiled for."""
        return self._arguments(self.jax.input_shardings)

    @property
    def output_shardings(self) -> Tree:
        """The shardings of the result."""
        return self.jax.output_shardings.tree

    def as_text(self) -> str | None:
        """Return the compiled program as text, in which paths name parameters: `model.up`."""
        return self.jax.as_text()

    def cost_analysis(self) -> Any | None:
        """Return the compiler's cost estimate, with flops and bytes accessed."""
        return self.jax.cost_analysis()

    def memory_analysis(self) -> Any | None:
        """Return the compiler's estimate of memory on one device, in bytes."""
        return self.jax.memory_analysis()

    def ledger(self) -> Ledger:
        """Return a ledger of the bytes that the program moves between devices and keeps in memory.

        The ledger attributes the moved bytes to parameters. Verdicts and causes are computed when
        one of them is first read. Until then, the ledger keeps the lowered program in memory,
        including constants. Causes quote the source files as they are then.

        Raises:
            FunctreeError: if the compiler returns no program text.
        """
        program = self._program
        paths, outputs = program.group.paths, self._output.paths()
        return ledger_of(
            self.jax,
            program.name,
            paths,
            outputs,
            program.mesh,
            self._warnings,
            layouts=self._layouts,
        )
