"""A body, and the shardings of its arguments and its result ─► the `Program` that JAX compiles for it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from functree.calls.body import Arguments, Arrays, Body
from functree.calls.call_groups import CallGroup
from functree.calls.derivatives import Context, has_derivatives, in_context
from functree.calls.output import Output
from functree.layout.constraint import constrained
from functree.layout.layout import Layout
from functree.layout.meshes import tracing, without_devices

ArrayFunction = Callable[..., Output]
"""A body, or a function with a body in it, of `Arrays` for each parameter."""

Shardings = Sequence[NamedSharding | None]
"""A sharding for each array; None for an array that may have any sharding."""


class Prepared(NamedTuple):
    """A body that has been traced, with the shardings of its result.

    Attributes:
        jitted: the function that `jax.jit` returned, or the body itself under `jax.disable_jit()`.
        traced: JAX's `Traced` of the call that the body was traced for; None under `jax.disable_jit()`.
        out_shardings: for each array of the result; None if there are none.
    """

    jitted: Any
    traced: Any
    out_shardings: Shardings | None


def prepare(
    body: Body,
    arrays: Sequence[Any],
    *,
    entered: Mesh | None = None,
    options: Mapping[str, Any] | None = None,
    in_shardings: Shardings | None = None,
    lay_outputs: Callable[[Output], Shardings | None] = lambda output: None,
) -> Prepared:
    """Trace a body, and lay out its result.

    Args:
        body: the function.
        arrays: the arrays of a call.
        entered: the mesh to enter around the trace, if it is not the current one.
        options: the options of `jax.jit`, without shardings and donation.
        in_shardings: for each array of a call; None if there are none.
        lay_outputs: a function from the traced result to a sharding for each of its arrays, or to None.
    """
    arguments, given = body.arguments, dict(options or {})
    # Not in a trace: the arrays behind the tracers of an eager `vmap` or `grad` cannot be checked, and JAX 0.10 ends
    # the process if one of them is deleted already. In the trace of an outer jit it has no effect.
    if arguments.donated and not tracing():
        given["donate_argnums"] = tuple(arguments.donated_arguments)
    constraining = tracing() and any(one is not None for one in in_shardings or ())
    fun: ArrayFunction = _Constrained(body, arguments, in_shardings) if constraining else body
    if in_shardings is not None and not constraining:
        given["in_shardings"] = arguments.split(in_shardings)
    if without_jit():
        return Prepared(fun, None, None)
    with around(entered):
        traced = jax.jit(fun, **given).trace(*arguments.split(arrays))
        output = traced.out_info
        out_shardings = lay_outputs(output)
        # JAX has the trace of the body in its cache, so the user's function is not traced again.
        fun = body
        if tracing() and body.context is not None and has_derivatives(traced.jaxpr):
            fun = _InContext(body, body.context)
        if constraining or (tracing() and _by_constraints(out_shardings)):
            fun = _Constrained(fun, arguments, in_shardings, out_shardings)
        elif out_shardings is not None:
            given["out_shardings"] = Output(out_shardings, output.skeleton, output.which)
    return Prepared(jax.jit(fun, **given), traced, out_shardings)


def _by_constraints(shardings: Shardings | None) -> bool:
    """Whether the shardings of a result are given by constraints, and not to `jax.jit`, inside of another trace."""
    meshes = [one.mesh for one in shardings or () if one is not None]
    return any(isinstance(mesh, AbstractMesh) or AxisType.Explicit in mesh.axis_types for mesh in meshes)


class _Constrained:
    """A body whose arguments and result are constrained, instead of being given shardings in `jax.jit`.

    In the trace of an outer function it is not known how the arguments are sharded, and an eager `grad` or `vmap` is
    such a trace and runs the program: `jax.jit` refuses an argument that is committed to another sharding than the one
    it was given. It also takes a sharding on an abstract mesh only to lower a function, while a constraint takes the
    devices of the arguments. And on Explicit axes `jax.jit` does not change the types of arrays, so the body would see
    and return arrays whose types are unsharded.

    Args:
        fun: the function.
        arguments: how the arrays are passed.
        in_shardings: for each array of a call; None if there are none.
        out_shardings: for each array of the result; None if there are none.
    """

    def __init__(
        self,
        fun: ArrayFunction,
        arguments: Arguments,
        in_shardings: Shardings | None,
        out_shardings: Shardings | None = None,
    ):
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        self._arguments = arguments
        # JAX caches its trace by the function.
        self._jitted: Any = jax.jit(fun)
        self.__name__, self.__signature__ = fun.__name__, inspect.signature(fun)

    def __call__(self, *arguments: Arrays) -> Output:
        arrays = _constrained(self._arguments.join(arguments), self._in_shardings)
        output: Output = self._jitted(*self._arguments.split(arrays))
        return Output(_constrained(output.values, self._out_shardings), output.skeleton, output.which)


def _constrained(arrays: Sequence[Any], shardings: Shardings | None) -> Sequence[Any]:
    """Arrays, each constrained to its sharding if it has one."""
    if shardings is None:
        return arrays
    new: list[Any] = []
    for array, one in zip(arrays, shardings, strict=True):
        new.append(array if one is None else constrained(array, one.mesh, one.spec, one.memory_kind))
    return new


class _InContext:
    """A body whose custom derivative rules run in the body's context when JAX differentiates an outer function."""

    def __init__(self, body: Body, context: Context):
        self._context = context
        self._jitted: Any = jax.jit(body)
        self.__name__, self.__signature__ = body.__name__, body.__signature__

    def __call__(self, *arguments: Arrays) -> Output:
        # Not `self._jitted.trace`, whose result does not have the traced arrays that the function closes over.
        jaxpr, output = jax.make_jaxpr(self._jitted, return_shape=True)(*arguments)
        run: Any = jaxpr_as_fun(in_context(jaxpr, self._context))
        return tree_unflatten(tree_structure(output), run(*tree_leaves(arguments)))


@dataclass(frozen=True, eq=False)
class Program:
    """A function that JAX compiles for the calls of one group.

    Attributes:
        name: the name of the user's function.
        group: the group of the calls.
        body: the function from arrays to arrays.
        jitted: `jax.jit` of the body.
        mesh: the mesh of the body; None for the mesh of the arguments.
        rules: the ambient rules of the body.
        entered: the mesh to enter around a call, if it is not the current one.
        in_shardings: for each array of a call; None if there are none.
        out_shardings: for each array of the result; None if there are none.
        moved: the indices of the arrays that JAX moves to other devices in every call.
        donates: whether parameters of the user's function are donated, even if none of their arrays can be.
    """

    name: str
    group: CallGroup
    body: Body
    jitted: Any
    mesh: Mesh | AbstractMesh | None = None
    rules: Layout | None = None
    entered: Mesh | None = None
    in_shardings: Shardings | None = None
    out_shardings: Shardings | None = None
    moved: tuple[int, ...] = ()
    donates: bool = False

    @cached_property
    def missing(self) -> str | None:
        """Why nothing can be run on the mesh; None if it has devices."""
        return None if self.mesh is None else without_devices(self.mesh)

    @cached_property
    def careful(self) -> bool:
        """Whether each call is checked before it runs: because it donates, or nothing can be run on the mesh."""
        return self.donates or self.missing is not None

    def __call__(self, arrays: Sequence[Any]) -> Any:
        output: Output = self.jitted(*self.body.arguments.split(arrays))
        return output.built()

    def trace(self, arrays: Sequence[Any]) -> Any:
        """JAX's `Traced` for a call's arrays, abstract ones too."""
        with around(self.entered):
            return self.jitted.trace(*self.body.arguments.split(traceable(arrays, self.mesh, self.in_shardings)))


def traceable(
    arrays: Sequence[Any], mesh: Mesh | AbstractMesh | None, in_shardings: Shardings | None = None
) -> Sequence[Any]:
    """The arrays of a call as its function can be traced with them.

    If the mesh is of devices that are only compiled for, those that nobody has placed are abstract: they are in the
    memory of other devices, of which there are other kinds. On Explicit axes abstract arrays that nobody has placed get
    their shardings here: `jax.jit` does not change types, so the body would see unsharded ones.
    """
    if mesh is None:
        return arrays
    if not isinstance(mesh, AbstractMesh) and without_devices(mesh) is not None:
        arrays = [
            _abstract(x) if isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer) else x for x in arrays
        ]
    if in_shardings is None or AxisType.Explicit not in mesh.axis_types:
        return arrays
    return [_typed(x, wanted) for x, wanted in zip(arrays, in_shardings, strict=True)]


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(array)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _typed(array: Any, wanted: NamedSharding | None) -> Any:
    """An abstract array without a sharding, with the one that is wanted."""
    if wanted is None or not isinstance(array, jax.ShapeDtypeStruct) or array.sharding is not None:
        return array
    return array.update(sharding=wanted)


_CONFIG: Any = jax.config  # its options are attributes that type checkers do not know


def without_jit() -> bool:
    """Whether functions are run and not compiled, because of `jax.disable_jit()`."""
    return _CONFIG.jax_disable_jit


def around(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """A context with a mesh. It does nothing if the mesh is the current one, or while a function is traced.

    Call this only in a `with` statement: `jax.set_mesh` sets the mesh when it is called, and not when it is entered.
    """
    if not isinstance(mesh, Mesh) or tracing() or jax.sharding.get_mesh() is mesh:
        return nullcontext()
    return jax.set_mesh(mesh)
