"""`plan_text` renders the rows of a plan as a table, in which identical layers share a line.

A `Row` holds the figures of one array. The notes below the table list replicated arrays, and axes
with several sizes. `PlanPage` renders the rows as HTML: a collapsible tree with a picture of each
array's shards.
"""

import html
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.devices.meshes import MeshView, mesh_axes, named_axes, of_rank, spec_text
from functree.errors import count, listed
from functree.labels.annotations.given_names import equinox_names
from functree.labels.leaves import Leaf
from functree.report.page import (
    Card,
    Pictures,
    TreeLeaf,
    cards_html,
    code,
    device_color,
    notes_html,
    report_html,
    section_html,
    tree_html,
)
from functree.report.table import (
    bytes_text,
    columns,
    common_parts,
    common_path,
    grouped,
    lines_text,
    numbered,
    paragraphs,
    pattern_of,
    row_lines,
)
from functree.tree.arrays import DType, dtype_text
from functree.tree.axes import Axes
from functree.tree.paths import Path, part_text


class Row(NamedTuple):
    """The figures of one array in a plan.

    Attributes:
        path: the path of the array in the tree.
        shape: the global shape of the array.
        dtype: the dtype of the array.
        axes: the names of its dimensions.
        spec: its spec, with one entry for each dimension; None if its sharding has no spec.
        reason: the reason for the spec.
        local_shape: the shape of the shard on one device.
        bytes_global: the bytes of the whole array.
        bytes_per_device: the bytes of the shard on one device.
        copies: the number of devices that hold each byte.
        memory_kind: `"pinned_host"` for host memory; None for the default.
        mesh: the array's mesh if it differs from the plan's, and None otherwise. A row has its
            own mesh only in a plan that shows how arrays are sharded now.
        follows: the path of the parameter whose dimensions and spec the array shares, as an
            optimizer's moment does; None if the array follows no parameter.

    Examples:
        >>> row = ft.plan(
        ...     jnp.ones((4, 8)), ft.P("data"), {"data": 2, "model": 4}
        ... )[()]
        >>> row.local_shape, row.bytes_per_device, row.copies
        ((2, 8), 64, 4)
    """

    path: Path
    shape: tuple[int, ...]
    dtype: DType
    axes: Axes
    spec: PartitionSpec | None
    reason: str
    local_shape: tuple[int, ...]
    bytes_global: int
    bytes_per_device: int
    copies: int
    memory_kind: str | None = None
    mesh: Mesh | AbstractMesh | None = None
    follows: Path | None = None


def row_of(
    leaf: Leaf,
    spec: PartitionSpec | None,
    reason: str,
    local_shape: tuple[int, ...],
    copies: int = 1,
    memory_kind: str | None = None,
) -> Row:
    """Return the row of an array, with its bytes."""
    shape, dtype = leaf.value.shape, leaf.value.dtype
    whole, part = math.prod(shape) * dtype.itemsize, math.prod(local_shape) * dtype.itemsize
    array = leaf.path, shape, dtype, leaf.axes
    return Row(*array, spec, reason, local_shape, whole, part, copies, memory_kind)


def per_device(rows: Iterable[Row]) -> int:
    """Return the bytes of some rows on one device."""
    return sum([row.bytes_per_device for row in rows])


def saved_by_sharding(row: Row) -> int:
    """Return the bytes per device that sharding would save if only one device held each byte."""
    return row.bytes_per_device - row.bytes_per_device // max(row.copies, 1)


def array_of(row: Row) -> str:
    """Return a row's array, with the mesh axes that divide each size: `f32[32000/model, 512]`.

    If several mesh axes divide a size, the outermost comes first: `64/data/model`. A missing spec,
    partial sums and host memory follow the sizes.
    """
    sizes: list[str] = []
    for size, axes in zip(row.shape, axes_of(row), strict=True):
        sizes.append("/".join((str(size), *axes)))
    text = f"{dtype_text(row.dtype)}[{', '.join(sizes)}]"
    if row.spec is None:
        text += " no spec"
    elif row.spec.unreduced or row.spec.reduced:
        text += f" {spec_text(row.spec)}"
    if row.memory_kind is not None:
        text += f" {row.memory_kind}"
    return text


def axes_of(row: Row) -> list[tuple[str, ...]]:
    """Return the mesh axes that divide each dimension of an array."""
    spec = PartitionSpec() if row.spec is None else row.spec
    # In a plan with problems, a spec may have more entries than the array has dimensions.
    entries = of_rank(spec, len(row.shape)).partitions
    return list(map(mesh_axes, entries[: len(row.shape)]))


# The table

COLUMNS = (38, 42, 3)  # the widths of the path, the array and the reason's number


class Group(NamedTuple):
    """Rows that share a line of the table.

    The rows differ only in the indices of their paths, or hold one kind of moment, sharded like the
    parameters.

    Attributes:
        rows: the rows.
        parts: the text of each key of their paths: `blocks`, `{0-3}`, `w`.
        follow: whether the rows follow parameters.
    """

    rows: Sequence[Row]
    parts: tuple[str, ...]
    follow: bool = False

    @property
    def title(self) -> str:
        """The path, and the number of rows if there are several."""
        path = ".".join(self.parts) or "(the root)"
        return f"{path} ×{len(self.rows)}" if len(self.rows) > 1 else path

    @property
    def array(self) -> str:
        """The array of each row, as text."""
        if self.follow:
            return f"like the parameters, in {dtype_text(self.rows[0].dtype)}"
        return array_of(self.rows[0])

    @property
    def why(self) -> str:
        """The shared axes and reason, or an empty string if the rows follow parameters."""
        if self.follow:
            return ""
        first, reason = self.rows[0], self.rows[0].reason
        if first.follows is not None:
            common = common_path([row.follows for row in self.rows if row.follows])
            reason = reason.replace(f"follows {first.follows}", f"follows {common}", 1)
        axes = str(first.axes) if any(first.axes) else ""
        return ": ".join(filter(None, (axes, reason)))

    @property
    def per_device(self) -> int:
        """The bytes of all rows on one device."""
        return per_device(self.rows)


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Group the rows that differ only in the indices of their paths, and each kind of moments."""
    by_path = {row.path: row for row in rows}
    groups: list[Group] = []
    for alike in grouped(rows, lambda row: _moments(row, by_path) or _but_for_indices(row)):
        moments = _moments(alike[0], by_path)
        if moments is not None:
            root, _ = moments
            groups.append(Group(alike, (*map(part_text, root), "**"), follow=True))
            continue
        # `a.{0-1}.{0-1}` stands for four rows, so three rows stay separate.
        different = map(set, zip(*[row.path for row in alike], strict=True))
        is_grid = math.prod(map(len, different)) == len(alike)
        for members in [alike] if is_grid else [[row] for row in alike]:
            groups.append(Group(members, tuple(common_parts([row.path for row in members]))))
    return groups


def _moments(row: Row, by_path: Mapping[Path, Row]) -> tuple[Path, str] | None:
    """Return the keys before the path of the parameter that an array follows, and the dtype.

    For `opt_state.0.mu.w`, the keys are `opt_state.0.mu`. Return None unless the array and the
    parameter are sharded alike.
    """
    parameter = None if row.follows is None else by_path.get(row.follows)
    if parameter is None or _sharded(row) != _sharded(parameter):
        return None
    below = 0
    for key, other in zip(reversed(row.path), reversed(parameter.path), strict=False):
        if key != other:
            break
        below += 1
    return (Path(row.path[: len(row.path) - below]), str(row.dtype)) if below else None


def _sharded(row: Row) -> Hashable:
    return row.shape, row.spec, row.memory_kind, row.copies


def _but_for_indices(row: Row) -> Hashable:
    array = row.shape, str(row.dtype), row.axes
    why = row.reason if row.follows is None else pattern_of(row.follows)
    return pattern_of(row.path), array, row.spec, why, row.memory_kind, row.copies


def plan_text(
    rows: Sequence[Row], notes: Sequence[str], column: str = "per device", by_bytes: bool = False
) -> str:
    """Render the table, at most 100 columns wide, with the reasons below it.

    Args:
        rows: one for each array.
        notes: the lines below the table.
        column: the title of the last column, which lists the bytes of each line.
        by_bytes: whether the largest line comes first.
    """
    groups = groups_of(rows)
    if by_bytes:
        groups.sort(key=lambda group: group.per_device, reverse=True)
    # Reasons are numbered in the order of their first lines.
    reasons: dict[str, int] = {}
    for group in groups:
        if group.why:
            reasons.setdefault(group.why, len(reasons) + 1)
    lines = columns(("path", "array", "why" if reasons else ""), COLUMNS, column)
    for group in groups:
        number = str(reasons.get(group.why, ""))
        cells = (group.title, group.array, number)
        lines += row_lines(cells, COLUMNS, bytes_text(group.per_device), "")
    if reasons:
        lines += ["", "why"]
    for text, number in reasons.items():
        lines += numbered(number, text)
    return lines_text([*lines, "", *paragraphs(notes)])


def replicated(rows: Sequence[Row], sizes: Mapping[str, int]) -> list[str]:
    """Return a line, with the cost, for each set of mesh axes over which arrays are replicated.

    Scalars are left out, since they cannot be sharded.

    Args:
        rows: the rows of a plan.
        sizes: the sizes of its mesh axes.
    """
    by_axes: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.spec is None or row.mesh is not None or not row.shape:
            continue
        used = named_axes(row.spec)
        axes = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)
        if axes:
            by_axes.setdefault(axes, []).append(row)
    texts: dict[str, int] = {}
    for axes, alike in by_axes.items():
        saved = sum(map(saved_by_sharding, alike))
        size = bytes_text(per_device(alike))
        largest = max(groups_of(alike), key=lambda group: group.rows[0].bytes_per_device)
        text = f"replicated over {', '.join(axes)}: {count(len(alike), 'array')}, {size} per device"
        text += f"; sharding would save {bytes_text(saved)} (largest: {largest.title})"
        texts[text] = saved
    # The largest saving comes first.
    return sorted(texts, key=lambda text: texts[text], reverse=True)


AxisSizes = Mapping[str, Mapping[int, tuple[Path, ...]]]
"""The sizes of each axis, with the paths of the arrays that have each size."""


# In `eqx.nn`, these axes may have a different size in each layer.
_OF_ONE_LAYER = {
    axis for names in equinox_names.values() for _, axes in names if isinstance(axes, Axes)
    for axis in axes
}  # fmt: skip

HEADLINE = "axes with several sizes in one module (are their names transposed?):"
MOST = 8  # the maximum number of lines; a network could have a line for each of many convolutions


def axis_sizes(rows: Iterable[Row]) -> AxisSizes:
    """Return the sizes of each axis, in the order of the rows."""
    by_name: dict[str, dict[int, dict[Path, None]]] = {}
    for row in rows:
        # Not strict: an annotation that does not fit has fewer or more axes than the array.
        for name, size in zip(row.axes, row.shape, strict=False):
            if name is not None:
                # The paths are the keys of a dict, since several dimensions of an array may have
                # the same name.
                by_name.setdefault(name, {}).setdefault(size, {})[row.path] = None
    return {
        name: {size: tuple(paths) for size, paths in sizes.items()}
        for name, sizes in by_name.items()
    }


def several_sizes(rows: Iterable[Row]) -> list[str]:
    """Return a line for each axis with several sizes in one module, below a headline.

    A line reads `hidden: 32 in up, 8 in down`. The names in an annotation may be transposed. If
    mesh axes divide both sizes, nothing else reveals this mistake.
    """
    modules: dict[Path, list[Row]] = {}
    for row in rows:
        # The moments of parameters have the same sizes.
        if row.follows is None:
            for module in _modules(row.path):
                modules.setdefault(module, []).append(row)
    # Equal lines appear once, since layers have equal sizes.
    lines: dict[str, str] = {}
    told: set[tuple[Path, str]] = set()
    # The innermost modules come first, so that an axis is reported in the smallest module in which
    # it has several sizes.
    for module in sorted(modules, key=len, reverse=True):
        for name, sizes in axis_sizes(modules[module]).items():
            if len(sizes) > 1 and (module, name) not in told and name not in _OF_ONE_LAYER:
                told.add((Path(module[:-1]), name))
                lines.setdefault(f"{name} {sorted(sizes)}", _text(name, sizes))
    texts = list(lines.values())
    if len(texts) > MOST:
        texts[MOST:] = [f"and {len(texts) - MOST} more (see `.axis_sizes`)"]
    return [HEADLINE, *texts] if texts else []


def _modules(path: Path) -> Sequence[Path]:
    """Return the module of an array, and the module that contains this module in a field.

    Elements of a list are not compared, since successive layers may have different sizes.
    """
    if not path or isinstance(path[-1], int):
        return ()
    inner = Path(path[:-1])
    if not inner or isinstance(inner[-1], int):
        return (inner,)
    return inner, Path(inner[:-1])


def _text(name: str, sizes: Mapping[int, Sequence[Path]]) -> str:
    texts: list[str] = []
    for size, paths in sizes.items():
        texts.append(f"{size} in {listed(list(map(_folded, paths)), 2)}")
    return f"{name}: {', '.join(texts)}"


def _folded(path: Path) -> str:
    """Return the text of a path, with `*` for each index."""
    keys = ["*" if isinstance(key, int) else str(Path((key,))) for key in path]
    return ".".join(keys)


# The page

MOST_DEVICES = 16
"""The maximum number of devices in the pictures' color key."""
MOST_LINES = 200
"""The maximum number of lines in a notebook. A page shows all lines."""


class PlanPage(NamedTuple):
    """The content of a plan's page.

    Attributes:
        rows: the rows of the plan.
        sizes: the sizes of the mesh axes.
        problems: the lines about problems, which are highlighted.
        notes: the other lines about the plan.
    """

    rows: Sequence[Row]
    sizes: Mapping[str, int]
    problems: Sequence[str]
    notes: Sequence[str]

    def html(self, page: bool) -> str:
        """Render the page, or a fragment for a notebook.

        If a plan has many arrays, a fragment shows only the largest.
        """
        head = cards_html(self.cards()) + notes_html(self.problems, self.notes)
        if not page:
            return report_html("", head, self.arrays(MOST_LINES), page)
        title = f"Plan on the mesh {MeshView(self.sizes)}"
        return report_html(title, head, self.devices() + self.arrays(), page)

    def cards(self) -> list[Card]:
        """Return the figures at the top."""
        copies = sum(map(saved_by_sharding, self.rows))
        return [
            Card(bytes_text(self._each()), "on each device"),
            Card(
                bytes_text(sum(row.bytes_global for row in self.rows)),
                "in total, each array counted once",
            ),
            Card(bytes_text(copies), "redundant on each device"),
            Card(f"{len(self.rows):,}", f"arrays on {MeshView(self.sizes).devices:,} devices"),
        ]

    def devices(self) -> str:
        """Render the key to the pictures' colors. All devices hold the same number of bytes."""
        number = MeshView(self.sizes).devices
        devices = "".join(map(self._device, range(min(number, MOST_DEVICES))))
        if number > MOST_DEVICES:
            devices += f"<span>and {number - MOST_DEVICES:,} more</span>"
        return section_html(
            f"{number:,} {'device' if number == 1 else 'devices'}, {bytes_text(self._each())} each",
            f'<div class="key devices muted">{devices}</div>',
        )

    def _each(self) -> int:
        """Return the bytes on one device."""
        return per_device(self.rows)

    def _device(self, device: int) -> str:
        sizes = tuple(self.sizes.values())
        position: list[str] = []
        for axis, size, i in zip(self.sizes, sizes, np.unravel_index(device, sizes), strict=True):
            if size > 1:
                position.append(f"{axis}={i}")
        name = html.escape(", ".join([f"device {device}", *position]))
        dot = f'<span class="dot" style="background:{device_color(device, self.sizes)}"></span>'
        return f'<span class="device">{dot}{name}</span>'

    def arrays(self, at_most: int | None = None) -> str:
        """Render the tree of arrays; with `at_most`, only the largest."""
        groups = groups_of(self.rows)
        left_out = ""
        if at_most is not None and len(groups) > at_most:
            left_out = f"and {len(groups) - at_most:,} more lines for smaller arrays "
            left_out += "(`plan.html()` shows all lines)"
            least = sorted(group.per_device for group in groups)[-at_most]
            groups = [group for group in groups if group.per_device >= least][:at_most]
        pictures = Pictures(self.sizes)
        tree = tree_html([self._leaf(group, pictures) for group in groups], "all arrays", "array")
        notes = notes_html([], [left_out] if left_out else [])
        return section_html("Arrays", pictures.definitions(), tree, notes)

    def _leaf(self, group: Group, pictures: Pictures) -> TreeLeaf:
        row, number = group.rows[0], len(group.rows)
        content = code(group.array)
        if any(row.axes) and not group.follow:
            content += f' <span class="muted">{html.escape(str(row.axes))}</span>'
        if number > 1:
            content += f' <span class="muted">×{number}</span>'
        if row.reason and not group.follow:
            content += f'<div class="why">{html.escape(row.reason)}</div>'
        picture = ""
        if row.spec is not None and row.mesh is None and not group.follow:
            picture = pictures.of(row.shape, axes_of(row))
        copies = sum(map(saved_by_sharding, group.rows))
        return TreeLeaf(group.parts, group.per_device, content, number, picture, copies)
