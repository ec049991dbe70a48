"""`Jit` places the arguments of a call, and finds or makes the program that runs the call.

A function and the options of `ft.jit` ─► a `Jit`, or a `CheckedJit`, which runs only if all
processes compile the same program.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Traced
from jax.tree_util import tree_map

from functree.calls.body import Arguments, Body, Output, donated_indices
from functree.calls.call_groups import FlatCall
from functree.calls.checks import (
    check_donated,
    check_mesh,
    warn_constants,
    warn_grouped_convolutions,
)
from functree.calls.function import Function
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Program, Shardings, make_program
from functree.calls.signature import Args, Kwargs, opened
from functree.devices.meshes import NO_MESH, current_mesh, tracing, without_devices
from functree.devices.placement import (
    first_mesh,
    is_concrete,
    is_deleted,
    refuse_deleted,
    with_devices_of,
)
from functree.errors import ShardingError, listed, warn
from functree.layout.layout import Layout, LayoutTree
from functree.layout.state_sharding import has_filters
from functree.placing.constrain import Surroundings
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import facts_of, has_values_here, settings, value_text
from functree.surgery.pack import Packed, pack
from functree.transforms.jit.layouts import (
    Donated,
    Placement,
    StateForm,
    by_in_shardings,
    by_rules,
    check_rules,
    closed,
    is_unplaced,
    is_worth_telling,
    resolve_out_shardings,
    state_form,
    warn_unplaced,
    warn_without_mesh,
)
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

_P = ParamSpec("_P")
_T = TypeVar("_T")


class JitOptions(NamedTuple):
    """The options of `ft.jit`."""

    in_shardings: LayoutTree
    out_shardings: LayoutTree
    mesh: Mesh | AbstractMesh | None
    rules: Layout | None
    donated: frozenset[str]
    static: frozenset[str]
    jax: Mapping[str, Any]  # options that are passed to `jax.jit`


class Jit(Function[_P, _T]):
    """A function that `ft.jit` compiles once for each structure and set of argument types.

    Attributes:
        compilations: a record for each program that the function has used, or that
            `.lower(...).compile()` compiled, with the differences from the most similar earlier
            program. Wrappers of one function with equal options share traces and programs. If
            another wrapper compiled a program, the program's record is marked as shared.
        static: the names of the parameters that are static, whatever their values.

    Examples:
        >>> double = ft.jit(lambda x: 2 * x)
        >>> _ = double(jnp.ones(3)), double(jnp.ones(4))
        >>> print(double.compilations[1])
        compilation 2: x: shape (3,) → (4,)
    """

    _options: JitOptions
    _door = "jit"
    _places = True

    def _set_up(self) -> None:
        options = self._options
        self._layouts: ParameterLayouts | None = None
        if options.in_shardings is not None:
            self._layouts = ParameterLayouts("in_shardings", options.in_shardings, self._signature)
        # How many times the array at each path was placed.
        self._placings: Counter[Path] = Counter()
        # Without layouts and donation, a `Program` does not depend on its arguments' shardings. The
        # key then stays short, and JAX compiles one program for each set of shardings.
        has_layouts = options.in_shardings is not None or options.out_shardings is not None
        self._by_shardings = has_layouts or bool(options.donated)

    @property
    def layouts(self) -> dict[str, LayoutTree]:
        """The options that are layouts, by name."""
        names = ("in_shardings", "out_shardings", "rules")
        return {name: getattr(self._options, name) for name in names}

    def _key(self, flat: FlatCall, rules: Layout | None) -> Hashable:
        # In the trace of an outer function, a program donates nothing, and has constraints instead
        # of shardings.
        start = (tracing(), self._options.mesh or current_mesh(), rules)
        if self._by_shardings:
            return (*start, *flat.kinds())
        return (*start, flat.placement())

    def _placed(self, flat: FlatCall, rules: Layout | None) -> FlatCall:
        if (rules is None and self._layouts is None) or flat.all_placed():
            return flat
        group, arrays = flat.group, flat.arrays
        moving: dict[int, AnyArray] = {}
        for i, (path, array) in enumerate(zip(group.paths, arrays, strict=True)):
            # An entry of `in_shardings` constrains every tracer, since a tracer's sharding is
            # unknown.
            if is_unplaced(array) or (isinstance(array, Tracer) and self._has_entry(path)):
                moving[i] = array
        if not moving:
            return flat
        mesh = self._options.mesh or current_mesh()
        if mesh is None and not flat.on_no_mesh():
            mesh = first_mesh(arrays)
        kinds = [(i, x.shape, x.dtype, isinstance(x, Tracer)) for i, x in moving.items()]
        key = (mesh, rules, *kinds)
        placement = group.placements.get(key)
        if placement is None:
            placement = self._placement(flat, moving, rules, mesh)
            group.placements[key] = placement
        # JAX would report a deleted array without its path.
        if any(map(is_deleted, [arrays[i] for i in placement.shardings])):
            raise refuse_deleted(self._signature.name, group.paths, arrays)
        if placement.can_run:
            self._warn_placed(flat, placement)
        new = placement.place(arrays)
        return FlatCall(flat.call, group, new, all(map(is_concrete, new)))

    def _placement(
        self,
        flat: FlatCall,
        moving: Mapping[int, AnyArray],
        rules: Layout | None,
        mesh: Mesh | AbstractMesh | None,
    ) -> Placement:
        """Decide where the uncommitted arrays of a call are placed.

        Arrays with an entry in `in_shardings` are placed according to this entry, and all other
        arrays according to the rules.
        """
        paths, shardings = flat.group.paths, dict[int, NamedSharding]()
        if self._layouts is not None:
            mesh, wanted = by_in_shardings(flat.call, flat.arrays, self._layouts, mesh)
            shardings |= {i: sharding for i in moving if (sharding := wanted[i]) is not None}
        others = {i: array for i, array in moving.items() if not self._has_entry(paths[i])}
        # Inside `shard_map`, arrays are local, but the rules describe global arrays.
        is_global = not jax.sharding.get_abstract_mesh().manual_axes
        if others and rules is not None and mesh is not None and is_global:
            shardings |= by_rules(flat.call, others, rules, self._signature, mesh)
        can_run = mesh is not None and without_devices(mesh) is None
        return Placement(shardings, can_run, donated_indices(paths, self._options.donated))

    def _warn_placed(self, flat: FlatCall, placement: Placement) -> None:
        """Warn about arrays that a second call places again."""
        again: list[str] = []
        for i in placement.shardings:
            path, array = flat.group.paths[i], flat.arrays[i]
            if isinstance(array, Tracer | jax.ShapeDtypeStruct) or not is_worth_telling(array):
                continue
            # Without an entry in `in_shardings`, a NumPy array must be moved in each call in any
            # case.
            if is_concrete(array) or self._has_entry(path):
                self._placings[path] += 1
                if self._placings[path] == 2:
                    again.append(f"`{path}`")
        if again:
            warn(
                f"{self._signature.name}: each call places {listed(again)} again: call `ft.shard` "
                "once, before the calls"
            )

    def _has_entry(self, path: Path) -> bool:
        """Return whether `in_shardings` has an entry for a path. The entry may be `None`."""
        return self._layouts is not None and self._layouts.has_entry(path)

    def _program(self, flat: FlatCall) -> Program:
        name, options = self._signature.name, self._options
        group, arrays = flat.group, flat.arrays
        # The filters of ambient rules are not checked, since such rules serve several functions.
        if options.rules is not None and has_filters(options.rules):
            check_rules(flat.call, options.rules, self._signature)
        if not tracing() and self._rules() is None:
            warn_unplaced(name, group.paths, arrays, self._has_entry)
        mesh, of_arguments = self._mesh(arrays), None
        if mesh is None:
            of_arguments = first_mesh(arrays)
            # A program that does not depend on its arguments' shardings serves every mesh.
            mesh = of_arguments if self._by_shardings else None
        if self._layouts is not None:
            mesh, _ = by_in_shardings(flat.call, arrays, self._layouts, mesh)
        check_mesh(name, group.paths, arrays, mesh)
        # JAX would report a deleted array without its path.
        if any(map(is_deleted, arrays)):
            raise refuse_deleted(name, group.paths, arrays)
        surroundings = Surroundings(mesh or of_arguments, self._rules())
        if surroundings.mesh is None and options.rules is not None and not tracing():
            warn_without_mesh(name, arrays)
        body = self._body(flat, surroundings)
        if body.arguments.donated:
            check_donated(name, group.paths, arrays, body.arguments, by_buffer=True)
        lay_outputs: Callable[[Output], Shardings | None] | None = None
        if options.out_shardings is not None or options.donated:
            lay_outputs = functools.partial(self._lay_outputs, flat, mesh)
        program, traced = make_program(
            group,
            body,
            arrays,
            mesh=mesh,
            rules=surroundings.rules,
            entered=options.mesh if isinstance(options.mesh, Mesh) else None,
            options=options.jax,
            lay_outputs=lay_outputs,
            donates=bool(options.donated),
        )
        if traced is None:
            return program
        warn_constants(name, self._partial.fun, traced)
        warn_grouped_convolutions(name, traced, surroundings.mesh)
        return program if of_arguments is None else _on_mesh(program, traced, of_arguments)

    def _mesh(self, arrays: Sequence[AnyArray]) -> Mesh | AbstractMesh | None:
        """Return the mesh of a call, or None if the call's arguments determine the mesh."""
        if self._options.mesh is not None:
            return self._options.mesh
        mesh = current_mesh()
        if isinstance(mesh, AbstractMesh) and not tracing():
            # For example, an eager `jax.sharding.auto_axes` sets an abstract mesh. The arrays'
            # shardings contain the devices.
            return with_devices_of(mesh, arrays)
        return mesh

    def _body(self, flat: FlatCall, surroundings: Surroundings) -> Body:
        """Return the body for a call.

        All programs with the same surroundings and donated arrays share one body.
        """
        group, mesh = flat.group, surroundings.mesh
        donated = donated_indices(group.paths, self._options.donated)
        # If no mesh is known, the layouts of the result may still contain one.
        several = self._options.out_shardings is not None if mesh is None else mesh.size > 1
        if several:
            donated = tuple(i for i in donated if not _is_spread(flat.arrays[i]))
        body = group.bodies.get((surroundings, donated))
        if body is not None:
            return body
        signature, fun = self._signature, self._traces.fun
        packed = [value for _, value in group.skeleton.statics if isinstance(value, Skeleton)]

        # `compute` must not refer to `self`, which holds the user's function: the group's cache
        # would keep that function alive.
        def compute(arrays: Sequence[AnyArray]) -> Output:
            call = group.skeleton.fill(arrays)
            with surroundings.entered(arrays):
                values = opened(call)
                if packed:
                    values = _unpacked(values)
                result = signature.run(fun(), values)
            return Output.of(_repacked(result, packed), signature.name)

        arguments = Arguments(group.paths, donated)
        body = Body(compute, arguments, self._traces)
        group.bodies[surroundings, donated] = body
        return body

    def _lay_outputs(
        self, flat: FlatCall, mesh: Mesh | AbstractMesh | None, output: Output
    ) -> Shardings | None:
        """Return the sharding of each array of a result.

        Each sharding comes from `out_shardings`, or otherwise from the donated argument that the
        array replaces.
        """
        name, layouts = self._signature.name, self._options.out_shardings
        # The tree is built only now, since some classes' constructors refuse abstract arrays.
        result = output.tree
        given: Shardings = [None] * len(output.values)
        if layouts is not None:
            given = resolve_out_shardings(self._signature, result, layouts, mesh)
        shardings = closed(name, result, self._donated(flat), given)
        if all(sharding is None for sharding in shardings):
            return None
        return shardings

    def _donated(self, flat: FlatCall) -> Donated:
        """Return the donated arguments, with the shardings that parts of the result keep."""
        paths = flat.group.paths
        indices = set(donated_indices(paths, self._options.donated))
        donated = dict[StateForm, dict[Path, tuple[NamedSharding | None, ...]]]()
        for name, value in self._signature.each(flat.call):
            below = [i for i, path in enumerate(paths) if path[: len(name)] == name]
            if below and below[0] in indices:
                # A traced array's sharding is unknown.
                given = [getattr(flat.arrays[i], "sharding", None) for i in below]
                kept = tuple(x if isinstance(x, NamedSharding) else None for x in given)
                donated.setdefault(state_form(value), {})[Path(name)] = kept
        return donated


def _is_spread(array: AnyArray) -> bool:
    """Return whether an array is uncommitted, so that the compiler chooses its sharding.

    JAX copies such an array to the devices, so donating it saves no memory. XLA may even fail: it
    assigns the memory of a donated input to an output before it chooses the input's sharding.
    """
    has_value = not isinstance(array, Tracer | jax.ShapeDtypeStruct)
    return has_value and is_unplaced(array) and array.ndim > 0


def _uses_mesh(jaxpr: Any) -> bool:
    """Return whether the result of a function depends on an argument that is on a mesh."""
    needed = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(x) in needed for x in equation.outvars):
            needed.update(map(id, equation.invars))
    return any(id(x) in needed and not x.aval.sharding.mesh.empty for x in jaxpr.invars)


def _on_mesh(program: Program, traced: Traced, mesh: Mesh | AbstractMesh) -> Program:
    """Make a program run on the mesh of its arguments, even if its result depends on none of them.

    JAX drops unused arguments, and takes the devices from the remaining arguments. If it dropped
    all arguments on the mesh, the program would run on the default device.

    Raises:
        ShardingError: if the mesh is abstract, and a constraint would have no effect.
    """
    if _uses_mesh(traced.jaxpr.jaxpr):
        return program
    if isinstance(mesh, Mesh):
        return replace(program, entered=mesh)
    if "sharding_constraint" in str(traced.jaxpr):
        raise ShardingError(
            f"{program.name} constrains arrays on the mesh of its arguments, but its result "
            "depends on no argument on that mesh. JAX drops unused arguments, and the constraints "
            f"with them: {NO_MESH}, where `mesh` is a `Mesh`"
        )
    return program


# Packed trees


def _is_packed(node: object) -> bool:
    return isinstance(node, Packed)


def _unpacked(values: Sequence[Tree]) -> list[Tree]:
    """Unpack packed modules among the arguments, for the user's function."""
    return tree_map(lambda x: x.tree if _is_packed(x) else x, list(values), is_leaf=_is_packed)


def _repacked(result: Tree, packed: Sequence[Skeleton]) -> Tree:
    """Pack each outermost part of a result that has the structure of a packed argument."""
    if not packed:
        return result
    # The type of the root is compared first, since computing the skeleton of every node is slow.
    roots = {data[0] for skeleton in packed if (data := skeleton.treedef.node_data()) is not None}
    # The argument's skeleton is reused, so that the next call finds its group by identity.
    known = {skeleton: skeleton for skeleton in packed}

    def fits(node: Tree) -> bool:
        return type(node) in roots and Skeleton.of(node) in known

    def packed_again(node: Tree) -> Tree:
        if not fits(node):
            return node
        new = pack(node)
        return Packed(new.arrays, known[new.static])

    return tree_map(packed_again, result, is_leaf=fits)


# In several processes


class CheckedJit(Jit[_P, _T]):
    """A function that runs only if all processes compile the same program.

    `ft.jit(..., check_processes=True)` makes it.
    """

    def _set_up(self) -> None:
        super()._set_up()
        # The key of a program then includes all that a compilation depends on, but the settings.
        self._by_shardings = True
        self._agreed: set[Hashable] = set()  # the compilations on which all processes agree
        self._compares = False  # whether the current call will run, and is not only traced

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._compares = jax.process_count() > 1 and not tracing()
        return super().__call__(*args, **kwargs)

    def _prepare(self, args: Args, kwargs: Kwargs) -> tuple[Program, FlatCall]:
        """Prepare a call. Compare its compilation between processes, if the compilation is new."""
        if not self._compares:
            return super()._prepare(args, kwargs)
        try:
            with ExitStack() as stack:
                # All processes are at their first call, so an error here is raised in all of them.
                first = None if self._agreed else stack.enter_context(self._agreement())
                program, flat = super()._prepare(args, kwargs)
                key = program, tuple(settings())
                if key not in self._agreed:
                    agreement = first or stack.enter_context(self._agreement())
                    agreement.compare(lambda: _facts(program, flat))
            self._agreed.add(key)
            return program, flat
        finally:
            self._compares = False

    def _placed(self, flat: FlatCall, rules: Layout | None) -> FlatCall:
        """Place the arguments of a call, after comparing their values between processes.

        `ft.shard` compares values too. JAX would compare them when it places arguments, but JAX's
        message contains no paths.
        """
        places = rules is not None or self._layouts is not None
        if self._compares and places and any(map(has_values_here, flat.arrays)):
            with self._agreement() as agreement:
                agreement.compare(lambda: {"arguments": _argument_lines(flat)})
        return super()._placed(flat, rules)

    def _agreement(self) -> Agreement:
        return Agreement(f"{self.__name__} cannot run", f"{self.__name__}(...)")


def _facts(program: Program, flat: FlatCall) -> Facts:
    """Return the facts that must agree in all processes: settings, arguments, mesh and program."""
    facts: dict[str, list[str]] = {"settings": settings(), "arguments": _argument_lines(flat)}
    if program.mesh is not None:
        facts["mesh"] = facts_of(program.mesh)
    facts["program"] = facts_of(program.trace(flat.arrays).lower())
    return facts


def _argument_lines(flat: FlatCall) -> list[str]:
    """Format the arguments. Values that each process has a copy of must be equal."""
    pairs = zip(flat.group.paths, flat.arrays, strict=True)
    return [f"{path}: {value_text(array)}" for path, array in pairs]
