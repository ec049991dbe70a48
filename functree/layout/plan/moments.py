"""The rows of a plan ─► those of an optimizer's moments set apart, in whole subtrees."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from functree.layout.plan.row import Row, rows_by_path
from functree.report.path_groups import alternatives, common_path, grouped
from functree.tree.arrays import dtype_text
from functree.tree.paths import Path


class Moments(NamedTuple):
    """Subtrees whose arrays have the shapes and the specs of parameters, such as `mu` and `nu`.

    Attributes:
        roots: the paths of the subtrees, which differ in their last key.
        model: the path of the subtree that the parameters are in.
        rows: the rows of each subtree.
        dtype: the dtype of all of them, if it is another than that of the parameters.
    """

    roots: tuple[Path, ...]
    model: Path
    rows: tuple[tuple[Row, ...], ...]
    dtype: str | None

    @property
    def parts(self) -> list[str]:
        """The text of each key of the path: `opt_state`, `0`, `{mu,nu}`."""
        *above, _ = self.roots[0]
        last = alternatives([root[-1] for root in self.roots])
        return [*(common_path([Path((key,))]) for key in above), last]

    @property
    def reference(self) -> str:
        """What they are sharded as: `model`."""
        name = str(self.model) or "the parameters"
        if self.dtype is not None:
            name += f" in {self.dtype}"
        return name

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all subtrees."""
        return [row for rows in self.rows for row in rows]


def moments(rows: Sequence[Row]) -> tuple[list[Row], list[Moments]]:
    """The rows that are no moments, and the moments."""
    by_path = rows_by_path(rows)
    # The subtrees by their path and that of the model.
    subtrees: dict[tuple[Path, Path], dict[Path, Row]] = {}
    for row in rows:
        if row.follows is None or not _is_as(row, by_path.get(row.follows)):
            continue
        below = _common_end(row.path, row.follows)
        if below:
            root, model = Path(row.path[:-below]), Path(row.follows[:-below])
            if root:
                subtrees.setdefault((root, model), {})[Path(row.path[-below:])] = row
    found: list[Moments] = []
    apart: set[Path] = set()
    for alike in grouped(subtrees.items(), _kind):
        one = _moments([(root, model, inner) for (root, model), inner in alike], by_path)
        # A line for a single array would say less than its row.
        if len(one.all_rows) > 1:
            found.append(one)
            apart.update(row.path for row in one.all_rows)
    return [row for row in rows if row.path not in apart], found


def _is_as(row: Row, parameter: Row | None) -> bool:
    """Whether a row has the shape and the spec of a parameter, as far as the plan has it."""
    if parameter is None:
        return True  # the plan is of the optimizer's state alone
    return _cut(row) == _cut(parameter)


def _cut(row: Row) -> tuple[object, ...]:
    return row.shape, row.spec, row.memory_kind, row.copies


def _common_end(path: Path, other: Path) -> int:
    """The number of keys at the end in which two paths agree."""
    number = 0
    for key, its in zip(reversed(path), reversed(other), strict=False):
        if key != its:
            break
        number += 1
    return number


def _kind(subtree: tuple[tuple[Path, Path], Mapping[Path, Row]]) -> tuple[object, ...]:
    """What siblings that are one line have in common."""
    (root, model), inner = subtree
    arrays = frozenset((path, str(row.dtype), _cut(row)) for path, row in inner.items())
    return root[:-1], model, arrays


def _moments(
    alike: Sequence[tuple[Path, Path, Mapping[Path, Row]]], by_path: Mapping[Path, Row]
) -> Moments:
    _, model, first = alike[0]
    own = {str(row.dtype) for row in first.values()}
    parameters = [by_path.get(row.follows) for row in first.values() if row.follows]
    dtypes = {str(row.dtype) for row in parameters if row is not None}
    dtype = None
    if len(own) == 1 and dtypes - own:
        dtype = dtype_text(own.pop())
    return Moments(
        tuple(root for root, _, _ in alike),
        model,
        tuple(tuple(inner.values()) for _, _, inner in alike),
        dtype,
    )
