"""`Parameters` selects the arrays of an argument to differentiate, and lays out their gradient.

An argument, a filter and a layout ─► `Parameters`.
"""

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
from functree.labels.filters import Filter
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
"""The scope that JAX gives to gradients. The ledger recognizes the backward pass by this scope."""


class Parameters(NamedTuple):
    """An argument of which some arrays are differentiated.

    Attributes:
        number: the argument's position.
        leaves: the argument's arrays.
        chosen: the indices of the differentiated arrays.
        parts: the layouts of the argument's parts, from `layout=` or the ambient rules. Without
            either, the sequence is empty.
        given: whether the layouts were passed as `layout=`.
    """

    number: int
    leaves: Leaves
    chosen: Sequence[int]
    parts: Sequence[Part]
    given: bool

    @staticmethod
    def of(tree: Any, number: int, wrt: Filter, layout: LayoutTree) -> "Parameters":
        """Select the arrays of an argument that a filter matches.

        Raises:
            FunctreeError: if the filter matches no array.
            FunctreeError: if a matched array cannot be differentiated.
        """
        layouts = layout if layout is not None else ambient_rules()
        leaves, parts = (read(tree), []) if layouts is None else read_for(tree, layouts)
        if layout is None:
            # Ambient rules serve other arguments too, so their filters may match nothing here.
            parts = as_partial(parts)
        chosen = [i for i, leaf in enumerate(leaves.leaves) if wrt(leaf)]
        argument = Parameters(number, leaves, chosen, parts, layout is not None)
        if not argument.matched:
            raise _nothing(argument, wrt)
        _check_differentiable(argument.matched)
        return argument

    @property
    def matched(self) -> list[Leaf]:
        """The differentiated leaves."""
        return [self.leaves.leaves[i] for i in self.chosen]

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the differentiated leaves."""
        return [leaf.value for leaf in self.matched]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """Return the argument with new arrays for the differentiated leaves."""
        values = list(self.leaves.values)
        for i, array in zip(self.chosen, arrays, strict=True):
            values[i] = array
        return self.leaves.skeleton.fill(values)

    def gradient(self, arrays: Sequence[Any]) -> Any:
        """Return the gradient as a tree like the argument, with None for undifferentiated leaves.

        The gradient is laid out with `layout=`, if a layout was passed. Otherwise, under ambient
        rules, the gradient is sharded like the parameters. Without a layout and rules, JAX's
        gradient is returned unchanged.
        """
        # If the types have shardings, JAX has already laid out the gradient.
        if not self.parts or (not self.given and all(map(_typed, self.arrays))):
            return self._tree(arrays)
        # A constant gradient has no mesh, so the parameters' mesh is a candidate too.
        mesh = find_mesh([*own_meshes(self.parts), first_mesh(self.arrays)], arrays)
        if mesh is None:
            return self._tree(arrays)
        # A constraint needs the devices of the arrays, which an eager transform hides.
        if isinstance(mesh, AbstractMesh) and current_mesh() is None and not compiling():
            return self._tree(list(map(laid_out_as, self.arrays, arrays)))
        layouts = [part.layout for part in self.parts]
        if (rules := ambient_rules()) is not None:
            layouts = [rules, *layouts]
        laid_out: list[Any] = []
        for gradient, leaf, decision in zip(
            arrays, self.matched, self._decisions(mesh), strict=True
        ):
            parameter, first = leaf.value, None
            if decision is not None and decision.specified:
                first = _summed_first(leaf, decision.spec, layouts, mesh)
            if first is not None:
                gradient = with_constraint(_tied(gradient, parameter), mesh, first)
                # Without the barrier, `first` would become the final sharding too.
                gradient = jax.lax.optimization_barrier(gradient)
            if self.given and decision is not None:
                gradient = with_decision(_tied(gradient, parameter), decision, mesh)
            else:
                # The ambient layout does not decide the gradient's sharding. Its specs and sizes
                # are meant for the arguments of a program, and under `vmap`, a parameter has fewer
                # dimensions.
                gradient = laid_out_as(parameter, gradient)
            laid_out.append(gradient)
        return self._tree(laid_out)

    def _decisions(self, mesh: Mesh | AbstractMesh) -> list[Decision | None]:
        """Return each parameter's decision, or None where ambient layouts do not fit.

        The whole argument is laid out, not only its differentiated arrays. Otherwise, a filter for
        the other arrays would match nothing, which is an error. Problems of arrays without a
        gradient are dropped.
        """
        meshes = own_meshes(self.parts)
        view = local_view(agreed_mesh(mesh, meshes))
        decided = decide_parts(self.leaves, self.parts, view)
        paths = {leaf.path for leaf in self.matched}
        problems = [
            problem for problem in decided.problems if problem.path in paths or problem.path is None
        ]
        if problems and self.given:
            gradient = f"the gradient of argument {self.number} on mesh {view}"
            raise ShardingError(f"grad: the layout does not fit {gradient}", problems)
        by_path: dict[Any, Decision] = dict(zip(self.leaves.paths, decided.decisions, strict=True))
        for problem in problems:
            by_path.pop(problem.path, None)
        return [by_path.get(leaf.path) for leaf in self.matched]

    def _tree(self, gradients: Sequence[Any]) -> Any:
        """Build a tree of gradients like the argument, with None for undifferentiated leaves."""
        values: list[Any] = [None] * len(self.leaves.leaves)
        for i, gradient in zip(self.chosen, gradients, strict=True):
            values[i] = gradient
        return self.leaves.skeleton.spread(values)


def _nothing(argument: Parameters, wrt: Filter) -> FunctreeError:
    """Build the error for a filter that matches no leaf."""
    remedy = "change `wrt=` so that it matches one of these arrays"
    problems = [leaf.problem("does not match", remedy) for leaf in argument.leaves.leaves]
    headline = f"grad: wrt={wrt!r} matches no array of argument {argument.number}"
    if not problems:
        headline += ", which has no arrays. Python numbers are static: pass `jnp.asarray(...)`"
    return FunctreeValueError(headline, problems)


def _check_differentiable(leaves: Sequence[Leaf]) -> None:
    problems: list[Problem] = []
    for leaf in leaves:
        if not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            why = f"is {dtype_text(leaf.value.dtype)}, but only inexact arrays have gradients"
            remedy = "narrow the filter (`wrt=... & ft.is_trainable`), or use a float dtype"
            problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeTypeError(
            f"grad: {count(len(problems), 'leaf')} cannot be differentiated", problems
        )


def _typed(array: Any) -> bool:
    """Return whether an array's type contains its full sharding, on a mesh without Auto axes."""
    mesh = jax.typeof(array).sharding.mesh
    return not mesh.empty and AxisType.Auto not in mesh.axis_types


def laid_out_as(parameter: Any, gradient: Any) -> Any:
    """Shard a gradient like its parameter.

    On Auto axes, the type of a traced parameter has no sharding. The compiler derives the sharding
    from the program's arguments, even under `vmap` and in a scan.
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
    """Return the gradient, made to depend on its parameter.

    The gradient of a linear function does not depend on the parameter. If no other value depends on
    the parameter, JAX drops the parameter and the devices of its mesh. A constraint on the mesh
    then has no effect. The gradient therefore passes through a `select`, which XLA removes.
    """
    if (
        not isinstance(parameter, Tracer)
        or _typed(parameter)
        or jax.typeof(parameter).sharding.mesh.empty
    ):
        return gradient
    return jax.lax.select(False, parameter, gradient)


# The first constraint of a gradient
#
# A gradient is a product that is summed over the mesh axes of the batch. On Auto axes, XLA's
# partitioner may take the wrong parts of the operands, without an error (jax 0.10.2 and 0.12). This
# happens if the gradient's spec scatters the sum over the same mesh axes, and two mesh axes shard a
# dimension of the gradient or of a factor.
#
# The result is right if the sum is constrained first and scattered afterwards. This moves no more
# bytes if two mesh axes shard the gradient itself, since the partitioner sums before it slices in
# any case. If two mesh axes shard only a factor, more bytes move, since the unsharded gradient is
# summed.


# A gradient is summed over the dimensions of an activation with these names.
_SUMMED = ("batch", "seq")


def _summed_first(
    leaf: Leaf, wanted: PartitionSpec, layouts: Sequence[Layout], mesh: Mesh | AbstractMesh
) -> PartitionSpec | None:
    """Return the spec of a gradient's first constraint, or None if none is needed.

    Args:
        leaf: the parameter.
        wanted: the final spec of its gradient.
        layouts: the ambient rules, and the layouts of the parameters.
        mesh: the mesh of the gradients.
    """

    def axes_of(name: str) -> tuple[str, ...]:
        """Return the mesh axes of an activation's dimension with this name."""
        known = (axes_of_name(name, layout, mesh) for layout in layouts)
        return next((axes for axes in known if axes), ())

    entries = [axes for axes in map(mesh_axes, wanted.partitions) if axes]
    if AxisType.Explicit in mesh.axis_types or not entries:
        return None
    batch = set[str]().union(*map(fsdp_axes, layouts), *map(axes_of, _SUMMED))
    if not batch:
        # No layout determines over which mesh axes the gradient is summed.
        several = len(entries) > 1 and any(len(axes) > 1 for axes in entries)
        return _first_of_each(wanted) if several else None
    summed = without(wanted, batch)
    split = [*map(mesh_axes, summed.partitions), *map(axes_of, filter(None, leaf.axes))]
    if summed == wanted or all(len(axes) < 2 for axes in split):
        return None
    return summed


def _first_of_each(spec: PartitionSpec) -> PartitionSpec:
    """Keep only the outermost mesh axis of each dimension of a spec."""
    return PartitionSpec(*(entry(mesh_axes(axes)[:1]) for axes in spec.partitions))
