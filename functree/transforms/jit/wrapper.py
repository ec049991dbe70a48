"""A function and what `ft.jit` was told of it ─► `Jit`: a call finds its program, or makes it."""

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.errors import FunctreeError, ShardingError
from functree.layout.layouts import Layout
from functree.layout.meshes import NO_MESH, MeshView, current_mesh, tracing
from functree.transforms.ambient import ambient_rules
from functree.transforms.entries import Entries
from functree.transforms.jit.closing import Kept, closed, state_form
from functree.transforms.jit.compilations import Compilation, Log, situation
from functree.transforms.jit.donation import refuse_deleted, refuse_twice, twice_by_identity
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

BIG_CONSTANT = 2**20  # bytes: a closed-over array above this is worth a word


class Options(NamedTuple):
    """What `ft.jit` was told beside the function."""

    in_shardings: Any
    out_shardings: Any
    mesh: Mesh | AbstractMesh | None
    rules: Layout | None
    donated: frozenset[str]
    static: frozenset[str]
    jax: dict[str, Any]


class Prepared(NamedTuple):
    """A call, ready for JAX.

    Attributes:
        program: to run.
        arrays: its arguments.
        concrete: whether all of them are JAX's own.
        context: the mesh to enter around it.
    """

    program: Program
    arrays: Sequence[Any]
    concrete: bool
    context: AbstractContextManager[Any]


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
        program, arrays, concrete, context = self._prepare(args, kwargs)
        groups = program.groups
        if not concrete or isinstance(program.where.mesh, AbstractMesh):
            _refuse_abstract(self._signature.name, program, arrays)
        elif (groups.donated or program.spread) and True in [array.is_deleted() for array in arrays]:
            refuse_deleted(program, arrays)
        if groups.donated and twice_by_identity(groups.take_donated(arrays), groups.take_kept(arrays)):
            refuse_twice(program, arrays, by_buffer=False)
        before = lowerings.count
        with context:
            result = program(arrays)
        if lowerings.count != before and not (tracing() or any(isinstance(x, Tracer) for x in arrays)):
            program.spread = program.spread or _spread(arrays)
            self._log.add(situation(program.structure, arrays, *program.where))
        if program.moved:
            _warn_moved(program)
        return result

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
        program, arrays, _, context = self._prepare((*bound, *args), kwargs)
        with context:
            traced = program.jitted.trace(*program.groups.split(arrays))
        told = situation(program.structure, arrays, *program.where)
        return Traced(traced, Origin(program, bound, self._options.static, told))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def __repr__(self) -> str:
        return f"<ft.jit of {self._signature.name}, compiled {len(self.compilations)} times>"

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
        """The program for a call, made if there is none yet."""
        options = self._options
        call = statically(self._signature.bind(args, kwargs), options.static)
        found = self._structures.find(call)
        here = options.mesh if options.mesh is not None else current_mesh()
        key: Any = (here, options.rules if options.rules is not None else ambient_rules())
        if self._laid:
            key = (*key, *_lie(found))
        structure = found.structure
        # Most calls are as the last one was: to compare what is mostly the same objects is cheaper than to hash it.
        last = structure.last
        if last is None or last[0] != key:
            program = structure.programs.get(key)
            if program is None:
                program = structure.programs[key] = self._program(call, found, Where(*key[:2]))
            structure.last = last = key, program
        program = last[1]
        return Prepared(program, found.arrays, found.concrete, _around(program.where.mesh))

    def _program(self, call: Any, found: Found, where: Where) -> Program:
        """A new program: all that is checked and resolved once."""
        name, options, (structure, arrays, _) = self._signature.name, self._options, found
        mesh, asked = where.mesh, None
        if mesh is None and self._laid:
            mesh = mesh_of(arrays)
        if self._entries is not None:
            asked = inputs(name, call, arrays, self._entries.prefix(call), mesh)
            mesh = asked.mesh
        if (error := elsewhere(name, structure.paths, arrays, mesh)) is not None:
            raise error
        where = Where(mesh, where.rules)
        if where not in structure.bodies:
            structure.bodies[where] = Body(self._signature, structure, options.donated, where)
        program = Program(structure.bodies[where], options.jax)
        if asked is not None:
            program.lay_inputs(asked.shardings, asked.moved)
        if program.groups.donated:
            refuse_twice(program, arrays, by_buffer=True)
        with _around(mesh):
            traced = program.jitted.trace(*program.groups.split(arrays))
            self._lay_outputs(program, call, arrays, traced.out_info)
        _warn_constants(name, traced)
        return program

    def _lay_outputs(self, program: Program, call: Any, arrays: Sequence[Any], result: Result) -> None:
        options = self._options
        if options.out_shardings is None and not options.donated:
            return
        shardings = closed(result.tree, _donated(program, call, arrays))
        if options.out_shardings is not None:
            asked = outputs(result.tree, options.out_shardings, program.where.mesh)
            shardings = [kept if wanted is None else wanted for wanted, kept in zip(asked, shardings, strict=True)]
        if any(sharding is not None for sharding in shardings):
            program.lay_outputs(result, shardings)


class Bound:
    """A method made by `ft.jit`, with its instance."""

    __slots__ = ("_instance", "_jitted")

    def __init__(self, jitted: Jit[Any, Any], instance: Any):
        self._jitted, self._instance = jitted, instance

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


_AVAL, _SHARDING = attrgetter("aval"), attrgetter("sharding")


def _lie(found: Found) -> tuple[Any, ...]:
    """What a layout depends on: the types of the arrays, and how they lie."""
    if found.concrete:
        return tuple(map(_AVAL, found.arrays)), tuple(map(_SHARDING, found.arrays))
    return tuple(map(_kind, found.arrays)), ()


def _kind(array: Any) -> tuple[Any, ...]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.shape, array.dtype, array.weak_type, array.sharding
    traced = isinstance(array, Tracer)
    return jax.typeof(array), None if traced else getattr(array, "sharding", None)


def _spread(arrays: Sequence[Any]) -> bool:
    return any(x.sharding.num_devices > 1 for x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer))


def _around(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """The mesh around a call: nothing to do where it is the current one, or where a trace is under way."""
    if not isinstance(mesh, Mesh) or tracing() or jax.sharding.get_mesh() is mesh:
        return nullcontext()
    return jax.set_mesh(mesh)


def _donated(program: Program, call: Any, arrays: Sequence[Any]) -> list[Kept]:
    """The donated arguments, as closing looks for them in the result."""
    lie = [None if isinstance(x, Tracer) else getattr(x, "sharding", None) for x in arrays]
    if program.in_shardings is not None:
        lie = [here if wanted is None else wanted for wanted, here in zip(program.in_shardings, lie, strict=True)]
    donated, found = set(program.groups.donated), []
    for name, value in zip(call._fields, call, strict=True):
        mine = [i for i, path in enumerate(program.structure.paths) if path[0] == name]
        if mine and mine[0] in donated and len(program.structure.paths[mine[0]]) > 1:
            named = tuple(x if isinstance(x, NamedSharding) else None for x in (lie[i] for i in mine))
            found.append(Kept(state_form(value), named))
    return found


def _refuse_abstract(name: str, program: Program, arrays: Sequence[Any]) -> None:
    for path, array in zip(program.structure.paths, arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise FunctreeError(
                f"{name}: `{path}` is abstract, so there is nothing to run: use `.lower`, `.eval_shape`"
            )
    if isinstance(program.where.mesh, AbstractMesh) and not tracing():
        view = MeshView(dict(program.where.mesh.shape))
        raise ShardingError(f"{name}: {view} has no devices to run on: {NO_MESH} with a `Mesh`")


def _warn_moved(program: Program) -> None:
    program.calls += 1
    if program.calls == 2:
        paths = ", ".join(f"`{program.structure.paths[i]}`" for i in program.moved[:4])
        more = f" and {len(program.moved) - 4} more" if len(program.moved) > 4 else ""
        warnings.warn(
            f"{program.signature.name}: {paths}{more} moved to where in_shardings says on each call: put it there once "
            "with `ft.shard`",
            stacklevel=3,
        )


def _warn_constants(name: str, traced: Any) -> None:
    """Arrays that the function closes over are copied into the program, however large they are."""
    for constant in getattr(traced.jaxpr, "consts", ()):
        size = getattr(constant, "nbytes", 0)
        if not isinstance(constant, Tracer) and size > BIG_CONSTANT:
            shape = f"{constant.dtype}{list(constant.shape)}"
            warnings.warn(
                f"{name} closes over an array of {size / 2**20:.1f} MiB, {shape}: it becomes a constant of the "
                "compiled program, on every device; hand it over as an argument",
                stacklevel=5,
            )
