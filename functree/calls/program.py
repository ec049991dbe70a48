"""A body, and the shardings of its arguments and its result ─► the `Program` that JAX compiles."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.stages import Traced, Wrapped

from functree.calls.body import Arrays, Body
from functree.calls.call_groups import CallGroup
from functree.calls.derivative_rules import has_derivatives, in_context
from functree.calls.output import Output
from functree.calls.runtime_checks import has_checks, run_checked
from functree.devices.constraint import with_constraint
from functree.devices.meshes import tracing, without_devices
from functree.devices.placement import is_concrete
from functree.layout.layout import Layout
from functree.tree.arrays import AnyArray, Tree, abstract

ArrayFunction = Callable[..., Output]
"""A body, or a function with a body in it, of `Arrays` for each parameter."""

Shardings = Sequence[NamedSharding | None]
"""A sharding for each array; None for an array that may have any sharding."""


# Compared by identity: wrappers remember the programs that they have used.
@dataclass(frozen=True, eq=False)
class Program:
    """A function that JAX compiles for the calls of one group.

    Attributes:
        group: the group of the calls.
        body: the function from arrays to arrays.
        jitted: `jax.jit` of the body; under `jax.disable_jit()` the body itself.
        mesh: the mesh of the body; None for the mesh of the arguments.
        rules: the ambient rules of the body.
        entered: the mesh to enter around a call, if it is not the current one.
        out_shardings: for each array of the result; None if there are none.
        donates: whether parameters of the user's function are donated, even if none of their arrays
            can be.
        has_checks: whether it has checks of Equinox, for which a call waits. Those of a program
            inside of another one are checks of the outer one.
        is_kept: whether later calls may use it. Not if it closes over a traced array, whose trace
            has ended then.
    """

    group: CallGroup
    body: Body
    jitted: Any
    mesh: Mesh | AbstractMesh | None = None
    rules: Layout | None = None
    entered: Mesh | None = None
    out_shardings: Shardings | None = None
    donates: bool = False
    has_checks: bool = False
    is_kept: bool = True

    @property
    def name(self) -> str:
        """The name of the user's function."""
        return self.body.name

    @cached_property
    def missing(self) -> str | None:
        """Why nothing can be run on the mesh; None if it has devices."""
        return None if self.mesh is None else without_devices(self.mesh)

    @cached_property
    def careful(self) -> bool:
        """Whether each call is checked before it runs: because it donates, or nothing can be run on
        the mesh."""
        return self.donates or self.missing is not None

    def run(self, jitted: ArrayFunction, arrays: Sequence[AnyArray]) -> Tree:
        """The result for the arrays of a call, by `jitted` or what JAX has compiled of it."""
        arguments = self.body.arguments.split(arrays)
        if self.has_checks:
            return run_checked(jitted, arguments, self.name).built()
        return jitted(*arguments).built()

    def trace(self, arrays: Sequence[AnyArray]) -> Traced:
        """Trace the program for a call's arrays, abstract ones too."""
        with around(self.entered):
            given = _traceable(arrays, self.mesh)
            return self.jitted.trace(*self.body.arguments.split(given))

    def of_arrays(self) -> Wrapped:
        """The program as a `jax.jit` function that takes single arrays and returns a tuple of
        arrays, so that its callers need nothing of functree's trees."""

        def of_arrays(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            output: Output = self.jitted(*self.body.arguments.split(arrays))
            return tuple(output.values)

        # What is exported is named by it.
        of_arrays.__name__ = self.body.__name__
        return jax.jit(of_arrays)


def make_program(
    group: CallGroup,
    body: Body,
    arrays: Sequence[AnyArray],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    rules: Layout | None = None,
    entered: Mesh | None = None,
    options: Mapping[str, Any] | None = None,
    lay_outputs: Callable[[Output], Shardings | None] | None = None,
    donates: bool = False,
) -> tuple[Program, Traced | None]:
    """Trace a body for a call, and lay out its result.

    Args:
        group: the group of the call.
        body: the function.
        arrays: the arrays of the call.
        mesh: as in `Program`, and so are `rules`, `entered`, `donates`.
        options: the options of `jax.jit`, without shardings and donation.
        lay_outputs: a function from the traced result to a sharding for each of its arrays, or to
            None; None if there are no shardings in any case.

    Returns:
        The program, and JAX's `Traced` of the call, which is None under `jax.disable_jit()`.
    """
    arguments, given = body.arguments, dict(options or {})
    # Not in a trace: the arrays behind the tracers of an eager `vmap` or `grad` cannot be checked,
    # and JAX 0.10 ends the process if one of them is deleted already. In the trace of an outer jit
    # it has no effect.
    in_trace = tracing()
    if arguments.donated and not in_trace:
        given["donate_argnums"] = tuple(arguments.donated_arguments)
    make = functools.partial(
        Program,
        group,
        body,
        mesh=mesh,
        rules=rules,
        entered=entered,
        donates=donates,
    )
    # Nothing is traced under `jax.disable_jit()`: a call runs the function itself.
    if without_jit():
        return make(body), None
    out_shardings: Shardings | None = None
    with around(entered):
        # First without shardings of the result, since these depend on what the result is.
        inputs = arguments.split(_traceable(arrays, mesh))
        jitted = jax.jit(body, **given)
        traced = jitted.trace(*inputs)
        if lay_outputs is not None:
            output: Output = traced.out_info
            out_shardings = lay_outputs(output)
            if out_shardings is not None:
                given["out_shardings"] = Output(out_shardings, output.skeleton, output.which)
    last: ArrayFunction = body
    if in_trace and body.context is not None and has_derivatives(traced.jaxpr):
        last = in_context(body, body.context)
    if in_trace and out_shardings is not None and _by_constraints(out_shardings):
        last = _constraining(last, out_shardings)
        del given["out_shardings"]
    # JAX has the trace of the body in its cache, so the user's function is not traced again. But
    # what it finds out once more for another `jax.jit` takes half as long as a trace.
    if last is not body or "out_shardings" in given:
        jitted = jax.jit(last, **given)
    checks = not in_trace and has_checks(traced.jaxpr)
    return make(jitted, out_shardings=out_shardings, has_checks=checks), traced


def _by_constraints(shardings: Shardings) -> bool:
    """Whether the shardings of a result are given by constraints, and not to `jax.jit`, inside of
    another trace."""
    meshes = [one.mesh for one in shardings if one is not None]
    return any(
        isinstance(mesh, AbstractMesh) or AxisType.Explicit in mesh.axis_types for mesh in meshes
    )


def _constraining(fun: ArrayFunction, shardings: Shardings) -> ArrayFunction:
    """A body whose result is constrained, instead of being given shardings in `jax.jit`.

    `jax.jit` takes a sharding on an abstract mesh only to lower a function, while a constraint
    takes the devices of the arguments. And on Explicit axes `jax.jit` does not change the types of
    arrays, so the body would return arrays whose types are unsharded.

    Args:
        fun: the function.
        shardings: for each array of the result.
    """
    # JAX caches its trace by the function.
    jitted = jax.jit(fun)

    @functools.wraps(fun, updated=())
    def constraining(*given: Arrays) -> Output:
        output: Output = jitted(*given)
        values: list[jax.Array] = []
        for array, one in zip(output.values, shardings, strict=True):
            if one is not None:
                array = with_constraint(array, one.mesh, one.spec, one.memory_kind)
            values.append(array)
        return Output(values, output.skeleton, output.which)

    return constraining


def _traceable(arrays: Sequence[AnyArray], mesh: Mesh | AbstractMesh | None) -> Sequence[AnyArray]:
    """The arrays of a call as its function can be traced with them.

    If the mesh is of devices that are only compiled for, those that nobody has placed are abstract:
    they are in the memory of other devices, of which there are other kinds.
    """
    if not isinstance(mesh, Mesh) or without_devices(mesh) is None:
        return arrays
    given: list[AnyArray] = []
    for array in arrays:
        has_value = isinstance(array, np.ndarray) or is_concrete(array)
        given.append(abstract(jax.typeof(array)) if has_value else array)
    return given


_CONFIG: Any = jax.config  # its options are attributes that type checkers do not know


def without_jit() -> bool:
    """Whether functions are run and not compiled, because of `jax.disable_jit()`."""
    return _CONFIG.jax_disable_jit


def around(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[object]:
    """A context with a mesh. It does nothing if the mesh is the current one, or while a function is
    traced.

    Call this only in a `with` statement: `jax.set_mesh` sets the mesh when it is called, and not
    when it is entered.
    """
    if not isinstance(mesh, Mesh) or tracing() or jax.sharding.get_mesh() is mesh:
        return nullcontext()
    return jax.set_mesh(mesh)
