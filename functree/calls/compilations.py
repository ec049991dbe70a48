"""Two compilations of one function ─► what differed between them, by path."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from functree.calls.call_groups import CallGroup
from functree.layout.meshes import MeshView
from functree.layout.placement import sharding_text
from functree.tree.arrays import dtype_text
from functree.tree.paths import Path
from functree.tree.skeleton.static_value import StaticValue, same_value


class Difference(NamedTuple):
    """One thing that was otherwise in an earlier compilation.

    Attributes:
        path: of the leaf, from the parameter's name on; empty for what is no leaf.
        kind: `static`, `shape`, `dtype`, `weak type`, `sharding`, `structure`, `rules`, `mesh` or `settings`.
        before: as it was.
        now: as it is.
    """

    path: Path
    kind: str
    before: Any
    now: Any

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        before, now = self.text(self.before), self.text(self.now)
        alike = " (another object, equal only by identity: make it once)" if before == now else ""
        return f"{where}{self.kind} {before} → {now}{alike}"

    def text(self, value: Any) -> str:
        """One of the two, for a person: a function by its name."""
        if self.kind == "static":
            return getattr(value, "__qualname__", getattr(value, "__name__", None)) or repr(value)
        return _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, Mesh | AbstractMesh):
        return str(value)
    kinds = "/".join(dict.fromkeys(kind.name for kind in value.axis_types))
    return f"{MeshView(dict(value.shape))} {kinds}"


class Compilation(NamedTuple):
    """One compilation of a function, and what made it one.

    Attributes:
        number: 1 for the first.
        differences: from the nearest earlier one; empty for the first.
        shared: whether the program was there already, compiled by another wrapper of the same function with equal
            options.
    """

    number: int
    differences: tuple[Difference, ...]
    shared: bool = False

    def __str__(self) -> str:
        why = "; ".join(map(str, self.differences)) or "the first"
        return f"compilation {self.number}: {why}" + (_SHARED if self.shared else "")


_SHARED = " (shared: compiled by another wrapper of this function)"


class Situation(NamedTuple):
    """All that a compilation depends on."""

    leaves: Mapping[Path, tuple[tuple[str, Any], ...]]
    mesh: Any
    rules: Any


def situation(group: CallGroup, arrays: Sequence[Any], mesh: Any, rules: Any) -> Situation:
    """What a call looks like to the compiler."""
    known = {path: _array(x) for path, x in zip(group.paths, arrays, strict=True)}
    for path, value in group.skeleton.statics:
        known.setdefault(path, (("static", StaticValue(value)),))
    return Situation(known, mesh, rules)


def _array(value: Any) -> tuple[tuple[str, Any], ...]:
    aval = value.aval if isinstance(value, jax.Array) else jax.typeof(value)
    return (
        ("shape", tuple(aval.shape)),
        ("dtype", dtype_text(aval.dtype)),
        ("weak type", bool(aval.weak_type)),
        ("sharding", sharding_text(getattr(value, "sharding", None))),
    )


def differences(before: Situation, now: Situation) -> tuple[Difference, ...]:
    """What is otherwise, leaf by leaf."""
    found: list[Difference] = []
    for path in dict.fromkeys((*before.leaves, *now.leaves)):
        old, new = before.leaves.get(path), now.leaves.get(path)
        if old is None or new is None or [kind for kind, _ in old] != [kind for kind, _ in new]:
            found.append(Difference(path, "structure", _brief(old), _brief(new)))
            continue
        for (kind, a), (_, b) in zip(old, new, strict=True):
            if a != b:
                found += _apart(path, kind, _bare(a), _bare(b))
    if before.mesh != now.mesh:
        found.append(Difference(Path(), "mesh", before.mesh, now.mesh))
    if before.rules != now.rules:
        found.append(Difference(Path(), "rules", before.rules, now.rules))
    return tuple(found)


def _apart(path: Path, kind: str, before: Any, now: Any) -> list[Difference]:
    """What differs; of two configs, the fields that do."""
    fields: list[Difference] = []
    if type(before) is type(now) and dataclasses.is_dataclass(before) and not isinstance(before, type):
        for name in (field.name for field in dataclasses.fields(before)):
            a, b = getattr(before, name), getattr(now, name)
            if not same_value(a, b):
                fields.append(Difference(path / name, kind, a, b))
    return fields or [Difference(path, kind, before, now)]


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, StaticValue) else value


def _brief(told: tuple[tuple[str, Any], ...] | None) -> str:
    if told is None:
        return "nothing"
    return f"static {told[0][1]!r}" if told[0][0] == "static" else "an array"


class Log:
    """The compilations of one function.

    Args:
        name: of the function.

    Attributes:
        records: one for each.
    """

    def __init__(self, name: str):
        self.name = name
        self.records: list[Compilation] = []
        self._situations: list[Situation] = []
        self._numbers: dict[Path, int] = {}

    def add(self, now: Situation, shared: bool = False) -> None:
        """A compilation, compared with the earlier one that is nearest. Warns where a Python number is the reason."""
        nearest = min((differences(before, now) for before in self._situations), key=len, default=())
        if self._situations and not nearest:
            # All that we know of is the same: it was a setting of JAX, such as its matmul precision.
            nearest = (Difference(Path(), "settings", "JAX's settings", "others"),)
        self._situations.append(now)
        self.records.append(Compilation(len(self._situations), nearest, shared))
        if len(nearest) == 1 and nearest[0].kind == "static" and type(nearest[0].now) in (int, float, complex):
            self._number(nearest[0])

    def _number(self, changed: Difference) -> None:
        self._numbers[changed.path] = self._numbers.get(changed.path, 0) + 1
        if self._numbers[changed.path] == 2:
            warnings.warn(
                f"{self.name} compiles a third time for `{changed.path}` alone, a Python number and so static "
                f"({changed.before!r}, now {changed.now!r}): hand it over as an array, `jnp.asarray(...)`, to trace it",
                stacklevel=5,
            )
