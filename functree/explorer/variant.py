"""A `Variant` is a traced program whose constraints and shardings can be changed."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Lowered
from jax.tree_util import tree_map

from functree.calls.program import around
from functree.compiled.sources import lines_of
from functree.tree.arrays import AnyArray
from functree.tree.jaxprs import all_equations


@dataclass(frozen=True)
class Variant:
    """A traced program with the shardings of its inputs and outputs.

    Attributes:
        program: the program, from arrays to arrays.
        inputs: its abstract inputs, with their shardings.
        outputs: the sharding of each output; None if the compiler chooses the sharding.
        donated: the indices of the donated inputs.
        mesh: the mesh to enter for lowering; None for the current mesh.
    """

    program: Any
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[NamedSharding | None, ...]
    donated: tuple[int, ...]
    mesh: Mesh | AbstractMesh | None

    @classmethod
    def of(
        cls, fn: Callable[..., Any], arrays: Sequence[AnyArray], mesh: Mesh | AbstractMesh | None
    ) -> "Variant | None":
        """Trace a function that only calls a jitted function; return None if it does more.

        Args:
            fn: the function, from arrays to arrays.
            arrays: its inputs, which may be abstract.
            mesh: the mesh to enter for tracing.
        """
        with around(mesh):
            traced = jax.make_jaxpr(fn)(*arrays)
        if len(traced.eqns) != 1 or "out_shardings" not in traced.eqns[0].params:
            return None
        [call] = traced.eqns
        given: dict[Any, Any] = dict(zip(traced.jaxpr.invars, arrays, strict=True))
        # If the function is a module, its arrays are constants.
        given |= zip(traced.jaxpr.constvars, traced.consts, strict=True)
        inputs: list[jax.ShapeDtypeStruct] = []
        shardings = call.params["in_shardings"]
        for variable, sharding in zip(call.invars, shardings, strict=True):
            if not isinstance(sharding, NamedSharding):
                array = variable.val if isinstance(variable, Literal) else given.get(variable)
                sharding = getattr(array, "sharding", None)
            inputs.append(_laid(variable.aval, sharding))
        donated = [i for i, is_donated in enumerate(call.params["donated_invars"]) if is_donated]
        outputs = map(_named, call.params["out_shardings"])
        return cls(call.params["jaxpr"], tuple(inputs), tuple(outputs), tuple(donated), mesh)

    def lower(self) -> Lowered:
        """Lower the program."""
        jitted = jax.jit(
            jaxpr_as_fun(self.program),
            out_shardings=list(self.outputs),
            donate_argnums=self.donated,
        )
        with around(self.mesh):
            return jitted.lower(*self.inputs)

    def constraints(self) -> Iterator[str]:
        """Yield each source line that contains a constraint, without repeats."""
        yield from dict.fromkeys(filter(None, map(_line, all_equations(self.program))))

    def without_constraint(self, line: str) -> "Variant":
        """Return the program without the constraints on a source line."""
        return replace(self, program=_Without(line).program(self.program))

    def with_sharding(
        self,
        sharding: NamedSharding | None,
        inputs: Collection[int] = (),
        outputs: Collection[int] = (),
    ) -> "Variant":
        """Return the program with a different sharding for some inputs and outputs."""
        arrays = [_laid(x, sharding) if i in inputs else x for i, x in enumerate(self.inputs)]
        shardings = [sharding if i in outputs else x for i, x in enumerate(self.outputs)]
        return replace(self, inputs=tuple(arrays), outputs=tuple(shardings))


def _laid(array: Any, sharding: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_named(sharding))


def _named(sharding: object) -> NamedSharding | None:
    """Return a sharding if it is a `NamedSharding`; None otherwise."""
    return sharding if isinstance(sharding, NamedSharding) else None


def _line(equation: JaxprEqn) -> str | None:
    """Return a constraint's line, as in a ledger; None for other operations."""
    if equation.primitive.name != "sharding_constraint" or equation.source_info.traceback is None:
        return None
    frames = equation.source_info.traceback.frames
    lines = lines_of((frame.file_name, frame.line_num) for frame in frames)
    return None if lines is None else lines.source


class _Without:
    """A transformation that removes the constraints on a source line from programs."""

    def __init__(self, line: str):
        self._line = line
        # The program of a function that is called several times must stay one object.
        self._known: dict[int, Any] = {}

    def program(self, program: Any) -> Any:
        """Remove these constraints from a program and the programs inside it."""
        if id(program) not in self._known:
            inner = getattr(program, "jaxpr", program)
            changed = self._jaxpr(inner)
            if inner is not program:
                changed = program.replace(jaxpr=changed)
            self._known[id(program)] = changed
        return self._known[id(program)]

    def _jaxpr(self, jaxpr: Any) -> Any:
        same: dict[Any, Any] = {}

        def seen(variables: Sequence[Any]) -> list[Any]:
            return [x if isinstance(x, Literal) else same.get(x, x) for x in variables]

        equations: list[JaxprEqn] = []
        for equation in jaxpr.eqns:
            operands = seen(equation.invars)
            if _line(equation) == self._line:
                same[equation.outvars[0]] = operands[0]
                continue
            params = tree_map(self._inner, equation.params)
            equations.append(equation.replace(invars=operands, params=params))
        return jaxpr.replace(eqns=equations, outvars=seen(jaxpr.outvars))

    def _inner(self, value: Any) -> Any:
        return self.program(value) if isinstance(value, ClosedJaxpr | Jaxpr) else value
