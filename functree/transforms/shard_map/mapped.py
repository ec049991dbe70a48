"""A function and the options of `ft.shard_map` ─► `Mapped`: the key, the checks and the program."""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Literal, NamedTuple, ParamSpec, Self, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.tree_util import register_static

from functree.calls.body import Arguments, Body
from functree.calls.call_groups import CallGroup, FlatCall
from functree.calls.closures import closed_over, held_at_any_depth, kept_by
from functree.calls.function import Function
from functree.calls.output import Output
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Program, make_program
from functree.calls.signature import AnyFunction, Args, Kwargs, Partial, Signature
from functree.calls.traces import Traces, traces_of
from functree.devices.meshes import NO_MESH, current_mesh, mesh_view, tracing
from functree.devices.placement import first_mesh
from functree.errors import ShardingError, did_you_mean
from functree.labels.leaf import Leaf
from functree.layout.layout import Layout, LayoutTree, as_partial
from functree.layout.plan.make_plan import read_for
from functree.placing.ambient import Surroundings, ambient_rules, axis_rules
from functree.transforms.shard_map.manual_mesh import ManualMesh
from functree.transforms.sizes import Sizes
from functree.tree.arrays import AnyArray
from functree.tree.skeleton.skeleton import Skeleton

_P = ParamSpec("_P")
_T = TypeVar("_T")
Shapes = Literal["global", "local"] | None


class MapOptions(NamedTuple):
    """The options of `ft.shard_map`."""

    mesh: Mesh | AbstractMesh | None
    in_specs: LayoutTree
    out_specs: LayoutTree
    rules: Layout | None
    axis_names: tuple[str, ...] | None
    check_vma: bool
    shapes: Shapes


class Mapped(Function[_P, _T]):
    """A function that runs on each device with its shards of the arrays; made by `ft.shard_map`.

    Attributes:
        compilations: one record for each compilation, with what differed from the most similar
            earlier one.

    Examples:
        >>> by_rows = {"in_specs": ft.P("data"), "out_specs": ft.P("data")}
        >>> mapped = ft.shard_map(
        ...     lambda x: 2 * x, mesh=ft.make_mesh(data=8), **by_rows
        ... )
        >>> mapped.eval_shape(jax.ShapeDtypeStruct((8,), "float32")).shape
        (8,)
    """

    _options: MapOptions

    def __init__(
        self, fun: Callable[_P, _T], partial: Partial, traces: Traces, options: MapOptions
    ):
        super().__init__(fun, partial, traces)
        self._options = options
        # Parameters without an entry are laid out by the rules.
        given = {} if options.in_specs is None else options.in_specs
        self._layouts = ParameterLayouts("in_specs", given, traces.signature, options.rules)

    @classmethod
    def of(cls, fun: Callable[_P, _T], options: MapOptions) -> Self:
        signature, partial = Signature.of(fun)
        return cls(fun, partial, traces_of(partial, signature, cls, tuple(options)), options)

    def __repr__(self) -> str:
        return f"<ft.shard_map of {self._signature.name}>"

    def _rules(self) -> Layout | None:
        return self._options.rules if self._options.rules is not None else ambient_rules()

    def _key(self, flat: FlatCall, rules: Layout | None) -> Hashable:
        # In the trace of an outer function, custom derivative rules have to keep the rules of the
        # body.
        return (tracing(), self._manual_mesh(flat.arrays), rules, *flat.kinds())

    def _prepare(self, args: Args, kwargs: Kwargs) -> tuple[Program, FlatCall]:
        # Outside of all traces there is no tracer.
        if not tracing() or not _captures_tracer(self._partial.fun):
            return super()._prepare(args, kwargs)
        # A program that contains a tracer must not be cached: the trace has ended when the next
        # call uses it, and JAX would raise for a leaked tracer.
        flat = self._groups.find(self._bind(args, kwargs))
        return self._program(flat), flat

    def _program(self, flat: FlatCall) -> Program:
        manual, rules = self._manual_mesh(flat.arrays), self._rules()
        compute = self._computation(flat, manual)
        # The mesh of a rule that is run later is that of the body, whose axes are Manual: JAX
        # restores it.
        context = functools.partial(Surroundings(None, rules).entered, ())
        arguments = Arguments(flat.group.paths, ())
        body = Body(compute, arguments, self._traces.fun, self._signature.name, context)
        program, _ = make_program(
            flat.group, body, flat.arrays, mesh=manual.mesh, rules=rules, options={"inline": True}
        )
        return program

    def _computation(
        self, flat: FlatCall, manual: ManualMesh
    ) -> Callable[[Sequence[AnyArray]], Output]:
        """The function from global arrays to global arrays, for calls like this one.

        Raises:
            ShardingError: the layouts do not fit the call.
            AxesError: the arrays are not as annotated.
        """
        options, signature, group = self._options, self._signature, flat.group
        leaves, parts = self._layouts.read(flat.call)
        inputs = manual.lay_global(leaves, parts)
        sizes = Sizes(signature.name, options.shapes or "")
        if options.shapes == "global":
            sizes.check(flat.call, inputs.leaves)
        problems = list(inputs.problems)
        for leaf, spec in zip(inputs.leaves, inputs.specs, strict=True):
            problems += manual.misplaced(leaf, spec)
        if problems:
            raise manual.refuse(signature.name, problems)
        rules, in_specs = self._rules(), inputs.specs
        local = _LocalBody(signature, self._traces.fun, group, options, rules, manual, sizes)
        traced = local.traced_once()
        if not tracing():
            # Programs that differ only in where their arguments are share one trace of the user's
            # function.
            types: list[Hashable] = []
            for leaf in inputs.leaves:
                weak = getattr(leaf.value, "weak_type", False)
                types.append((leaf.shape, leaf.value.dtype, weak))
            traced = group.bodies.setdefault((manual, rules, in_specs, *types), traced)
        return functools.partial(_run_mapped, traced, manual, in_specs, options.check_vma)

    def _manual_mesh(self, arrays: Iterable[AnyArray]) -> ManualMesh:
        """The mesh of a call, and the mesh axes that become Manual."""
        name, outer = self._signature.name, jax.sharding.get_abstract_mesh()
        mesh = self._options.mesh
        if mesh is None:
            mesh = current_mesh()
        if mesh is None:
            mesh = first_mesh(arrays)
        if mesh is None:
            raise ShardingError(f"{name}: there is no mesh: {NO_MESH}")
        view = mesh_view(mesh)
        if outer.manual_axes:
            if dict(mesh.shape) != dict(outer.shape):
                around = mesh_view(outer)
                raise ShardingError(
                    f"{name}: its mesh is {view}, but it is called inside a shard_map over "
                    f"{around}: leave `mesh=` out"
                )
            mesh = outer  # it records which axes are Manual
        elif tracing() and not outer.empty and outer.size != mesh.size:
            # JAX would say it of a context that the user has not entered.
            raise ShardingError(
                f"{name}: its mesh is {view}, but it is called on the mesh {mesh_view(outer)}, of "
                "another number of devices: leave `mesh=` out"
            )
        free = [axis for axis in mesh.axis_names if axis not in outer.manual_axes]
        wanted = list(self._options.axis_names or free)
        for axis in wanted:
            if axis in free:
                continue
            if axis in outer.manual_axes:
                raise ShardingError(
                    f"{name}: `{axis}` in `axis_names` is manual already, on the mesh {view}"
                )
            near = did_you_mean(axis, free)
            raise ShardingError(f"{name}: `{axis}` in `axis_names` is not in the mesh {view}{near}")
        if not wanted:
            raise ShardingError(f"{name}: all axes of the mesh {view} are manual already")
        return ManualMesh(mesh, frozenset(wanted))


@register_static
@dataclass(frozen=True)
class _Specs:
    """The spec of each array of a result, as static data of what JAX has traced."""

    specs: tuple[PartitionSpec, ...]


_LocalFunction = Callable[..., tuple[Output, _Specs]]
"""A function of local arrays, which JAX traces: the local result, and the spec of each array in
it."""


class _LocalBody(NamedTuple):
    """The user's function on local arrays."""

    signature: Signature
    fun: Callable[[], AnyFunction]
    group: CallGroup
    options: MapOptions
    rules: Layout | None
    manual: ManualMesh
    sizes: Sizes

    def traced_once(self) -> _LocalFunction:
        """A function of local arrays that JAX traces once for arguments of one type."""

        def body(*arrays: jax.Array) -> tuple[Output, _Specs]:
            return self(arrays)

        body.__name__ = body.__qualname__ = self.signature.name.rpartition(".")[2]
        return jax.jit(body)

    def __call__(self, arrays: Sequence[jax.Array]) -> tuple[Output, _Specs]:
        """The local result, and the spec of each of its arrays."""
        signature, options, manual = self.signature, self.options, self.manual
        # A copy: JAX may trace this again, and the result's sizes must not be compared with those
        # of another trace.
        call, sizes = self.group.skeleton.fill(arrays), self.sizes.copy()
        if options.shapes == "local":
            sizes.check(call)
        with axis_rules(self.rules):
            result = signature.run(self.fun(), call)
        record = signature.result(result)
        out_specs = options.rules if options.out_specs is None else options.out_specs
        leaves, parts = read_for(record, signature.result(out_specs))
        if options.out_specs is None:
            parts = as_partial(parts)  # a result may be anything, such as a loss
        outputs = manual.lay_local(leaves, parts)
        problems = list(outputs.problems)
        if options.check_vma and not problems:
            # JAX checks this too, but its message has no path.
            for leaf, spec in zip(outputs.leaves, outputs.specs, strict=True):
                problems += manual.varying(leaf, spec)
        if problems:
            raise manual.refuse(signature.name, problems)
        sized: Sequence[Leaf] = outputs.leaves
        if options.shapes == "global":
            sized = list(map(manual.enlarge, outputs.leaves, outputs.specs))
        if options.shapes is not None:
            sizes.check(record, sized)
        return Output.of(result, signature.name), _Specs(outputs.specs)


def _run_mapped(
    traced: _LocalFunction,
    manual: ManualMesh,
    in_specs: Sequence[PartitionSpec],
    check_vma: bool,
    arrays: Sequence[AnyArray],
) -> Output:
    """Run a function of local arrays on global ones, by `jax.shard_map`."""
    # The specs of the result depend on its structure, which is known after the body has run. JAX
    # reads `out_specs` only then, so the body appends to the list. Otherwise the function would be
    # traced twice.
    out_specs: list[PartitionSpec] = []
    skeletons: list[Skeleton] = []

    def body(*arrays: jax.Array) -> list[jax.Array]:
        output, specs = traced(*arrays)
        out_specs.extend(specs.specs)
        skeletons.append(output.skeleton)
        return list(output.values)

    # The name is that of the user's function in JAX's messages and in profiles.
    body.__name__ = body.__qualname__ = traced.__name__
    # Not named if they are all: a `vmap` on an Explicit mesh takes one of them away.
    axis_names = manual.manual
    if axis_names == set(manual.mesh.axis_names):
        axis_names = frozenset()
    inputs = list(map(manual.reshard, arrays, in_specs))
    with jax.sharding.use_abstract_mesh(manual.abstract):
        run = jax.shard_map(
            body,
            mesh=manual.mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )
        values = run(*inputs)
    return Output(values, skeletons[0])


def _captures_tracer(fun: AnyFunction) -> bool:
    """Whether a function closes over a traced array, directly or in the functions that it closes
    over."""
    # Not its defaults, which are arguments of the call.
    variables = closed_over(fun) if isinstance(fun, FunctionType) else kept_by(fun)
    return any(isinstance(value, Tracer) for _, value in held_at_any_depth(variables))
