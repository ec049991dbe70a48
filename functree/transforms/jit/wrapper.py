"""A function and what `ft.jit` was told of it ─► `Jit`: a call finds its program, or makes it."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.layout.layouts import Layout
from functree.layout.meshes import current_mesh, tracing
from functree.transforms.ambient import ambient_rules
from functree.transforms.entries import Entries
from functree.transforms.jit.checks import check_call, warn_constants, warn_moved
from functree.transforms.jit.closing import Kept, closed, state_form
from functree.transforms.jit.compilations import Compilation, Log, situation
from functree.transforms.jit.donation import is_gone, refuse_deleted, refuse_twice
from functree.transforms.jit.layouts import elsewhere, inputs, mesh_of, outputs
from functree.transforms.jit.monitor import lowerings
from functree.transforms.jit.program import Body, Program, Where
from functree.transforms.jit.stages import Lowered, Origin, Traced
from functree.transforms.jit.statics import statically
from functree.transforms.result import Result
from functree.transforms.signature import Signature
from functree.transforms.structures import Found, Structures

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Options(NamedTuple):
    """What `ft.jit` was told beside the function."""

    in_shardings: Any
    out_shardings: Any
    mesh: Mesh | AbstractMesh | None
    rules: Layout | None
    donated: frozenset[str]
    static: frozenset[str]
    jax: dict[str, Any]


class Jit(Generic[_P, _T]):
    """A function that is compiled once for each structure of its arguments; made by `ft.jit`.

    Attributes:
        compilations: a record for each compilation, of what differed from the nearest earlier one.

    Examples:
        >>> double = ft.jit(lambda x: 2 * x)
        >>> _ = double(jnp.ones(3)), double(jnp.ones(4))
        >>> print(double.compilations[1])
        compilation 2: x: shape (3,) → (4,)
    """

    compilations: list[Compilation]
    __name__: str
    __wrapped__: Callable[_P, _T]

    def __init__(self, fun: Callable[_P, _T], signature: Signature, options: Options):
        functools.update_wrapper(self, fun, updated=())
        self._signature, self._options = signature, options
        given = options.in_shardings
        self._entries = None if given is None else Entries("in_shardings", given, signature)
        # Only where a layout is at stake does a program depend on how its arguments lie; else JAX keeps count itself.
        self._laid = bool(options.donated) or given is not None or options.out_shardings is not None
        self._structures = Structures()
        self._log = Log(signature.name)
        self.compilations = self._log.records

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # What most calls need not do is left out of their way: where a call has 300 µs, each function that it enters
        # for the first time in a while costs one or two.
        program, found = self._prepare(args, kwargs)
        arrays = found.arrays
        if program.careful or not found.concrete:
            check_call(program, found)
        before = lowerings.count
        if program.entered is None:
            result = program(arrays)
        else:
            with _around(program.entered):
                result = program(arrays)
        if lowerings.count != before:
            self._note(program, arrays)
        if program.moved:
            warn_moved(program)
        return result

    def _note(self, program: Program, arrays: Sequence[Any]) -> None:
        """A call has compiled something, unless it is a part of another program."""
        if tracing() or any(isinstance(x, Tracer) for x in arrays):
            return
        if _spread(arrays):
            program.careful = program.structure.spread = True
        self._log.add(situation(program.structure, arrays, *program.where))

    def trace(self, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """Trace a call, of arrays or of `jax.ShapeDtypeStruct`s, without running it."""
        return self._trace((), args, kwargs)

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace and lower a call, of arrays or of `jax.ShapeDtypeStruct`s, without running it."""
        return self._trace((), args, kwargs).lower()

    def eval_shape(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """The result of a call as `jax.ShapeDtypeStruct`s."""
        return self._trace((), args, kwargs).out_info

    def _trace(self, bound: tuple[Any, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
        program, found = self._prepare((*bound, *args), kwargs)
        with _around(program.entered):
            traced = program.jitted.trace(*program.groups.split(found.arrays))
        told = situation(program.structure, found.arrays, *program.where)
        return Traced(traced, Origin(program, bound, self._options.static, told))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def __repr__(self) -> str:
        return f"<ft.jit of {self._signature.name}>"

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Program, Found]:
        """The program for a call, made if there is none yet; and the call taken apart."""
        options, call = self._options, self._signature.bind(args, kwargs)
        if options.static:
            call = statically(call, options.static)
        found = self._structures.find(call)
        structure = found.structure
        rules = options.rules if options.rules is not None else ambient_rules()
        mesh: Any = options.mesh or jax.sharding.get_abstract_mesh()
        key: Any
        if self._laid:
            key = (mesh if mesh.empty else options.mesh or current_mesh(), rules, *_lie(found))
        else:
            key = (mesh, rules, _meshes(found) if structure.spread else ())
        # Most calls are as the last one was: to compare what is mostly the same objects is cheaper than to hash it.
        last = structure.last
        if last is None or last[0] != key:
            program = structure.programs.get(key)
            if program is None:
                program = structure.programs[key] = self._program(call, found, rules)
            structure.last = last = key, program
        return last[1], found

    def _program(self, call: Any, found: Found, rules: Layout | None) -> Program:
        """A new program: all that is checked and resolved once."""
        name, options, (structure, arrays, _) = self._signature.name, self._options, found
        here = current_mesh()
        mesh, asked = options.mesh or here, None
        if mesh is None and self._laid:
            mesh = mesh_of(arrays)
        if self._entries is not None:
            asked = inputs(name, call, arrays, self._entries.prefix(call), mesh)
            mesh = asked.mesh
        if (error := elsewhere(name, structure.paths, arrays, mesh)) is not None:
            raise error
        where = Where(mesh, rules)
        if where not in structure.bodies:
            structure.bodies[where] = Body(self._signature, structure, options.donated, where)
        program = Program(structure.bodies[where], options.jax)
        program.entered = options.mesh if isinstance(options.mesh, Mesh) else None
        program.careful = bool(program.groups.donated) or isinstance(mesh, AbstractMesh)
        if _spread(arrays):
            program.careful = structure.spread = True
        if asked is not None:
            program.lay_inputs(asked.shardings, asked.moved)
        if any(map(is_gone, arrays)):
            refuse_deleted(program, arrays)
        if program.groups.donated:
            refuse_twice(program, arrays, by_buffer=True)
        with _around(program.entered):
            traced = program.jitted.trace(*program.groups.split(arrays))
            self._lay_outputs(program, call, arrays, traced.out_info)
        if program.entered is None and here is None and not _uses_arguments(traced.jaxpr.jaxpr):
            # JAX drops arguments that are not used, and with them all that says on which devices to run.
            found_mesh = mesh_of(arrays)
            program.entered = found_mesh if isinstance(found_mesh, Mesh) else None
        warn_constants(self._signature, traced)
        return program

    def _lay_outputs(self, program: Program, call: Any, arrays: Sequence[Any], result: Result) -> None:
        options = self._options
        if options.out_shardings is None and not options.donated:
            return
        shardings = closed(result.tree, _donated(program, call, arrays))
        if options.out_shardings is not None:
            asked = outputs(self._signature, result.tree, options.out_shardings, program.where.mesh)
            shardings = [kept if wanted is None else wanted for wanted, kept in zip(asked, shardings, strict=True)]
        if any(sharding is not None for sharding in shardings):
            program.lay_outputs(result, shardings)


class Bound:
    """A method made by `ft.jit`, with its instance."""

    def __init__(self, jitted: Jit[Any, Any], instance: Any):
        self._jitted, self._instance = jitted, instance
        # As of any bound method: by these others, `ft.jit` too, know what it is bound to.
        self.__func__: Jit[Any, Any] = jitted
        self.__self__: Any = instance
        self.__name__: str = jitted.__name__
        self.__doc__ = jitted.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(self._instance, *args, **kwargs)

    @property
    def compilations(self) -> list[Compilation]:
        """Those of the function, for all instances."""
        return self._jitted.compilations

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As `Jit.trace`."""
        return self._jitted._trace((self._instance,), args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `Jit.lower`."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `Jit.eval_shape`."""
        return self.trace(*args, **kwargs).out_info


_AVAL, _SHARDING, _COMMITTED = attrgetter("aval"), attrgetter("sharding"), attrgetter("committed")


def _lie(found: Found) -> tuple[Any, ...]:
    """What a layout depends on: the types of the arrays, and how they lie."""
    if not found.concrete:
        return tuple(map(_kind, found.arrays)), ()
    shardings = tuple(map(_SHARDING, found.arrays))
    # An array with a `NamedSharding` is committed; of others it has to be asked.
    asked = () if _NAMED.issuperset(map(type, shardings)) else tuple(map(_COMMITTED, found.arrays))
    return tuple(map(_AVAL, found.arrays)), shardings, asked


_NAMED = frozenset({NamedSharding})


def _meshes(found: Found) -> tuple[Any, ...]:
    """The meshes of a call, by the first array of each parameter: to ask all arrays would cost as much as the call.

    For a function without layouts: arrays on other devices are the one thing that JAX does not tell by their types.
    """
    heads = (found.arrays[i] for i in found.structure.heads)
    return tuple(getattr(x.sharding, "mesh", None) if found.concrete else None for x in heads)


def _kind(array: Any) -> tuple[Any, ...]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.shape, array.dtype, array.weak_type, array.sharding
    here = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return jax.typeof(array), (array.sharding, array.committed) if here else None


def _spread(arrays: Sequence[Any]) -> bool:
    return any(x.sharding.num_devices > 1 for x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer))


def _uses_arguments(jaxpr: Any) -> bool:
    used = {id(x) for equation in jaxpr.eqns for x in equation.invars} | {id(x) for x in jaxpr.outvars}
    return any(id(x) in used for x in jaxpr.invars)


def _around(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """The mesh around a call: nothing to do where it is the current one, or where a trace is under way.

    `jax.set_mesh` sets it at once, not when it is entered: so call this nowhere but in a `with`.
    """
    if not isinstance(mesh, Mesh) or tracing() or jax.sharding.get_mesh() is mesh:
        return nullcontext()
    return jax.set_mesh(mesh)


def _donated(program: Program, call: Any, arrays: Sequence[Any]) -> list[Kept]:
    """The donated arguments, as closing looks for them in the result."""
    lie = [None if isinstance(x, Tracer) else getattr(x, "sharding", None) for x in arrays]
    if program.in_shardings is not None:
        lie = [here if wanted is None else wanted for wanted, here in zip(program.in_shardings, lie, strict=True)]
    donated, found = set(program.groups.donated), []
    for name, value in program.signature.each(call):
        mine = [i for i, path in enumerate(program.structure.paths) if path[: len(name)] == name]
        if mine and mine[0] in donated and len(program.structure.paths[mine[0]]) > len(name):
            named = tuple(x if isinstance(x, NamedSharding) else None for x in (lie[i] for i in mine))
            found.append(Kept(state_form(value), named))
    return found
