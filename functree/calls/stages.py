"""A call of a function made by `ft.jit` ─► what JAX knows of it: traced, lowered, compiled, over modules."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.tree_util import tree_structure

from functree.calls.call_groups import CallGroup
from functree.calls.compilations import Difference, Situation, differences, situation
from functree.calls.donation import check_donated, refuse_deleted, twice_by_identity
from functree.calls.program import Program
from functree.calls.signature import Bound, Signature
from functree.calls.static_arguments import with_static
from functree.errors import FunctreeError, Problem, count
from functree.layout.placement import is_sharded_as, sharding_text
from functree.tree.arrays import is_array
from functree.tree.leaf import array_problem
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class Call(NamedTuple):
    """The call that a stage is of.

    Attributes:
        program: the function, for one group of its calls.
        signature: of the function.
        bound: what is bound to the function.
        instance: what is given in front of every call's arguments: the instance of a method.
        static: the names of static parameters.
        situation: all that a compilation depends on.
    """

    program: Program
    signature: Signature
    bound: Bound
    instance: tuple[Any, ...]
    static: frozenset[str]
    situation: Situation

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Another call of the same function."""
        args, kwargs = self.bound.call((*self.instance, *args), kwargs)
        return with_static(self.signature.bind(args, kwargs), self.static)

    def values(self, tree: Any) -> list[Any]:
        """JAX's tree for the two arguments ─► a value for each of the call's arrays."""
        (kept, donated), _ = tree
        return self.program.body.arguments.join(kept, donated)

    def arguments(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A value for each array ─► `(args, kwargs)` as the function takes them, None for statics."""
        return self.signature.arguments(self.program.group.skeleton.spread(values))


class Stage:
    """What all three stages tell. Trees have the structure of the function's arguments `(args, kwargs)`, or of its
    result, with None where a leaf of the arguments is no array."""

    def __init__(self, stage: Any, call: Call):
        self._stage, self._call = stage, call

    @property
    def args_info(self) -> Any:
        """`(args, kwargs)` of `jax.stages.ArgInfo`: shapes, dtypes, what is donated."""
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
        """The result, as `jax.ShapeDtypeStruct`s and the like."""
        return self._stage.out_info.tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_structure(self.out_info)

    @property
    def out_avals(self) -> Any:
        """The result, as abstract values."""
        return jax.tree.map(jax.typeof, self._stage.out_info).tree

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Which of the arguments' arrays are donated, as places among them in JAX's order."""
        return self._call.program.body.arguments.donated

    @property
    def in_shardings(self) -> Any:
        """What `in_shardings` came to, `(args, kwargs)`; None where an array goes as it comes."""
        program = self._call.program
        return self._call.arguments(program.in_shardings or [None] * len(program.group.paths))

    @property
    def out_shardings(self) -> Any:
        """What `out_shardings` and the donated state came to; None where the compiler chooses."""
        output = self._stage.out_info
        return output.like(self._call.program.out_shardings or [None] * len(output.values))

    def _arguments(self, tree: Any) -> Any:
        """JAX's tree for the two arguments, as `(args, kwargs)`."""
        return self._call.arguments(self._call.values(tree))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._call.program.name}>"


class Traced(Stage):
    """A function traced for one call; as `jax.stages.Traced`, over modules.

    Examples:
        >>> traced = ft.jit(lambda x: {"y": 2 * x}).trace(jax.ShapeDtypeStruct((3,), "float32"))
        >>> traced.out_info["y"].shape
        (3,)
    """

    @property
    def jaxpr(self) -> Any:
        """The function as a `ClosedJaxpr`: its arguments are the kept arrays, then the donated ones."""
        return self._stage.jaxpr

    @property
    def fun_name(self) -> str:
        """The function's name."""
        return self._stage.fun_name

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None) -> "Lowered":
        """The program before it is compiled, for this platform or others (`("tpu",)`)."""
        return Lowered(self._stage.lower(lowering_platforms=lowering_platforms), self._call)


class Lowered(Stage):
    """A function lowered for one call; as `jax.stages.Lowered`, over modules.

    Examples:
        >>> lowered = ft.jit(lambda x: 2 * x).lower(jnp.ones(3))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> "Compiled":
        """The compiled program."""
        return Compiled(self._stage.compile(compiler_options), self._call)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text: `dialect` is `"stablehlo"` or `"hlo"`."""
        return self._stage.as_text(dialect=dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any | None:
        """The program as the compiler's own object."""
        return self._stage.compiler_ir(dialect=dialect)

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of costs, before compilation."""
        return self._stage.cost_analysis()


class Compiled(Stage):
    """A function compiled for one call; as `jax.stages.Compiled`, over modules. It can be called.

    Examples:
        >>> compiled = ft.jit(lambda m, x: m["w"] * x).lower({"w": jnp.ones(3)}, jnp.ones(3)).compile()
        >>> compiled({"w": jnp.ones(3)}, jnp.ones(4))
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: <lambda>: 1 argument not as it was compiled for
        <BLANKLINE>
          x   f32[4]
              shape (3,) when compiled, (4,) now
        <BLANKLINE>
        Try: call the function itself, which compiles again where it has to
    """

    _checked: tuple[Any, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            FunctreeError: arguments of another structure, shape, dtype or sharding than it was compiled for, by path;
                an array donated twice, or to an earlier call.
        """
        program, call = self._call.program, self._call.bind(args, kwargs)
        arrays = program.group.take(call)
        if arrays is None or not all(map(is_array, arrays)):
            raise self._other(call)
        self._check(arrays)
        arguments = program.body.arguments
        if arguments.donated and twice_by_identity(arguments.take_donated(arrays), arguments.take_kept(arrays)):
            check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=False)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
            raise refuse_deleted(program.name, program.group.paths, arrays)
        return self._stage(*arguments.split(arrays)).tree

    call = __call__

    def _check(self, arrays: Sequence[Any]) -> None:
        """That arrays are as they were when it was compiled. What was so in the last call is so now."""
        # JAX moves an uncommitted array to where it is needed; one that is committed to the same device it does not.
        seen = tuple(tuple(getattr(x, name, None) for name in ("aval", "sharding", "committed")) for x in arrays)
        if self._checked is not None and seen == self._checked and not any(aval is None for aval, *_ in seen):
            return
        program, found = self._call.program, list[Difference]()
        wanted, avals = self._call.values(self._stage.input_shardings), self._call.values(self._stage.in_avals)
        for path, x, aval, sharding in zip(program.group.paths, arrays, avals, wanted, strict=True):
            if isinstance(x, Tracer | jax.ShapeDtypeStruct):
                raise FunctreeError(f"{program.name}: `{path}` has no value, and a compiled program runs on values")
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

    def _other(self, call: Any) -> FunctreeError:
        """The error for a call of another group."""
        group = CallGroup(Skeleton.of(call))
        arrays = group.take(call) or []
        now = situation(group, arrays, self._call.situation.mesh, self._call.situation.rules)
        kinds = ("static", "structure", "shape", "dtype")
        found = [different for different in differences(self._call.situation, now) if different.kind in kinds]
        return _refuse(self._call.program, found, dict(zip(group.paths, arrays, strict=True)))

    @property
    def input_shardings(self) -> Any:
        """`(args, kwargs)` of the shardings that it was compiled for."""
        return self._arguments(self._stage.input_shardings)

    @property
    def output_shardings(self) -> Any:
        """The result's shardings."""
        return self._stage.output_shardings.tree

    @property
    def input_formats(self) -> Any:
        """`(args, kwargs)` of the memory layouts that it was compiled for."""
        return self._arguments(self._stage.input_formats)

    @property
    def output_formats(self) -> Any:
        """The result's memory layouts."""
        return self._stage.output_formats.tree

    def as_text(self) -> str | None:
        """The compiled program as text. Its parameters carry their paths: `kept.x`, `donated.model.up`."""
        return self._stage.as_text()

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of costs: flops, bytes accessed."""
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any | None:
        """The compiler's estimate of memory on one device, in bytes."""
        return self._stage.memory_analysis()

    def runtime_executable(self) -> Any | None:
        """The executable as the runtime's own object."""
        return self._stage.runtime_executable()


def _is_taken(array: Any, sharding: Any) -> bool:
    """Whether JAX takes an array as it is, or may move it since it is uncommitted."""
    if sharding is None or not isinstance(array, jax.Array) or not array.committed:
        return True
    return is_sharded_as(array, sharding)


def _refuse(program: Program, found: Sequence[Difference], arrays: Mapping[Path, Any]) -> FunctreeError:
    remedy = "call the function itself, which compiles again where it has to"
    problems: list[Problem] = []
    for different in found:
        before, now = different.text(different.before), different.text(different.now)
        why = f"{different.kind} {before} when compiled, {now} now"
        array = arrays.get(different.path)
        if array is None:
            problems.append(Problem(different.path, None, "", why, remedy))
        else:
            problems.append(array_problem(different.path, array, why, remedy))
    number = count(len({problem.path for problem in problems}), "argument")
    return FunctreeError(f"{program.name}: {number} not as it was compiled for", problems)
