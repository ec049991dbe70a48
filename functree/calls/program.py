"""A body, and the shardings of its arguments and its result ─► the `Program` that JAX compiles for it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.calls.body import Body
from functree.calls.call_groups import CallGroup
from functree.calls.output import Output
from functree.layout.layout import Layout
from functree.layout.meshes import tracing

Shardings = Sequence[NamedSharding | None]
"""A sharding for each array; None for an array that may have any sharding."""


class Prepared(NamedTuple):
    """A body that has been traced, with the shardings of its result.

    Attributes:
        jitted: the function that `jax.jit` returned.
        traced: JAX's `Traced` of the call that the body was traced for.
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
    if arguments.donated:
        given["donate_argnums"] = (1,)
    if in_shardings is not None:
        given["in_shardings"] = arguments.split([_ambient(sharding) for sharding in in_shardings])
    jitted = jax.jit(body, **given)
    with around(entered):
        traced = jitted.trace(*arguments.split(arrays))
        output = traced.out_info
        out_shardings = lay_outputs(output)
        if out_shardings is not None:
            # JAX has the trace of the same body in its cache, so the user's function is not traced again.
            values = [_ambient(sharding) for sharding in out_shardings]
            jitted = jax.jit(body, out_shardings=Output(values, output.skeleton, output.which), **given)
    return Prepared(jitted, traced, out_shardings)


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

    @cached_property
    def careful(self) -> bool:
        """Whether each call is checked before it runs: because arrays are donated, or the mesh has no devices."""
        return bool(self.body.arguments.donated) or isinstance(self.mesh, AbstractMesh)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        kept, donated = self.body.arguments.split(arrays)
        output = self.jitted(kept, donated)
        # As `output.tree`, without the function calls for what most results do not have.
        return output.skeleton.build(output.values) if output.which is None else output.tree

    def trace(self, arrays: Sequence[Any]) -> Any:
        """JAX's `Traced` for a call's arrays, abstract ones too."""
        with around(self.entered):
            return self.jitted.trace(*self.body.arguments.split(arrays))


def around(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """A context with a mesh. It does nothing if the mesh is the current one, or while a function is traced.

    Call this only in a `with` statement: `jax.set_mesh` sets the mesh when it is called, and not when it is entered.
    """
    if not isinstance(mesh, Mesh) or tracing() or jax.sharding.get_mesh() is mesh:
        return nullcontext()
    return jax.set_mesh(mesh)


def _ambient(sharding: Any) -> Any:
    """A sharding for `jax.jit`, or only its spec if its mesh is the current abstract mesh."""
    # During a trace the current mesh is abstract. But an eager `vmap` or `grad` is a trace too, and runs the program:
    # JAX then needs devices. For a spec it takes the current mesh, of which it knows the devices.
    if sharding is None or isinstance(sharding.mesh, Mesh) or sharding.memory_kind is not None:
        return sharding
    ambient = jax.sharding.get_abstract_mesh()
    return sharding if ambient.empty or ambient != sharding.mesh else sharding.spec
