"""An argument, a filter and a layout ─► `Parameters`: the arrays to differentiate, and how to lay out the gradient."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh

from functree.errors import FunctreeError, Problem, ShardingError, count
from functree.layout.decision import Decision
from functree.layout.layout import Layout, LayoutTree, Resolution
from functree.layout.meshes import MeshView
from functree.layout.plan.resolver import plan_leaves, read_for
from functree.layout.prefix import Part
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import constrain
from functree.tree.arrays import dtype_text
from functree.tree.filters.filter import Filter
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves, read


class Parameters(NamedTuple):
    """An argument, and which of its arrays are differentiated.

    Attributes:
        number: the argument's position.
        leaves: its arrays.
        chosen: for each of them, whether it is differentiated.
        parts: the layouts of its parts; empty if there is no layout.
        ambient: whether they come from the ambient rules.
    """

    number: int
    leaves: Leaves
    chosen: Sequence[bool]
    parts: Sequence[Part]
    ambient: bool

    @staticmethod
    def of(tree: Any, number: int, wrt: Filter, layout: LayoutTree) -> "Parameters":
        """The arrays that a filter matches. Raises FunctreeError if there are none, or one has no gradient."""
        given = layout if layout is not None else ambient_rules()
        leaves, parts = (read(tree), []) if given is None else read_for(tree, given)
        chosen = [wrt(leaf) for leaf in leaves.leaves]
        found = Parameters(number, leaves, chosen, parts, layout is None)
        if not found.matched:
            raise _nothing(found, wrt)
        _check_differentiable(found.matched)
        return found

    @property
    def matched(self) -> list[Leaf]:
        """The leaves that are differentiated."""
        return [leaf for leaf, chosen in zip(self.leaves.leaves, self.chosen, strict=True) if chosen]

    @property
    def arrays(self) -> list[Any]:
        """Their arrays."""
        return [leaf.value for leaf in self.matched]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """The argument with other arrays for the differentiated ones."""
        return self.leaves.skeleton.fill(self._merged(arrays, [leaf.value for leaf in self.leaves.leaves]))

    def gradient(self, arrays: Sequence[Any]) -> Any:
        """The gradient as a tree like the argument, with None for other leaves, constrained by the layout."""
        # If the types have the shardings, JAX has laid out the gradient already. A given `layout=` is still applied.
        if not self.parts or (self.ambient and all(map(_typed, self.arrays))):
            return self._tree(arrays)
        tied = [_tied(gradient, array) for gradient, array in zip(arrays, self.arrays, strict=True)]
        return constrain(self._tree(tied), _Gradients(self))

    def _tree(self, gradients: Sequence[Any]) -> Any:
        """Gradients as a tree like the argument, with None for other leaves."""
        return self.leaves.skeleton.spread(self._merged(gradients, [None] * len(self.chosen)))

    def _merged(self, arrays: Iterable[Any], others: Sequence[Any]) -> list[Any]:
        """One value for each leaf: the next of `arrays` if it is differentiated, else that of `others`."""
        new = iter(arrays)
        return [next(new) if chosen else other for chosen, other in zip(self.chosen, others, strict=True)]


def _nothing(found: Parameters, wrt: Filter) -> FunctreeError:
    """The error for a filter that matches no leaf."""
    leaves, remedy = found.leaves.leaves, "give `wrt=` a filter that matches"
    problems = [leaf.problem("does not match", remedy) for leaf in leaves]
    why = "" if leaves else "; it has no arrays; Python numbers are static, so write `jnp.asarray(...)`"
    headline = f"nothing to differentiate: no array of argument {found.number} matches wrt={wrt!r}{why}"
    return FunctreeError(headline, problems)


def _check_differentiable(leaves: Sequence[Leaf]) -> None:
    problems: list[Problem] = []
    for leaf in leaves:
        if not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            why = f"is {dtype_text(leaf.value.dtype)}, but only inexact arrays have a gradient"
            remedy = "narrow the filter (`wrt=... & ft.is_trainable`), or make it a float array"
        elif isinstance(leaf.value, jax.ShapeDtypeStruct):
            why, remedy = "is abstract", "differentiate inside `jax.eval_shape` or `.lower`, where it is traced"
        else:
            continue
        problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeError(f"{count(len(problems), 'leaf')} cannot be differentiated", problems)


def _typed(array: Any) -> bool:
    """Whether the type of an array has its whole sharding: there is a mesh, without Auto axes."""
    mesh = jax.typeof(array).sharding.mesh
    return not mesh.empty and AxisType.Auto not in mesh.axis_types


def _tied(gradient: jax.Array, parameter: Any) -> jax.Array:
    """The gradient, in a program that needs the parameter.

    The gradient of a linear function does not depend on the parameter. If nothing else does, JAX drops the parameter
    and with it the devices of its mesh, and a constraint on the mesh has no effect. XLA removes the selection.
    """
    if not isinstance(parameter, Tracer) or _typed(parameter) or jax.typeof(parameter).sharding.mesh.empty:
        return gradient
    return jax.lax.select(False, parameter, gradient)


def _type_mesh(arrays: Iterable[Any]) -> AbstractMesh | None:
    """The first mesh in the types of some arrays."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if not mesh.empty), None)


class _Gradients(Layout):
    """The layout of an argument, for the gradients of some of its arrays.

    The whole argument is planned, not only its differentiated arrays: otherwise a filter of the layout for the others
    would match nothing, which is an error. Problems of arrays without a gradient are left out.
    """

    def __init__(self, parameters: Parameters):
        self.parameters = parameters

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh of the layouts, else that of the parameters. (The type of a constant's gradient has no mesh.)"""
        layouts = (part.layout.own_mesh for part in self.parameters.parts)
        own = next((mesh for mesh in layouts if mesh is not None), None)
        return own if own is not None else _type_mesh(self.parameters.arrays)

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        planned = plan_leaves(self.parameters.leaves, self.parameters.parts, mesh, check=False)
        wanted = {leaf.path for leaf in leaves}
        problems = [problem for problem in planned.problems if problem.path is None or problem.path in wanted]
        if problems:
            gradient = f"the gradient for argument {self.parameters.number} on mesh {mesh}"
            if self.parameters.ambient:
                headline = f"the ambient rules cannot lay out {gradient}; change them, or pass `layout=` to grad"
            else:
                headline = f"the layout cannot lay out {gradient}"
            raise ShardingError(headline, problems)
        return planned.resolve(leaves, mesh)
