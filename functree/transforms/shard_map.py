"""A function of local arrays, and the options of `ft.shard_map` ─► a function of global arrays."""

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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.argument_checks import FUNCTION, TEXTS, Flag, check, checked, parameter_error, shown
from functree.calls.body import Arguments, Body
from functree.calls.call_groups import CallGroup, FlatCall
from functree.calls.function import Function
from functree.calls.output import Output
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Program, make_program
from functree.calls.signature import AnyFunction, Signature
from functree.devices.meshes import (
    NO_MESH,
    MeshLike,
    MeshView,
    abstract_mesh,
    current_mesh,
    mesh_view,
    tracing,
)
from functree.devices.placement import first_mesh, is_concrete, sharding_text
from functree.devices.specs import axes_text, named_axes, spec_text, typed_spec, without
from functree.devices.varying import varying_axes
from functree.errors import FunctreeTypeError, Problem, ShardingError, did_you_mean
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves
from functree.layout.decide import UNSPECIFIED
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
)
from functree.layout.plan.make_plan import plan_leaves, read_for
from functree.placing.ambient import Surroundings, axis_rules
from functree.transforms.typed import Sizes, check_sizes
from functree.tree.arrays import AnyArray

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


class PartialView(MeshView):
    """A mesh of which some axes count as one device in a plan. Messages show the real sizes."""

    def __str__(self) -> str:
        return str(mesh_view(self.mesh))


class ManualMesh(NamedTuple):
    """The mesh of a shard_map.

    Attributes:
        mesh: the mesh outside of the body. Axes that an outer shard_map has made Manual are Manual
            in it.
        axes: the mesh axes that this shard_map makes Manual.
    """

    mesh: Mesh | AbstractMesh
    axes: frozenset[str]

    @property
    def explicit(self) -> bool:
        """Whether the mesh axes that become Manual are Explicit outside, so that the types of
        arrays have specs."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(types[axis] == AxisType.Explicit for axis in self.axes)

    def lay(
        self, leaves: Leaves, parts: Sequence[Part], *, local: bool = False
    ) -> tuple[tuple[PartitionSpec, ...], list[Problem]]:
        """Lay out a tree.

        Args:
            leaves: the leaves of the tree.
            parts: its layouts.
            local: whether the arrays are local: every axis counts as one device then, so each size
                fits. Of global arrays the sizes have to be divisible by the Manual axes, and on
                Explicit axes one without a layout has the spec in its type.

        Returns:
            The spec of each leaf, restricted to the Manual axes, and what is wrong.
        """
        sizes = dict.fromkeys(self.mesh.shape, 1)
        if not local:
            sizes.update((axis, self.mesh.shape[axis]) for axis in self.axes)
        # `same`: one array at two places may have two specs here, since nothing is placed.
        plan = plan_leaves(
            leaves,
            parts,
            PartialView(sizes, self.mesh),
            check=False,
            same=range(len(leaves.leaves)),
            allow_unspecified=True,
        )
        problems, specs = [*plan.problems, *self._outside(leaves, parts)], list[PartitionSpec]()
        for leaf, row in zip(leaves.leaves, plan.rows, strict=True):
            spec = row.spec
            if row.memory_kind is not None:
                why = f"is laid out in {row.memory_kind}, "
                why += "but shard_map moves no array to another memory"
                remedy = "move it before or after, by `ft.shard` or `ft.jit`"
                problems.append(leaf.problem(why, remedy))
            if spec is None and not local and self.explicit and not is_untyped(leaf.value):
                spec = typed_spec(leaf.value)
            if spec is None:
                problems.append(leaf.problem(*UNSPECIFIED))
            specs.append(self.project(spec or PartitionSpec()))
        return tuple(specs), problems

    def _outside(self, leaves: Leaves, parts: Sequence[Part]) -> list[Problem]:
        """Problems of `P`s that name a mesh axis which does not become Manual here.

        Rules may name other mesh axes: they are made for more than this function, and lose those
        axes here.
        """
        problems: list[Problem] = []
        for part in parts:
            if not isinstance(part.layout, SpecLayout):
                continue
            spec = part.layout.spec
            others = named_axes(spec).intersection(self.mesh.axis_names) - self.axes
            if not others:
                continue
            manual = axes_text(sorted(self.axes))
            why = f"{spec_text(spec)} names {axes_text(sorted(others))}, "
            why += f"but only {manual} is manual here"
            remedy = "leave it out of the spec, or add it to `axis_names`"
            for leaf in leaves.leaves:
                if leaf.path[: len(part.path)] == part.path:
                    problems.append(leaf.problem(why, remedy))
        return problems

    def project(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec without the mesh axes that are not Manual here."""
        return without(spec, set(self.mesh.axis_names) - self.axes)

    # Problems that a plan does not find

    def misplaced(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """The problem of an array that JAX would not move: on other devices, or on Explicit axes
        of another mesh or with another spec."""
        value, why, remedy = leaf.value, "", "move it to the mesh with `ft.shard`"
        # JAX moves an array of NumPy, and an abstract one is on no device.
        committed = is_concrete(value) and value.committed
        devices = set(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else None
        if committed and devices is not None and value.sharding.device_set != devices:
            why = f"is sharded {sharding_text(value.sharding)}, but the mesh has other devices"
        elif not is_untyped(value):
            have, mesh = typed_spec(value), jax.typeof(value).sharding.mesh
            if have is None and self.explicit:
                why = f"its type is on a mesh of Auto axes, {mesh_view(mesh)}"
            elif have is not None and mesh.axis_names != self.mesh.axis_names:
                why = f"its type is on a mesh of Explicit axes, {mesh_view(mesh)}"
            elif have is not None and self.explicit and self.project(have) != spec:
                why = f"its type is sharded {spec_text(self.project(have))}, "
                why += f"but its spec is {spec_text(spec)}; Explicit axes are not moved"
                remedy = "apply `jax.sharding.reshard` before, or write the spec of its type"
        if not why:
            return []
        return [leaf.problem(why, remedy)]

    def varying(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """The problem of a result that may differ between devices although its spec says that it is
        replicated."""
        unnamed = sorted((varying_axes(leaf.value) & self.axes) - named_axes(spec))
        if not unnamed:
            return []
        axes = axes_text(unnamed)
        why = f"{spec_text(spec)} says that it is the same along {axes}, but it may differ there"
        remedy = f"reduce it (`jax.lax.psum`, `pmean`) over {axes}, or name {axes} in its spec; "
        return [
            leaf.problem(why, remedy + "or pass `check_vma=False` if you know that it is the same")
        ]

    def reshard(self, value: Any, spec: PartitionSpec) -> Any:
        """An argument for `jax.shard_map`: on Explicit axes, an array without a sharding in its
        type gets its spec."""
        if not self.explicit or not is_untyped(value):
            return value
        return jax.sharding.reshard(value, NamedSharding(self.mesh, spec))


def is_untyped(value: Any) -> bool:
    """Whether the type of an array has no sharding: the array is on one device, or NumPy's."""
    return jax.typeof(value).sharding.mesh.empty


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
    _door = "shard_map"

    def _set_up(self) -> None:
        # Parameters without an entry are laid out by the rules.
        options = self._options
        given = {} if options.in_specs is None else options.in_specs
        self._layouts = ParameterLayouts("in_specs", given, self._signature, options.rules)

    def _key(self, flat: FlatCall, rules: Layout | None) -> Hashable:
        # In the trace of an outer function, custom derivative rules have to keep the rules of the
        # body.
        return (tracing(), self._manual_mesh(flat.arrays), rules, *flat.kinds())

    def _program(self, flat: FlatCall) -> Program:
        manual, rules = self._manual_mesh(flat.arrays), self._rules()
        compute = self._computation(flat, manual, rules)
        # The mesh of a rule that is run later is that of the body, whose axes are Manual: JAX
        # restores it.
        context = functools.partial(Surroundings(None, rules).entered, ())
        arguments = Arguments(flat.group.paths, ())
        body = Body(compute, arguments, self._traces, context)
        program, traced = make_program(
            flat.group, body, flat.arrays, mesh=manual.mesh, rules=rules, options={"inline": True}
        )
        # JAX passes traced arrays that a function closes over as further arguments.
        if traced is not None and len(traced.jaxpr.in_avals) > len(flat.arrays):
            return replace(program, is_kept=False)
        return program

    def _computation(
        self, flat: FlatCall, manual: ManualMesh, rules: Layout | None
    ) -> Callable[[Sequence[AnyArray]], Output]:
        """The function from global arrays to global arrays, for calls like this one.

        Raises:
            ShardingError: the layouts do not fit the call.
            AxesError: the arrays are not as annotated.
        """
        options, signature, group = self._options, self._signature, flat.group
        leaves, parts = self._layouts.read(flat.call)
        specs, problems = manual.lay(leaves, parts)
        sizes: Sizes = {}
        if options.shapes == "global":
            sizes = check_sizes(signature.name, flat.call, leaves.leaves, where="global")
        for leaf, spec in zip(leaves.leaves, specs, strict=True):
            problems += manual.misplaced(leaf, spec)
        if problems:
            raise refuse(problems, mesh_view(manual.mesh), f"{signature.name}: ")
        traced = _traced_once(signature, self._traces.fun, group, options.shapes, rules)
        if not tracing():
            # Programs that differ only in where their arguments are share one trace of the user's
            # function.
            traced = group.bodies.setdefault((manual, rules), traced)

        # No reference to `self`, which holds the function: the group is kept as long as this is.
        def compute(arrays: Sequence[AnyArray]) -> Output:
            output = _run_mapped(traced, signature, options, manual, specs, arrays)
            if options.shapes == "global":
                record = signature.result(output.tree)
                check_sizes(signature.name, record, known=sizes, where="global")
            return output

        return compute

    def _manual_mesh(self, arrays: Iterable[AnyArray]) -> ManualMesh:
        """The mesh of a call, and the mesh axes that become Manual."""
        name, outer = self._signature.name, jax.sharding.get_abstract_mesh()
        mesh = self._options.mesh or current_mesh() or first_mesh(arrays)
        if mesh is None:
            raise ShardingError(f"{name}: there is no mesh: {NO_MESH}")
        view = mesh_view(mesh)
        where = ""
        if outer.manual_axes and dict(mesh.shape) != dict(outer.shape):
            where = f"inside a shard_map over {mesh_view(outer)}"
        elif tracing() and not outer.empty and outer.size != mesh.size:
            # JAX would say it of a context that the user has not entered.
            where = f"on the mesh {mesh_view(outer)}, of another number of devices"
        if where:
            raise ShardingError(
                f"{name}: its mesh is {view}, but it is called {where}: leave `mesh=` out"
            )
        if outer.manual_axes:
            mesh = outer  # it records which axes are Manual
        free = [axis for axis in mesh.axis_names if axis not in outer.manual_axes]
        wanted = self._options.axis_names or free
        if not wanted:
            raise ShardingError(f"{name}: all axes of the mesh {view} are manual already")
        for axis in wanted:
            if axis not in free:
                why = f"is not in the mesh {view}{did_you_mean(axis, free)}"
                if axis in outer.manual_axes:
                    why = f"is manual already, on the mesh {view}"
                raise ShardingError(f"{name}: `{axis}` in `axis_names` {why}")
        return ManualMesh(mesh, frozenset(wanted))


def _traced_once(
    signature: Signature,
    fun: Callable[[], AnyFunction],
    group: CallGroup,
    shapes: Shapes,
    rules: Layout | None,
) -> Callable[..., Output]:
    """The user's function of local arrays, which JAX traces once for arguments of one type."""

    def body(*arrays: jax.Array) -> Output:
        call, sizes = group.skeleton.fill(arrays), Sizes()
        if shapes == "local":
            sizes = check_sizes(signature.name, call, where="local")
        with axis_rules(rules):
            result = signature.run(fun(), call)
        if shapes == "local":
            check_sizes(signature.name, signature.result(result), known=sizes, where="local")
        return Output.of(result, signature.name)

    body.__name__ = body.__qualname__ = signature.name.rpartition(".")[2]
    return jax.jit(body)


def _run_mapped(
    traced: Callable[..., Output],
    signature: Signature,
    options: MapOptions,
    manual: ManualMesh,
    in_specs: Sequence[PartitionSpec],
    arrays: Sequence[AnyArray],
) -> Output:
    """Run a function of local arrays on global ones, by `jax.shard_map`."""
    # The specs of the result depend on its structure, which is known after the body has run. JAX
    # reads `out_specs` only then, so the body appends to the list. Otherwise the function would be
    # traced twice.
    out_specs: list[PartitionSpec] = []
    outputs: list[Output] = []

    def body(*arrays: jax.Array) -> list[jax.Array]:
        output = traced(*arrays)
        outputs.append(output)
        out_specs.extend(_specs_of_result(output, signature, options, manual))
        return list(output.values)

    # The name is that of the user's function in JAX's messages and in profiles.
    body.__name__ = body.__qualname__ = traced.__name__
    # Not named if they are all: a `vmap` on an Explicit mesh takes one of them away.
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
    return Output(values, outputs[0].skeleton)


def _specs_of_result(
    output: Output, signature: Signature, options: MapOptions, manual: ManualMesh
) -> Sequence[PartitionSpec]:
    """The spec of each array of a local result."""
    layout = options.rules if options.out_specs is None else options.out_specs
    leaves, parts = read_for(signature.result(output.tree), signature.result(layout))
    if options.out_specs is None:
        parts = as_partial(parts)  # a result may be anything, such as a loss
    specs, problems = manual.lay(leaves, parts, local=True)
    if options.check_vma and not problems:
        # JAX checks this too, but its message has no path.
        for leaf, spec in zip(leaves.leaves, specs, strict=True):
            problems += manual.varying(leaf, spec)
    if problems:
        raise refuse(problems, mesh_view(manual.mesh), f"{signature.name}: ")
    return specs


class MapKeywords(TypedDict, total=False):
    """The options of `ft.shard_map` as they are written."""

    mesh: MeshLike
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
@checked("shard_map cannot map so")
def shard_map(
    fun: Annotated[Callable[_P, _T], FUNCTION] | None = None,
    *,
    mesh: MeshLike = None,
    in_specs: LayoutTree = None,
    out_specs: LayoutTree = None,
    rules: LayoutLike = None,
    axis_names: Collection[str] | None = None,
    check_vma: Flag = True,
    shapes: Shapes = "global",
    **refused: object,
) -> Mapped[_P, _T] | Callable[[Callable[_P, _T]], Mapped[_P, _T]]:
    """Run a function on each device with its shards of the arrays.

    The function sees local arrays and may use collectives (`jax.lax.psum(x, "model")`). It may take
    and return modules and containers. Values that are not arrays, Python numbers included, are
    passed through and are static: another value needs another program. One program is compiled for
    each structure, shapes and mesh, and the function is traced once for each, as under `jax.jit`;
    the layouts of the result need no second trace. A function that closes over traced values is
    traced on each call.

    Args:
        fun: a function, a method, a partial, or a callable module. What is bound to it, such as
            `self`, is an argument too.
        mesh: a mesh. If it is not given, it is the current mesh, or else the mesh of the arguments.
        in_specs: the layouts of the arguments: one entry for each positional parameter, or a dict
            by parameter name, each entry a layout or a prefix tree of layouts; or one layout for
            all. `*args` has a single entry. `None` is the entry of a value that is not an array,
            and of arrays on Explicit axes, whose types have their specs.
        out_specs: the layout of the result, or a prefix tree of layouts. A layout sees the local
            result.
        rules: the layout where `in_specs` or `out_specs` is not given, by the annotations of the
            function and of its modules. They are ambient in the body.
        axis_names: the mesh axes that become Manual; by default all that are not Manual yet. Rules
            lose the others.
        check_vma: as in JAX: check that a result which `out_specs` say is replicated is the same on
            all devices, and let autodiff insert the collectives that this needs.
        shapes: which sizes the annotations mean: `"global"`, those of the arguments and results
            outside; `"local"`, those of the arrays in the body; None for no check.

    Returns:
        A function of the same signature, with `trace`, `lower`, `eval_shape` and `compilations` as
            in `ft.jit`. Under other transforms it becomes a part of their program.

    Raises:
        FunctreeError: an option is unknown or has a wrong value.
        RuleError: (when called) `in_specs` does not have the structure of the parameters or of a
            tree.
        ShardingError: (when called) an array has no layout or its layout does not fit, by path;
            there is no mesh.
        AxesError: (when called) an array is not as annotated; the message has the argument, the
            axis and both sizes.

    Gradients:
        A mean over a local batch is a local mean: inside the function, take `jax.lax.pmean` of it
        before `jax.grad`. With `check_vma=True`, JAX sums the gradient with respect to a replicated
        parameter over the devices. So the gradient of a *local* mean is too large, by the number of
        devices. With `check_vma=False` it is the gradient of one device only. A gradient that is
        taken outside of the function is right in both cases.

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
        raise FunctreeTypeError(_REFUSED.get(name, f"shard_map has no option `{name}`"))
    # By type first: `in` would compare an array element by element.
    if not (shapes is None or isinstance(shapes, str)) or shapes not in ("global", "local", None):
        raise parameter_error(
            f'shard_map: shapes={shown(shapes)} is not one of "global", "local", None',
            right_type=isinstance(shapes, str),
        )
    # A string is a collection of strings too, of its characters.
    if isinstance(axis_names, str):
        raise FunctreeTypeError(
            f"shard_map: axis_names={axis_names!r} is a string: use a set, {{{axis_names!r}}}"
        )
    check("shard_map cannot map so", axis_names=(axis_names, TEXTS.or_none()))
    # `mesh_view` also takes None, as the current mesh; here None means the mesh of each call.
    given_mesh = None
    if mesh is not None:
        given_mesh = mesh_view(mesh).mesh
        if given_mesh is None:
            raise ShardingError("shard_map runs on devices: give a `Mesh`, not sizes")
    layout = None if rules is None else as_layout(rules)
    # Copies, because the traces are shared by the options as they are now.
    layouts = copied(in_specs), copied(out_specs)
    manual = None if axis_names is None else tuple(axis_names)
    options = MapOptions(given_mesh, *layouts, layout, manual, check_vma, shapes)

    def wrap(fun: Callable[_P, _T]) -> Mapped[_P, _T]:
        return Mapped.of(fun, options)

    return wrap if fun is None else wrap(fun)


# Earlier versions of JAX had these.
_REFUSED = {
    "check_rep": "shard_map: use `check_vma=` instead of check_rep",
    "auto": (
        "shard_map: use `axis_names=`, the mesh axes that become manual, instead of auto, those "
        "that do not"
    ),
}
