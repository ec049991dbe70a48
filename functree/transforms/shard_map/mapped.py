"""A function and the options of `ft.shard_map` ─► `Mapped`, with the key, the checks and the program of each call."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.tree_util import register_static

from functree.calls.body import Arguments, Body
from functree.calls.call_groups import CallGroup, FoundCall
from functree.calls.closures import closed_over, held_at_any_depth, kept_by
from functree.calls.function import Function, on_several_devices
from functree.calls.output import Output
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Program, prepare
from functree.calls.signature import Bound, Signature
from functree.calls.traces import Traces
from functree.errors import ShardingError, did_you_mean
from functree.layout.layout import Layout, LayoutTree
from functree.layout.meshes import NO_MESH, current_mesh, mesh_view, tracing
from functree.layout.placement import first_mesh
from functree.placing.ambient import Surroundings, ambient_rules, axis_rules
from functree.transforms.shard_map.manual_mesh import ManualMesh
from functree.transforms.sizes import Sizes
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
        compilations: one record for each compilation, with what differed from the most similar earlier one.

    Examples:
        >>> by_rows = {"in_specs": ft.P("data"), "out_specs": ft.P("data")}
        >>> mapped = ft.shard_map(lambda x: 2 * x, mesh=ft.make_mesh(data=8), **by_rows)
        >>> mapped.eval_shape(jax.ShapeDtypeStruct((8,), "float32")).shape
        (8,)
    """

    def __init__(self, fun: Callable[_P, _T], bound: Bound, traces: Traces, options: MapOptions):
        super().__init__(fun, bound, traces)
        self._options = options
        given = options.rules if options.in_specs is None else options.in_specs
        self._layouts = ParameterLayouts("in_specs", given, traces.signature, options.rules)

    def __repr__(self) -> str:
        return f"<ft.shard_map of {self._signature.name}>"

    def _rules(self) -> Layout | None:
        return self._options.rules if self._options.rules is not None else ambient_rules()

    def _key(self, found: FoundCall, rules: Layout | None) -> Hashable:
        # In the trace of an outer function, custom derivative rules have to keep the rules of the body.
        return (tracing(), self._place(found.arrays), rules, *found.kinds())

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Program, FoundCall]:
        # Outside of all traces there is no tracer.
        if not tracing() or not _captures_tracer(self._bound.fun):
            return super()._prepare(args, kwargs)
        # A program that contains a tracer must not be cached: the trace has ended when the next call uses it, and JAX
        # would raise for a leaked tracer.
        call = self._signature.bind(*self._bound.call(args, kwargs))
        found = self._groups.find(call)
        return self._program(call, found), found

    def _program(self, call: Any, found: FoundCall) -> Program:
        name, (group, arrays, _) = self._signature.name, found
        place = self._place(arrays)
        compute, fun = self._computation(call, found, place), self._traces.fun
        # The mesh of a rule that is run later is that of the body, whose axes are Manual: JAX restores it.
        context = partial(Surroundings(None, self._rules()).entered, ())
        body = Body(compute, Arguments(group.paths, ()), fun, name, context)
        prepared = prepare(body, arrays, options={"inline": True})
        group.several_devices = group.several_devices or on_several_devices(arrays)
        return Program(name, group, body, prepared.jitted, mesh=place.mesh, rules=self._rules())

    def _computation(self, call: Any, found: FoundCall, place: ManualMesh) -> Callable[[Sequence[Any]], Output]:
        """The function from global arrays to global arrays, for calls like this one.

        Raises:
            ShardingError: the layouts do not fit the call.
            AxesError: the arrays are not as annotated.
        """
        options, signature, fun, group = self._options, self._signature, self._traces.fun, found.group
        laid = place.lay_global(call, self._layouts.prefix(call))
        sizes = Sizes(signature.name, options.shapes or "")
        if options.shapes == "global":
            sizes.check(call, laid.leaves)
        problems = list(laid.problems)
        for leaf, spec in zip(laid.leaves, laid.specs, strict=True):
            problems += place.misplaced(leaf, spec)
        if problems:
            raise place.refuse(signature.name, problems)
        local = _LocalBody(signature, fun, group, options, self._rules(), place, sizes)
        in_specs, traced = laid.specs, local.traced_once()
        if not tracing():
            # Programs that differ only in where their arguments are share one trace of the user's function.
            types = [(leaf.shape, leaf.value.dtype, getattr(leaf.value, "weak_type", False)) for leaf in laid.leaves]
            traced = group.bodies.setdefault((place, self._rules(), in_specs, *types), traced)

        def compute(arrays: Sequence[Any]) -> Output:
            # The specs of the result depend on its structure, which is known after the body has run. JAX reads
            # `out_specs` only then, so the body appends to the list. Otherwise the function would be traced twice.
            out_specs: list[PartitionSpec] = []
            skeletons: list[Skeleton] = []

            def body(*arrays: Any) -> list[Any]:
                output, specs = traced(*arrays)
                out_specs.extend(specs.specs)
                skeletons.append(output.skeleton)
                return list(output.values)

            # The name is that of the user's function in JAX's messages and in profiles.
            body.__name__ = body.__qualname__ = traced.__name__
            with jax.sharding.use_abstract_mesh(place.abstract):
                values = jax.shard_map(
                    body,
                    mesh=place.mesh,
                    in_specs=in_specs,
                    out_specs=out_specs,
                    # Not named if they are all: a `vmap` on an Explicit mesh takes one of them away.
                    axis_names=frozenset() if place.manual == set(place.mesh.axis_names) else place.manual,
                    check_vma=options.check_vma,
                )(*[place.reshard(x, spec) for x, spec in zip(arrays, in_specs, strict=True)])
            return Output(values, skeletons[0])

        return compute

    def _place(self, arrays: Iterable[Any]) -> ManualMesh:
        """The mesh of a call, and the mesh axes that become Manual."""
        name, outer = self._signature.name, jax.sharding.get_abstract_mesh()
        mesh = self._options.mesh if self._options.mesh is not None else current_mesh()
        mesh = mesh if mesh is not None else first_mesh(arrays)
        if mesh is None:
            raise ShardingError(f"{name}: there is no mesh: {NO_MESH}")
        view = mesh_view(mesh)
        if outer.manual_axes:
            if dict(mesh.shape) != dict(outer.shape):
                around = mesh_view(outer)
                raise ShardingError(
                    f"{name}: its mesh is {view}, but it is called inside a shard_map over {around}: leave `mesh=` out"
                )
            mesh = outer  # it records which axes are Manual
        free = [axis for axis in mesh.axis_names if axis not in outer.manual_axes]
        wanted = list(self._options.axis_names or free)
        for axis in wanted:
            if axis in free:
                continue
            if axis in outer.manual_axes:
                raise ShardingError(f"{name}: `{axis}` in `axis_names` is manual already, on the mesh {view}")
            raise ShardingError(f"{name}: `{axis}` in `axis_names` is not in the mesh {view}{did_you_mean(axis, free)}")
        if not wanted:
            raise ShardingError(f"{name}: all axes of the mesh {view} are manual already")
        return ManualMesh(mesh, frozenset(wanted))


@register_static
@dataclass(frozen=True)
class _Specs:
    """The spec of each array of a result, as static data of what JAX has traced."""

    specs: tuple[PartitionSpec, ...]


class _LocalBody(NamedTuple):
    """The user's function on local arrays."""

    signature: Signature
    fun: Callable[[], Any]
    group: CallGroup
    options: MapOptions
    rules: Layout | None
    place: ManualMesh
    sizes: Sizes

    def traced_once(self) -> Any:
        """A function of local arrays that JAX traces once for arguments of one type."""

        def body(*arrays: Any) -> tuple[Output, _Specs]:
            return self(arrays)

        body.__name__ = body.__qualname__ = self.signature.name.rpartition(".")[2]
        return jax.jit(body, inline=True)

    def __call__(self, arrays: Sequence[Any]) -> tuple[Output, _Specs]:
        """The local result, and the spec of each of its arrays."""
        signature, options, place = self.signature, self.options, self.place
        # A copy: JAX may trace this again, and the result's sizes must not be compared with those of another trace.
        call, sizes = self.group.skeleton.fill(arrays), self.sizes.copy()
        if options.shapes == "local":
            sizes.check(call)
        with axis_rules(self.rules):
            result = signature.run(self.fun(), call)
        record = signature.result(result)
        out_specs = options.rules if options.out_specs is None else options.out_specs
        laid = place.lay_local(record, signature.result(out_specs))
        problems = list(laid.problems)
        if options.check_vma and not problems:
            # JAX checks this too, but its message has no path.
            for leaf, spec in zip(laid.leaves, laid.specs, strict=True):
                problems += place.varying(leaf, spec)
        if problems:
            raise place.refuse(signature.name, problems)
        leaves: Sequence[Any] = laid.leaves
        if options.shapes == "global":
            leaves = [place.enlarge(leaf, spec) for leaf, spec in zip(laid.leaves, laid.specs, strict=True)]
        if options.shapes is not None:
            sizes.check(record, leaves)
        return Output.of(result, signature.name), _Specs(laid.specs)


def _captures_tracer(fun: Any) -> bool:
    """Whether a function closes over a traced array, directly or in the functions that it closes over."""
    # Not its defaults, which are arguments of the call.
    variables = closed_over(fun) if isinstance(fun, FunctionType) else kept_by(fun)
    return any(isinstance(value, Tracer) for _, value in held_at_any_depth(variables))
