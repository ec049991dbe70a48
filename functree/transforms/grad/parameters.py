"""An argument, a filter and a layout ─► `Parameters`: the arrays to differentiate, and how to lay
out the gradient."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.devices.constraint import with_constraint
from functree.devices.lies_as import lies_as
from functree.devices.meshes import agreed_mesh, compiling, current_mesh
from functree.devices.placement import first_mesh, is_sharded_as
from functree.devices.specs import entry, mesh_axes, without
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    ShardingError,
    count,
)
from functree.labels.filters import Filter, FilterLike, check_wrt
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves, read
from functree.layout.decide import decide_parts
from functree.layout.decision import Decision
from functree.layout.fsdp import fsdp_axes
from functree.layout.layout import Layout, LayoutTree, Part, as_partial, own_meshes
from functree.layout.plan.make_plan import read_for
from functree.placing.ambient import ambient_rules
from functree.placing.batch import axes_of_name
from functree.placing.constrain import find_mesh, local_view, with_decision
from functree.tree.arrays import dtype_text

BACKWARD = "transpose(jvp())"
"""The scope by which the ledger tells the backward pass, which JAX gives to gradients."""


class Parameters(NamedTuple):
    """An argument, and which of its arrays are differentiated.

    Attributes:
        number: the argument's position.
        leaves: its arrays.
        chosen: for each of them, whether it is differentiated.
        parts: the layouts of its parts, or the ambient ones; empty if there are none.
        given: whether the layouts were passed as `layout=`.
    """

    number: int
    leaves: Leaves
    chosen: Sequence[bool]
    parts: Sequence[Part]
    given: bool

    @staticmethod
    def of(tree: Any, number: int, wrt: Filter, layout: LayoutTree) -> "Parameters":
        """The arrays that a filter matches. Raises FunctreeError if there are none, or one has no
        gradient."""
        layouts = layout if layout is not None else ambient_rules()
        leaves, parts = (read(tree), []) if layouts is None else read_for(tree, layouts)
        if layout is None:
            # Ambient rules are for more than one argument.
            parts = as_partial(parts)
        chosen = [wrt(leaf) for leaf in leaves.leaves]
        found = Parameters(number, leaves, chosen, parts, layout is not None)
        if not found.matched:
            raise _nothing(found, wrt)
        _check_differentiable(found.matched)
        return found

    @property
    def matched(self) -> list[Leaf]:
        """The leaves that are differentiated."""
        return [
            leaf for leaf, chosen in zip(self.leaves.leaves, self.chosen, strict=True) if chosen
        ]

    @property
    def arrays(self) -> list[Any]:
        """Their arrays."""
        return [leaf.value for leaf in self.matched]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """The argument with other arrays for the differentiated ones."""
        return self.leaves.skeleton.fill(self._merged(arrays, self.leaves.values))

    def gradient(self, arrays: Sequence[Any]) -> Any:
        """The gradient as a tree like the argument, with None for other leaves.

        It is laid out by `layout=`. Under ambient rules it is laid out as the parameters are.
        Otherwise it is JAX's own.
        """
        # If the types have the shardings, JAX has laid out the gradient already.
        if not self.parts or (not self.given and all(map(_typed, self.arrays))):
            return self._tree(arrays)
        # A gradient that is a constant has no mesh, so that of the parameter is asked.
        mesh = find_mesh([*own_meshes(self.parts), first_mesh(self.arrays)], arrays)
        if mesh is None:
            return self._tree(arrays)
        # An eager transform hides the devices of the arrays, and a constraint needs them.
        if isinstance(mesh, AbstractMesh) and current_mesh() is None and not compiling():
            return self._tree(list(map(laid_out_as, self.arrays, arrays)))
        rules = ambient_rules()
        layouts = [part.layout for part in self.parts]
        summed = SummedFirst(layouts if rules is None else [rules, *layouts], mesh)
        found: list[Any] = []
        for gradient, leaf, decision in zip(
            arrays, self.matched, self._decisions(mesh), strict=True
        ):
            parameter, first = leaf.value, None
            if decision is not None and decision.specified:
                first = summed.spec(leaf, decision.spec)
            if first is not None:
                gradient = with_constraint(_tied(gradient, parameter), mesh, first)
                # Without the barrier, this would be the final sharding too.
                gradient = jax.lax.optimization_barrier(gradient)
            if self.given and decision is not None:
                gradient = with_decision(_tied(gradient, parameter), decision, mesh)
            else:
                # Not by the ambient layout: its specs and sizes are for the arguments of a
                # program. Under `vmap` a parameter has fewer dimensions.
                gradient = laid_out_as(parameter, gradient)
            found.append(gradient)
        return self._tree(found)

    def _decisions(self, mesh: Mesh | AbstractMesh) -> list[Decision | None]:
        """What the layouts decide about the parameters; None where ambient ones do not fit.

        The whole argument is laid out, not only its differentiated arrays: otherwise a filter of
        the layout for the others would match nothing, which is an error. Problems of arrays without
        a gradient are left out.
        """
        own = own_meshes(self.parts)
        view = local_view(agreed_mesh(mesh, own))
        decided = decide_parts(self.leaves, self.parts, view)
        paths = {leaf.path for leaf in self.matched}
        chosen = [one for one in decided.problems if one.path in paths or one.path is None]
        if chosen and self.given:
            gradient = f"the gradient for argument {self.number} on mesh {view}"
            raise ShardingError(f"the layout cannot lay out {gradient}", chosen)
        broken = {one.path for one in chosen}
        decisions: list[Decision | None] = []
        for leaf, decision, differentiated in zip(
            self.leaves.leaves, decided.decisions, self.chosen, strict=True
        ):
            if differentiated:
                decisions.append(None if leaf.path in broken else decision)
        return decisions

    def _tree(self, gradients: Sequence[Any]) -> Any:
        """Gradients as a tree like the argument, with None for other leaves."""
        return self.leaves.skeleton.spread(self._merged(gradients, [None] * len(self.chosen)))

    def _merged(self, arrays: Iterable[Any], others: Sequence[Any]) -> list[Any]:
        """One value for each leaf: the next of `arrays` if it is differentiated, else that of
        `others`."""
        new = iter(arrays)
        return [
            next(new) if chosen else other
            for chosen, other in zip(self.chosen, others, strict=True)
        ]


def check_differentiated(wrt: FilterLike, parameters: Sequence[Parameters]) -> None:
    """Raise RuleError if a pattern in a filter matches no leaf of the arguments."""
    leaves: list[Leaf] = []
    for found in parameters:
        leaves += found.leaves.leaves
    noun = "argument" if len(parameters) == 1 else "arguments"
    numbers = ", ".join(str(found.number) for found in parameters)
    check_wrt(wrt, leaves, f"{noun} {numbers}")


def _nothing(found: Parameters, wrt: Filter) -> FunctreeError:
    """The error for a filter that matches no leaf."""
    leaves, remedy = found.leaves.leaves, "give `wrt=` a filter that matches"
    problems = [leaf.problem("does not match", remedy) for leaf in leaves]
    why = (
        ""
        if leaves
        else "; it has no arrays; Python numbers are static, so write `jnp.asarray(...)`"
    )
    headline = (
        f"nothing to differentiate: no array of argument {found.number} matches wrt={wrt!r}{why}"
    )
    return FunctreeValueError(headline, problems)


def _check_differentiable(leaves: Sequence[Leaf]) -> None:
    problems: list[Problem] = []
    for leaf in leaves:
        if not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            why = f"is {dtype_text(leaf.value.dtype)}, but only inexact arrays have a gradient"
            remedy = "narrow the filter (`wrt=... & ft.is_trainable`), or make it a float array"
        elif isinstance(leaf.value, jax.ShapeDtypeStruct):
            why, remedy = (
                "is abstract",
                "differentiate inside `jax.eval_shape` or `.lower`, where it is traced",
            )
        else:
            continue
        problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeTypeError(
            f"{count(len(problems), 'leaf')} cannot be differentiated", problems
        )


def _typed(array: Any) -> bool:
    """Whether the type of an array has its whole sharding: there is a mesh, without Auto axes."""
    mesh = jax.typeof(array).sharding.mesh
    return not mesh.empty and AxisType.Auto not in mesh.axis_types


def laid_out_as(parameter: Any, gradient: Any) -> Any:
    """The gradient, sharded as its parameter is.

    A traced parameter has no sharding on Auto axes. The compiler knows it: by the argument that it
    is, or by what it is computed from. That holds under `vmap` and in a scan too.
    """
    if _typed(parameter):
        return gradient
    if isinstance(gradient, Tracer) or isinstance(parameter, Tracer):
        if jax.typeof(parameter).sharding.mesh.empty and not compiling():
            return gradient
        with jax.named_scope(BACKWARD):
            return lies_as(gradient, parameter)
    placed = isinstance(parameter, jax.Array) and first_mesh([parameter]) is not None
    if placed and not is_sharded_as(gradient, parameter.sharding):
        return jax.device_put(gradient, parameter.sharding)
    return gradient


def _tied(gradient: jax.Array, parameter: Any) -> jax.Array:
    """The gradient, in a program that needs the parameter.

    The gradient of a linear function does not depend on the parameter. If nothing else does, JAX
    drops the parameter and with it the devices of its mesh, and a constraint on the mesh has no
    effect. XLA removes the selection.
    """
    if (
        not isinstance(parameter, Tracer)
        or _typed(parameter)
        or jax.typeof(parameter).sharding.mesh.empty
    ):
        return gradient
    return jax.lax.select(False, parameter, gradient)


# What a gradient is constrained to first
#
# A gradient is a product that is summed over the mesh axes of the batch. Where its spec scatters it
# over these, and a dimension of it, or of what it is a product of, is split by two mesh axes, XLA's
# partitioner may take the wrong parts of the operands, and says nothing (in jax 0.10.2 and 0.12, on
# Auto axes). It does not where the sum is constrained first, and what is scattered afterwards. That
# costs no byte where the gradient itself is split so: the partitioner sums and then takes a part in
# any case. Where only what it is a product of is, the sum is of the whole gradient.


# The names of the dimensions of an activation that a gradient is summed over.
_SUMMED = ("batch", "seq")


class SummedFirst:
    """What gradients are constrained to first.

    Args:
        layouts: the ambient rules, and the layouts of the parameters.
        mesh: the mesh.
    """

    def __init__(self, layouts: Sequence[Layout], mesh: Mesh | AbstractMesh):
        self._layouts, self._mesh = layouts, mesh
        self._is_needed = AxisType.Explicit not in mesh.axis_types
        self._batch: set[str] = set()
        for layout in layouts:
            self._batch.update(fsdp_axes(layout))
        for name in _SUMMED:
            self._batch.update(self._axes_of(name))

    def spec(self, leaf: Leaf, wanted: PartitionSpec) -> PartitionSpec | None:
        """The spec that the gradient of a parameter is constrained to first; None if the one that
        is wanted is enough.

        Args:
            leaf: the parameter.
            wanted: the spec of its gradient.
        """
        entries = [axes for axes in map(mesh_axes, wanted.partitions) if axes]
        if not self._is_needed or not entries:
            return None
        if not self._batch:
            # Nobody says which mesh axes are summed over.
            several = len(entries) > 1 and any(len(axes) > 1 for axes in entries)
            return _first_of_each(wanted) if several else None
        summed = without(wanted, self._batch)
        split = [*map(mesh_axes, summed.partitions), *map(self._axes_of, filter(None, leaf.axes))]
        if summed == wanted or all(len(axes) < 2 for axes in split):
            return None
        return summed

    def _axes_of(self, name: str) -> tuple[str, ...]:
        """The mesh axes of an activation's dimension of this name."""
        known = (axes_of_name(name, layout, self._mesh) for layout in self._layouts)
        return next((axes for axes in known if axes), ())


def _first_of_each(spec: PartitionSpec) -> PartitionSpec:
    """A spec with the outermost mesh axis of each dimension."""
    return PartitionSpec(*(entry(mesh_axes(one)[:1]) for one in spec.partitions))
