"""A lowered program ─► how each of its operations will be laid out, and who has decided so."""

import html
import linecache
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from jax.sharding import PartitionSpec
from jax.stages import Lowered

from functree.argument_checks import shown
from functree.compiled.shardy import Frame, Propagated, Value, propagated
from functree.compiled.sources import lines_of
from functree.devices.meshes import MeshView
from functree.devices.specs import mesh_axes
from functree.errors import FunctreeTypeError, count
from functree.report.diff import Diff, changes
from functree.report.json_text import json_of, read_json
from functree.report.page import Pictures, code, leaf_html, report_html, section_html
from functree.report.table import INDENT, WIDTH, grouped, wrapped
from functree.tree.paths import Path


class LaidOut(NamedTuple):
    """An array in a program: an argument, or what an operation makes.

    Attributes:
        op: the operation, as StableHLO calls it: `dot_general`; `argument` for an argument.
        source: the line of a model that it comes from, `file:line`, as in a ledger; None if it is
            not known.
        expression: what stands there; the path of an argument.
        shape: the shape on all devices.
        dtype: the dtype, as StableHLO calls it: `f32`, `i1`.
        spec: how it is sharded. Where the compiler shards by a part of a mesh axis, the entry says
            so: `"data:(1)2"`.
        origins: who has decided it, by mesh axis: the path of an argument or of a result
            (`result.loss`), or the line of a constraint or of a `shard_map`.
        name: the name that JAX gives the operation: `jit(step)/jvp()/dot_general`.
        operands: the indices of the rows that it is made of.
        called_from: the line of the user's own code, if `source` is in a package, as in a ledger.
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
    called_from: str | None = None

    @property
    def array(self) -> str:
        """The array, each size with the mesh axes that divide it: `f32[64/data, 32]`."""
        sizes: list[str] = []
        for size, one in zip(self.shape, self.spec.partitions, strict=True):
            sizes.append("/".join([str(size), *mesh_axes(one)]))
        return f"{self.dtype}[{', '.join(sizes)}]"

    @property
    def decided(self) -> str:
        """Who else has decided how it is sharded: `data by x, model by model.up`."""
        others = [(axis, by) for axis, by in self.origins.items() if by != self.name]
        return ", ".join(f"{axis} by {by}" for axis, by in others)


@dataclass(frozen=True, repr=False)
class Layouts:
    """How each operation of a program will be laid out; made by `lowered.layouts()` and
    `ft.layouts`.

    Nothing is compiled: these are the layouts that Shardy finds, from which the compiler starts.
    What is inside of `shard_map` is not part of it.

    Attributes:
        rows: the arrays of the program: the arguments, and then what its operations make.
        sizes: the sizes of the mesh axes.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> w, x = (
        ...     jax.ShapeDtypeStruct(shape, "float32")
        ...     for shape in [(64, 32), (16, 64)]
        ... )
        >>> layouts = ft.layouts(
        ...     lambda w, x: x @ w,
        ...     w,
        ...     x,
        ...     in_shardings=(ft.P(None, "model"), ft.P("data")),
        ...     mesh=mesh,
        ... )
        >>> layouts.rows[-1].spec, layouts.rows[-1].origins
        (P('data', 'model'), {'data': 'x', 'model': 'w'})
    """

    rows: tuple[LaidOut, ...]
    sizes: Mapping[str, int] = field(hash=False)

    def __iter__(self) -> Iterator[LaidOut]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        lines = [f"layouts on the mesh {MeshView(self.sizes)}"]
        for source, rows in self._by_source():
            lines.append(source)
            for alike in grouped(rows, _told):
                row = alike[0]
                text = f"{row.expression}   {row.op} {row.array}"
                if len(alike) > 1:
                    text += f" ×{len(alike)}"
                if row.decided:
                    text += f": {row.decided}"
                lines += [INDENT + line for line in wrapped(text, WIDTH - len(INDENT))]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Layouts of {count(len(self.rows), 'array')}>"

    def _by_source(self) -> Iterator[tuple[str, list[LaidOut]]]:
        """The rows of each line of source, in the program's order; those without one are of
        arguments, and of what JAX adds."""
        for source, rows in groupby(self.rows, lambda row: row.source):
            yield source or "no line", list(rows)

    def diff(self, other: "Layouts") -> Diff:
        """What is laid out otherwise in another program of the same lines.

        Raises:
            FunctreeError: the other value is no such layouts.
        """
        if not isinstance(other, Layouts):
            raise FunctreeTypeError(f"layouts are compared with layouts, not with {shown(other)}")
        found = changes(
            _by_place(self.rows),
            _by_place(other.rows),
            lambda place: Path(),
            lambda place, row: {" ".join(place[:2]): row.array},
            lambda place, row: (" ".join(place[:2]), row.array),
        )
        return Diff(tuple(found))

    def to_json(self) -> str:
        """The layouts as JSON."""
        return json_of("layouts", self)

    @classmethod
    def from_json(cls, text: str) -> "Layouts":
        """The layouts of a JSON, equal to those that it was made from.

        Raises:
            FunctreeError: the text is not the JSON of layouts.
        """
        return read_json(text, "layouts", cls)

    def html(self) -> str:
        """The program by line of source, with a picture of each array as it is cut."""
        return self._html(page=True)

    def _repr_html_(self) -> str:
        return self._html(page=False)

    def _html(self, page: bool) -> str:
        # Several may be in one notebook, so the names of the pictures are told apart.
        pictures = Pictures(self.sizes, f"laid{zlib.crc32(repr(self.rows).encode()):x}-")
        content = ""
        for source, rows in self._by_source():
            lines = ""
            for row, *others in grouped(rows, _told):
                cuts = [mesh_axes(one) for one in row.spec.partitions]
                times = f" ×{1 + len(others)}" if others else ""
                why = f'<div class="why">{html.escape(row.decided)}</div>' if row.decided else ""
                lines += leaf_html(
                    f"{source} {row.expression}",
                    f"{code(row.expression)} {html.escape(row.op)}{times}{why}",
                    code(row.array),
                    pictures.of(row.shape, cuts),
                )
            content += section_html(source, lines)
        title = f"Layouts on the mesh {MeshView(self.sizes)}"
        return report_html(title, "", pictures.definitions() + content, page)


def _told(row: LaidOut) -> tuple[str, ...]:
    """What is told of a row."""
    return row.expression, row.op, row.array, row.decided


def _by_place(rows: Sequence[LaidOut]) -> dict[tuple[str, str, int], LaidOut]:
    """The rows by expression and operation, numbered where several have the same. Not by line: an
    edit moves lines."""
    times = Counter[tuple[str, str]]()
    found: dict[tuple[str, str, int], LaidOut] = {}
    for row in rows:
        place = row.expression, row.op
        times[place] += 1
        found[*place, times[place]] = row
    return found


def layouts_of(lowered: Lowered, results: Sequence[Path] | None = None) -> Layouts:
    """The layouts of a lowered function.

    Args:
        lowered: JAX's lowered function.
        results: the paths of its results, if they are not those that JAX knows.

    Raises:
        FunctreeError: this version of JAX does not have Shardy's passes.
    """
    program = propagated(lowered)
    names = program.results
    if results is not None:
        names = [".".join(["result", *map(str, filter(None, [path]))]) for path in results]
    rows: list[LaidOut] = []
    for value in program.values:
        lines = lines_of((frame.file, frame.line) for frame in value.frames)
        source = called_from = None
        expression = value.name
        if lines is not None:
            source, called_from = lines
            expression = _expression(value.frames, source)
        origins: dict[str, str] = {}
        for axis, by in value.origins.items():
            origins[axis] = _decided(by, value, program, names)
        rows.append(
            LaidOut(
                value.op,
                source,
                expression,
                value.shape,
                value.dtype,
                value.spec,
                origins,
                value.name,
                value.operands,
                called_from,
            )
        )
    return Layouts(tuple(rows), program.sizes)


def _decided(by: str, value: Value, program: Propagated, results: Sequence[str]) -> str:
    """What Shardy's name for an origin stands for: `input: 2`, `constraint_1`, `mc_0_input: 1`."""
    name, _, index = by.partition(": ")
    if by == "self":
        return value.name
    if name == "input":
        return program.values[int(index)].name
    if name == "output":
        return results[int(index)]
    frames = program.frames[name.removesuffix("_input").removesuffix("_output")]
    lines = lines_of((frame.file, frame.line) for frame in frames)
    return by if lines is None else lines.source


def _expression(frames: Sequence[Frame], source: str) -> str:
    """What stands at a line of source, where the frame in it begins."""
    frame = next(one for one in frames if f"{one.file}:{one.line}" == source)
    texts = linecache.getlines(frame.file)[frame.line - 1 : frame.end_line]
    if not texts:
        return ""  # the file is not there, or is that of an interactive session
    # Columns count bytes.
    texts[-1] = texts[-1].encode()[: frame.end_column].decode(errors="replace")
    texts[0] = texts[0].encode()[frame.column :].decode(errors="replace")
    text = " ".join(" ".join(texts).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_LONGEST = 60
