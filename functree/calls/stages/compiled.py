"""A compiled call ─► `Compiled`, which can be called with trees of modules, and looked at."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Sharding

from functree.calls.call_groups import CallGroup, FlatCall
from functree.calls.checks import check_call
from functree.calls.compilations import Difference, Situation, differences
from functree.calls.donation import check_donated
from functree.calls.output import Output
from functree.calls.program import Program
from functree.calls.program_ledger import ledger_of
from functree.calls.signature import Args, Record
from functree.calls.stages.stage import Stage, StagedCall
from functree.compiled.ledger import Ledger
from functree.devices.placement import is_sharded_as, sharding_text
from functree.errors import FunctreeError, FunctreeTypeError, Problem, count
from functree.labels.leaf import array_problem
from functree.tree.arrays import AnyArray, Tree, abstract, is_array
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


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
    ):
        super().__init__(stage, call)
        # JAX has it for a compiled function too, but not for one with ordered effects.
        self._output: Output = output
        self._warnings = warnings
        # The types, shardings and commitments of the arrays that were checked last.
        self._checked: list[tuple[Any, ...]] | None = None

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
        if program.missing is None:  # otherwise it cannot run in any case
            self._check(arrays)
        check_call(program, FlatCall(call, program.group, arrays, concrete))
        return program.run(self.jax, arrays)

    def _check(self, arrays: Sequence[AnyArray]) -> None:
        """Raise FunctreeError if arrays are not as they were when the program was compiled."""
        program = self._program
        # Arrays with the same type, sharding and commitment as in the last call need no check. The
        # commitment counts, since JAX moves uncommitted arrays to the devices of the program, but
        # not committed ones.
        now = [tuple(getattr(x, name, None) for name in _CHECKED) for x in arrays]
        if now == self._checked:
            return
        found = self._differences(arrays)
        if found:
            raise _refuse(program, found, dict(zip(program.group.paths, arrays, strict=True)))
        arguments = program.body.arguments
        # Their buffers are compared only here, as in the first call of a function.
        if arguments.donated:
            check_donated(program.name, program.group.paths, arrays, arguments, by_buffer=True)
        # An array of numpy has none of the three: it is checked in each call.
        self._checked = now if all(isinstance(x, jax.Array) for x in arrays) else None

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
        return ledger_of(self.jax, program.name, paths, outputs, program.mesh, self._warnings)


# What the check of a call depends on, as far as it is an attribute of an array.
_CHECKED = ("aval", "sharding", "committed")


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
