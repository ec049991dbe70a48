"""Two compilations of one function ─► the differences between them, with paths."""

import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import PyTreeDef

from functree.calls.call_groups import CallGroup
from functree.calls.signature import NOT_GIVEN
from functree.devices.meshes import mesh_view
from functree.devices.placement import sharding_text
from functree.errors import listed, warn
from functree.layout.layout import Layout
from functree.tree.arrays import AnyArray, dtype_text
from functree.tree.paths import Path
from functree.tree.skeleton.static_value import StaticValue


class Difference(NamedTuple):
    """One difference from an earlier compilation.

    Attributes:
        path: the path of the leaf, which begins with the name of a parameter; empty if the
            difference is not in a leaf.
        kind: `static`, `shape`, `dtype`, `weak type`, `sharding`, `devices`, `structure`, `rules`,
            `mesh`, `compiler options`, `settings`.
        before: the value in the earlier compilation.
        now: the value in this one.
    """

    path: Path
    kind: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.change}" if self.path else self.change

    @property
    def change(self) -> str:
        """Its text, without the path."""
        before, now = self.text(self.before), self.text(self.now)
        text = f"{self.kind} {before} → {now}"
        if before == now and self.kind in ("mesh", "devices"):
            text += " (other devices, or in another order)"
        elif before == now:
            # Such as two lambdas from one line. The values differ, but their texts do not show it.
            text += " (a different object, which is equal only to itself: create it once)"
        return text

    def text(self, value: object) -> str:
        """The text of one of the two values; for a function it is the name."""
        if self.kind == "static":
            return getattr(value, "__qualname__", getattr(value, "__name__", None)) or repr(value)
        if isinstance(value, Mesh | AbstractMesh):
            # The types of the axes may be the only difference.
            kinds = "/".join(dict.fromkeys(kind.name for kind in value.axis_types))
            return f"{mesh_view(value)} {kinds}"
        if self.kind == "devices" and isinstance(value, tuple):
            return _devices_text(value)
        return str(value)


def _devices_text(names: tuple[str, ...]) -> str:
    """The names of the devices of a mesh, the first of them if there are many."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown}, … ({len(names)} devices)"


class Compilation(NamedTuple):
    """One compilation of a function, and the reason for it.

    Attributes:
        number: 1 for the first compilation.
        differences: the differences from the most similar earlier compilation; empty for the first
            one.
        shared: whether the program existed already, because another wrapper of the same function
            with equal options had compiled it.
    """

    number: int
    differences: tuple[Difference, ...]
    shared: bool = False

    def __str__(self) -> str:
        text = f"compilation {self.number}: {_why(self.differences)}"
        if self.shared:
            text += " (shared: compiled by another wrapper of this function)"
        return text


def _why(differences: Sequence[Difference]) -> str:
    """The text of some differences: those that are alike at once."""
    paths: dict[str, list[str]] = {}
    # The arrays of a state often change place together, because of something else.
    for one in sorted(differences, key=lambda one: one.kind in ("sharding", "devices")):
        paths.setdefault(one.change, []).extend([str(one.path)] if one.path else [])
    texts: list[str] = []
    for change, changed in paths.items():
        texts.append(f"{listed(changed, 3)}: {change}" if changed else change)
    return "; ".join(texts) or "the first"


Properties = tuple[tuple[str, Any], ...]
"""What a compilation depends on at one leaf, as (kind, value) pairs."""


class Situation(NamedTuple):
    """Everything that a compilation depends on.

    Attributes:
        leaves: the properties of each leaf of the call.
        mesh: the mesh.
        rules: the ambient rules.
        options: the options of the compiler, as (name, value) pairs.
    """

    leaves: Mapping[Path, Properties]
    mesh: Mesh | AbstractMesh | None
    rules: Layout | None
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        group: CallGroup,
        arrays: Sequence[AnyArray],
        mesh: Mesh | AbstractMesh | None,
        rules: Layout | None,
    ) -> "Situation":
        """The situation of a call of a group with these arrays."""
        leaves: dict[Path, Properties] = {}
        for path, array in zip(group.paths, arrays, strict=True):
            leaves[path] = _of_array(array)
        for keys, value in group.skeleton.statics:
            if not (isinstance(value, PyTreeDef) and value == _NOT_GIVEN):
                leaves.setdefault(Path(keys), (("static", StaticValue(value)),))
        return cls(leaves, mesh, rules)

    def distance(self, other: "Situation") -> int:
        """In how many leaves, and other things, it differs from another one."""
        beside = sum(one != two for one, two in zip(self[1:], other[1:], strict=True))
        return len(self.leaves.items() ^ other.leaves.items()) + beside


_NOT_GIVEN = jax.tree.structure(NOT_GIVEN)


def _of_array(array: AnyArray) -> Properties:
    """The properties of an array that a compilation depends on."""
    kind, sharding = jax.typeof(array), getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return (
        ("shape", tuple(kind.shape)),
        ("dtype", dtype_text(kind.dtype)),
        ("weak type", bool(kind.weak_type)),
        ("sharding", sharding_text(sharding)),
        # The text of a sharding without a mesh names the devices itself.
        ("devices", _device_names(mesh) if isinstance(mesh, Mesh) else None),
    )


@functools.lru_cache(maxsize=64)
def _device_names(mesh: Mesh) -> tuple[str, ...]:
    """The names of the devices of a mesh; one object for all arrays that are on it."""
    return tuple(map(str, mesh.devices.flat))


def differences(before: Situation, now: Situation) -> tuple[Difference, ...]:
    """The differences between two situations, leaf by leaf."""
    found: list[Difference] = []
    for path in dict.fromkeys((*before.leaves, *now.leaves)):
        old, new = before.leaves.get(path), now.leaves.get(path)
        # A leaf that exists only in one of them, or is an array in one and static in the other.
        if old is None or new is None or dict(old).keys() != dict(new).keys():
            found.append(Difference(path, "structure", _brief(old), _brief(new)))
        else:
            found += _leaf_differences(path, old, new)
    if before.mesh != now.mesh:
        found.append(Difference(Path(), "mesh", before.mesh, now.mesh))
    if before.rules != now.rules:
        found.append(Difference(Path(), "rules", before.rules, now.rules))
    if before.options != now.options:
        found.append(
            Difference(Path(), "compiler options", dict(before.options), dict(now.options))
        )
    return tuple(found)


def _leaf_differences(path: Path, before: Properties, now: Properties) -> list[Difference]:
    """The differences between the properties of a leaf, which is an array or static in both."""
    found: list[Difference] = []
    for (kind, old), (_, new) in zip(before, now, strict=True):
        if old == new:
            continue
        if isinstance(old, StaticValue) and isinstance(new, StaticValue):
            found += _static_differences(path, old.value, new.value)
        # The text of another sharding shows other devices already.
        elif kind != "devices" or not any(one.kind == "sharding" for one in found):
            found.append(Difference(path, kind, old, new))
    return found


def _static_differences(path: Path, before: Any, now: Any) -> list[Difference]:
    """The differences between two static values: of two configs the fields that differ."""
    fields: list[Difference] = []
    is_config = dataclasses.is_dataclass(before) and not isinstance(before, type)
    if is_config and type(before) is type(now):
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(now, field.name)
            if StaticValue(old).differs(new):
                fields.append(Difference(path / field.name, "static", old, new))
    return fields or [Difference(path, "static", before, now)]


def _brief(properties: Properties | None) -> str:
    """A leaf in a difference of structure."""
    if properties is None:
        return "nothing"
    kind, value = properties[0]
    return f"static {value!r}" if kind == "static" else "an array"


observers: list[Callable[[str, Compilation], None]] = []
"""Functions that are told of each compilation, with the name of the function that is compiled."""


_COMPARED = 32
"""The number of the latest compilations that a new one is compared with."""


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
        self._earlier = deque[Situation](maxlen=_COMPARED)
        # How often a Python number at a path was the only difference.
        self._numbers: Counter[Path] = Counter()

    def add(self, now: Situation, shared: bool = False) -> None:
        """Add a compilation, compared with the most similar of the last ones. Warns if a Python
        number is the reason."""
        nearest: tuple[Difference, ...] = ()
        if self._earlier:
            nearest = differences(min(self._earlier, key=now.distance), now)
        if self._earlier and not nearest:
            # Everything that is compared is the same. So a setting of JAX has changed, such as its
            # matmul precision.
            nearest = (Difference(Path(), "settings", "of JAX", "others"),)
        self._earlier.append(now)
        record = Compilation(len(self.records) + 1, nearest, shared)
        self.records.append(record)
        for observe in observers:
            observe(self.name, record)
        if len(nearest) == 1 and nearest[0].kind == "static":
            self._count_number(nearest[0])

    def clear(self) -> None:
        """Forget all compilations."""
        self.records.clear()
        self._numbers.clear()
        self._earlier.clear()

    def _count_number(self, changed: Difference) -> None:
        """Count a compilation for a Python number, and warn at the second: a single one may be on
        purpose."""
        # By type and not by isinstance: True is an int, and switches between two programs.
        if type(changed.now) not in (int, float, complex):
            return
        self._numbers[changed.path] += 1
        if self._numbers[changed.path] == 2:
            warn(
                f"{self.name} compiles a third time because of `{changed.path}` alone, a Python "
                f"number and therefore static ({changed.before!r}, now {changed.now!r}): pass an "
                "array, `jnp.asarray(...)`, to trace it",
            )
