"""`ft.shard_map` runs a function on each device, with that device's shards of the arrays.

A function of local arrays, and options ─► a function of global arrays.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functree.argument_checks import FUNCTION, TEXTS, Flag, checked
from functree.calls.body import Arguments, Body, Output
from functree.calls.call_groups import CallGroup, FlatCall
from functree.calls.checks import check_mesh
from functree.calls.function import Function
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Program, make_program
from functree.calls.signature import AnyFunction, Signature
from functree.devices.meshes import (
    NO_MESH,
    MeshView,
    abstract_mesh,
    axes_text,
    current_mesh,
    mesh_view,
    named_axes,
    spec_text,
    tracing,
    typed_spec,
    without,
)
from functree.devices.placement import first_mesh
from functree.devices.varying import varying_axes
from functree.errors import FunctreeTypeError, Problem, ShardingError, did_you_mean
from functree.labels.leaves import Leaf, Leaves, read
from functree.layout.decide import UNSPECIFIED, plan_leaves
from functree.layout.decision import refuse
from functree.layout.layout import (
    Layout,
    LayoutLike,
    LayoutTree,
    Part,
    SpecLayout,
    as_layout,
    as_partial,
    copied,
    read_for,
)
from functree.placing.constrain import axis_rules
from functree.transforms.typed import Sizes, check_sizes
from functree.tree.arrays import AnyArray

_P = ParamSpec("_P")
_T = TypeVar("_T")
Shapes = Literal["global", "local"] | None


class MapOptions(NamedTuple):
    """The checked options of `ft.shard_map`."""

    mesh: Mesh | AbstractMesh | None
    in_specs: LayoutTree
    out_specs: LayoutTree
    rules: Layout | None
    axis_names: tuple[str, ...] | None
    check_vma: bool
    shapes: Shapes


class ManualMesh(NamedTuple):
    """The mesh of a shard_map.

    Attributes:
        mesh: the mesh outside the body. If an outer shard_map made mesh axes Manual, they are
            Manual on this mesh.
        axes: the mesh axes that this shard_map makes Manual.
    """

    mesh: Mesh | AbstractMesh
    axes: frozenset[str]

    @property
    def explicit(self) -> bool:
        """Whether the mesh axes that become Manual are Explicit outside the body.

        If they are Explicit, the types of arrays contain specs.
        """
        return self.axes <= set(self.mesh.explicit_axes)

    def lay(
        self, leaves: Leaves, parts: Sequence[Part], *, local: bool = False
    ) -> tuple[tuple[PartitionSpec, ...], list[Problem]]:
        """Return the spec of each leaf of a tree, and the problems of its layouts.

        Args:
            leaves: the leaves of the tree.
            parts: the layouts of the tree.
            local: whether the arrays are local. For local arrays, every mesh axis is treated as
                having one device, so any size fits. Manual axes must divide the sizes of global
                arrays. On Explicit axes, a global array without a layout gets the spec in its type.

        Returns:
            The specs, restricted to the Manual axes, and the problems.
        """
        sizes = dict.fromkeys(self.mesh.shape, 1)
        if not local:
            sizes.update((axis, self.mesh.shape[axis]) for axis in self.axes)
        # All leaves are treated as different arrays (`same`): nothing is placed, so one array at
        # two paths may have two specs.
        plan = plan_leaves(
            leaves,
            parts,
            MeshView(sizes, self.mesh),
            check=False,
            same=range(len(leaves.leaves)),
            allow_unspecified=True,
        )
        problems, specs = [*plan.problems, *self._outside(parts)], list[PartitionSpec]()
        for leaf, row in zip(leaves.leaves, plan.rows, strict=True):
            spec = row.spec
            if row.memory_kind is not None:
                why = f"its layout has the memory kind {row.memory_kind}, "
                why += "but shard_map cannot move arrays between memory kinds"
                remedy = "move it before or after the call, with `ft.shard` or `ft.jit`"
                problems.append(leaf.problem(why, remedy))
            if spec is None and not local and self.explicit:
                spec = typed_spec(leaf.value)
            if spec is None:
                problems.append(leaf.problem(*UNSPECIFIED))
            specs.append(self.project(spec or PartitionSpec()))
        return tuple(specs), problems

    def _outside(self, parts: Sequence[Part]) -> list[Problem]:
        """Return a problem for each `P` that names a mesh axis that is not made Manual here.

        Rules may name such mesh axes, since rules also serve other functions. Specs from rules omit
        these mesh axes.
        """
        problems: list[Problem] = []
        for part in parts:
            spec = part.layout.spec if isinstance(part.layout, SpecLayout) else PartitionSpec()
            others = named_axes(spec).intersection(self.mesh.axis_names) - self.axes
            if others:
                why = f"names `{axes_text(sorted(others))}`, but this shard_map makes only "
                why += f"`{axes_text(sorted(self.axes))}` Manual"
                remedy = "remove the others from the spec, or add them to `axis_names`"
                problems.append(Problem(part.path, None, spec_text(spec), why, remedy))
        return problems

    def project(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec without the mesh axes that are not Manual here."""
        return without(spec, set(self.mesh.axis_names) - self.axes)

    # Problems that a plan does not find

    def differing(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """Return the problem of an array whose type has a different spec, or an empty list.

        JAX does not reshard such an array.
        """
        have = typed_spec(leaf.value)
        if have is None or not self.explicit or self.project(have) == spec:
            return []
        why = f"its type has the spec {spec_text(self.project(have))}, "
        why += f"but its layout has the spec {spec_text(spec)}; shard_map does not reshard it"
        remedy = "apply `jax.sharding.reshard` before the call, or use the spec of its type"
        return [leaf.problem(why, remedy)]

    def varying(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """Return the problem of a result whose spec replicates it, although its shards may differ.

        The list is empty if there is no problem.
        """
        unnamed = sorted((varying_axes(leaf.value) & self.axes) - named_axes(spec))
        if not unnamed:
            return []
        axes = axes_text(unnamed)
        why = f"{spec_text(spec)} replicates it over `{axes}`, "
        why += "but its values may differ between devices"
        remedy = f"reduce it over `{axes}` with `jax.lax.psum` or `pmean`, "
        remedy += f"name `{axes}` in its spec, or pass `check_vma=False` if its values are equal"
        return [leaf.problem(why, remedy)]

    def reshard(self, value: Any, spec: PartitionSpec) -> Any:
        """Return an argument as `jax.shard_map` requires it.

        On Explicit axes, an array without a sharding in its type is resharded to its spec.
        """
        if not self.explicit or not jax.typeof(value).sharding.mesh.empty:
            return value
        return jax.sharding.reshard(value, NamedSharding(self.mesh, spec))


class Mapped(Function[_P, _T]):
    """A function that runs on each device with that device's shards. `ft.shard_map` returns it.

    Attributes:
        compilations: one record for each compilation, with the differences from the most similar
            earlier compilation.

    Examples:
        >>> by_rows = {"in_specs": ft.P("data"), "out_specs": ft.P("data")}
        >>> mapped = ft.shard_map(
        ...     lambda x: 2 * x, mesh=ft.make_mesh(data=8), **by_rows
        ... )
        >>> mapped.eval_shape(jax.ShapeDtypeStruct((8,), "float32")).shape
        (8,)
    """

    _options: MapOptions
    _door = "shard_map"

    def _set_up(self) -> None:
        # The rules lay out parameters without an entry.
        options = self._options
        given = {} if options.in_specs is None else options.in_specs
        self._layouts = ParameterLayouts("in_specs", given, self._signature, options.rules)

    def _key(self, flat: FlatCall, rules: Layout | None) -> Hashable:
        # In the trace of an outer function, a program does not wait for Equinox checks.
        return (tracing(), self._manual_mesh(flat.arrays), rules, *flat.kinds())

    def _program(self, flat: FlatCall) -> Program:
        manual, rules = self._manual_mesh(flat.arrays), self._rules()
        compute = self._computation(flat, manual, rules)
        arguments = Arguments(flat.group.paths, ())
        body = Body(compute, arguments, self._traces)
        program, traced = make_program(
            flat.group, body, flat.arrays, mesh=manual.mesh, rules=rules, options={"inline": True}
        )
        # JAX passes traced arrays that a function closes over as additional arguments.
        if traced is not None and len(traced.jaxpr.in_avals) > len(flat.arrays):
            return replace(program, is_kept=False)
        return program

    def _computation(
        self, flat: FlatCall, manual: ManualMesh, rules: Layout | None
    ) -> Callable[[Sequence[AnyArray]], Output]:
        """Return the function from global arrays to global arrays, for calls like this one.

        Raises:
            ShardingError: if the layouts do not fit the call.
            AxesError: if the arrays do not match their annotations.
        """
        options, signature, group = self._options, self._signature, flat.group
        check_mesh(signature.name, group.paths, flat.arrays, manual.mesh)
        leaves, parts = self._layouts.read(flat.call)
        specs, problems = manual.lay(leaves, parts)
        sizes: Sizes = {}
        if options.shapes == "global":
            sizes = check_sizes(signature.name, leaves.leaves, where="global")
        for leaf, spec in zip(leaves.leaves, specs, strict=True):
            problems += manual.differing(leaf, spec)
        if problems:
            raise refuse(problems, mesh_view(manual.mesh), f"{signature.name}: ")
        traced = _traced_once(signature, self._traces.fun, group, options.shapes, rules)
        if not tracing():
            # Programs that differ only in the placement of their arguments share one trace of the
            # user's function.
            traced = group.bodies.setdefault((manual, rules), traced)

        # The computation must not refer to `self`, which holds the user's function: the group's
        # cache would keep that function alive.
        return functools.partial(_run_mapped, traced, signature, options, manual, specs, sizes)

    def _manual_mesh(self, arrays: Iterable[AnyArray]) -> ManualMesh:
        """Return the mesh of a call, and the mesh axes that become Manual."""
        name, outer = self._signature.name, jax.sharding.get_abstract_mesh()
        mesh = self._options.mesh or current_mesh() or first_mesh(arrays)
        if mesh is None:
            raise ShardingError(f"{name}: there is no mesh: {NO_MESH}")
        view = mesh_view(mesh)
        inside = bool(outer.manual_axes)
        # JAX's own message would mention a context that the user did not enter.
        is_lost = tracing() and not outer.empty and outer.size != mesh.size
        if is_lost or (inside and dict(mesh.shape) != dict(outer.shape)):
            where = "inside a shard_map over" if inside else "under the mesh"
            raise ShardingError(
                f"{name}: its mesh is {view}, but it is called {where} {mesh_view(outer)}: "
                "leave `mesh=` out"
            )
        if inside:
            mesh = outer  # it records which axes are Manual
        free = [axis for axis in mesh.axis_names if axis not in outer.manual_axes]
        wanted = self._options.axis_names or free
        others = [axis for axis in wanted if axis not in free]
        if others or not wanted:
            near = did_you_mean(others[0], free) if others else ""
            raise ShardingError(
                f"{name}: `axis_names` ({', '.join(wanted) or 'none'}) must be axes of the mesh "
                f"{view} that are not Manual yet ({', '.join(free) or 'none'}){near}"
            )
        return ManualMesh(mesh, frozenset(wanted))


def _traced_once(
    signature: Signature,
    fun: Callable[[], AnyFunction],
    group: CallGroup,
    shapes: Shapes,
    rules: Layout | None,
) -> Callable[..., Output]:
    """Return the user's function of local arrays. JAX traces it once for each set of types."""

    def body(*arrays: jax.Array) -> Output:
        call, sizes = group.skeleton.fill(arrays), Sizes()
        if shapes == "local":
            sizes = check_sizes(signature.name, read(call).leaves, where="local")
        with axis_rules(rules):
            result = signature.run(fun(), call)
        if shapes == "local":
            check_sizes(signature.name, read(signature.result(result)).leaves, sizes, "local")
        return Output.of(result, signature.name)

    body.__name__ = body.__qualname__ = signature.name.rpartition(".")[2]
    return jax.jit(body)


def _run_mapped(
    traced: Callable[..., Output],
    signature: Signature,
    options: MapOptions,
    manual: ManualMesh,
    in_specs: Sequence[PartitionSpec],
    sizes: Sizes,
    arrays: Sequence[AnyArray],
) -> Output:
    """Run a function of local arrays on global arrays, with `jax.shard_map`."""
    # The specs of the result depend on its structure, which is unknown until the body has run. JAX
    # reads `out_specs` only after that, so the body can fill the list. To fill the list earlier,
    # functree would have to trace the function twice.
    out_specs: list[PartitionSpec] = []
    outputs: list[Output] = []

    def body(*arrays: jax.Array) -> list[jax.Array]:
        output = traced(*arrays)
        outputs.append(output)
        out_specs.extend(_specs_of_result(output, signature, options, manual))
        return list(output.values)

    # JAX's messages and profiles show the name of the user's function.
    body.__name__ = body.__qualname__ = traced.__name__
    # An empty set means all axes. Naming all axes would be wrong under a `vmap` on an Explicit
    # mesh, since the `vmap` removes an axis.
    axis_names = manual.axes
    if axis_names == set(manual.mesh.axis_names):
        axis_names = frozenset()
    inputs = list(map(manual.reshard, arrays, in_specs))
    with jax.sharding.use_abstract_mesh(abstract_mesh(manual.mesh)):
        run = jax.shard_map(
            body,
            mesh=manual.mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=options.check_vma,
        )
        values = run(*inputs)
    output = Output(values, outputs[0].skeleton)
    if options.shapes == "global":
        check_sizes(signature.name, read(signature.result(output.tree)).leaves, sizes, "global")
    return output


def _specs_of_result(
    output: Output, signature: Signature, options: MapOptions, manual: ManualMesh
) -> Sequence[PartitionSpec]:
    """Return the spec of each array of a local result."""
    layout = options.rules if options.out_specs is None else options.out_specs
    leaves, parts = read_for(signature.result(output.tree), signature.result(layout))
    if options.out_specs is None:
        parts = as_partial(parts)  # a result such as a loss need not use all rules
    specs, problems = manual.lay(leaves, parts, local=True)
    if options.check_vma and not problems:
        # JAX checks this too, but its message contains no path.
        for leaf, spec in zip(leaves.leaves, specs, strict=True):
            problems += manual.varying(leaf, spec)
    if problems:
        raise refuse(problems, mesh_view(manual.mesh), f"{signature.name}: ")
    return specs


class MapKeywords(TypedDict, total=False):
    """The options of `ft.shard_map`, as users write them."""

    mesh: Mesh | AbstractMesh | None
    in_specs: LayoutTree
    out_specs: LayoutTree
    rules: LayoutLike
    axis_names: Collection[str] | None
    check_vma: bool
    shapes: Shapes


@overload
def shard_map(fun: Callable[_P, _T], **options: Unpack[MapKeywords]) -> Mapped[_P, _T]: ...
@overload
def shard_map(
    fun: None = None, **options: Unpack[MapKeywords]
) -> Callable[[Callable[_P, _T]], Mapped[_P, _T]]: ...
@checked("shard_map: invalid arguments")
def shard_map(
    fun: Annotated[Callable[_P, _T], FUNCTION] | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: LayoutTree = None,
    out_specs: LayoutTree = None,
    rules: LayoutLike = None,
    axis_names: Annotated[Collection[str], TEXTS] | None = None,
    check_vma: Flag = True,
    shapes: Shapes = "global",
    **refused: object,
) -> Mapped[_P, _T] | Callable[[Callable[_P, _T]], Mapped[_P, _T]]:
    """Run a function on each device, with that device's shards of the arrays.

    The function gets local arrays and may use collectives (`jax.lax.psum(x, "model")`). Its
    arguments and results may be modules and containers. Values that are not arrays, including
    Python numbers, are passed unchanged. These values are static, so each different value triggers
    a compilation. One program is compiled for each structure, set of shapes and mesh. As under
    `jax.jit`, the function is traced once for each program. The layouts of the result need no
    second trace. A function that closes over traced values is traced in each call.

    Args:
        fun: a function, a method, a partial, or a callable module. Bound values, such as `self`,
            are arguments too.
        mesh: a mesh. The default is the current mesh, or otherwise the mesh of the arguments.
        in_specs: the layouts of the arguments: one entry for each positional parameter, a dict by
            parameter name, or one layout for all. An entry is a layout or a prefix tree of layouts.
            Pass a single entry for `*args`. Pass `None` for a value that is not an array, and for
            arrays on Explicit axes, since their types contain their specs.
        out_specs: the layout of the result, or a prefix tree of layouts. It is resolved for the
            local result.
        rules: the layout to use if `in_specs` or `out_specs` is missing. It uses the axis names in
            the annotations of the function and of its modules. The rules are ambient in the body.
        axis_names: the mesh axes that become Manual. By default, they are all mesh axes that are
            not Manual yet. Rules for other mesh axes do not apply.
        check_vma: whether to check, as in JAX, that all devices compute equal values where
            `out_specs` replicates a result. Autodiff then inserts the collectives that gradients
            need.
        shapes: the arrays whose sizes the annotations describe: `"global"` for the arguments and
            results outside the function, `"local"` for the arrays in the body, or `None` for no
            check.

    Returns:
        A function with the same signature, and with `trace`, `lower`, `eval_shape` and
            `compilations` as in `ft.jit`. Under other transforms, the function becomes part of
            their program.

    Raises:
        FunctreeError: if `fun` is not a function.
        FunctreeError: if an option is unknown or invalid.
        RuleError: if `in_specs` does not have the structure of the parameters.
        RuleError: (when called) if a layout does not have the structure of its tree.
        ShardingError: if `mesh` has only sizes.
        ShardingError: (when called) if an array has no layout. The message gives its path.
        ShardingError: (when called) if an array's layout does not fit. The message gives its path.
        ShardingError: (when called) if there is no mesh.
        ShardingError: (when called) if `axis_names` contains an axis that the mesh lacks.
        ShardingError: (when called) if a mesh axis in `axis_names` is already Manual.
        ShardingError: (when called) if a spec replicates a result that may differ between devices.
        AxesError: (when called) if an array does not match its annotation. If sizes differ, the
            message gives the argument, the axis and both sizes.

    Gradients:
        Inside the function, a mean over a local batch is a local mean. Apply `jax.lax.pmean` to it
        in the loss that `jax.grad` differentiates. With `check_vma=True`, JAX sums the gradient of
        a replicated parameter over the devices. The gradient of a *local* mean is then too large:
        it is multiplied by the number of devices. With `check_vma=False`, each device computes only
        its own part of the gradient. A gradient that is taken outside the function is correct in
        both cases.

    Examples:
        >>> rules = ft.AxisRules(
        ...     {"batch": "data", "hidden": "model", "embed": None}
        ... )
        >>> @ft.shard_map(mesh=ft.make_mesh(data=2, model=4), rules=rules)
        ... def ffn(
        ...     x: Float[Array, "batch embed"],
        ...     up: Float[Array, "embed hidden"],
        ...     down: Float[Array, "hidden embed"],
        ... ) -> Float[Array, "batch embed"]:
        ...     return jax.lax.psum(jax.nn.relu(x @ up) @ down, "model")
        >>> y = ffn(jnp.ones((4, 6)), jnp.ones((6, 8)), down=jnp.ones((8, 6)))
        >>> y.sharding.shard_shape(y.shape)
        (2, 6)
    """
    for name in refused:
        near = did_you_mean(name, MapKeywords.__annotations__)
        raise FunctreeTypeError(f"shard_map has no option `{name}`{near}")
    # Sizes are enough for a plan, but a program is compiled for devices.
    if mesh is not None and mesh_view(mesh).mesh is None:
        raise ShardingError("shard_map: `mesh` has only sizes: pass a `Mesh` with devices")
    layout = None if rules is None else as_layout(rules)
    # The containers of layouts are copied, so that later changes cannot affect shared traces.
    layouts = copied(in_specs), copied(out_specs)
    manual = None if axis_names is None else tuple(axis_names)
    options = MapOptions(mesh, *layouts, layout, manual, check_vma, shapes)

    def wrap(fun: Callable[_P, _T]) -> Mapped[_P, _T]:
        return Mapped.of(fun, options)

    return wrap if fun is None else wrap(fun)
