"""A body, and how its arguments and its result are sharded ─► the program that JAX compiles for it."""

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
"""A sharding for each array; None for one that is handed over or returned as it comes."""


class Prepared(NamedTuple):
    """A body that has been traced, and the layout of its result found.

    Attributes:
        jitted: the function that `jax.jit` made.
        traced: JAX's `Traced` of the call that it was prepared for.
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
        arrays: of a call.
        entered: the mesh to enter around the trace, if it is not the current one.
        options: what `jax.jit` takes besides shardings and donation.
        in_shardings: for each array of a call; None if there are none.
        lay_outputs: from the traced result to a sharding for each of its arrays, or to None.
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
            # JAX finds the trace of the same body: the user's function does not run again.
            values = [_ambient(sharding) for sharding in out_shardings]
            jitted = jax.jit(body, out_shardings=Output(values, output.skeleton, output.which), **given)
    return Prepared(jitted, traced, out_shardings)


@dataclass(frozen=True, eq=False)
class Program:
    """What JAX compiles for the calls of one group.

    Attributes:
        name: of the function.
        group: of the calls.
        body: the function from arrays to arrays.
        jitted: the same, by `jax.jit`.
        mesh: the mesh of the body; None for that of the arguments.
        rules: the ambient rules of the body.
        entered: the mesh to enter around a call, if it is not the current one.
        in_shardings: for each array of a call; None if there are none.
        out_shardings: for each array of the result; None if there are none.
        moved: the places of the arrays that JAX moves to their devices in every call.
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
        """Whether a call is checked before: arrays are donated, or there are no devices."""
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
    """The mesh around a call: nothing to do where it is the current one, or where a trace is under way.

    `jax.set_mesh` sets it at once, not when it is entered: so call this nowhere but in a `with`.
    """
    if not isinstance(mesh, Mesh) or tracing() or jax.sharding.get_mesh() is mesh:
        return nullcontext()
    return jax.set_mesh(mesh)


def _ambient(sharding: Any) -> Any:
    """A sharding for `jax.jit`.

    Under a trace a mesh is known without its devices; but an eager `vmap` or `grad` is about to run all the same. So
    there the spec is left to JAX, which knows the ambient mesh whole.
    """
    if sharding is None or isinstance(sharding.mesh, Mesh) or sharding.memory_kind is not None:
        return sharding
    ambient = jax.sharding.get_abstract_mesh()
    return sharding if ambient.empty or ambient != sharding.mesh else sharding.spec
