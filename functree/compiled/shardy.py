"""A lowered program ─► its values with their layouts, by Shardy's own propagation.

In a lowered program, only arguments, results and constraints have layouts. The compiler runs Shardy
on it, which finds those of all other values. Its passes run here on a copy of the program: that
takes a tenth of a second where the compiler takes many.

Passes and their options are texts and no API: another version may have other ones. Then there are
no layouts, and nothing else needs them.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

from jax.extend.mlir import ir, passmanager
from jax.sharding import PartitionSpec

from functree.devices.specs import entry, of_rank
from functree.errors import FunctreeError

# The last pass brings the layouts of what loops carry from the edges of the data flow to the loops.
_PASSES = (
    "symbol-dce, sdy-import-pipeline, sdy-user-priority-propagate{debug-sharding-origins=true}, "
    "sdy-close-shardings, func.func(sdy-sink-data-flow-edges{sink-debug-sharding-origins=true})"
)
# The operations with other values of the program inside. Inside of a reduction are single elements,
# and inside of `shard_map` the parts of one device.
_ENTERED = ("stablehlo.while", "stablehlo.case", "stablehlo.optimization_barrier")


class Frame(NamedTuple):
    """A place in a file: from a line and a column on to others. Lines count from 1, columns from
    0."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


class Value(NamedTuple):
    """A value of a program, with its layout.

    Attributes:
        op: the operation that makes it, as StableHLO calls it: `dot_general`; `argument` for one
            of the program's arguments.
        name: the name that JAX gives it: `jit(f)/jvp()/dot_general`, or the path of an argument.
        frames: where it is made, the innermost place first.
        shape: the shape on all devices.
        dtype: the dtype, as StableHLO calls it: `f32`.
        spec: the layout. An axis that shards in part has its text there: `"data:(1)2"`.
        origins: who has set each mesh axis: `input: 2`, `output: 0`, `constraint_1`.
        operands: the indices of the values that it is made of.
    """

    op: str
    name: str
    frames: tuple[Frame, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    origins: dict[str, str]
    operands: tuple[int, ...]


class Propagated(NamedTuple):
    """A program whose values have layouts.

    Attributes:
        values: first the arguments, and then what the operations make, in the program's order.
        frames: the places of what `origins` call `constraint_1` and `mc_0`, a `shard_map`.
        results: the names that JAX gives the results: `result['loss']`.
        sizes: the sizes of the mesh axes.
    """

    values: list[Value]
    frames: dict[str, tuple[Frame, ...]]
    results: list[str]
    sizes: dict[str, int]


def propagated(lowered: Any) -> Propagated:
    """The values of a program, laid out as the compiler will do it.

    Args:
        lowered: JAX's lowered function.

    Raises:
        FunctreeError: this version of JAX does not have the passes.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context, _passes():
        program = module.operation.clone().operation
        functions: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for one in _inside(program):
            if one.name == "func.func":
                functions[one.attributes["sym_name"].value] = one
            elif one.name == "sdy.mesh":
                sizes |= {
                    name: int(size) for name, size in _SIZE.findall(str(one.attributes["mesh"]))
                }
        _inline(functions["main"], functions)
        passes = passmanager.PassManager.parse(f"builtin.module({_PASSES})")
        passes.enable_verifier(False)  # which takes a third of the time
        passes.run(program)
        reader = _Reader()
        reader.read(functions["main"])
        results = [
            one["jax.result_info"].value for one in functions["main"].attributes["res_attrs"]
        ]
        return Propagated(reader.values, reader.frames, results, sizes)


@contextmanager
def _passes() -> Iterator[None]:
    """Say what it means if the passes are others."""
    try:
        yield
    except (ValueError, ir.MLIRError) as error:
        what = str(error).partition("\n")[0]
        raise FunctreeError(
            f"layouts are not known: the passes of Shardy in this jaxlib are others ({what})"
        ) from error


def _inside(outer: Any) -> Iterator[Any]:
    """The operations directly inside of one, which may be replaced meanwhile."""
    for region in outer.regions:
        for block in region.blocks:
            for one in list(block.operations):
                yield one.operation


def _inline(outer: Any, functions: dict[str, Any]) -> None:
    """Put what functions do in the place of their calls.

    MLIR's own pass leaves those that are inside of loops.
    """
    for one in _inside(outer):
        if one.name != "func.call":
            _inline(one, functions)
            continue
        function = functions[one.attributes["callee"].value]
        _inline(function, functions)
        known: dict[Any, Any] = dict(zip(_arguments(function), one.operands, strict=True))
        for inner in _inside(function):
            if inner.name == "func.return":
                for old, new in zip(one.results, inner.operands, strict=True):
                    old.replace_all_uses_with(known.get(new, new))
                continue
            with ir.InsertionPoint(one):
                copy = inner.clone().operation
            _replace_operands(copy, known)
            copy.location = ir.Location.callsite(copy.location, [one.location])
            known.update(zip(inner.results, copy.results, strict=True))
        one.erase()


def _arguments(operation: Any) -> Sequence[Any]:
    """The arguments of what is inside of an operation."""
    return operation.regions[0].blocks[0].arguments


def _replace_operands(outer: Any, known: dict[Any, Any]) -> None:
    for i, operand in enumerate(outer.operands):
        if operand in known:
            outer.operands[i] = known[operand]
    for one in _inside(outer):
        _replace_operands(one, known)


class _Reader:
    """The values of a program, as far as they were read."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.frames: dict[str, tuple[Frame, ...]] = {}
        self._indices: dict[Any, int] = {}
        self._known: dict[Any, tuple[Frame, ...]] = {}

    def read(self, function: Any) -> None:
        """Read the values of a function: its arguments, and what its operations make."""
        for value, attributes in zip(
            _arguments(function), function.attributes["arg_attrs"], strict=True
        ):
            own = {one.name: str(one.attr) for one in attributes}
            spec, origins = own.get("sdy.sharding", ""), own.get("sdy.sharding_origins", "")
            self._add(value, "argument", value.location, spec, origins, ())
        self._read_inside(function)

    def _read_inside(self, around: Any) -> None:
        for one in _inside(around):
            attributes = one.attributes
            if "sdy.sharding_origin_name" in attributes:
                name = attributes["sdy.sharding_origin_name"].value
                self.frames[name] = self._frames_of(one.location)
            if not one.results or one.name == "sdy.constant":
                continue
            operands = tuple(self._indices[x] for x in one.operands if x in self._indices)
            specs = _texts(attributes, _SPEC, "sdy.sharding", "sharding", "out_shardings")
            origins = iter(
                _texts(attributes, _ORIGINS, "sdy.sharding_origins", "sdy.result_sharding_origins")
            )
            is_loop = one.name in _ENTERED
            for value, spec in zip_longest(one.results, specs, fillvalue=""):
                # Of the scalars that a loop carries, no origins are kept.
                own = "" if is_loop and not value.type.shape else next(origins, "")
                self._add(value, one.name, one.location, spec, own, operands)
            if is_loop:
                # What a loop carries is laid out as its results are.
                for region in one.regions:
                    for inner, outer in zip(region.blocks[0].arguments, one.results, strict=False):
                        self._indices[inner] = self._indices[outer]
                self._read_inside(one)

    def _add(
        self,
        value: Any,
        op: str,
        location: Any,
        spec: str,
        origins: str,
        operands: tuple[int, ...],
    ) -> None:
        self._indices[value] = len(self.values)
        shape = tuple(value.type.shape)
        self.values.append(
            Value(
                op.rpartition(".")[2],
                _name(location),
                self._frames_of(location),
                shape,
                str(value.type.element_type),
                _spec(spec, len(shape)),
                dict(_ORIGIN.findall(origins)),
                operands,
            )
        )

    def _frames_of(self, location: Any) -> tuple[Frame, ...]:
        """The places of a location, the innermost first."""
        # Most operations share what is around them. Of equal locations the attributes are one.
        known = self._known.get(location.attr)
        if known is None:
            known = self._known[location.attr] = self._read_frames(location)
        return known

    def _read_frames(self, location: Any) -> tuple[Frame, ...]:
        if isinstance(location, ir.NameLoc):
            return self._frames_of(location.child_loc)
        if isinstance(location, ir.CallSiteLoc):
            return self._frames_of(location.callee) + self._frames_of(location.caller)
        if isinstance(location, ir.FileLineColLoc):
            return (
                Frame(
                    location.filename,
                    location.start_line,
                    # MLIR counts columns from 1, and JAX hands it those of Python.
                    location.start_col,
                    location.end_line,
                    location.end_col,
                ),
            )
        return ()


_SIZE = re.compile(r'"([^"]+)"=(\d+)')
# `<@mesh, [{"data"}, {}]>`, of which only the dimensions count
_SPEC = re.compile(r"<(?:@|mesh<).*?, \[((?:\{[^{}]*\},? ?)*)\]")
_DIMENSION = re.compile(r"\{([^{}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')
# `[{data = "input: 0"}, {}]`
_ORIGINS = re.compile(r"\{([^{}]*)\}")
_ORIGIN = re.compile(r'"?([^\s"{,]+)"? = "([^"]*)"')


def _texts(attributes: Any, each: re.Pattern[str], *names: str) -> list[str]:
    """The texts for each result, of the first of these attributes that there is."""
    for name in names:
        if name in attributes:
            return each.findall(str(attributes[name]))
    return []


@cache
def _spec(text: str, ndim: int) -> PartitionSpec:
    """The spec of a text; the shortest may be of a scalar or of what has no layout."""
    entries = [
        entry([name + part for name, part in _AXIS.findall(dimension)])
        for dimension in _DIMENSION.findall(text)
    ]
    return of_rank(PartitionSpec(*entries), ndim)


def _name(location: Any) -> str:
    """The name that JAX gives an operation."""
    # What was called has the place of the call around it.
    while isinstance(location, ir.CallSiteLoc):
        location = location.callee
    return location.name_str if isinstance(location, ir.NameLoc) else ""
