"""An optimizer ─► one whose update is computed on whole matrices, with the layers of stacks spread
over devices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, PartitionSpec

from functree.argument_checks import Takes, check
from functree.devices.meshes import mesh_view, traced_under
from functree.errors import FunctreeValueError, Problem, did_you_mean
from functree.labels.optimizer.followed_parameters import check_optimizer
from functree.layout.layout import LayoutTree
from functree.optimizers.apart import check_matrices_apart
from functree.optimizers.exchange import Exchange
from functree.optimizers.layerwise import layerwise, trace_apart
from functree.optimizers.matrix_program import Division, MatrixProgram, Variable
from functree.optimizers.matrix_update import MatrixUpdate, MatrixUpdates, Values, grouped
from functree.optimizers.over_layers import over_layers
from functree.optimizers.parameter_specs import ParameterSpecs, type_spec
from functree.optimizers.update_trace import UpdateTrace, stack_sizes
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


def whole_matrices(
    tx: optax.GradientTransformation,
    over: str | Sequence[str] | None = None,
    layout: LayoutTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Compute the matrix products of an optimizer on whole matrices.

    An optimizer such as Muon multiplies each matrix of a model with itself, several times in each
    update. If the matrices are sharded, as under FSDP and tensor parallelism, each product moves
    partial sums between the devices. Here the layers of a stack are spread over the devices
    instead, so that each device has whole matrices: they are exchanged once before the products,
    and once after them. Moments, the decay of weights and all else that is computed element by
    element stay sharded as they are.

    The values are those of `ft.layerwise(tx)`: each layer of a stack is a matrix of its own. So are
    the state and what is refused.

    If the layers do not fill the devices, some devices have nothing to do. A single matrix, which
    is in no stack, is gathered by all devices, and each of them computes the same.

    Parameters whose update has no operations on matrices, such as those that Muon leaves to Adam,
    are computed as without it. On one device nothing is moved.

    Args:
        tx: the optimizer.
        over: the mesh axes over which the layers are spread; by default all that shard the
            parameter. Along others they are gathered.
        layout: the layout of the model; by default the ambient one. On Explicit axes none is
            needed.

    Raises:
        FunctreeError: `tx` is not an optimizer, or `over` names no mesh axes; (when called) as
            `ft.layerwise`; on a mesh with Auto axes there is no layout; matrices of several
            parameters are computed in one loop or condition, as by `optax.MultiSteps`, which
            belongs outside.

    Examples:
        >>> import optax
        >>> layers = ft.stack(
        ...     lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0)
        ... )
        >>> dimensions = ft.nn.matrix_dimensions(layers)
        >>> muon = optax.contrib.muon(
        ...     1e-3, muon_weight_dimension_numbers=dimensions
        ... )
        >>> tx = ft.whole_matrices(muon)
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> layout = ft.AxisRules({"hidden": "model", ...: None})
        >>> ts = ft.TrainState.create(layers, tx, layout=layout, mesh=mesh)
        >>> ts.opt_state.inner_states["muon"].inner_state[
        ...     0
        ... ].mu.layer.up.sharding.spec
        P(None, None, 'model')

        Each step is under ambient rules, which say how the matrices are sharded:

        >>> step = ft.jit(ft.apply_gradients, rules=layout, donate="ts")
    """
    check_optimizer(tx, ("init", "update"))
    axes = _axes(over)
    apart = layerwise(tx)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        where = ParameterSpecs.of(updates if params is None else params, layout)
        if where is None:
            return apart.update(updates, state, params, **extra)
        _check_mesh(axes, where)
        _check_stacks(where)
        skeleton, arrays = Skeleton.apart((updates, state, params, extra))
        # Without a mesh, since what is traced runs on whole matrices in a `shard_map`, and on those
        # that the partitioner has sharded outside of it.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            trace = trace_apart(tx, *skeleton.fill(map(_unsharded, arrays)), by="whole_matrices")
            run = _Run.of(trace, where, axes)
        if not run.groups:
            return apart.update(updates, state, params, **extra)
        return trace.build(_on_auto(run, arrays))

    return optax.GradientTransformationExtraArgs(apart.init, update)


OVER = Takes(
    "a mesh axis, or several in a tuple",
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, tuple | list) and all(isinstance(one, str) for one in value))
    ),
    lambda value: isinstance(value, str) or len(set(value)) == len(value),
).or_none()


def _axes(over: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """The mesh axes that a user wrote."""
    check("there is no such optimizer", over=(over, OVER))
    if over is None:
        return None
    return (over,) if isinstance(over, str) else tuple(over)


def _check_mesh(axes: Sequence[str] | None, where: ParameterSpecs) -> None:
    """Raise FunctreeError for mesh axes that the mesh does not have."""
    problems: list[Problem] = []
    for axis in axes or ():
        if axis not in where.mesh.axis_names:
            why = f"mesh {mesh_view(where.mesh)} has no such axis"
            why += did_you_mean(axis, where.mesh.axis_names)
            problems.append(Problem(None, None, f"over={axis!r}", why))
    if problems:
        raise FunctreeValueError("`ft.whole_matrices` cannot spread layers", problems)


def _check_stacks(where: ParameterSpecs) -> None:
    """Raise FunctreeError inside of `ft.layerwise`, which shows one layer of each stack."""
    problems: list[Problem] = []
    for leaf in where.leaves.leaves:
        if leaf.stacked and not stack_sizes(leaf):
            problems.append(leaf.problem("is one layer of a stack", _OUTSIDE_IN))
    if problems:
        raise FunctreeValueError(
            "`ft.whole_matrices` inside of `ft.layerwise` would move each layer by itself", problems
        )


_OUTSIDE_IN = (
    "leave `ft.layerwise` away, since `ft.whole_matrices` takes each layer by itself too; or write "
    "it inside: `ft.whole_matrices(ft.layerwise(tx))`"
)
_NO_MESH = AbstractMesh((), ())


def _unsharded(array: AnyArray) -> jax.ShapeDtypeStruct:
    """The type of an array, without how it is sharded."""
    type_: Any = jax.typeof(array)
    weak = getattr(type_, "weak_type", False)
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=weak)


def _on_auto(run: "_Run", arrays: Sequence[Any]) -> list[Any]:
    """The outputs of a run. On Explicit axes they are sharded as the inputs in whose place they
    are."""
    where, trace = run.where, run.trace
    if not where.explicit:
        return run.outputs(arrays)
    given: dict[tuple[str, Path], PartitionSpec] = {}
    for place, array in zip(trace.inputs, arrays, strict=True):
        part = "update" if place.part == "gradient" else place.part
        given[part, place.path] = type_spec(array)
    specs: list[PartitionSpec] = []
    for place in trace.outputs:
        specs.append(given.get((place.part, place.path), PartitionSpec()))
    apply: Any = jax.sharding.auto_axes(
        lambda *arrays: run.outputs(arrays), axes=where.explicit, out_sharding=specs
    )
    with traced_under(where.mesh):
        return apply(*arrays)


class _Run(NamedTuple):
    """A traced update, in which the matrices of some parameters are made whole.

    Attributes:
        trace: the trace.
        program: its program, inlined.
        groups: the updates of these parameters.
        moved: for each of them the indices of its outputs.
        where: the parameters on their mesh.
    """

    trace: UpdateTrace
    program: MatrixProgram
    groups: Sequence[MatrixUpdates]
    moved: Mapping[Path, Sequence[int]]
    where: ParameterSpecs

    @staticmethod
    def of(trace: UpdateTrace, where: ParameterSpecs, over: tuple[str, ...] | None) -> "_Run":
        """The run of a traced update.

        Raises:
            FunctreeError: an update of matrices needs other parameters; it is not known how a
                parameter is sharded.
        """
        program = MatrixProgram(trace.program)
        outputs: dict[Path, list[int]] = {}
        for i, place in enumerate(trace.outputs):
            if place.owner is not None:
                outputs.setdefault(place.owner, []).append(i)
        divisions = _divisions(trace, program, outputs)
        specs = where.specs(divisions.keys()) if divisions else {}
        shapes = {leaf.path: leaf.shape for leaf in where.leaves.leaves}
        sizes = dict(where.mesh.shape)
        updates: list[MatrixUpdate] = []
        for path, division in divisions.items():
            stack = trace.outputs[outputs[path][0]].stack
            exchange = Exchange.of(sizes, shapes[path], specs[path], len(stack), over)
            updates.append(MatrixUpdate(path, division, exchange, specs[path], stack))
        groups = grouped(updates)
        moved = {one.path: outputs[one.path] for group in groups for one in group.members}
        _check_alone(trace, program, moved)
        return _Run(trace, program, groups, moved, where)

    def outputs(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs of the update, by its inputs."""
        ambient = jax.sharding.get_abstract_mesh()
        mesh = self.where.mesh if ambient.empty else ambient
        found: dict[int, Any] = {}

        def inputs(member: MatrixUpdate) -> Values:
            return self._inputs(arrays, member.stack)

        for group in self.groups:
            values = group.values(inputs, mesh)
            for member, own in zip(group.members, values, strict=True):
                for i in self.moved[member.path]:
                    found[i] = self._output(i, own, member)
        rest = [i for i in range(len(self.trace.outputs)) if i not in found]
        found.update(zip(rest, over_layers(self._only(rest, arrays)), strict=True))
        return [found[i] for i in range(len(self.trace.outputs))]

    def _inputs(self, arrays: Sequence[Any], stack: tuple[int, ...]) -> dict[Variable, Any]:
        """The values of the inputs and constants, with random keys for the layers of some
        stacks."""
        program = self.program.program
        values: dict[Variable, Any] = dict(
            zip(program.jaxpr.constvars, program.consts, strict=True)
        )
        for place, one, array in zip(self.trace.inputs, program.jaxpr.invars, arrays, strict=True):
            if place.is_key and stack:
                array = jax.random.split(array, stack)
            values[one] = array
        return values

    def _output(self, i: int, values: Mapping[Variable, Any], update: MatrixUpdate) -> Any:
        """The value of an output that belongs to a parameter."""
        variable = self.program.program.jaxpr.outvars[i]
        type_: Any = variable.aval
        if isinstance(variable, Literal):
            value = jnp.asarray(variable.val, type_.dtype)
        else:
            value = values[variable]
            if variable in update.division.layered:
                return value
        # It depends on nothing that layers have of their own.
        return jnp.broadcast_to(value, (*update.stack, *type_.shape))

    def _only(self, indices: Sequence[int], arrays: Sequence[Any]) -> UpdateTrace:
        """The trace, with some of its outputs."""
        program = self.program.only(indices)
        outputs = tuple(self.trace.outputs[i] for i in indices)
        depends = tuple(self.trace.depends[i] for i in indices)
        return replace(
            self.trace, program=program, arrays=tuple(arrays), outputs=outputs, depends=depends
        )


def _divisions(
    trace: UpdateTrace, program: MatrixProgram, outputs: Mapping[Path, Sequence[int]]
) -> dict[Path, Division]:
    """The pieces of the update of each parameter with operations on matrices."""
    own: dict[Path | None, list[Variable]] = {}
    random: list[Variable] = []
    invars, outvars = program.program.jaxpr.invars, program.program.jaxpr.outvars
    for place, one in zip(trace.inputs, invars, strict=True):
        own.setdefault(place.owner, []).append(one)
        if place.is_key:
            random.append(one)
    found: dict[Path, Division] = {}
    for path, indices in outputs.items():
        wanted = [outvars[i] for i in indices]
        division = program.divide(wanted, own.get(path, ()), random)
        if division is not None:
            found[path] = division
    return found


def _check_alone(
    trace: UpdateTrace, program: MatrixProgram, outputs: Mapping[Path, Sequence[int]]
) -> None:
    """Raise FunctreeError if the update of a parameter has others in its program."""
    invars, outvars = program.program.jaxpr.invars, program.program.jaxpr.outvars
    owners = {one: place.owner for one, place in zip(invars, trace.inputs, strict=True)}
    joint: dict[Path, list[Path]] = {}
    for path, indices in outputs.items():
        found = {owners[one] for one in program.inputs(outvars[i] for i in indices)}
        others = [one for one in found if one is not None and one != path]
        if others:
            joint[path] = sorted(others, key=str)
    check_matrices_apart(trace, joint)
