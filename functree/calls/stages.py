"""A call of a function ─► its stages, traced, lowered and compiled, for trees of modules."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import tree_structure

from functree.argument_checks import DEVICES, MAPPING, TEXTS, check
from functree.calls.call_groups import CallGroup, FlatCall
from functree.calls.callbacks import check_callbacks
from functree.calls.checks import check_call, check_donated
from functree.calls.compilations import Difference, Log, Situation, differences
from functree.calls.compile_events import compile_events
from functree.calls.out_of_memory import check_fits, refusing_too_large
from functree.calls.output import Output
from functree.calls.program import Program, around
from functree.calls.program_ledger import heard_compiling, ledger_of
from functree.calls.signature import Args, Kwargs, Record, Signature
from functree.compiled.layouts import Layouts, layouts_of
from functree.compiled.ledger import Ledger
from functree.devices.placement import is_placed, is_sharded_as, sharding_text
from functree.errors import FunctreeError, FunctreeTypeError, Problem, count, did_you_mean
from functree.labels.leaf import array_problem
from functree.tree.arrays import AnyArray, Tree, abstract, is_array
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class StagedCall(NamedTuple):
    """The call that a stage belongs to. It holds no arrays.

    Attributes:
        program: the program of the call.
        signature: the signature of the function.
        bind: a function from the arguments of another call to this call, as a tree.
        by_keyword: the names of the arguments that are passed by keyword.
        arrays: the arrays of the call, abstract, with their shardings as far as they are known.
        log: the compilations of the function.
    """

    program: Program
    signature: Signature
    bind: Callable[[Args, Kwargs], Record]
    by_keyword: frozenset[str]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    log: Log

    def values(self, tree: Tree) -> list[Any]:
        """A tree from JAX with the structure of the compiled function's arguments ─► a value for
        each array."""
        arguments, _ = tree
        return self.program.body.arguments.join(arguments)

    def arguments(self, values: Sequence[object]) -> tuple[Args, dict[str, Tree]]:
        """A value for each array ─► `(args, kwargs)` of the call, with None for static values."""
        args, kwargs = self.signature.arguments(self.program.group.skeleton.spread(values))
        # Behind an argument that is passed by keyword, defaults have no position either.
        return self.signature.by_keyword(args, kwargs, self.by_keyword)

    def situation(self) -> Situation:
        """Everything that a compilation of the call depends on."""
        return Situation.of(self.program.group, self.arrays, self.program.mesh, self.program.rules)


_Stage = TypeVar("_Stage", jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)


class Stage(Generic[_Stage]):
    """The base class of the three stages.

    Trees have the structure of the function's arguments `(args, kwargs)`, with None instead of
    leaves that are not arrays, or the structure of its result.

    Attributes:
        jax: JAX's own stage, of a function of arrays: the jaxpr, memory layouts, the executable.
    """

    def __init__(self, stage: _Stage, call: StagedCall):
        self.jax: _Stage = stage
        self._call, self._program = call, call.program

    @property
    def args_info(self) -> tuple[Args, dict[str, Tree]]:
        """`(args, kwargs)` of `jax.stages.ArgInfo`: shapes, dtypes, and whether they are
        donated."""
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
        """The result, with an abstract value for each array."""
        return self.jax.out_info.tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_structure(self.out_info)

    def _arguments(self, tree: Tree) -> tuple[Args, dict[str, Tree]]:
        """A tree from JAX as `(args, kwargs)` of the function."""
        return self._call.arguments(self._call.values(tree))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._program.name}>"


class Traced(Stage[jax.stages.Traced]):
    """A function traced for one call; like `jax.stages.Traced`, for functions of modules.

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
        """The paths of the donated ones."""
        return tuple(self.paths[i] for i in self._program.body.arguments.donated)

    def arrays(self, args: Args, kwargs: Kwargs) -> list[AnyArray]:
        """The arrays of a call like the traced one, in JAX's order, and placed as that is traced.

        Args:
            args: the arguments by position.
            kwargs: those by keyword.
        """
        _, arrays = Skeleton.apart(self._call.bind(args, kwargs))
        for i, kind in enumerate(self._call.arrays):
            sharding = kind.sharding
            if isinstance(sharding, NamedSharding) and not is_placed(arrays[i], sharding):
                arrays[i] = jax.device_put(arrays[i], sharding)
        return arrays

    def of_arrays(self) -> tuple[jax.stages.Wrapped, list[jax.ShapeDtypeStruct]]:
        """The program as a plain `jax.jit` function of its arrays, for `jax.export`; and these,
        abstract."""
        if self._closes_over_refs:
            raise FunctreeError(
                f"{self._program.name} closes over a `jax.Ref`, which stays in this process: pass "
                "and return the value"
            )
        arrays = list(self._call.arrays)
        for i, array in enumerate(arrays):
            # JAX puts an array that nobody has placed on a single device. What is exported does not
            # depend on that.
            if not isinstance(array.sharding, NamedSharding):
                arrays[i] = array.update(sharding=None)
        return self._program.of_arrays(), arrays

    @property
    def entered(self) -> Mesh | None:
        """The mesh that is entered around a call, if it is not the current one."""
        return self._program.entered

    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, **refused: object
    ) -> "Lowered":
        """Lower the function, for this platform or for others (`("tpu",)`).

        Raises:
            FunctreeError: `lowering_platforms` is not a tuple of names; another option is given, as
                by `jax.export`.
        """
        name = self._program.name
        # Only JAX's own functions, such as `jax.export.export`, have options like this one.
        if any(option.startswith("_") for option in refused):
            raise FunctreeTypeError(
                f"`jax.export.export` takes what `jax.jit` returns, and {name} is a function of "
                f"functree: write `ft.export({name}, *args)`, whose result "
                "`jax.export.deserialize` reads"
            )
        for option in refused:
            raise FunctreeTypeError(
                f"{name} cannot be lowered so: there is no option `{option}`"
                f"{did_you_mean(option, ['lowering_platforms'])}"
            )
        check(
            f"{self._program.name} cannot be lowered so",
            lowering_platforms=(lowering_platforms, TEXTS.or_none()),
        )
        # On the mesh of the calls: otherwise JAX would lower and compile again for a call.
        program = self._program
        shardings = (one.sharding for one in self._call.arrays)
        check_callbacks(program.name, self.jax.jaxpr, shardings)
        with around(program.entered):
            lowered = self.jax.lower(lowering_platforms=lowering_platforms)
        return Lowered(lowered, self._call, self._closes_over_refs)

    @property
    def _closes_over_refs(self) -> bool:
        return any(isinstance(one, jax.Ref) for one in self.jax.jaxpr.consts)


class Lowered(Stage[jax.stages.Lowered]):
    """A function lowered for one call; like `jax.stages.Lowered`, for functions of modules.

    Examples:
        >>> lowered = ft.jit(lambda x: 2 * x).lower(jnp.ones(3))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def __init__(self, stage: jax.stages.Lowered, call: StagedCall, closes_over_refs: bool):
        super().__init__(stage, call)
        self._closes_over_refs = closes_over_refs
        self._layouts: Layouts | None = None

    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        device_assignment: tuple[Any, ...] | None = None,
    ) -> "Compiled":
        """Compile the program.

        Args:
            compiler_options: as in `jax.jit`.
            device_assignment: the devices of a program that was traced on an abstract mesh, in the
                order of that mesh.

        Raises:
            FunctreeError: one of them is something else; or the program does not fit in the memory
                of a target; or the function closes over a `jax.Ref`.
        """
        # JAX cannot describe such a program: its result has the refs among the arrays.
        if self._closes_over_refs:
            raise FunctreeError(
                f"{self._program.name} closes over a `jax.Ref`, and JAX does not tell how such a "
                "program is compiled: call the function itself, or pass and return the value"
            )
        check(
            f"{self._program.name} cannot be compiled so",
            compiler_options=(compiler_options, MAPPING.or_none()),
            device_assignment=(device_assignment, DEVICES.or_none()),
        )
        options = None if compiler_options is None else dict(compiler_options)
        before = compile_events.count
        with heard_compiling() as heard, around(self._program.entered), self._refusing_too_large():
            compiled = self.jax.compile(options, device_assignment=device_assignment)
        # Otherwise JAX had compiled it before, for a call or here.
        if compile_events.have(self._program.body.__name__, before):
            pairs = tuple(sorted((options or {}).items()))
            self._call.log.add(self._call.situation()._replace(options=pairs))
        # On devices that are there, JAX's own error comes when the program is run.
        target = self._target()
        if target is not None:
            check_fits(self._program.name, target, compiled, self._placed_by_path)
        return Compiled(compiled, self._call, self.jax.out_info, heard.warnings, self.layouts)

    def _refusing_too_large(self) -> AbstractContextManager[None]:
        """A context in which a program that is too large for a target is an error with paths."""
        target = self._target()
        if target is None:
            return nullcontext()
        return refusing_too_large(self._program.name, target, self._placed_by_path)

    def _target(self) -> Mesh | None:
        """The mesh, if its devices are only compiled for."""
        mesh = self._program.mesh
        if self._program.missing is None or not isinstance(mesh, Mesh):
            return None
        return mesh

    def _placed_by_path(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """The arrays of the call by path, as the program takes them."""
        return dict(zip(self._program.group.paths, self._call.arrays, strict=True))

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text: `dialect` is `"stablehlo"` or `"hlo"`."""
        return self.jax.as_text(dialect=dialect, debug_info=debug_info)

    def layouts(self) -> Layouts:
        """How each operation will be laid out, and who has decided so. Nothing is compiled.

        Raises:
            FunctreeError: this version of JAX does not have the passes of Shardy.

        Examples:
            >>> mesh = ft.make_mesh(data=8)
            >>> scale = ft.jit(
            ...     lambda x: 2 * x, in_shardings=ft.P("data"), mesh=mesh
            ... )
            >>> print(scale.lower(jnp.ones((16, 4))).layouts().rows[-1].array)
            f32[16/data, 4]
        """
        # Kept, because a ledger has them too.
        if self._layouts is None:
            self._layouts = layouts_of(self.jax, self.jax.out_info.paths())
        return self._layouts

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of the costs, before compilation."""
        return self.jax.cost_analysis()


class Compiled(Stage[jax.stages.Compiled]):
    """A function compiled for one call; like `jax.stages.Compiled`, for functions of modules. It
    can be called.

    Examples:
        >>> scale = ft.jit(lambda m, x: m["w"] * x)
        >>> compiled = scale.lower({"w": jnp.ones(3)}, jnp.ones(3)).compile()
        >>> compiled({"w": jnp.ones(3)}, jnp.ones(4))
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeTypeError: <lambda>: 1 argument is not as compiled
        <BLANKLINE>
          x   f32[4]
              shape (3,) when compiled, (4,) now
        <BLANKLINE>
        Try: call the function itself, which compiles again if necessary
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
        # JAX has it for a compiled function too, but not for one with ordered effects.
        self._output: Output = output
        self._warnings, self._layouts = warnings, layouts
        self._checked: Hashable = None  # the kinds of the arrays that were checked last

    def __call__(self, /, *args: Any, **kwargs: Any) -> Tree:
        """Run the compiled program.

        Raises:
            FunctreeError: arguments have another structure, shape, dtype or sharding than those
                that it was compiled for; an array is donated twice, or is deleted. The error lists
                the paths. Or the program was compiled for devices that are not there.
        """
        program, call = self._program, self._call.bind(args, kwargs)
        arrays = program.group.take(call)
        if isinstance(arrays, tuple) or not all(map(is_array, arrays)):
            raise self._other(call)
        # By class, because this runs in every call; and before the others, because a tracer has no
        # commitment.
        kinds = set(map(type, arrays))
        if any(issubclass(kind, Tracer | jax.ShapeDtypeStruct) for kind in kinds):
            raise self._without_value(arrays)
        concrete = all(issubclass(kind, jax.Array) for kind in kinds)
        flat = FlatCall(call, program.group, arrays, concrete)
        if program.missing is None:  # otherwise it cannot run in any case
            self._check(flat)
        check_call(program, flat)
        return program.run(self.jax, arrays)

    def _check(self, flat: FlatCall) -> None:
        """Raise FunctreeError if arrays are not as they were when the program was compiled."""
        program, arrays = self._program, flat.arrays
        # Arrays with the same type, sharding and commitment as in the last call need no check. The
        # commitment counts, since JAX moves uncommitted arrays to the devices of the program, but
        # not committed ones.
        now = flat.kinds()
        if now == self._checked:
            return
        found = self._differences(arrays)
        if found:
            raise _refuse(program, found, dict(zip(program.group.paths, arrays, strict=True)))
        arguments = program.body.arguments
        # Their buffers are compared only here, as in the first call of a function.
        if arguments.donated:
            check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=True)
        self._checked = now

    def _differences(self, arrays: Sequence[AnyArray]) -> list[Difference]:
        """The differences from the arrays that the program was compiled for."""
        found: list[Difference] = []
        types = self._call.values(self.jax.in_avals)
        shardings = self._call.values(self.jax.input_shardings)
        paths = self._program.group.paths
        for path, x, kind, sharding in zip(paths, arrays, types, shardings, strict=True):
            # One for each array: what is said of the first would be repeated by the others.
            if tuple(x.shape) != tuple(kind.shape):
                found.append(Difference(path, "shape", tuple(kind.shape), tuple(x.shape)))
            elif x.dtype != kind.dtype:
                found.append(Difference(path, "dtype", kind.dtype, x.dtype))
            elif isinstance(x, jax.Array) and not _is_taken(x, sharding):
                before, now = sharding_text(sharding), sharding_text(x.sharding)
                found.append(Difference(path, "sharding", before, now))
        return found

    def _without_value(self, arrays: Sequence[AnyArray]) -> FunctreeError:
        """The error for an array that is traced or abstract."""
        name, pairs = self._program.name, zip(self._program.group.paths, arrays, strict=True)
        path = next(path for path, x in pairs if isinstance(x, Tracer | jax.ShapeDtypeStruct))
        return FunctreeTypeError(
            f"{name}: `{path}` has no value, and a compiled program runs on values"
        )

    def _other(self, call: Record) -> FunctreeError:
        """The error for a call with another structure or other static values."""
        skeleton, arrays = Skeleton.apart(call)
        group = CallGroup(skeleton.learn(call))
        before = self._call.situation()
        now = Situation.of(group, arrays, before.mesh, before.rules)
        # Not the shardings: those of the program are the compiler's, and those of the call that it
        # was traced for are no requirement.
        kinds = ("static", "structure", "shape", "dtype")
        found = [one for one in differences(before, now) if one.kind in kinds]
        return _refuse(self._program, found, dict(zip(group.paths, arrays, strict=True)))

    @property
    def abstract_arguments(self) -> tuple[Args, dict[str, Tree]]:
        """`(args, kwargs)` of `jax.ShapeDtypeStruct`s: what the program takes, with its
        shardings."""
        types = self._call.values(self.jax.in_avals)
        shardings = self._call.values(self.jax.input_shardings)
        # With the weak types too: a step that returns a Python number where it took an array is
        # compiled again.
        return self._call.arguments(list(map(abstract, types, shardings)))

    def abstract_result(self, types: Sequence[Any]) -> Tree:
        """The result as `jax.ShapeDtypeStruct`s, with its shardings.

        Args:
            types: JAX's type of each array of the program's result: those that are in the jaxpr may
                be weak.
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
        """The compiled program as text. Its parameters have the paths of the arrays: `x`,
        `model.up`."""
        return self.jax.as_text()

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of costs: flops, bytes accessed."""
        return self.jax.cost_analysis()

    def memory_analysis(self) -> Any | None:
        """The compiler's estimate of memory on one device, in bytes."""
        return self.jax.memory_analysis()

    def ledger(self) -> Ledger:
        """What the compiled program moves between devices, for which parameters, and what it keeps
        in memory.

        Raises:
            FunctreeError: the compiler gives no text of the program.
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


def _is_taken(array: jax.Array, sharding: Sharding | None) -> bool:
    """Whether JAX accepts an array: it is sharded as required, or may be moved because it is
    uncommitted."""
    return sharding is None or not array.committed or is_sharded_as(array, sharding)


def _refuse(
    program: Program, found: Sequence[Difference], arrays: Mapping[Path, AnyArray]
) -> FunctreeError:
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
    headline = f"{program.name}: {count(number, 'argument')} {verb} not as compiled"
    return FunctreeTypeError(headline, problems)
