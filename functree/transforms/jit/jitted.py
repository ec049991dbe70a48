"""A function and the options of `ft.jit` ─► `Jit`: how its calls are keyed, checked and laid out."""

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import tree_map

from functree.calls.body import Arguments, Body
from functree.calls.call_groups import CallGroup, FoundCall
from functree.calls.checks import warn_constants
from functree.calls.donation import check_donated, is_deleted, refuse_deleted
from functree.calls.function import Function, on_several_devices
from functree.calls.output import Output
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Program, Shardings, prepare
from functree.calls.signature import Bound
from functree.calls.static_arguments import opened
from functree.calls.traces import Traces
from functree.layout.layout import Layout, LayoutTree
from functree.layout.meshes import current_mesh
from functree.layout.placement import first_mesh, is_concrete
from functree.placing.ambient import Surroundings, ambient_rules
from functree.transforms.jit.closed_state import Kept, StateForm, closed
from functree.transforms.jit.shardings import Inputs, check_mesh, inputs, outputs
from functree.tree.pack import Packed, pack
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
        compilations: a record for each program that it has used, of what differed from the nearest earlier one.
            Wrappers of one function with equal options share traces and programs; such a record is marked as shared.

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
        # Only where a layout is at stake does a program depend on how its arguments are sharded; else JAX keeps count.
        self._laid_out = bool(options.donated) or given is not None or options.out_shardings is not None

    def __repr__(self) -> str:
        return f"<ft.jit of {self._signature.name}>"

    def _key(self, found: FoundCall) -> Hashable:
        options = self._options
        rules = options.rules if options.rules is not None else ambient_rules()
        mesh: Any = options.mesh or jax.sharding.get_abstract_mesh()
        if self._laid_out:
            return (mesh if mesh.empty else options.mesh or current_mesh(), rules, *_shardings(found))
        return (mesh, rules, _meshes(found) if found.group.several_devices else ())

    def _program(self, call: Any, found: FoundCall) -> Program:
        name, options, (group, arrays, _) = self._signature.name, self._options, found
        rules = options.rules if options.rules is not None else ambient_rules()
        here = current_mesh()
        mesh = options.mesh or here
        if mesh is None and self._laid_out:
            mesh = first_mesh(arrays)
        asked = Inputs(mesh, None, ())
        if self._layouts is not None:
            asked = inputs(name, call, arrays, self._layouts.prefix(call), mesh)
        check_mesh(name, group.paths, arrays, asked.mesh)
        surroundings = Surroundings(asked.mesh, rules)
        body = group.bodies.get(surroundings)
        if body is None:
            body = group.bodies[surroundings] = _body(self._traces, group, options.donated, surroundings)
        group.several_devices = group.several_devices or on_several_devices(arrays)
        if any(map(is_deleted, arrays)):
            raise refuse_deleted(name, group.paths, arrays)
        if body.arguments.donated:
            check_donated(name, group.paths, arrays, body.arguments, by_buffer=True)
        entered = options.mesh if isinstance(options.mesh, Mesh) else None

        def lay_outputs(output: Output) -> Shardings | None:
            return self._lay_outputs(output, call, found, body.arguments, asked)

        prepared = prepare(
            body,
            arrays,
            entered=entered,
            options=options.jax,
            in_shardings=asked.shardings,
            lay_outputs=lay_outputs,
        )
        warn_constants(name, self._bound.fun, prepared.traced)
        if entered is None and here is None and not _uses_arguments(prepared.traced.jaxpr.jaxpr):
            # JAX drops arguments that are not used, and with them all that tells it on which devices to run.
            theirs = first_mesh(arrays)
            entered = theirs if isinstance(theirs, Mesh) else None
        return Program(
            name,
            group,
            body,
            prepared.jitted,
            mesh=asked.mesh,
            rules=rules,
            entered=entered,
            in_shardings=asked.shardings,
            out_shardings=prepared.out_shardings,
            moved=asked.moved,
        )

    def _lay_outputs(
        self, output: Output, call: Any, found: FoundCall, arguments: Arguments, asked: Inputs
    ) -> Shardings | None:
        """How each array of a result is sharded: as `out_shardings` asks, else as the donated argument it replaces."""
        options = self._options
        if options.out_shardings is None and not options.donated:
            return None
        result = output.tree
        shardings = closed(result, self._donated(call, found, arguments, asked))
        if options.out_shardings is not None:
            wanted = outputs(self._signature, result, options.out_shardings, asked.mesh)
            shardings = [kept if one is None else one for one, kept in zip(wanted, shardings, strict=True)]
        return None if all(sharding is None for sharding in shardings) else shardings

    def _donated(self, call: Any, found: FoundCall, arguments: Arguments, asked: Inputs) -> list[Kept]:
        """The donated arguments, as they are looked for in the result. A bare array is not state."""
        have = [getattr(x, "sharding", None) if not isinstance(x, Tracer) else None for x in found.arrays]
        if asked.shardings is not None:
            have = [here if wanted is None else wanted for wanted, here in zip(asked.shardings, have, strict=True)]
        paths, donated = found.group.paths, set(arguments.donated)
        kept: list[Kept] = []
        for name, value in self._signature.each(call):
            mine = [i for i, path in enumerate(paths) if path[: len(name)] == name]
            if mine and mine[0] in donated and len(paths[mine[0]]) > len(name):
                named = tuple(x if isinstance(x, NamedSharding) else None for x in (have[i] for i in mine))
                kept.append(Kept(StateForm.of(value), named))
        return kept


def _body(traces: Traces, group: CallGroup, donated: frozenset[str], surroundings: Surroundings) -> Body:
    """The user's function, for one group of its calls and what holds around it."""
    signature, fun, record = traces.signature, traces.fun, traces.signature.call
    packed = [value for _, value in group.skeleton.statics if isinstance(value, Skeleton)]

    def compute(arrays: Sequence[Any]) -> Output:
        call = group.build(arrays)
        with surroundings.entered(arrays):
            check_mesh(signature.name, group.paths, arrays, surroundings.mesh)
            result = signature.run(fun(), record(*_unpacked(opened(call))))
        return Output.of(_repacked(result, packed), signature.name)

    return Body(compute, Arguments(group.paths, donated), fun, signature.name)


_AVAL, _SHARDING, _COMMITTED = attrgetter("aval"), attrgetter("sharding"), attrgetter("committed")
_NAMED = frozenset({NamedSharding})


def _shardings(found: FoundCall) -> tuple[Any, ...]:
    """What a layout depends on: the types of the arrays, and how they are sharded."""
    if not found.concrete:
        return tuple(map(_kind, found.arrays)), ()
    shardings = tuple(map(_SHARDING, found.arrays))
    # An array with a `NamedSharding` is committed; of others it has to be asked.
    asked = () if _NAMED.issuperset(map(type, shardings)) else tuple(map(_COMMITTED, found.arrays))
    return tuple(map(_AVAL, found.arrays)), shardings, asked


def _kind(array: Any) -> tuple[Any, ...]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.shape, array.dtype, array.weak_type, array.sharding
    return jax.typeof(array), (array.sharding, array.committed) if is_concrete(array) else None


def _meshes(found: FoundCall) -> tuple[Any, ...]:
    """The meshes of a call, by the first array of each parameter: to ask all arrays would cost as much as the call.

    For a function without layouts: arrays on other devices are the one thing that JAX does not tell by their types.
    """
    heads = (found.arrays[i] for i in found.group.heads)
    return tuple(getattr(x.sharding, "mesh", None) if found.concrete else None for x in heads)


def _uses_arguments(jaxpr: Any) -> bool:
    used = {id(x) for equation in jaxpr.eqns for x in equation.invars} | {id(x) for x in jaxpr.outvars}
    return any(id(x) in used for x in jaxpr.invars)


# Packed trees


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def _unpacked(values: Sequence[Any]) -> list[Any]:
    """Arguments as the function sees them: modules, packed or not when they were handed over."""
    return tree_map(lambda x: x.tree if _is_packed(x) else x, list(values), is_leaf=_is_packed)


def _repacked(result: Any, packed: Sequence[Skeleton]) -> Any:
    """A result whose outermost parts that have a packed argument's structure are packed."""
    if not packed:
        return result
    roots = {data[0] for skeleton in packed if (data := skeleton.treedef.node_data()) is not None}
    # With the argument's own skeleton, so that the next call finds the same object.
    known = {skeleton: skeleton for skeleton in packed}

    def fits(node: Any) -> bool:
        return type(node) in roots and Skeleton.of(node) in known

    def packed_again(node: Any) -> Any:
        new = pack(node)
        return Packed(new.arrays, known[new.static])

    return tree_map(lambda x: packed_again(x) if fits(x) else x, result, is_leaf=fits)
