"""The rows of a plan ─► a table as text, in which equal layers are one line; and notes: what is
replicated, and axes with several sizes."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from functree.devices.specs import named_axes
from functree.errors import count, listed
from functree.labels.annotations.given_names import equinox_names
from functree.layout.plan.row import Row, array_of, rows_by_path, saved_by_sharding
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
from functree.tree.arrays import dtype_text
from functree.tree.axes import Axes
from functree.tree.paths import Path, part_text

COLUMNS = (38, 42, 3)  # of path, array and the number of the reason


class Group(NamedTuple):
    """Rows in one line of a table: they differ only in the indices of their paths, or are what an
    optimizer keeps for each parameter, sharded as that.

    Attributes:
        rows: the rows.
        parts: the text of each key of their paths: `blocks`, `{0-3}`, `w`.
        follow: whether they follow parameters.
    """

    rows: Sequence[Row]
    parts: tuple[str, ...]
    follow: bool = False

    @property
    def title(self) -> str:
        """The path, and the number of rows if there are several."""
        path = ".".join(self.parts) or "(the array)"
        return f"{path} ×{len(self.rows)}" if len(self.rows) > 1 else path

    @property
    def array(self) -> str:
        """The array of each row."""
        if self.follow:
            return f"as the parameters, in {dtype_text(self.rows[0].dtype)}"
        return array_of(self.rows[0])

    @property
    def why(self) -> str:
        """The axes and the reason, which all rows share; empty for those that follow parameters."""
        if self.follow:
            return ""
        first, reason = self.rows[0], self.rows[0].reason
        if first.follows is not None:
            reason = reason.replace(
                str(first.follows), common_path([row.follows for row in self.rows if row.follows])
            )
        axes = str(first.axes) if any(first.axes) else ""
        return ": ".join(filter(None, (axes, reason)))

    @property
    def per_device(self) -> int:
        """The bytes of all rows on one device."""
        return sum(row.bytes_per_device for row in self.rows)


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """The rows in groups that differ only in the indices of their paths, in their order."""
    groups: list[Group] = []
    for alike in grouped(rows, _but_for_indices):
        # `a.{0-1}.{0-1}` is for four rows. It would be wrong for three of them.
        different = map(set, zip(*[row.path for row in alike], strict=True))
        is_grid = math.prod(map(len, different)) == len(alike)
        for own in [alike] if is_grid else [[row] for row in alike]:
            groups.append(Group(own, tuple(common_parts([row.path for row in own]))))
    return groups


def table_groups(rows: Sequence[Row]) -> list[Group]:
    """The same, but the moments of an optimizer are one group."""
    by_path = rows_by_path(rows)
    others: list[Row] = []
    followers: dict[tuple[Path, str], list[Row]] = {}
    for row in rows:
        root = _above_parameter(row, by_path)
        if root is None:
            others.append(row)
        else:
            followers.setdefault((root, str(row.dtype)), []).append(row)
    groups = groups_of(others)
    for (root, _), alike in followers.items():
        groups.append(Group(alike, (*map(part_text, root), "**"), follow=True))
    order = {row.path: i for i, row in enumerate(rows)}
    return sorted(groups, key=lambda group: order[group.rows[0].path])


def _above_parameter(row: Row, by_path: Mapping[Path, Row]) -> Path | None:
    """The beginning of an array's path, before the path of the parameter that it follows:
    `opt_state.0.mu` for `opt_state.0.mu.w`. None unless both are sharded alike."""
    parameter = None if row.follows is None else by_path.get(row.follows)
    if parameter is None or _sharded(row) != _sharded(parameter):
        return None
    below = 0
    for key, other in zip(reversed(row.path), reversed(parameter.path), strict=False):
        if key != other:
            break
        below += 1
    return Path(row.path[: len(row.path) - below]) if below else None


def _sharded(row: Row) -> Hashable:
    return row.shape, row.spec, row.memory_kind, row.copies


def _but_for_indices(row: Row) -> Hashable:
    array = row.shape, str(row.dtype), row.axes
    why = row.reason if row.follows is None else pattern_of(row.follows)
    return pattern_of(row.path), array, row.spec, why, row.memory_kind, row.copies


def plan_text(
    rows: Sequence[Row], notes: Sequence[str], column: str = "per device", by_bytes: bool = False
) -> str:
    """The table, at most 100 columns wide, with the reasons below it.

    Args:
        rows: one for each array.
        notes: the lines below the table.
        column: the title of the last column, the bytes of each line.
        by_bytes: whether the largest line is first.
    """
    groups = table_groups(rows)
    if by_bytes:
        groups.sort(key=lambda group: group.per_device, reverse=True)
    # A number for each reason, in the order in which they come first.
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
    """A line for each combination of mesh axes over which arrays are replicated, and its cost.

    Single numbers are left out, since they cannot be sharded.

    Args:
        rows: the rows of a plan.
        sizes: the sizes of its mesh axes.
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.spec is None or row.mesh is not None or not row.shape:
            continue
        used = named_axes(row.spec)
        axes = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)
        if axes:
            found.setdefault(axes, []).append(row)
    texts: dict[str, int] = {}
    for axes, alike in found.items():
        saved = sum(map(saved_by_sharding, alike))
        size = bytes_text(sum(row.bytes_per_device for row in alike))
        largest = max(groups_of(alike), key=lambda group: group.rows[0].bytes_per_device)
        text = f"replicated over {', '.join(axes)}: {count(len(alike), 'array')}, {size} per device"
        text += f"; sharding would save {bytes_text(saved)} (largest: {largest.title})"
        texts[text] = saved
    # What costs most is first.
    return sorted(texts, key=lambda text: texts[text], reverse=True)


AxisSizes = Mapping[str, Mapping[int, tuple[Path, ...]]]
"""For each axis its sizes, and for each of these the paths of the arrays that have it."""


# Each layer of `eqx.nn` has sizes of its own for these.
_OF_ONE_LAYER = {
    axis for names in equinox_names.values() for _, axes in names if isinstance(axes, Axes)
    for axis in axes
}  # fmt: skip

HEADLINE = "axes with several sizes in one module (are their names transposed?):"
MOST = 8  # lines of a text; a network of many convolutions may have very many


def axis_sizes(rows: Iterable[Row]) -> AxisSizes:
    """The sizes of each axis, in the order of the rows."""
    found: dict[str, dict[int, dict[Path, None]]] = {}
    for row in rows:
        # Not strict: an annotation that does not fit has fewer or more axes than the array.
        for name, size in zip(row.axes, row.shape, strict=False):
            if name is not None:
                # A dict, since an array may have one axis for several dimensions.
                found.setdefault(name, {}).setdefault(size, {})[row.path] = None
    return {
        name: {size: tuple(paths) for size, paths in sizes.items()} for name, sizes in found.items()
    }


def several_sizes(rows: Iterable[Row]) -> list[str]:
    """A line for each axis with several sizes in one module, below a headline: `hidden: 32 in up, 8
    in down`.

    That is what an annotation looks like whose names are transposed. A mesh axis may divide both
    sizes, so nothing else shows it.
    """
    modules: dict[Path, list[Row]] = {}
    for row in rows:
        for module in _modules(row.path):
            modules.setdefault(module, []).append(row)
    found: dict[Path, dict[str, str]] = {}
    told: set[tuple[Path, str]] = set()
    # Innermost first: an axis is told where its sizes are nearest to each other.
    for module in sorted(modules, key=len, reverse=True):
        for name, sizes in axis_sizes(modules[module]).items():
            if len(sizes) > 1 and (module, name) not in told and name not in _OF_ONE_LAYER:
                told.add((Path(module[:-1]), name))
                found.setdefault(module, {})[f"{name} {sorted(sizes)}"] = _text(name, sizes)
    # Then in the order of the rows, and without repetition: the layers of a model, and the moments
    # of its parameters, have the same sizes.
    lines: dict[str, str] = {}
    for module in modules:
        for key, text in found.get(module, {}).items():
            lines.setdefault(key, text)
    texts = list(lines.values())
    if len(texts) > MOST:
        texts[MOST:] = [f"and {len(texts) - MOST} more, all in `.axis_sizes`"]
    return [HEADLINE, *texts] if texts else []


def _modules(path: Path) -> Sequence[Path]:
    """The module that an array is in, and the one that has this module in a field of its own.

    The elements of a list are not compared: layers one after another have different sizes.
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
    """The text of a path, with `*` for the index of a layer."""
    keys = ["*" if isinstance(key, int) else str(Path((key,))) for key in path]
    return ".".join(keys)
