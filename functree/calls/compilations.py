"""Two compilations of one function ─► the differences between them, with paths."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import PyTreeDef

from functree.calls.call_groups import CallGroup
from functree.calls.signature import NOT_GIVEN
from functree.errors import warn
from functree.layout.layout import Layout
from functree.layout.meshes import mesh_view
from functree.layout.placement import sharding_text
from functree.tree.arrays import dtype_text
from functree.tree.paths import Path
from functree.tree.skeleton.static_value import StaticValue, same_value


class Difference(NamedTuple):
    """One difference from an earlier compilation.

    Attributes:
        path: the path of the leaf, which begins with the name of a parameter; empty if the difference is not in a leaf.
        kind: `static`, `shape`, `dtype`, `weak type`, `sharding`, `devices`, `structure`, `rules`, `mesh`,
            `compiler options`, `settings`.
        before: the value in the earlier compilation.
        now: the value in this one.
    """

    path: Path
    kind: str
    before: Any
    now: Any

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        before, now = self.text(self.before), self.text(self.now)
        text = f"{where}{self.kind} {before} → {now}"
        if before == now and isinstance(self.now, Mesh | Devices):
            text += " (other devices, or in another order)"
        elif before == now:
            # Such as two lambdas from one line. The values differ, but their texts do not show it.
            text += " (a different object, which is equal only to itself: create it once)"
        return text

    def text(self, value: Any) -> str:
        """The text of one of the two values; for a function it is the name."""
        if self.kind == "static":
            return getattr(value, "__qualname__", getattr(value, "__name__", None)) or repr(value)
        return _text(value)


def _text(value: Any) -> str:
    """The text of a value; a mesh has its sizes and the types of its axes, which may be the only difference."""
    if not isinstance(value, Mesh | AbstractMesh):
        return str(value)
    kinds = "/".join(dict.fromkeys(kind.name for kind in value.axis_types))
    return f"{mesh_view(value)} {kinds}"


class Compilation(NamedTuple):
    """One compilation of a function, and the reason for it.

    Attributes:
        number: 1 for the first compilation.
        differences: the differences from the most similar earlier compilation; empty for the first one.
        shared: whether the program existed already, because another wrapper of the same function with equal options
            had compiled it.
    """

    number: int
    differences: tuple[Difference, ...]
    shared: bool = False

    def __str__(self) -> str:
        why = "; ".join(map(str, self.differences)) or "the first"
        return f"compilation {self.number}: {why}" + (_SHARED if self.shared else "")


_SHARED = " (shared: compiled by another wrapper of this function)"


class Situation(NamedTuple):
    """Everything that a compilation depends on.

    Attributes:
        leaves: for each leaf of the call, (kind, value) pairs.
        mesh: the mesh.
        rules: the ambient rules.
        options: the options of the compiler, as (name, value) pairs.
    """

    leaves: Mapping[Path, tuple[tuple[str, Any], ...]]
    mesh: Mesh | AbstractMesh | None
    rules: Layout | None
    options: tuple[tuple[str, Any], ...] = ()


class Seen(NamedTuple):
    """A call that was traced. It holds no arrays, and much less than a `Situation`, which few traces need.

    Attributes:
        group: the group of the call.
        types: JAX's type of each array.
        shardings: the sharding of each array, or None.
        mesh: the mesh.
        rules: the ambient rules.
    """

    group: CallGroup
    types: tuple[Any, ...]
    shardings: tuple[Any, ...]
    mesh: Mesh | AbstractMesh | None
    rules: Layout | None

    @classmethod
    def of(
        cls, group: CallGroup, arrays: Sequence[Any], mesh: Mesh | AbstractMesh | None, rules: Layout | None
    ) -> "Seen":
        """A call with these arrays."""
        types = tuple([x.aval if isinstance(x, jax.Array) else jax.typeof(x) for x in arrays])
        return cls(group, types, tuple([getattr(x, "sharding", None) for x in arrays]), mesh, rules)

    @property
    def situation(self) -> Situation:
        """Everything that its compilation depends on."""
        known: dict[Path, tuple[tuple[str, Any], ...]] = {}
        for path, aval, sharding in zip(self.group.paths, self.types, self.shardings, strict=True):
            known[path] = _array(aval, sharding)
        for keys, value in self.group.skeleton.statics:
            if not (isinstance(value, PyTreeDef) and value == _NOT_GIVEN):
                known.setdefault(Path(keys), (("static", StaticValue(value)),))
        return Situation(known, self.mesh, self.rules)


_NOT_GIVEN = jax.tree.structure(NOT_GIVEN)


def _array(aval: Any, sharding: Any) -> tuple[tuple[str, Any], ...]:
    """The properties of an array that a compilation depends on."""
    return (
        ("shape", tuple(aval.shape)),
        ("dtype", dtype_text(aval.dtype)),
        ("weak type", bool(aval.weak_type)),
        ("sharding", sharding_text(sharding)),
        ("devices", _devices_of(sharding)),
    )


class Devices(NamedTuple):
    """The devices of a mesh, in its order."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.names[:4])
        return shown if len(self.names) <= 4 else f"{shown}, … ({len(self.names)} devices)"


@functools.lru_cache(maxsize=64)
def _devices(mesh: Mesh) -> Devices:
    """The devices of a mesh; one object for all arrays that are on it."""
    return Devices(tuple(map(str, mesh.devices.flat)))


def _devices_of(sharding: Any) -> Devices | None:
    """The devices of a sharding on a mesh. The text of one without a mesh names the devices itself."""
    mesh = getattr(sharding, "mesh", None)
    return _devices(mesh) if isinstance(mesh, Mesh) else None


def differences(before: Situation, now: Situation) -> tuple[Difference, ...]:
    """The differences between two situations, leaf by leaf."""
    found: list[Difference] = []
    for path in dict.fromkeys((*before.leaves, *now.leaves)):
        old, new = before.leaves.get(path), now.leaves.get(path)
        # A leaf that exists only in one of them, or is an array in one and static in the other.
        if old is None or new is None or [kind for kind, _ in old] != [kind for kind, _ in new]:
            found.append(Difference(path, "structure", _brief(old), _brief(new)))
            continue
        different = {kind: (_bare(a), _bare(b)) for (kind, a), (_, b) in zip(old, new, strict=True) if a != b}
        if "sharding" in different:
            different.pop("devices", None)  # another sharding says it already
        for kind, (a, b) in different.items():
            found += _apart(path, kind, a, b)
    if before.mesh != now.mesh:
        found.append(Difference(Path(), "mesh", before.mesh, now.mesh))
    if before.rules != now.rules:
        found.append(Difference(Path(), "rules", before.rules, now.rules))
    if before.options != now.options:
        found.append(Difference(Path(), "compiler options", dict(before.options), dict(now.options)))
    return tuple(found)


def _apart(path: Path, kind: str, before: Any, now: Any) -> list[Difference]:
    """The differences between two values. For two dataclasses of one class (configs) these are their fields."""
    fields: list[Difference] = []
    if type(before) is type(now) and dataclasses.is_dataclass(before) and not isinstance(before, type):
        for name in (field.name for field in dataclasses.fields(before)):
            a, b = getattr(before, name), getattr(now, name)
            if not same_value(a, b):
                fields.append(Difference(path / name, kind, a, b))
    return fields or [Difference(path, kind, before, now)]


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, StaticValue) else value


def _brief(properties: tuple[tuple[str, Any], ...] | None) -> str:
    """A leaf in a difference of structure."""
    if properties is None:
        return "nothing"
    kind, value = properties[0]
    return f"static {value!r}" if kind == "static" else "an array"


class _Seen:
    """The situations of earlier compilations, as a table of numbers: a row for each, a column for each leaf.

    Most situations of one function have most of their values in common, and each value is kept once. To compare rows of
    numbers takes a few microseconds for each hundred of them, where to compare situations takes a millisecond for each.
    """

    # The number of rows that are compared leaf by leaf. The others differ from the new situation in more leaves.
    NEAREST = 4

    def __init__(self) -> None:
        self._columns: dict[Hashable, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._values: list[Any] = [None]  # by number; 0 is that of a leaf that does not exist
        self._table: np.ndarray[Any, Any] = np.zeros((0, 0), np.int32)
        self._size: int = 0

    def __len__(self) -> int:
        return self._size

    def add(self, situation: Situation) -> None:
        """Add a situation."""
        row = self._row(situation)
        rows, columns = self._table.shape
        if self._size == rows:
            # Twice as large, so that a row is copied only a few times.
            self._table = np.pad(self._table, ((0, max(8, rows)), (0, 0)))
        if len(row) > columns:
            self._table = np.pad(self._table, ((0, 0), (0, max(len(row) - columns, columns))))
        self._table[self._size, : len(row)] = row
        self._size += 1

    def nearest(self, situation: Situation) -> list[Situation]:
        """A few earlier situations that differ from this one in the fewest leaves, the earliest first."""
        row = self._row(situation)
        padded = np.zeros(self._table.shape[1], np.int32)
        padded[: len(row)] = row[: len(padded)]  # new leaves differ from all earlier situations
        differing = np.count_nonzero(self._table[: self._size] != padded, axis=1)
        order = np.argsort(differing, kind="stable")[: self.NEAREST]
        return [self._situation(self._table[i]) for i in order]

    def _row(self, situation: Situation) -> np.ndarray[Any, Any]:
        """The numbers of a situation; values and leaves that are new get new numbers and columns."""
        cells: dict[Hashable, Hashable] = {**situation.leaves, **dict(zip(_BESIDE, situation[1:], strict=True))}
        row = np.zeros(len(self._columns) + len(cells), np.int32)
        for key, value in cells.items():
            column = self._columns.setdefault(key, len(self._columns))
            number = self._numbers.setdefault(value, len(self._values))
            if number == len(self._values):
                self._values.append(value)
            row[column] = number
        return row[: len(self._columns)]

    def _situation(self, row: np.ndarray[Any, Any]) -> Situation:
        """The situation of a row."""
        # The table may have fewer columns than there are, and more: some are not used yet.
        cells: dict[Any, Any] = {}
        for key, number in zip(self._columns, row.tolist(), strict=False):
            if number:
                cells[key] = self._values[number]
        beside = [cells.pop(key) for key in _BESIDE]
        return Situation(cells, *beside)


# The columns of what is not a leaf.
_BESIDE = ("mesh", "rules", "options")


observers: list[Callable[[str, Compilation], None]] = []
"""Functions that are told of each compilation, with the name of the function that is compiled."""


class Log:
    """The compilations of one function.

    Args:
        name: the name of the function.

    Attributes:
        records: one for each compilation.
    """

    def __init__(self, name: str):
        self.name = name
        self.records: list[Compilation] = []
        self._seen = _Seen()
        self._numbers: dict[Path, int] = {}  # how often a Python number at a path was the only difference

    def add(self, now: Situation, shared: bool = False) -> None:
        """Add a compilation, compared with the most similar earlier one. Warns if a Python number is the reason."""
        nearest = min((differences(before, now) for before in self._seen.nearest(now)), key=len, default=())
        if self._seen and not nearest:
            # Everything that is compared is the same. So a setting of JAX has changed, such as its matmul precision.
            nearest = (Difference(Path(), "settings", "of JAX", "others"),)
        self._seen.add(now)
        record = Compilation(len(self._seen), nearest, shared)
        self.records.append(record)
        for observe in observers:
            observe(self.name, record)
        if len(nearest) == 1 and nearest[0].kind == "static" and type(nearest[0].now) in (int, float, complex):
            self._number(nearest[0])

    def clear(self) -> None:
        """Forget all compilations."""
        self.records.clear()
        self._numbers.clear()
        self._seen = _Seen()

    def _number(self, changed: Difference) -> None:
        """Count a compilation for a Python number, and warn at the second: a single one may be on purpose."""
        self._numbers[changed.path] = self._numbers.get(changed.path, 0) + 1
        if self._numbers[changed.path] == 2:
            warn(
                f"{self.name} compiles a third time because of `{changed.path}` alone, a Python number and therefore "
                f"static ({changed.before!r}, now {changed.now!r}): pass an array, `jnp.asarray(...)`, to trace it",
            )
