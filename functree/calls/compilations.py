"""`Log` records the compilations of one function, and the reason for each.

Two compilations of one function ─► the differences between them. `compile_events` counts the
programs that JAX lowers and compiles in the current thread. The counts show whether a call lowered
or compiled anything. Counting traces would not suffice, since a compilation may reuse an earlier
trace. Lowerings and compilations are both counted, since each may occur without the other. For
different devices, for example, JAX compiles the lowered text that it kept, without lowering the
program again.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
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


class CompileEvents(threading.local):
    """The lowerings and compilations in one thread.

    Attributes:
        count: the number of lowerings and compilations.
        names: the names of the most recent programs, in order; None for a program without a name.
        compiled: the number of compilations, including hits in the persistent cache.
        cached: the number of hits in the persistent cache.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.compiled: int = 0
        self.cached: int = 0
        # Bounded, since it is never emptied. One call lowers and compiles far fewer programs than
        # the bound.
        self.names: deque[str | None] = deque(maxlen=256)

    @property
    def by_compiler(self) -> int:
        """The number of programs that the compiler compiled, excluding cache hits."""
        return self.compiled - self.cached

    def have(self, name: str, before: int) -> bool:
        """Return whether a function was lowered or compiled since the count was `before`.

        The name matters because JAX compiles its own functions too, such as one that moves arrays
        to a program's devices.
        """
        number = min(self.count - before, len(self.names))
        recent = list(self.names)[len(self.names) - number :]
        # A program without a name may belong to the function.
        return f"jit({name})" in recent or None in recent


compile_events: CompileEvents = CompileEvents()

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"
_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", _COMPILED)


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Count an event. JAX calls this in the thread that has just lowered or compiled."""
    if event not in _EVENTS:
        return
    compile_events.count += 1
    if event == _COMPILED:
        compile_events.compiled += 1
    name = kwargs.get("fun_name")
    compile_events.names.append(None if name is None else str(name))


def _found(event: str, **kwargs: str | int) -> None:
    """Count a program that was in the persistent cache."""
    if event == _CACHED:
        compile_events.cached += 1


# Registered once for all threads. JAX calls a listener in the compiling thread, which has its own
# counts.
jax.monitoring.register_event_duration_secs_listener(_heard)
jax.monitoring.register_event_listener(_found)


# Differences


class Difference(NamedTuple):
    """One difference from an earlier compilation.

    Attributes:
        path: the path of the leaf, which begins with a parameter's name; empty if the difference is
            not in a leaf.
        kind: one of `static`, `shape`, `dtype`, `weak type`, `sharding`, `structure`, `rules`,
            `mesh`, `compiler options` and `settings`.
        before: the value in the earlier compilation.
        now: the value in this compilation.
    """

    path: Path
    kind: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.change}" if self.path else self.change

    @property
    def change(self) -> str:
        """The difference as text, without the path."""
        before, now = self._text(self.before), self._text(self.now)
        text = f"{self.kind} {before} → {now}"
        if before == now and self.kind in ("mesh", "sharding"):
            text += " (different devices, a different order of devices, or other types of axes)"
        elif before == now:
            # The values differ but their texts do not, as with two lambdas from one line.
            text += " (a different object, equal only to itself: create it once and reuse it)"
        return text

    def _text(self, value: object) -> str:
        """Return the text of `before` or `now`. A function's text is its name."""
        if self.kind == "static":
            return getattr(value, "__qualname__", getattr(value, "__name__", None)) or repr(value)
        if isinstance(value, Mesh | AbstractMesh):
            return str(mesh_view(value))
        return str(value)


class Compilation(NamedTuple):
    """One compilation of a function, and the reason for it.

    Attributes:
        number: 1 for the first compilation.
        differences: the differences from the most similar earlier compilation; empty for the first.
        shared: whether another wrapper of the same function with equal options had already compiled
            the program.
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
    """Render differences as text, with one entry for all paths that share a change."""
    paths: dict[str, list[str]] = {}
    # Shardings come last, since a state's arrays often move together as a result of another change.
    for each in sorted(differences, key=lambda each: each.kind == "sharding"):
        paths.setdefault(each.change, []).extend([str(each.path)] if each.path else [])
    texts: list[str] = []
    for change, changed in paths.items():
        texts.append(f"{listed(changed, 3)}: {change}" if changed else change)
    return "; ".join(texts) or "the first"


Properties = tuple[tuple[str, Any], ...]
"""The properties of one leaf that a compilation depends on, as (kind, value) pairs."""


class Situation(NamedTuple):
    """Everything that a compilation depends on.

    Attributes:
        leaves: the properties of each leaf of the call.
        mesh: the mesh.
        rules: the ambient rules.
        options: the compiler options, as (name, value) pairs.
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
        """Return the situation of a group's call with these arrays."""
        leaves: dict[Path, Properties] = {}
        for path, array in zip(group.paths, arrays, strict=True):
            leaves[path] = _of_array(array)
        for keys, value in group.skeleton.statics:
            if not (isinstance(value, PyTreeDef) and value == _NOT_GIVEN):
                leaves.setdefault(Path(keys), (("static", StaticValue(value)),))
        return cls(leaves, mesh, rules)

    def distance(self, other: "Situation") -> int:
        """Count the leaves and other fields that differ from another situation.

        A changed leaf adds two to the count.
        """
        fields = sum(mine != theirs for mine, theirs in zip(self[1:], other[1:], strict=True))
        return len(self.leaves.items() ^ other.leaves.items()) + fields


_NOT_GIVEN = jax.tree.structure(NOT_GIVEN)


def _of_array(array: AnyArray) -> Properties:
    """Return the properties of an array that a compilation depends on."""
    kind = jax.typeof(array)
    return (
        ("shape", tuple(kind.shape)),
        ("dtype", kind.dtype),
        ("weak type", bool(kind.weak_type)),
        ("sharding", getattr(array, "sharding", None)),
    )


def differences(before: Situation, now: Situation) -> tuple[Difference, ...]:
    """Return the differences between two situations, leaf by leaf."""
    changes: list[Difference] = []
    for path in dict.fromkeys((*before.leaves, *now.leaves)):
        old, new = before.leaves.get(path), now.leaves.get(path)
        # The leaf exists in only one situation, or is an array in one and static in the other.
        if old is None or new is None or len(old) != len(new):
            changes.append(Difference(path, "structure", _brief(old), _brief(new)))
            continue
        for (kind, one), (_, other) in zip(old, new, strict=True):
            if one == other:
                continue
            shown = _SHOWN.get(kind, lambda value: value)
            changes.append(Difference(path, kind, shown(one), shown(other)))
    if before.mesh != now.mesh:
        changes.append(Difference(Path(), "mesh", before.mesh, now.mesh))
    if before.rules != now.rules:
        changes.append(Difference(Path(), "rules", before.rules, now.rules))
    if before.options != now.options:
        changes.append(
            Difference(Path(), "compiler options", dict(before.options), dict(now.options))
        )
    return tuple(changes)


_SHOWN = {"static": attrgetter("value"), "dtype": dtype_text, "sharding": sharding_text}
"""For some kinds of properties, the value that a difference shows."""


def _brief(properties: Properties | None) -> str:
    """Describe a leaf in a difference of structure."""
    if properties is None:
        return "nothing"
    kind, value = properties[0]
    return f"static {value!r}" if kind == "static" else "an array"


observers: list[Callable[[str, Compilation], None]] = []
"""Functions called after each compilation, with the compiled function's name and the record."""


_COMPARED = 32
"""The number of recent compilations that a new compilation is compared with."""


class Log:
    """The compilations of one function.

    Args:
        name: the name of the function.

    Attributes:
        records: one record for each compilation.
    """

    def __init__(self, name: str):
        self.name = name
        self.records: list[Compilation] = []
        self._earlier = deque[Situation](maxlen=_COMPARED)
        # The number of times that a Python number at a path was the only difference.
        self._numbers: Counter[Path] = Counter()

    def add(self, now: Situation, shared: bool = False) -> None:
        """Add a compilation and compare it with the most similar recent one.

        This method warns if a Python number repeatedly causes compilations.
        """
        nearest: tuple[Difference, ...] = ()
        if self._earlier:
            nearest = differences(min(self._earlier, key=now.distance), now)
        if self._earlier and not nearest:
            if shared:
                return  # nothing was compiled, and nothing differs
            # Nothing that is compared differs, so a JAX setting changed, such as the matmul
            # precision.
            nearest = (
                Difference(Path(), "settings", "of the earlier compilation", "other JAX settings"),
            )
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
        """Count a compilation caused by a Python number, and warn at the second.

        A single recompilation may be intended.
        """
        # `isinstance` would count True as an int, but a bool only switches between two programs.
        if type(changed.now) not in (int, float, complex):
            return
        self._numbers[changed.path] += 1
        if self._numbers[changed.path] == 2:
            warn(
                f"{self.name} recompiles a second time only because `{changed.path}` differs "
                f"({changed.before!r} before, {changed.now!r} now). A Python number is static: to "
                "trace it, pass an array, `jnp.asarray(...)`",
            )
