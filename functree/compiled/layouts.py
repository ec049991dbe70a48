"""`Layouts` shows how each operation of a lowered program will be sharded, and why."""

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from functree.argument_checks import shown
from functree.compiled.shardy import ARGUMENT, LaidOut, laid_out
from functree.devices.meshes import MeshView, mesh_axes
from functree.errors import FunctreeTypeError, count
from functree.report.diff import Diff, changes
from functree.report.json_text import json_of, read_json
from functree.report.page import Pictures, Report, code, leaf_html, report_html, section_html
from functree.report.table import INDENT, WIDTH, grouped, wrapped
from functree.tree.paths import Path


@dataclass(frozen=True, repr=False)
class Layouts(Report):
    """The sharding of each operation in a program, from `lowered.layouts()` or `ft.layouts`.

    Nothing is compiled. These are the layouts that Shardy derives and the compiler starts from.
    Operations inside `shard_map` are left out.

    Attributes:
        rows: the arrays of the program: first its arguments, then the results of its operations,
            and last the program's results that have a sharding.
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
        """Yield the rows of each source line, in the program's order.

        Rows without a line are arguments, and operations that JAX adds.
        """
        for source, rows in groupby(self.rows, lambda row: row.source):
            yield source or "no source line", list(rows)

    def diff(self, other: "Layouts") -> Diff:
        """Compare these layouts with another program's, for example before and after an edit.

        Raises:
            FunctreeError: if `other` is not a `Layouts`.
        """
        if not isinstance(other, Layouts):
            raise FunctreeTypeError(f"diff: `other` must be an `ft.Layouts`, not {shown(other)}")
        differences = changes(
            _by_place(self.rows),
            _by_place(other.rows),
            lambda place: Path(),
            lambda place, row: {" ".join(place[:2]): row.array},
            lambda place, row: (" ".join(place[:2]), row.array),
        )
        return Diff(tuple(differences))

    def to_json(self) -> str:
        """Return the layouts as JSON."""
        return json_of("layouts", self)

    @classmethod
    def from_json(cls, text: str) -> "Layouts":
        """Read layouts from JSON; they equal the layouts that were written.

        Raises:
            FunctreeError: if the text is not layouts JSON.
        """
        return read_json(text, "layouts", cls)

    def _html(self, page: bool) -> str:
        pictures = Pictures(self.sizes)
        content = ""
        for source, rows in self._by_source():
            lines = ""
            for row, *others in grouped(rows, _told):
                cuts = list(map(mesh_axes, row.spec.partitions))
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
    """Return the texts that the table shows for a row."""
    return row.expression, row.op, row.array, row.decided


def _by_place(rows: Sequence[LaidOut]) -> dict[tuple[str, str, int], LaidOut]:
    """Index the rows by expression and operation, and number the repeats.

    Line numbers are not part of the key, because an edit changes them.
    """
    times = Counter[tuple[str, str]]()
    by_place: dict[tuple[str, str, int], LaidOut] = {}
    for row in rows:
        place = row.expression, row.op
        times[place] += 1
        by_place[*place, times[place]] = row
    return by_place


def layouts_of(program: Any, results: Sequence[Path] | None = None) -> Layouts:
    """Return the layouts of a lowered function.

    Args:
        program: the function's module in StableHLO.
        results: the paths of its results; None to use the names in the lowered function.

    Raises:
        FunctreeError: if the installed jaxlib lacks the Shardy passes.
    """
    names = None if results is None else list(map(result_name, results))
    return Layouts(*laid_out(program, names))


def result_name(path: Path) -> str:
    """Return the name that origins use for a result, such as `result.loss`."""
    return f"result.{path}" if path else "result"


def named(layouts: Layouts, parameters: Sequence[Path]) -> Layouts | None:
    """Rename the arguments to these paths; return None if the number of arguments differs."""
    old = [row.name for row in layouts.rows if row.op == ARGUMENT]
    if len(old) != len(parameters):
        return None
    new = dict(zip(old, map(str, parameters), strict=True))
    if all(name == by for name, by in new.items()):
        return layouts
    rows: list[LaidOut] = []
    for i, row in enumerate(layouts.rows):
        origins = {axis: new.get(by, by) for axis, by in row.origins.items()}
        if i < len(old):
            row = row._replace(name=new[row.name], expression=new[row.name])
        rows.append(row._replace(origins=origins))
    return replace(layouts, rows=tuple(rows))
