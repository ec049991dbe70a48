"""A call of a function made by `ft.jit` ─► its stages, traced, lowered and compiled, for trees of modules."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.tree_util import tree_structure

from functree.calls.call_groups import CallGroup
from functree.calls.compilations import Difference, Log, Seen, differences
from functree.calls.compile_events import compile_events
from functree.calls.compiled_program import heard_compiling, ledger_of
from functree.calls.donation import check_donated, refuse_deleted, twice_by_identity
from functree.calls.flat import FlatProgram, flat_program
from functree.calls.out_of_memory import Argument, check_fits, refusing_too_large
from functree.calls.output import Output
from functree.calls.program import Program, around
from functree.calls.signature import Bound, Signature
from functree.calls.static_arguments import with_static
from functree.compiled.ledger import Ledger
from functree.errors import FunctreeError, Problem, ShardingError, count
from functree.layout.placement import is_sharded_as, sharding_text
from functree.parameters import DEVICES, MAPPING, TEXTS, check
from functree.tree.arrays import is_array
from functree.tree.leaf import array_problem
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class Call(NamedTuple):
    """The call that a stage belongs to.

    Attributes:
        program: the program of the call.
        signature: the signature of the function.
        bound: the function and the arguments bound to it.
        instance: the instance of a method, which comes before the arguments of every call; or an empty tuple.
        static: the names of static parameters.
        by_keyword: the names of the arguments that are passed by keyword.
        seen: what a compilation depends on.
        log: the compilations of the function.
    """

    program: Program
    signature: Signature
    bound: Bound
    instance: tuple[Any, ...]
    static: frozenset[str]
    by_keyword: frozenset[str]
    seen: Seen
    log: Log

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Another call of the same function."""
        args, kwargs = self.bound.call((*self.instance, *args), kwargs)
        return with_static(self.signature.bind(args, kwargs), self.static)

    def values(self, tree: Any) -> list[Any]:
        """A tree from JAX with the structure of the compiled function's arguments ─► a value for each array."""
        arguments, _ = tree
        return self.program.body.arguments.join(arguments)

    def arguments(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A value for each array ─► `(args, kwargs)` of the call, with None for static values."""
        args, kwargs = self.signature.arguments(self.program.group.skeleton.spread(values))
        # Behind an argument that is passed by keyword, defaults have no position either.
        return self.signature.by_keyword(args, kwargs, self.by_keyword)


class Stage:
    """The base class of the three stages.

    Trees have the structure of the function's arguments `(args, kwargs)`, with None in the place of leaves that are not
    arrays, or the structure of its result.
    """

    def __init__(self, stage: Any, call: Call):
        self._stage, self._call = stage, call

    @property
    def args_info(self) -> Any:
        """`(args, kwargs)` of `jax.stages.ArgInfo`: shapes, dtypes, and whether they are donated."""
        return self._arguments(self._stage.args_info)

    @property
    def in_avals(self) -> Any:
        """`(args, kwargs)` of abstract values."""
        return self._arguments(self._stage.in_avals)

    @property
    def in_tree(self) -> Any:
        """The structure of `(args, kwargs)`."""
        return tree_structure(self.args_info)

    @property
    def out_info(self) -> Any:
        """The result, with an abstract value for each array."""
        return self._stage.out_info.tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_structure(self.out_info)

    @property
    def out_avals(self) -> Any:
        """The result, with JAX's type of each array."""
        return jax.tree.map(jax.typeof, self._stage.out_info).tree

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The indices of the donated arrays, among all arrays of the arguments in JAX's order."""
        return self._call.program.body.arguments.donated

    @property
    def in_shardings(self) -> Any:
        """`(args, kwargs)` of the shardings by `in_shardings`; None for an array with any sharding."""
        program = self._call.program
        return self._call.arguments(program.in_shardings or [None] * len(program.group.paths))

    @property
    def out_shardings(self) -> Any:
        """The shardings of the result by `out_shardings` and by donated state; None if the compiler chooses."""
        output = self._stage.out_info
        return output.like(self._call.program.out_shardings or [None] * len(output.values))

    def _arguments(self, tree: Any) -> Any:
        """A tree from JAX as `(args, kwargs)` of the function."""
        return self._call.arguments(self._call.values(tree))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._call.program.name}>"


class Traced(Stage):
    """A function traced for one call; like `jax.stages.Traced`, for functions of modules.

    Examples:
        >>> traced = ft.jit(lambda x: {"y": 2 * x}).trace(jax.ShapeDtypeStruct((3,), "float32"))
        >>> traced.out_info["y"].shape
        (3,)
    """

    @property
    def jaxpr(self) -> Any:
        """The function as a `ClosedJaxpr`. Its arguments are the arrays, in JAX's order."""
        return self._stage.jaxpr

    @property
    def out_avals(self) -> Any:
        """The result, with JAX's type of each array, which may be weak."""
        output = self._stage.out_info
        return output.like(self._stage.jaxpr.out_avals)

    @property
    def fun_name(self) -> str:
        """The name of the function."""
        return self._stage.fun_name

    def of_arrays(self) -> FlatProgram:
        """The program as a plain function of its arrays, for `jax.export`."""
        seen = self._call.seen
        return flat_program(self._call.program, seen.types, seen.shardings)

    @property
    def entered(self) -> Mesh | None:
        """The mesh that is entered around a call, if it is not the current one."""
        return self._call.program.entered

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None, **refused: Any) -> "Lowered":
        """Lower the function, for this platform or for others (`("tpu",)`).

        Raises:
            FunctreeError: `lowering_platforms` is not a tuple of names; another option is given, as by `jax.export`.
        """
        if refused:
            name = self._call.program.name
            raise FunctreeError(
                f"{name} has arguments that JAX cannot export: write `ft.export({name}, *args)`, whose result "
                "`jax.export.deserialize` reads"
            )
        check(
            f"{self._call.program.name} cannot be lowered so",
            lowering_platforms=(lowering_platforms, TEXTS.or_none()),
        )
        # On the mesh of the calls: otherwise JAX would lower and compile again for a call.
        with around(self._call.program.entered):
            return Lowered(self._stage.lower(lowering_platforms=lowering_platforms), self._call)


class Lowered(Stage):
    """A function lowered for one call; like `jax.stages.Lowered`, for functions of modules.

    Examples:
        >>> lowered = ft.jit(lambda x: 2 * x).lower(jnp.ones(3))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        device_assignment: tuple[Any, ...] | None = None,
    ) -> "Compiled":
        """Compile the program.

        Args:
            compiler_options: as in `jax.jit`.
            device_assignment: the devices of a program that was traced on an abstract mesh, in the order of that mesh.

        Raises:
            FunctreeError: one of them is something else; or the program does not fit in the memory of a target.
        """
        check(
            f"{self._call.program.name} cannot be compiled so",
            compiler_options=(compiler_options, MAPPING.or_none()),
            device_assignment=(device_assignment, DEVICES.or_none()),
        )
        before = compile_events.count
        with heard_compiling() as heard, around(self._call.program.entered), self._refusing_too_large():
            compiled = self._stage.compile(compiler_options, device_assignment=device_assignment)
        # Otherwise JAX had compiled it before, for a call or here.
        if compile_events.have(self._call.program.body.__name__, before):
            options = tuple(sorted((compiler_options or {}).items()))
            self._call.log.add(self._call.seen.situation._replace(options=options))
        self._check_fits(compiled)
        return Compiled(compiled, self._call, self._stage.out_info, heard.warnings)

    def _refusing_too_large(self) -> AbstractContextManager[None]:
        """A context in which a program that is too large for a target is an error with paths."""
        mesh = self._call.program.mesh
        if self._call.program.missing is None or not isinstance(mesh, Mesh):
            return nullcontext()
        return refusing_too_large(self._call.program.name, mesh.devices.flat[0], self._arguments_of_program())

    def _check_fits(self, compiled: Any) -> None:
        mesh = self._call.program.mesh
        if self._call.program.missing is not None and isinstance(mesh, Mesh):
            check_fits(self._call.program.name, mesh.devices.flat[0], compiled, self._arguments_of_program())

    def _arguments_of_program(self) -> list[Argument]:
        """The arrays of the call, with their shardings as far as they are known."""
        program, seen = self._call.program, self._call.seen
        wanted = program.in_shardings or seen.shardings
        return [
            Argument(path, value, one if one is not None else sharding)
            for path, value, one, sharding in zip(program.group.paths, seen.types, wanted, seen.shardings, strict=True)
        ]

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text: `dialect` is `"stablehlo"` or `"hlo"`."""
        return self._stage.as_text(dialect=dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any | None:
        """The program as an object of the compiler."""
        return self._stage.compiler_ir(dialect=dialect)

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of the costs, before compilation."""
        return self._stage.cost_analysis()


class Compiled(Stage):
    """A function compiled for one call; like `jax.stages.Compiled`, for functions of modules. It can be called.

    Examples:
        >>> compiled = ft.jit(lambda m, x: m["w"] * x).lower({"w": jnp.ones(3)}, jnp.ones(3)).compile()
        >>> compiled({"w": jnp.ones(3)}, jnp.ones(4))
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: <lambda>: 1 argument is not as compiled
        <BLANKLINE>
          x   f32[4]
              shape (3,) when compiled, (4,) now
        <BLANKLINE>
        Try: call the function itself, which compiles again if necessary
    """

    def __init__(self, stage: Any, call: Call, output: Output, warnings: tuple[str, ...] | None):
        super().__init__(stage, call)
        # JAX has it for a compiled function too, but not for one with ordered effects.
        self._output = output
        self._checked: tuple[Any, ...] | None = None
        self._warnings = warnings

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled program.

        Raises:
            FunctreeError: arguments have another structure, shape, dtype or sharding than those that it was compiled
                for; an array is donated twice, or is deleted. The error lists the paths. Or the program was compiled
                for devices that are not there.
        """
        program, call = self._call.program, self._call.bind(args, kwargs)
        if program.missing is not None:
            raise ShardingError(f"{program.name} cannot run: {program.missing}")
        arrays = program.group.take(call)
        if type(arrays) is tuple or not all(map(is_array, arrays)):
            raise self._other(call)
        self._check(arrays)
        arguments = program.body.arguments
        if arguments.donated and twice_by_identity(arrays, arguments):
            check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=False)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
            raise refuse_deleted(program.name, program.group.paths, arrays)
        return self._stage(*arguments.split(arrays)).built()

    call = __call__

    def _check(self, arrays: Sequence[Any]) -> None:
        """Raise FunctreeError if arrays are not as they were when the program was compiled."""
        # By class first, because this runs in every call; and first of all, because a tracer has no commitment.
        if any(issubclass(kind, Tracer | jax.ShapeDtypeStruct) for kind in set(map(type, arrays))):
            raise self._without_value(arrays)
        # Arrays with the same type, sharding and commitment as in the last call need no check. The commitment counts,
        # since JAX moves uncommitted arrays to the devices of the program, but not committed ones.
        seen = tuple(tuple(getattr(x, name, None) for name in ("aval", "sharding", "committed")) for x in arrays)
        if self._checked is not None and seen == self._checked and not any(aval is None for aval, *_ in seen):
            return
        program, found = self._call.program, list[Difference]()
        wanted, avals = self._call.values(self._stage.input_shardings), self._call.values(self._stage.in_avals)
        for path, x, aval, sharding in zip(program.group.paths, arrays, avals, wanted, strict=True):
            if tuple(x.shape) != tuple(aval.shape):
                found.append(Difference(path, "shape", tuple(aval.shape), tuple(x.shape)))
            elif x.dtype != aval.dtype:
                found.append(Difference(path, "dtype", aval.dtype, x.dtype))
            elif not _is_taken(x, sharding):
                found.append(Difference(path, "sharding", sharding_text(sharding), sharding_text(x.sharding)))
        if found:
            raise _refuse(program, found, dict(zip(program.group.paths, arrays, strict=True)))
        if program.body.arguments.donated:
            check_donated(program.name, program.group.paths, arrays, program.body.arguments, by_buffer=True)
        self._checked = seen

    def _without_value(self, arrays: Sequence[Any]) -> FunctreeError:
        """The error for an array that is traced or abstract."""
        program = self._call.program
        pairs = zip(program.group.paths, arrays, strict=True)
        path = next(path for path, x in pairs if isinstance(x, Tracer | jax.ShapeDtypeStruct))
        return FunctreeError(f"{program.name}: `{path}` has no value, and a compiled program runs on values")

    def _other(self, call: Any) -> FunctreeError:
        """The error for a call with another structure or other static values."""
        skeleton, arrays = Skeleton.apart(call)
        group = CallGroup(skeleton)
        before = self._call.seen
        now = Seen.of(group, arrays, before.mesh, before.rules)
        kinds = ("static", "structure", "shape", "dtype")
        found = [different for different in differences(before.situation, now.situation) if different.kind in kinds]
        return _refuse(self._call.program, found, dict(zip(group.paths, arrays, strict=True)))

    @property
    def input_shardings(self) -> Any:
        """`(args, kwargs)` of the shardings that the program was compiled for."""
        return self._arguments(self._stage.input_shardings)

    @property
    def output_shardings(self) -> Any:
        """The shardings of the result."""
        return self._stage.output_shardings.tree

    @property
    def input_formats(self) -> Any:
        """`(args, kwargs)` of the memory layouts that the program was compiled for."""
        return self._arguments(self._stage.input_formats)

    @property
    def output_formats(self) -> Any:
        """The memory layouts of the result."""
        return self._stage.output_formats.tree

    def as_text(self) -> str | None:
        """The compiled program as text. Its parameters have the paths of the arrays: `x`, `model.up`."""
        return self._stage.as_text()

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of costs: flops, bytes accessed."""
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any | None:
        """The compiler's estimate of memory on one device, in bytes."""
        return self._stage.memory_analysis()

    def ledger(self) -> Ledger:
        """What the compiled program moves between devices, for which parameters, and what it keeps in memory.

        Raises:
            FunctreeError: the compiler gives no text of the program.
        """
        program = self._call.program
        paths = [path for part in program.body.arguments.split(program.group.paths) for path in part.values]
        outputs = _output_paths(self._output)
        return ledger_of(self._stage, program.name, paths, outputs, program.mesh, self._warnings)

    def runtime_executable(self) -> Any | None:
        """The executable as an object of the runtime."""
        return self._stage.runtime_executable()


def _output_paths(output: Output) -> list[Path]:
    """The path of each array that a program returns; of an array that is at several paths of the result, the first."""
    found = [Path()] * len(output.values)
    which = output.which or tuple(range(len(output.values)))
    for i, path in reversed(list(zip(which, output.skeleton.paths, strict=True))):
        found[i] = path
    return found


def _is_taken(array: Any, sharding: Any) -> bool:
    """Whether JAX accepts an array: it is sharded as required, or may be moved because it is uncommitted."""
    if sharding is None or not isinstance(array, jax.Array) or not array.committed:
        return True
    return is_sharded_as(array, sharding)


def _refuse(program: Program, found: Sequence[Difference], arrays: Mapping[Path, Any]) -> FunctreeError:
    """The error for arguments that differ from those that the program was compiled for."""
    remedy = "call the function itself, which compiles again if necessary"
    problems: list[Problem] = []
    for different in found:
        before, now = different.text(different.before), different.text(different.now)
        why = f"{different.kind} {before} when compiled, {now} now"
        array = arrays.get(different.path)
        if array is None:
            problems.append(Problem(different.path, None, "", why, remedy))
        else:
            problems.append(array_problem(different.path, array, why, remedy))
    number = len({problem.path for problem in problems})
    verb = "is" if number == 1 else "are"
    return FunctreeError(f"{program.name}: {count(number, 'argument')} {verb} not as compiled", problems)
