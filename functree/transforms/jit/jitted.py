"""A function and the options of `ft.jit` ─► `Jit`, with the key, the checks and the shardings of each call."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import tree_map

from functree.calls.body import Arguments, Body, donated_places
from functree.calls.call_groups import CallGroup, FoundCall
from functree.calls.checks import check_mesh, warn_constants, warn_placed
from functree.calls.donation import check_donated, is_deleted, refuse_deleted
from functree.calls.function import Function, on_several_devices
from functree.calls.output import Output
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Program, Shardings, prepare, traceable
from functree.calls.signature import Bound
from functree.calls.static_arguments import opened
from functree.calls.traces import Traces
from functree.errors import RuleError, ShardingError
from functree.layout.layout import Layout, LayoutTree
from functree.layout.meshes import NO_MESH, current_mesh, tracing
from functree.layout.placement import first_mesh, is_concrete, with_devices_of
from functree.placing.ambient import Surroundings, ambient_rules
from functree.placing.arguments import find_targets, is_unplaced, rules_for_parameters
from functree.transforms.jit.closed_state import Kept, StateForm, closed
from functree.transforms.jit.shardings import Inputs, inputs, outputs
from functree.tree.pack import Packed, pack
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
    jax: dict[str, Any]


class Jit(Function[_P, _T]):
    """A function that is compiled once for each structure of its arguments; made by `ft.jit`.

    Attributes:
        compilations: one record for each program that it has used, with what differed from the most similar earlier
            one. Wrappers of one function with equal options share traces and programs. The record of a
            program that another wrapper compiled is marked.

    Examples:
        >>> double = ft.jit(lambda x: 2 * x)
        >>> _ = double(jnp.ones(3)), double(jnp.ones(4))
        >>> print(double.compilations[1])
        compilation 2: x: shape (3,) → (4,)
    """

    def __init__(self, fun: Callable[_P, _T], bound: Bound, traces: Traces, options: JitOptions):
        super().__init__(fun, bound, traces, options.static)
        self._options = options
        given = options.in_shardings
        self._layouts = None if given is None else ParameterLayouts("in_shardings", given, traces.signature)
        if self._layouts is not None:
            _check_static(self._layouts, options.static)
        # How often the rules have placed the array at a path.
        self._placings: Counter[Path] = Counter()
        # Without layouts and donation our part of a program does not depend on the shardings of the arguments. JAX then
        # distinguishes its own programs by them, and the key stays short.
        self._laid_out = bool(options.donated) or given is not None or options.out_shardings is not None

    def __repr__(self) -> str:
        return f"<ft.jit of {self._signature.name}>"

    def _rules(self) -> Layout | None:
        return self._options.rules if self._options.rules is not None else ambient_rules()

    def _key(self, found: FoundCall, rules: Layout | None) -> Hashable:
        # In the trace of an outer function a program donates nothing, and has constraints in the place of shardings.
        start = (tracing(), self._options.mesh or current_mesh(), rules)
        return (*start, *found.kinds()) if self._laid_out else (*start, found.placement())

    def _placed(self, call: Any, found: FoundCall, rules: Layout) -> FoundCall:
        options = self._options
        if found.all_placed():
            return found
        mesh = options.mesh or current_mesh()
        if mesh is None:
            mesh = None if found.on_no_mesh() else first_mesh(found.arrays)
        if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
            return found
        group, arrays = found.group, found.arrays
        unplaced = {i: x for i, x in enumerate(arrays) if self._by_rules(group.paths[i]) and is_unplaced(x)}
        if not unplaced:
            return found
        # A traced array without names is left to the compiler; any other one is replicated, which is warned of.
        key = (mesh, rules, tuple((i, x.shape, x.dtype, isinstance(x, Tracer)) for i, x in unplaced.items()))
        targets = group.targets.get(key)
        if targets is None:
            layouts = rules_for_parameters(rules, self._signature)
            donated = donated_places(group.paths, options.donated)
            targets = group.targets[key] = find_targets(call, unplaced, layouts, mesh, donated)
        put = [row.path for i, row in targets.rows.items() if row.shape and is_concrete(arrays[i])]
        warn_placed(self._signature.name, put, self._placings)
        new = targets.place(arrays)
        return FoundCall(group, new, all(map(is_concrete, new)))

    def _by_rules(self, path: Path) -> bool:
        """Whether the rules decide about an argument that nobody has placed: `in_shardings` has no entry for it."""
        return self._layouts is None or not self._layouts.has_entry(path)

    def _program(self, call: Any, found: FoundCall) -> Program:
        name, options, (group, arrays, _) = self._signature.name, self._options, found
        mesh, rules = options.mesh, self._rules()
        if mesh is None:
            mesh = current_mesh()
            if isinstance(mesh, AbstractMesh) and not tracing():
                # Such as inside of an eager `jax.sharding.auto_axes`, whose arrays know the devices.
                mesh = with_devices_of(mesh, arrays)
        mesh_of_arguments = first_mesh(arrays) if mesh is None else None
        if mesh is None and self._laid_out:
            mesh = mesh_of_arguments
        requested = Inputs(mesh, None, ())
        if self._layouts is not None:
            requested = inputs(name, call, arrays, self._layouts.prefix(call), mesh)
        check_mesh(name, group.paths, arrays, requested.mesh)
        surroundings = Surroundings(requested.mesh or mesh_of_arguments, rules)
        body = self._body(found, requested, surroundings)
        group.several_devices = group.several_devices or on_several_devices(arrays)
        # JAX would report a deleted array without its path.
        if any(map(is_deleted, arrays)):
            raise refuse_deleted(name, group.paths, arrays)
        if body.arguments.donated:
            check_donated(name, group.paths, arrays, body.arguments, by_buffer=True)
        entered = options.mesh if isinstance(options.mesh, Mesh) else None

        def lay_outputs(output: Output) -> Shardings | None:
            return self._lay_outputs(output, call, found, requested)

        prepared = prepare(
            body,
            traceable(arrays, requested.mesh, requested.shardings),
            entered=entered,
            options=options.jax,
            in_shardings=requested.shardings,
            lay_outputs=lay_outputs,
        )
        warn_constants(name, self._bound.fun, prepared.traced)
        traced = prepared.traced
        if mesh_of_arguments is not None and traced is not None and not _uses_mesh(traced.jaxpr.jaxpr):
            # JAX drops unused arguments, and chooses the devices by the others. If it drops all that are on a mesh, it
            # would run on the default device.
            if isinstance(mesh_of_arguments, Mesh):
                entered = mesh_of_arguments
            elif "sharding_constraint" in str(traced.jaxpr):
                raise _lost_mesh(name)
        return Program(
            name,
            group,
            body,
            prepared.jitted,
            mesh=requested.mesh,
            rules=rules,
            entered=entered,
            in_shardings=requested.shardings,
            out_shardings=prepared.out_shardings,
            moved=requested.moved,
            donates=bool(options.donated),
        )

    def _body(self, found: FoundCall, requested: Inputs, surroundings: Surroundings) -> Body:
        """The body for a call: one for all programs with the same surroundings and the same donated arrays."""
        group, arrays, _ = found
        donated, mesh = donated_places(group.paths, self._options.donated), surroundings.mesh
        # If no mesh is known, layouts of the result bring their own.
        several = self._options.out_shardings is not None if mesh is None else mesh.size > 1
        if several:
            donated = tuple(i for i in donated if not _is_spread(arrays[i], requested.sharding(i)))
        body = group.bodies.get((surroundings, donated))
        if body is None:
            body = group.bodies[surroundings, donated] = _body(self._traces, group, donated, surroundings)
        return body

    def _lay_outputs(self, output: Output, call: Any, found: FoundCall, requested: Inputs) -> Shardings | None:
        """The sharding of each array of a result: by `out_shardings`, else that of the donated argument it replaces."""
        options = self._options
        if options.out_shardings is None and not options.donated:
            return None
        result = output.tree
        shardings = closed(result, self._donated(call, found, requested))
        if options.out_shardings is not None:
            wanted = outputs(self._signature, result, options.out_shardings, requested.mesh)
            shardings = _first_of_each(wanted, shardings)
        return None if all(sharding is None for sharding in shardings) else shardings

    def _donated(self, call: Any, found: FoundCall, requested: Inputs) -> list[Kept]:
        """The donated arguments, with the shardings that their replacements in the result keep."""
        shardings = [_named_sharding(x) for x in found.arrays]
        if requested.shardings is not None:
            shardings = _first_of_each(requested.shardings, shardings)
        paths = found.group.paths
        donated, kept = set(donated_places(paths, self._options.donated)), list[Kept]()
        for name, value in self._signature.each(call):
            own = [i for i, path in enumerate(paths) if path[: len(name)] == name]
            # An argument that is a bare array has no path below its name. It is not state (see `closed`).
            if not own or own[0] not in donated or len(paths[own[0]]) == len(name):
                continue
            kept.append(Kept(StateForm.of(value), tuple(shardings[i] for i in own)))
        return kept


def _check_static(layouts: ParameterLayouts, static: Collection[str]) -> None:
    """Raise RuleError for a static parameter that has a layout of its own. (One layout for all is for arrays only.)"""
    for name in sorted(static):
        # A parameter among `**more` is `more.mode` here, and `mode` among the layouts.
        own = name.rpartition(".")[2]
        if layouts.by_name is not None and layouts.by_name.get(own) is not None:
            raise RuleError(
                f"in_shardings: `{own}` is static, so it has no sharding: leave it out, or write `None` in its place"
            )


def _is_spread(array: Any, sharding: NamedSharding | None) -> bool:
    """Whether the compiler spreads an array over the devices as it likes: nobody has placed it.

    JAX copies such an array to the devices, so a donation gives nothing, and XLA may fail: it chooses the output that
    takes the place of a donated input before it chooses how the input is sharded.
    """
    has_value = not isinstance(array, Tracer | jax.ShapeDtypeStruct)
    return sharding is None and has_value and is_unplaced(array) and array.ndim > 0


def _named_sharding(array: Any) -> NamedSharding | None:
    """The sharding of an array that is on a mesh, else None. That of a traced array is not known."""
    sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _first_of_each(ones: Shardings, others: Shardings) -> list[NamedSharding | None]:
    """Of each pair the first value, or the second one where the first is None."""
    return [other if one is None else one for one, other in zip(ones, others, strict=True)]


def _body(traces: Traces, group: CallGroup, donated: tuple[int, ...], surroundings: Surroundings) -> Body:
    """The user's function for one group of its calls, and one ambient mesh and rules."""
    signature, fun, record = traces.signature, traces.fun, traces.signature.call
    packed = [value for _, value in group.skeleton.statics if isinstance(value, Skeleton)]

    def compute(arrays: Sequence[Any]) -> Output:
        call = group.skeleton.fill(arrays)
        with surroundings.entered(arrays):
            check_mesh(signature.name, group.paths, arrays, surroundings.mesh)
            result = signature.run(fun(), record(*_unpacked(opened(call))))
        return Output.of(_repacked(result, packed), signature.name)

    return Body(compute, Arguments(group.paths, donated), fun, signature.name, partial(surroundings.entered, ()))


def _uses_mesh(jaxpr: Any) -> bool:
    """Whether the result of a function depends on an argument that is on a mesh."""
    needed = {id(x) for x in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(x) in needed for x in equation.outvars):
            needed.update(map(id, equation.invars))
    return any(id(x) in needed and not x.aval.sharding.mesh.empty for x in jaxpr.invars)


def _lost_mesh(name: str) -> ShardingError:
    """The error for a function, called in a trace, whose constraints would have no effect."""
    return ShardingError(
        f"{name} constrains arrays on the mesh of its arguments, but its result depends on none that is on the mesh. "
        f"JAX drops unused arguments, and the constraints with them: {NO_MESH} with a `Mesh`"
    )


# Packed trees


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def _unpacked(values: Sequence[Any]) -> list[Any]:
    """Arguments as the function sees them: a packed module is unpacked."""
    return tree_map(lambda x: x.tree if _is_packed(x) else x, list(values), is_leaf=_is_packed)


def _repacked(result: Any, packed: Sequence[Skeleton]) -> Any:
    """A result in which each outermost part with the structure of a packed argument is packed."""
    if not packed:
        return result
    # The type of the root is compared first: to compute the skeleton of every node would be slow.
    roots = {data[0] for skeleton in packed if (data := skeleton.treedef.node_data()) is not None}
    # The argument's own skeleton is used again, so that the next call finds its group by identity.
    known = {skeleton: skeleton for skeleton in packed}

    def fits(node: Any) -> bool:
        return type(node) in roots and Skeleton.of(node) in known

    def packed_again(node: Any) -> Any:
        new = pack(node)
        return Packed(new.arrays, known[new.static])

    return tree_map(lambda x: packed_again(x) if fits(x) else x, result, is_leaf=fits)
