"""A call of a function made by `ft.jit` ─► what JAX knows of it: traced, lowered, compiled, over modules."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.tree_util import tree_structure

from functree.errors import FunctreeError, Problem, count
from functree.transforms.jit.compilations import Difference, Situation, differences, situation
from functree.transforms.jit.donation import refuse_deleted, refuse_twice, twice_by_identity
from functree.transforms.jit.layouts import sharding_text
from functree.transforms.jit.program import Program
from functree.transforms.jit.statics import statically
from functree.transforms.structures import Structure
from functree.tree.codec import form_of
from functree.tree.leaf import array_text
from functree.tree.leaves import is_array


class Origin(NamedTuple):
    """What a stage is of.

    Attributes:
        program: the function, for one structure of its calls.
        bound: what is handed over in front of every call's arguments: the instance of a method.
        static: the names of static parameters.
        situation: the call that it was made by.
    """

    program: Program
    bound: tuple[Any, ...]
    static: frozenset[str]
    situation: Situation

    def arguments(self, tree: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """JAX's tree for the two groups of arrays ─► `(args, kwargs)` as the function takes them, None for statics."""
        (kept, donated), _ = tree
        values = self.program.groups.join(kept.values, donated.values)
        return self.program.signature.arguments(self.program.structure.leaves.tree(values))

    def shardings(self, shardings: Sequence[Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What was asked for the arguments, None where nothing was."""
        values = shardings if shardings is not None else [None] * len(self.program.structure.paths)
        return self.program.signature.arguments(self.program.structure.leaves.tree(values))


class Stage:
    """What all three stages tell. Trees have the structure of the function's arguments `(args, kwargs)`, or of its
    result, with None where a leaf of the arguments is no array."""

    def __init__(self, stage: Any, origin: Origin):
        self._stage, self._origin = stage, origin

    @property
    def args_info(self) -> Any:
        """`(args, kwargs)` of `jax.stages.ArgInfo`: shapes, dtypes, what is donated."""
        return self._origin.arguments(self._stage.args_info)

    @property
    def in_avals(self) -> Any:
        """`(args, kwargs)` of abstract values."""
        return self._origin.arguments(self._stage.in_avals)

    @property
    def in_tree(self) -> Any:
        """The structure of `(args, kwargs)`."""
        return tree_structure(self.args_info)

    @property
    def out_info(self) -> Any:
        """The result, as `jax.ShapeDtypeStruct`s and the like."""
        return self._stage.out_info.tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_structure(self.out_info)

    @property
    def out_avals(self) -> Any:
        """The result, as abstract values."""
        return jax.tree.map(jax.typeof, self._stage.out_info).tree

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Which of the arguments' arrays are donated, as places among them in JAX's order."""
        return self._origin.program.groups.donated

    @property
    def in_shardings(self) -> Any:
        """What `in_shardings` came to, `(args, kwargs)`; None where an array goes as it comes."""
        return self._origin.shardings(self._origin.program.in_shardings)

    @property
    def out_shardings(self) -> Any:
        """What `out_shardings` and the donated state came to; None where the compiler chooses."""
        result = self._stage.out_info
        asked = self._origin.program.out_shardings or [None] * len(result.values)
        return result.shape.build(asked)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._origin.program.signature.name}>"


class Traced(Stage):
    """A function traced for one call; as `jax.stages.Traced`, over modules.

    Examples:
        >>> traced = ft.jit(lambda x: {"y": 2 * x}).trace(jax.ShapeDtypeStruct((3,), "float32"))
        >>> traced.out_info["y"].shape
        (3,)
    """

    @property
    def jaxpr(self) -> Any:
        """The function as a `ClosedJaxpr`: its arguments are the kept arrays, then the donated ones."""
        return self._stage.jaxpr

    @property
    def fun_name(self) -> str:
        """The function's name."""
        return self._stage.fun_name

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None) -> "Lowered":
        """The program before it is compiled, for this platform or others (`("tpu",)`)."""
        return Lowered(self._stage.lower(lowering_platforms=lowering_platforms), self._origin)


class Lowered(Stage):
    """A function lowered for one call; as `jax.stages.Lowered`, over modules.

    Examples:
        >>> lowered = ft.jit(lambda x: 2 * x).lower(jnp.ones(3))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> "Compiled":
        """The compiled program."""
        return Compiled(self._stage.compile(compiler_options), self._origin)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text: `dialect` is `"stablehlo"` or `"hlo"`."""
        return self._stage.as_text(dialect=dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any | None:
        """The program as the compiler's own object."""
        return self._stage.compiler_ir(dialect=dialect)

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of costs, before compilation."""
        return self._stage.cost_analysis()


class Compiled(Stage):
    """A function compiled for one call; as `jax.stages.Compiled`, over modules. It can be called.

    Examples:
        >>> compiled = ft.jit(lambda m, x: m["w"] * x).lower({"w": jnp.ones(3)}, jnp.ones(3)).compile()
        >>> compiled({"w": jnp.ones(3)}, jnp.ones(4))
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: <lambda>: 1 argument not as it was compiled for
        <BLANKLINE>
          x   f32[4]
              shape (3,) when compiled, (4,) now
        <BLANKLINE>
        Try: call the function itself, which compiles anew where it has to
    """

    _checked: tuple[Any, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            FunctreeError: arguments of another structure, shape, dtype or sharding than it was compiled for, by path;
                an array donated twice, or to an earlier call.
        """
        program, bound, static, _ = self._origin
        call = statically(program.signature.bind((*bound, *args), kwargs), static)
        arrays = program.structure.take(call)
        if arrays is None or not all(map(is_array, arrays)):
            raise self._other(call)
        self._check(arrays)
        groups = program.groups
        if groups.donated and twice_by_identity(groups.take_donated(arrays), groups.take_kept(arrays)):
            refuse_twice(program, arrays, by_buffer=False)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
            refuse_deleted(program, arrays)
        result = self._stage(*groups.split(arrays))
        return result.shape.build(result.values)

    call = __call__

    def _check(self, arrays: Sequence[Any]) -> None:
        """That arrays are as they were when it was compiled. What was so in the last call is so now."""
        # An array that nobody has put anywhere is put there by JAX; one that lies on the same device by choice is not.
        seen = tuple(tuple(getattr(x, name, None) for name in ("aval", "sharding", "committed")) for x in arrays)
        if self._checked is not None and seen == self._checked and None not in map(_first, seen):
            return
        program, found = self._origin.program, list[Difference]()
        (kept, donated), _ = self._stage.input_shardings
        wanted = program.groups.join(kept.values, donated.values)
        (kept, donated), _ = self._stage.in_avals
        avals = program.groups.join(kept.values, donated.values)
        for path, x, aval, sharding in zip(program.structure.paths, arrays, avals, wanted, strict=True):
            if isinstance(x, Tracer | jax.ShapeDtypeStruct):
                raise FunctreeError(
                    f"{program.signature.name}: `{path}` has no value, and what is compiled runs on values"
                )
            if tuple(x.shape) != tuple(aval.shape):
                found.append(Difference(path, "shape", tuple(aval.shape), tuple(x.shape)))
            elif x.dtype != aval.dtype:
                found.append(Difference(path, "dtype", aval.dtype, x.dtype))
            elif not _lies_so(x, sharding):
                found.append(Difference(path, "sharding", sharding_text(sharding), sharding_text(x.sharding)))
        if found:
            raise _refuse(program, found, dict(zip(program.structure.paths, arrays, strict=True)))
        if program.groups.donated:
            refuse_twice(program, arrays, by_buffer=True)
        self._checked = seen

    def _other(self, call: Any) -> FunctreeError:
        """The error for a call of another structure."""
        structure = Structure(call, form_of(call))
        arrays = structure.take(call)
        now = situation(structure, arrays, self._origin.situation.mesh, self._origin.situation.rules)
        found = [
            d for d in differences(self._origin.situation, now) if d.kind in ("static", "structure", "shape", "dtype")
        ]
        return _refuse(self._origin.program, found, dict(zip(structure.paths, arrays, strict=True)))

    @property
    def input_shardings(self) -> Any:
        """`(args, kwargs)` of the shardings that it was compiled for."""
        return self._origin.arguments(self._stage.input_shardings)

    @property
    def output_shardings(self) -> Any:
        """The result's shardings."""
        return self._stage.output_shardings.tree

    @property
    def input_formats(self) -> Any:
        """`(args, kwargs)` of the memory layouts that it was compiled for."""
        return self._origin.arguments(self._stage.input_formats)

    @property
    def output_formats(self) -> Any:
        """The result's memory layouts."""
        return self._stage.output_formats.tree

    def as_text(self) -> str | None:
        """The compiled program as text. Its parameters carry their paths: `kept.x`, `donated.model.up`."""
        return self._stage.as_text()

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of costs: flops, bytes accessed."""
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any | None:
        """The compiler's estimate of memory on one device, in bytes."""
        return self._stage.memory_analysis()

    def runtime_executable(self) -> Any | None:
        """The executable as the runtime's own object."""
        return self._stage.runtime_executable()


def _first(told: tuple[Any, ...]) -> Any:
    return told[0]


def _lies_so(array: Any, sharding: Any) -> bool:
    """Whether JAX takes an array as it is, or may put it there since nobody has put it anywhere."""
    if sharding is None or not isinstance(array, jax.Array) or not array.committed:
        return True
    kinds = {array.sharding.memory_kind or "device", sharding.memory_kind or "device"}
    return len(kinds) == 1 and array.sharding.is_equivalent_to(sharding, array.ndim)


def _refuse(program: Program, found: Sequence[Difference], arrays: Mapping[Any, Any]) -> FunctreeError:
    remedy = "call the function itself, which compiles anew where it has to"
    problems = []
    for different in found:
        path, kind, before, now = different
        array = arrays.get(path)
        why = f"{kind} {different.text(before)} when compiled, {different.text(now)} now"
        problems.append(
            Problem(path, getattr(array, "shape", None), "" if array is None else array_text(array), why, remedy)
        )
    number = count(len({path for path, *_ in found}), "argument")
    return FunctreeError(f"{program.signature.name}: {number} not as it was compiled for", problems)
