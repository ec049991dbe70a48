"""`laid_out` derives the sharding of each value in a lowered program, using Shardy's propagation.

In a lowered program, only arguments, results and constraints have shardings. The compiler runs
Shardy to derive all other shardings. Here, Shardy's passes run on a copy of the program. The passes
take much less time than a compilation.

Passes and their options are strings, not an API, and may change with jaxlib. If they change, only
features that need layouts fail.
"""

import gc
import linecache
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from jax.extend.mlir import ir, passmanager
from jax.sharding import PartitionSpec
from jax.stages import Lowered

from functree.compiled.sources import lines_of, source_end
from functree.devices.meshes import entry, mesh_axes, named_axes, of_rank
from functree.errors import FunctreeError


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause Python's garbage collector.

    The collector would repeatedly scan all operations of a large program, although none is in a
    reference cycle. The pause halves the time for 50,000 instructions.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# The last pass moves the layouts of loop carries from data-flow edges to the loops.
_PASSES = (
    "symbol-dce, sdy-import-pipeline, sdy-user-priority-propagate, sdy-close-shardings, "
    "func.func(sdy-sink-data-flow-edges)"
)
# Passes that make the movement of arrays explicit, as operations.
_COLLECTIVES = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}, sdy-reshard-to-collectives)"
)
_MOVING = (
    "sdy.all_gather", "sdy.all_reduce", "sdy.all_to_all", "sdy.collective_permute",
    "sdy.reduce_scatter",
)  # fmt: skip
# The operations whose regions contain arrays of the program. A reduction's region contains single
# elements, and a `shard_map`'s region contains the shards of one device.
_ENTERED = ("stablehlo.while", "stablehlo.case", "stablehlo.optimization_barrier")

_SHARD_MAP = "sdy.manual_computation"
# The operations that users give shardings.
_GIVING = ("sdy.sharding_constraint", _SHARD_MAP)
# Shardy propagates shardings through all other operations first.
_PASS_LATER = frozenset({
    "concatenate", "convolution", "custom_call", "dot_general", "fft", "gather", "pad", "reduce",
    "reduce_window", "scatter", "select_and_scatter", "slice", "sort",
})  # fmt: skip
# Operations that may move a dimension to a different position.
_MOVES_DIMENSIONS = frozenset({
    "broadcast_in_dim", "custom_call", "dot_general", "gather", "manual_computation",
    "reduce", "reshape", "scatter", "transpose",
})  # fmt: skip
ARGUMENT, RESULT, CONSTRAINT = "argument", "result", "sharding_constraint"
"""The `op` of the rows of arguments, results and constraints."""
# The sharding of a constraint or a `shard_map` before propagation, which adds mesh axes to it.
_WRITTEN = "functree.written"
# The attributes of a function that hold the shardings of its arguments and results.
_SIGNATURE = _OF_ARGUMENTS, _OF_RESULTS = "arg_attrs", "res_attrs"


class _Place(NamedTuple):
    """The content of a location: JAX's name for an operation, and its source line with the code."""

    name: str
    source: str | None
    expression: str


class LaidOut(NamedTuple):
    """An array in a program: an argument, the result of an operation, or a result of the program.

    Attributes:
        op: the operation's name in StableHLO, such as `dot_general`; `argument` and `result` for
            the program's arguments and results.
        source: the line that computes it, as in `Collective.source`; None if it is unknown.
        expression: the code at that line; for an argument or a result, its path.
        shape: the global shape.
        dtype: the dtype as StableHLO writes it: `f32`, `i1`.
        spec: how it is sharded. If the compiler uses a part of a mesh axis, the entry has this
            form: `"data:(1)2"`.
        origins: the origin of the sharding, by mesh axis: the path of an argument or of a result
            (`result.loss`), or the line of a constraint or of a `shard_map`.
        name: JAX's name for the operation: `jit(step)/jvp()/dot_general`.
        operands: the row indices of its operands.
    """

    op: str
    source: str | None
    expression: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    origins: Mapping[str, str]
    name: str
    operands: tuple[int, ...] = ()

    @property
    def array(self) -> str:
        """The dtype and the shape, each size with its mesh axes: `f32[64/data, 32]`."""
        sizes: list[str] = []
        for size, axes in zip(self.shape, self.spec.partitions, strict=True):
            sizes.append("/".join([str(size), *mesh_axes(axes)]))
        return f"{self.dtype}[{', '.join(sizes)}]"

    def bytes_of(self, sizes: Mapping[str, int]) -> int:
        """Return the array's bytes on one device.

        Args:
            sizes: the sizes of the mesh axes.
        """
        devices = math.prod(sizes.get(axis, 1) for axis in named_axes(self.spec))
        return _bytes_of(self.shape, self.dtype) // devices

    @property
    def decided(self) -> str:
        """The origins of its sharding, except the array itself: `data by x, model by model.up`."""
        others = [(axis, by) for axis, by in self.origins.items() if by != self.name]
        return ", ".join(f"{axis} by {source_end(by)}" for axis, by in others)


@without_collector()
def laid_out(
    program: Any, results: Sequence[str] | None = None
) -> tuple[tuple[LaidOut, ...], dict[str, int]]:
    """Return a program's arrays as the compiler will shard them, and the sizes of the mesh axes.

    Args:
        program: a lowered function's module in StableHLO.
        results: the names of its results; None to use JAX's names.

    Raises:
        FunctreeError: if the installed jaxlib lacks the Shardy passes.
    """
    with _propagated(program, _PASSES) as (main, sizes):
        return _Reader().rows_of(main, results), sizes


def moved_bytes(lowered: Lowered) -> int:
    """Estimate, before compilation, the bytes that a program will move to each device.

    Raises:
        FunctreeError: if the installed jaxlib lacks the Shardy passes.
    """
    passes = f"{_PASSES}, {_COLLECTIVES}"
    with _propagated(lowered.compiler_ir("stablehlo"), passes) as (main, sizes):
        return sum(times * _bytes(collective, sizes) for collective, times in _collectives(main, 1))


@contextmanager
def _propagated(module: Any, passes: str) -> Iterator[tuple[Any, dict[str, int]]]:
    """Run passes on a copy of a program.

    Yield the program's main function with calls inlined, and the sizes of the mesh axes. The copy
    exists until the context is left.
    """
    with module.context:
        program = module.operation.clone().operation
        functions: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for operation in _inside(program):
            if operation.name == "func.func":
                functions[operation.attributes["sym_name"].value] = operation
            elif operation.name == "sdy.mesh":
                axes = _SIZE.findall(_text(operation.attributes["mesh"]))
                sizes |= {name: int(size) for name, size in axes}
        main = functions["main"]
        _inline(main, functions)
        for name in _SIGNATURE:
            attributes = main.attributes[name] if name in main.attributes else ()
            texts = [ir.StringAttr.get(_sharding(each)) for each in attributes]
            main.attributes[f"{_WRITTEN}.{name}"] = ir.ArrayAttr.get(texts)
        try:
            manager = passmanager.PassManager.parse(f"builtin.module({passes})")
            manager.enable_verifier(False)  # saves a third of the time
            manager.run(program)
        except (ValueError, ir.MLIRError) as error:
            what = str(error).partition("\n")[0]
            raise FunctreeError(
                "layouts: this jaxlib's Shardy passes differ from the passes that functree uses "
                f"({what}): install a jaxlib that functree was tested with. Ledgers work, but have "
                "no verdicts"
            ) from error
        yield main, sizes


def _collectives(outer: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Yield the collectives inside an operation, with the number of runs."""
    for operation in _inside(outer):
        if operation.name in _MOVING:
            yield operation, times
        elif operation.name == "stablehlo.while":
            yield from _collectives(operation, times * _iterations(operation))
        elif operation.name in _ENTERED:
            yield from _collectives(operation, times)


def _iterations(loop: Any) -> int:
    """Return the constant that a loop's counter is compared with; 1 if there is none."""
    for operation in _inside(loop):
        if operation.name == "stablehlo.compare":
            limit = operation.operands[1].owner
            constant = re.match(r"dense<(\d+)>", str(getattr(limit, "attributes", {}).get("value")))
            if constant:
                return int(constant[1])
    return 1


def _bytes(collective: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a collective's result on one device."""
    made = collective.results[0].type
    [spec] = _SPEC.findall(_text(collective.attributes["out_sharding"]))
    devices = math.prod(sizes[axis] for axis, part in _AXIS.findall(spec) if not part)
    return _bytes_of(made.shape, str(made.element_type)) // devices


def _bytes_of(shape: Sequence[int], dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = max(int(digits[0] if digits else 8), 8)
    if dtype.startswith("complex"):  # `complex<f32>` is two f32
        bits *= 2
    return math.prod(shape) * bits // 8


def _inside(outer: Any) -> Iterator[Any]:
    """Yield the operations directly inside an operation. The caller may replace them meanwhile."""
    for region in outer.regions:
        for block in region.blocks:
            for operation in list(block.operations):
                yield operation.operation


def _inline(outer: Any, functions: dict[str, Any]) -> None:
    """Replace calls with the operations of the called functions, and record written shardings.

    MLIR's own pass does not inline calls inside loops.
    """
    for operation in _inside(outer):
        if operation.name in _GIVING:
            operation.attributes[_WRITTEN] = ir.StringAttr.get(_written(operation.attributes))
        if operation.name != "func.call":
            _inline(operation, functions)
            continue
        function = functions[operation.attributes["callee"].value]
        _inline(function, functions)
        known: dict[Any, Any] = dict(zip(_arguments(function), operation.operands, strict=True))
        for inner in _inside(function):
            if inner.name == "func.return":
                for old, new in zip(operation.results, inner.operands, strict=True):
                    old.replace_all_uses_with(known.get(new, new))
                continue
            with ir.InsertionPoint(operation):
                copy = inner.clone().operation
            _replace_operands(copy, known)
            copy.location = ir.Location.callsite(copy.location, [operation.location])
            known.update(zip(inner.results, copy.results, strict=True))
        operation.erase()


def _written(attributes: Any) -> str:
    names = ("sharding", "in_shardings", "out_shardings")
    return " ".join(_text(attributes[name]) for name in names if name in attributes)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array, and not a token, which orders effects."""
    return isinstance(value.type, ir.RankedTensorType)


def _last(region: Any) -> Any:
    """Return the last operation of a region, which returns its results."""
    operations = region.blocks[0].operations
    return operations[len(operations) - 1].operation


def _arguments(operation: Any) -> Sequence[Any]:
    """Return the arguments of an operation's region."""
    return operation.regions[0].blocks[0].arguments


def _replace_operands(outer: Any, known: dict[Any, Any]) -> None:
    for i, operand in enumerate(outer.operands):
        if operand in known:
            outer.operands[i] = known[operand]
    for operation in _inside(outer):
        _replace_operands(operation, known)


class _Reader:
    """The reader of a program's rows."""

    def __init__(self) -> None:
        self._rows: list[LaidOut] = []
        self._origins: list[dict[str, str]] = []  # of each row
        self._indices: dict[Any, int] = {}  # of each value's row
        # One entry for each mesh axis of a given sharding: the row, the axis and the origin's name.
        self._given: list[tuple[int, str, str]] = []
        # Rows that share mesh axes: the result of an operation and its operands.
        self._linked: list[tuple[int, ...]] = []
        # The members of each sharding group, which `ft.grad` and `shard_alike` create.
        self._groups: dict[int, list[int]] = {}
        self._typed: set[int] = set()  # rows that JAX constrains to their types, on Explicit axes
        # A program has many operations, but few different locations, types and shardings. MLIR
        # stores each of them once, so reading each once is enough.
        self._places: dict[Any, _Place] = {}
        self._types: dict[Any, tuple[tuple[int, ...], str]] = {}
        self._specs: dict[Any, list[str]] = {}

    def rows_of(self, function: Any, results: Sequence[str] | None) -> tuple[LaidOut, ...]:
        """Return a function's rows: arguments, results of its operations, and its results."""
        written = function.attributes[f"{_WRITTEN}.{_OF_ARGUMENTS}"]
        arguments = zip(
            _arguments(function), function.attributes[_OF_ARGUMENTS], written, strict=True
        )
        for value, attributes, text in arguments:
            if not _is_array(value):
                continue
            spec = _sharding(attributes)
            self._add(value, ARGUMENT, self._place(value.location), spec, ())
            if text.value:
                self._give(len(self._rows) - 1, spec, self._rows[-1].name)
        self._read_inside(function)
        self._read_results(function, results)
        self._trace_origins()
        return tuple(self._rows)

    def _give(self, row: int, text: str, name: str) -> None:
        """Record that a row has a given sharding, and the name of the sharding's origin."""
        axes = dict.fromkeys(axis for axis, _ in _AXIS.findall(text))
        self._given += [(row, axis, name) for axis in axes]

    def _read_results(self, function: Any, names: Sequence[str] | None) -> None:
        last = _last(function.regions[0])
        arrays = [(i, value) for i, value in enumerate(last.operands) if _is_array(value)]
        attributes = function.attributes[_OF_RESULTS] if arrays else ()
        written = [text.value for text in function.attributes[f"{_WRITTEN}.{_OF_RESULTS}"]]
        if names is None:
            names = [attributes[i]["jax.result_info"].value for i, _ in arrays]
        # A value may be returned several times.
        indices = [self._indices.get(value) for _, value in arrays]
        for (i, value), name, index in zip(arrays, names, indices, strict=True):
            spec = _sharding(attributes[i])
            if spec and index is not None:
                # The value's own location is where the program was lowered.
                place = _Place(name, self._rows[index].source, name)
                self._add(value, RESULT, place, spec, (index,))
                if index not in self._typed:
                    self._give(len(self._rows) - 1, written[i], name)

    def _trace_origins(self) -> None:
        """Trace each mesh axis of each row back to the nearest given sharding that contains it.

        Shardy visits operations in program order. A sharding reaches the results of later
        operations in the same sweep, and the operands of earlier ones in the next sweep.

        Shardy can record origins itself, but its recording crashes the process on some programs. It
        reads past the end of a list after some reshapes, and for groups of equal shardings.
        """
        linked: list[list[tuple[int, ...]]] = [[] for _ in self._rows]
        for rows in self._linked:
            for i in rows:
                linked[i].append(rows)
        alike: list[list[int]] = [[] for _ in self._rows]
        for members in self._groups.values():
            for i in members:
                alike[i] += members
        dimensions = [_dimensions(row.spec) for row in self._rows]
        origins: list[dict[str, str]] = [{} for _ in self._rows]
        # If several shardings arrive at once, the one that was given first is kept: arguments come
        # first, and results last.
        waiting = [(0, 0, i, source) for source, (i, _, _) in enumerate(self._given)]
        heapify(waiting)
        while waiting:
            phase, sweep, i, source = heappop(waiting)
            _, axis, name = self._given[source]
            if axis in origins[i] or axis not in dimensions[i]:
                continue
            origins[i][axis] = name
            for other in alike[i]:
                heappush(waiting, (phase, sweep, other, source))
            for rows in linked[i]:
                for other in rows:
                    if axis in origins[other] or axis not in dimensions[other]:
                        continue
                    here, there = dimensions[i][axis], dimensions[other][axis]
                    if here != there and not self._moves_dimensions(rows, i, other):
                        continue
                    # A product's dimensions are told apart by their sizes.
                    different = self._rows[i].shape[here] != self._rows[other].shape[there]
                    if different and self._rows[rows[0]].op == "dot_general":
                        continue
                    needed, late = self._step(rows[0], i, other)
                    if needed <= phase:
                        heappush(waiting, (phase, sweep + late, other, source))
                    else:
                        heappush(waiting, (needed, 0, other, source))
        for row, known, named in zip(self._rows, self._origins, origins, strict=True):
            for part in _parts(row.spec):
                known[part] = named.get(_whole(part)) or row.source or row.name

    def _moves_dimensions(self, linked: Sequence[int], here: int, there: int) -> bool:
        """Return whether a dimension may have a different position in each of two linked rows."""
        op = self._rows[linked[0]].op
        if op == "convolution":
            return {here, there} != set(linked[:2])  # only a kernel's dimensions move
        return op in _MOVES_DIMENSIONS

    def _step(self, made: int, here: int, there: int) -> tuple[int, int]:
        """Return the phase in which an operation propagates a sharding, and the delay in sweeps."""
        op = self._rows[made].op
        late = int(there != made)
        if made in self._typed and not late:
            return 0, 0  # its type follows from its operands, when JAX traces it
        if op == "broadcast_in_dim":
            return (1, 1) if late else (2, 0)
        if op not in _PASS_LATER:
            return 0, late
        return (1, late) if made in (here, there) else (2, 1)

    def _read_inside(self, around: Any) -> None:
        for operation in _inside(around):
            op = operation.name
            if op == "sdy.constant" or (op == f"sdy.{CONSTRAINT}" and self._is_type(operation)):
                continue
            if op == "sdy.sharding_group":
                members = self._groups.setdefault(operation.attributes["group_id"].value, [])
                if operation.operands[0] in self._indices:
                    members.append(self._indices[operation.operands[0]])
            self._read(operation, op)
            if op in _ENTERED:
                self._read_regions(operation)

    def _is_type(self, constraint: Any) -> bool:
        """Return whether JAX added a constraint for a value's type, as on Explicit axes."""
        known = self._indices.get(constraint.operands[0])
        if known is None or self._rows[known].op == CONSTRAINT:
            return False
        if self._rows[known].name != self._place(constraint.location).name:
            return False
        self._indices[constraint.results[0]] = known
        self._typed.add(known)
        return True

    def _read(self, operation: Any, op: str) -> None:
        """Read the results of an operation."""
        attributes, results = operation.attributes, list(operation.results)
        indices = list(map(self._indices.get, operation.operands))
        # A loop carry depends on its initial value.
        carries = op in _ENTERED and len(indices) == len(results) > 1
        specs = self._specs_of(attributes)
        for i, value in enumerate(results):
            if not _is_array(value):
                continue
            taken = indices[i : i + 1] if carries else indices
            made_of = tuple(x for x in taken if x is not None)
            spec = specs[i] if i < len(specs) else ""
            self._add(value, op, self._place(operation.location), spec, made_of)
            if op in _GIVING and _WRITTEN in attributes:
                by = self._rows[-1].source or self._rows[-1].name
                # A `shard_map` also shards its operands.
                operands = made_of if op == _SHARD_MAP else ()
                for row in (self._indices[value], *operands):
                    self._give(row, attributes[_WRITTEN].value, by)

    def _read_regions(self, loop: Any) -> None:
        """Read the operations inside a loop, or inside another operation that contains arrays."""
        # A loop carry is sharded like the loop's result.
        for region in loop.regions:
            for inner, outer in zip(region.blocks[0].arguments, loop.results, strict=False):
                if outer in self._indices:
                    self._indices[inner] = self._indices[outer]
        self._read_inside(loop)
        # The values that the region returns are sharded like the result, too. A loop's condition
        # returns a scalar.
        for region in loop.regions:
            for inner, outer in zip(_last(region).operands, loop.results, strict=False):
                if inner in self._indices and outer in self._indices:
                    self._linked.append((self._indices[outer], self._indices[inner]))

    def _add(
        self, value: Any, op: str, place: _Place, spec: str, operands: tuple[int, ...]
    ) -> None:
        kind = value.type
        known = self._types.get(kind)
        if known is None:
            known = self._types[kind] = tuple(kind.shape), str(kind.element_type)
        (shape, dtype), op = known, op.rpartition(".")[2]
        self._indices[value] = len(self._rows)
        self._linked.append((len(self._rows), *operands))
        name, source, expression = place
        sharded, origins = _spec(spec, len(shape)), dict[str, str]()
        self._origins.append(origins)
        self._rows.append(
            LaidOut(op, source, expression, shape, dtype, sharded, origins, name, operands)
        )

    def _specs_of(self, attributes: Any) -> list[str]:
        """Return the text of each result's spec, from the first of these attributes that exists."""
        for name in ("sdy.sharding", "sharding", "out_shardings"):
            if name in attributes:
                attribute = attributes[name]
                if attribute not in self._specs:
                    self._specs[attribute] = _SPEC.findall(_text(attribute))
                return self._specs[attribute]
        return []

    def _place(self, location: Any) -> _Place:
        attribute = location.attr
        known = self._places.get(attribute)
        if known is None:
            name = _name(location)
            known = _Place(name, None, name)
            lines = lines_of((frame.filename, frame.start_line) for frame in _frames(location))
            if lines is not None:
                known = _Place(name, lines.source, _expression(location, lines.source))
            self._places[attribute] = known
        return known


def _frames(location: Any) -> Iterator[Any]:
    """Yield the ranges in files that a location contains, innermost first."""
    waiting = [location]
    while waiting:
        location = waiting.pop()
        if isinstance(location, ir.NameLoc):
            waiting.append(location.child_loc)
        elif isinstance(location, ir.CallSiteLoc):
            waiting += [location.caller, location.callee]
        elif isinstance(location, ir.FileLineColLoc):
            yield location


_SIZE = re.compile(r'"([^"]+)"=(\d+)')
# The dimensions of `<@mesh, [{"data"}, {}]>`
_SPEC = re.compile(r"<(?:@|mesh<).*?, \[((?:\{[^{}]*\},? ?)*)\]")
_DIMENSION = re.compile(r"\{([^{}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')

# MLIR escapes non-ASCII letters in a mesh axis name as `\C3\A4`. In a key, it escapes them twice.
_ESCAPED = re.compile(r"(?:\\+[89A-F][0-9A-F])+")


def _text(attribute: Any) -> str:
    return _ESCAPED.sub(_unescaped, str(attribute))


def _unescaped(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("\\", "")).decode(errors="replace")


def _sharding(attributes: Any) -> str:
    """Return the text of an argument's or a result's sharding; empty if it has no sharding."""
    return _text(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else ""


@cache
def _spec(text: str, ndim: int) -> PartitionSpec:
    """Parse a spec. The text of a value without a sharding is empty, so the spec is padded."""
    entries = [
        entry([name + part for name, part in _AXIS.findall(dimension)])
        for dimension in _DIMENSION.findall(text)
    ]
    return of_rank(PartitionSpec(*entries), ndim)


@cache
def _parts(spec: PartitionSpec) -> list[str]:
    """Return the mesh axes that a spec names, or parts of them, in alphabetical order."""
    return sorted(named_axes(spec))


@cache
def _dimensions(spec: PartitionSpec) -> dict[str, int]:
    """Return the dimension that each mesh axis, or a part of it, shards."""
    return {_whole(part): i for i, axes in enumerate(spec.partitions) for part in mesh_axes(axes)}


def _whole(part: str) -> str:
    """Return the mesh axis of a part, such as `model:(1)2`, which a reshape may leave."""
    return part.partition(":")[0]


def _name(location: Any) -> str:
    """Return JAX's name for an operation."""
    # An inlined operation's location contains the location of its call.
    while isinstance(location, ir.CallSiteLoc):
        location = location.callee
    return location.name_str if isinstance(location, ir.NameLoc) else ""


def _expression(location: Any, source: str) -> str:
    """Return the code of a location's frame at a source line."""
    frames = _frames(location)
    frame = next(one for one in frames if f"{one.filename}:{one.start_line}" == source)
    texts = linecache.getlines(frame.filename)[frame.start_line - 1 : frame.end_line]
    if not texts:
        return ""  # the file is missing, or belongs to an interactive session
    # Columns are byte offsets. MLIR counts them from 1, but JAX passes Python's, which begin at 0.
    texts[-1] = texts[-1].encode()[: frame.end_col].decode(errors="replace")
    texts[0] = texts[0].encode()[frame.start_col :].decode(errors="replace")
    text = " ".join(" ".join(texts).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_LONGEST = 60
