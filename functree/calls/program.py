"""`make_program` turns a body into a `Program` for JAX to compile, and lays out its result.

`run_checked` raises Equinox's own error if an Equinox check in a program fails. One such check is
`eqx.error_if`. Equinox raises its error from a callback in the program. JAX wraps this error in an
error with a much longer text. JAX raises the longer error where the result is used, which may be in
a different function. `run_checked` raises Equinox's error in the call, as `eqx.filter_jit` does.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.stages import Traced, Wrapped

from functree.calls.body import Arrays, Body, Output
from functree.calls.call_groups import CallGroup
from functree.devices.constraint import with_constraint
from functree.devices.meshes import tracing, without_devices
from functree.devices.placement import is_concrete
from functree.layout.layout import Layout
from functree.tree.arrays import AnyArray, Tree, abstract
from functree.tree.jaxprs import AnyJaxpr, all_equations

# The texts around the message in JAX's error. Equinox has no public names for them.
_BEGINNING, _END = "_EquinoxRuntimeError: ", "\n\n\n-----"

# JAX logs the traceback of a failed callback here, with Equinox's advice to use `eqx.filter_jit`.
_LOG = logging.getLogger("jax._src.callback")


def has_checks(program: AnyJaxpr) -> bool:
    """Return whether a function, or a function that it calls, has Equinox checks."""
    for equation in all_equations(program):
        if equation.primitive.name == "pure_callback" and _is_check(equation.params["callback"]):
            return True
    return False


def _is_check(callback: object) -> bool:
    """Return whether a callback belongs to Equinox. A user's callback does not make a call wait."""
    fun = getattr(callback, "callback_func", callback)
    return str(getattr(fun, "__module__", "")).startswith("equinox.")


def run_checked(run: Callable[..., Output], arguments: Sequence[Tree], name: str) -> Output:
    """Run a program with checks, and wait for the checks as `eqx.filter_jit` does.

    Without the wait, the error would be raised where the result is used.

    Raises:
        EquinoxRuntimeError: if a check fails; the message is short.
    """
    _LOG.addFilter(_is_no_failure)
    try:
        output = run(*arguments)
        # Wait for the first device first, since it runs the callback. If the callback fails, the
        # other simulated CPU devices wait for the first until XLA aborts the process.
        local = [value for value in output.values if value.addressable_shards]
        jax.block_until_ready([value.addressable_data(0) for value in local])
        jax.block_until_ready(local)
    except (RuntimeError, ValueError) as error:
        raise_failed(error, name)
        raise
    finally:
        _LOG.removeFilter(_is_no_failure)
    return output


def raise_failed(error: RuntimeError | ValueError, name: str) -> None:
    """Raise Equinox's error if a failed check caused JAX's error.

    JAX raises a ValueError if the program ends before the call returns.
    """
    _, found, rest = str(error).partition(_BEGINNING)
    if not found:
        return
    message, _, _ = rest.partition(_END)
    # `from None`, since JAX's error repeats this message in a much longer text.
    raise eqx.EquinoxRuntimeError(
        f"{message}\n\nThis check failed in {name}. Set the environment variable "
        "`EQX_ON_ERROR=breakpoint` to open a debugger at the check."
    ) from None


def _is_no_failure(record: logging.LogRecord) -> bool:
    return "pure_callback failed" not in record.getMessage()


# Programs

ArrayFunction = Callable[..., Output]
"""A body, or a function around a body. It takes one `Arrays` per argument."""

Shardings = Sequence[NamedSharding | None]
"""A sharding for each array; None for an array that may have any sharding."""


# Compared by identity, since wrappers remember the programs that they used.
@dataclass(frozen=True, eq=False)
class Program:
    """A function that JAX compiles for the calls of one group.

    Attributes:
        group: the group of the calls.
        body: the function from arrays to arrays.
        jitted: `jax.jit` of the body; under `jax.disable_jit()`, the body itself.
        mesh: the mesh of the body; None to use the mesh of the arguments.
        rules: the ambient rules of the body.
        entered: the mesh to set around a call, unless it is the current mesh.
        out_shardings: the sharding of each array of the result; None if the result is not laid out.
        donates: whether parameters of the user's function are donated, even if none of their arrays
            can be donated.
        has_checks: whether the program has Equinox checks, for which a call waits. The checks of a
            program inside another program belong to the outer program.
        is_kept: whether later calls may use the program. They may not if the program closes over a
            traced array, since that array's trace ends before later calls.
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
        """The reason why the mesh cannot run programs, or None if it can or there is no mesh."""
        return None if self.mesh is None else without_devices(self.mesh)

    @cached_property
    def careful(self) -> bool:
        """Whether every call is checked before it runs.

        The check is necessary if the program donates, or if the mesh cannot run programs.
        """
        return self.donates or self.missing is not None

    def run(self, jitted: ArrayFunction, arrays: Sequence[AnyArray]) -> Tree:
        """Run `jitted`, or a compiled version of it, on the arrays of a call."""
        arguments = self.body.arguments.split(arrays)
        if self.has_checks:
            return run_checked(jitted, arguments, self.name).built()
        return jitted(*arguments).built()

    def trace(self, arrays: Sequence[AnyArray]) -> Traced:
        """Trace the program for a call's arrays, which may be abstract."""
        with around(self.entered):
            given = _traceable(arrays, self.mesh)
            return self.jitted.trace(*self.body.arguments.split(given))

    def of_arrays(self) -> Wrapped:
        """Return the program as a `jax.jit` function from arrays to a tuple of arrays.

        Callers of the returned function do not need functree's pytree classes.
        """

        def of_arrays(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            output: Output = self.jitted(*self.body.arguments.split(arrays))
            return tuple(output.values)

        # An exported function takes this name.
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
    """Make the program of a call: trace the body and lay out its result.

    Args:
        group: the group of the call.
        body: the function.
        arrays: the arrays of the call.
        mesh: the mesh, as in `Program`.
        rules: the ambient rules, as in `Program`.
        entered: the mesh to set around a call, as in `Program`.
        options: options for `jax.jit`, except for shardings and donation.
        lay_outputs: a function from the traced result to a sharding for each of its arrays. The
            function, or its return value, is None if the result is not laid out.
        donates: whether parameters are donated, as in `Program`.

    Returns:
        The program, and JAX's `Traced` of the call, which is None under `jax.disable_jit()`.
    """
    arguments, given = body.arguments, dict(options or {})
    # Nothing is donated in a trace. The arrays inside the tracers of an eager `vmap` or `grad`
    # cannot be checked, and JAX 0.10 aborts the process if one of them is already deleted. In an
    # outer jit's trace, donation has no effect.
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
    # Under `jax.disable_jit()`, nothing is traced: a call runs the function itself.
    if without_jit():
        return make(body), None
    out_shardings: Shardings | None = None
    with around(entered):
        # The first trace has no shardings for the result, since they depend on the result.
        inputs = arguments.split(_traceable(arrays, mesh))
        jitted = jax.jit(body, **given)
        traced = jitted.trace(*inputs)
        if lay_outputs is not None:
            output: Output = traced.out_info
            out_shardings = lay_outputs(output)
            if out_shardings is not None:
                given["out_shardings"] = Output(out_shardings, output.skeleton, output.which)
    last: ArrayFunction = body
    if in_trace and out_shardings is not None and _by_constraints(out_shardings):
        last = _constraining(last, out_shardings)
        del given["out_shardings"]
    # JAX has cached the trace of the body, so the user's function is not traced again. The rest of
    # JAX's work for a second `jax.jit` still takes half as long as a trace, so a second `jax.jit`
    # is called only if necessary.
    if last is not body or "out_shardings" in given:
        jitted = jax.jit(last, **given)
    checks = not in_trace and has_checks(traced.jaxpr)
    return make(jitted, out_shardings=out_shardings, has_checks=checks), traced


def _by_constraints(shardings: Shardings) -> bool:
    """Return whether constraints must apply a result's shardings in an outer trace."""
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    return any(
        isinstance(mesh, AbstractMesh) or AxisType.Explicit in mesh.axis_types for mesh in meshes
    )


def _constraining(fun: ArrayFunction, shardings: Shardings) -> ArrayFunction:
    """Constrain the result of a body, instead of passing its shardings to `jax.jit`.

    `jax.jit` accepts a sharding on an abstract mesh only for lowering. A constraint uses the
    devices of the arguments instead. On Explicit axes, `jax.jit` does not change the types of
    arrays, so the body would return arrays whose types are unsharded.

    Args:
        fun: the function.
        shardings: the sharding of each array of the result.
    """
    # JAX caches the trace of this function by its identity.
    jitted = jax.jit(fun)

    @functools.wraps(fun, updated=())
    def constraining(*given: Arrays) -> Output:
        output: Output = jitted(*given)
        values: list[jax.Array] = []
        for array, target in zip(output.values, shardings, strict=True):
            if target is not None:
                array = with_constraint(array, target.mesh, target.spec, target.memory_kind)
            values.append(array)
        return Output(values, output.skeleton, output.which)

    return constraining


def _traceable(arrays: Sequence[AnyArray], mesh: Mesh | AbstractMesh | None) -> Sequence[AnyArray]:
    """Return the arrays of a call in a form that can be traced on a mesh.

    If the mesh is a compilation target without devices, arrays with values become abstract. Their
    values are on other devices, which may have different memory kinds.
    """
    if not isinstance(mesh, Mesh) or without_devices(mesh) is None:
        return arrays
    given: list[AnyArray] = []
    for array in arrays:
        has_value = isinstance(array, np.ndarray) or is_concrete(array)
        given.append(abstract(jax.typeof(array)) if has_value else array)
    return given


_CONFIG: Any = jax.config  # type checkers do not know its options, which are attributes


def without_jit() -> bool:
    """Return whether functions run without compilation, under `jax.disable_jit()`."""
    return _CONFIG.jax_disable_jit


def around(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[object]:
    """Return a context manager that sets a mesh.

    The context manager does nothing for an abstract mesh or None, if the mesh is already current,
    or during a trace. Call this function only in a `with` statement, since `jax.set_mesh` sets the
    mesh when it is called, not when it is entered.
    """
    if not isinstance(mesh, Mesh) or tracing() or jax.sharding.get_mesh() is mesh:
        return nullcontext()
    return jax.set_mesh(mesh)
