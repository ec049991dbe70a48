"""`Ledger`: what a compiled program moves between devices, and what it keeps in their memory; and
what differs between two of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from functree.argument_checks import shown
from functree.compiled.collective import Collective, Memory
from functree.compiled.page import LedgerPage, argument_of, moved_for
from functree.compiled.table import (
    axes_text,
    full_paths,
    idle_text,
    ledger_text,
    summary_text,
    warning_lines,
)
from functree.devices.meshes import MeshView
from functree.errors import FunctreeTypeError
from functree.layout.plan.page import PlanPage
from functree.layout.plan.plan import Plan
from functree.report.diff import Change, Diff, SharedWhat, by_bytes, changes
from functree.report.json_text import json_of, read_json
from functree.report.table import Bytes
from functree.tree.paths import Path


@dataclass(frozen=True, repr=False)
class Ledger:
    """What a compiled program moves between devices, and what it keeps in their memory.

    It is made by `compiled.ledger()`, or by `ft.ledger`.

    Attributes:
        collectives: each array that is moved, in the order of the program's text.
        memory: the bytes on one device.
        backend: what it was compiled for: `cpu`, `tpu v5e`, `cuda h100`.
        sizes: the sizes of the mesh axes; empty if the mesh is not known.
        warnings: what the compiler has said, for example of an involuntary rematerialization.
        warnings_known: whether the compiler was listened to. False if JAX had the program in a
            cache, so that nothing was compiled.
        not_understood: what the ledger could not read, one sentence for each.
        idle: the mesh axes of more than one device over which nothing is moved, and none of the
            arguments and results is sharded: their devices all do the same. Empty if that is not
            known.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> layouts = (ft.P("model"), ft.P(None, "model"))
        >>> @ft.jit(in_shardings=layouts, out_shardings=ft.P(), mesh=mesh)
        ... def project(w, x):
        ...     return x @ w
        >>> shapes = [
        ...     jax.ShapeDtypeStruct(shape, "float32")
        ...     for shape in [(64, 32), (16, 64)]
        ... ]
        >>> ledger = project.lower(*shapes).compile().ledger()
        >>> moved = ledger.collectives[0]
        >>> moved.kind, moved.mesh_axes, moved.bytes, moved.count
        ('all-reduce', ('model',), 2048, 1)
        >>> ledger.memory.arguments["w"]
        2048
    """

    collectives: tuple[Collective, ...]
    memory: Memory
    backend: str
    sizes: Mapping[str, int] = field(hash=False)  # a dict has no hash
    warnings: tuple[str, ...] = ()
    warnings_known: bool = True
    not_understood: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    def totals(self) -> dict[tuple[str, tuple[str, ...] | None], int]:
        """The bytes of all runs by kind and mesh axes, the largest first.

        A collective in a loop of unknown length counts once, so that its total is the least that it
        may be.
        """
        found: dict[tuple[str, tuple[str, ...] | None], int] = {}
        for one in self.collectives:
            key = (one.kind, one.mesh_axes)
            found[key] = found.get(key, 0) + one.total
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def attributed(self) -> float:
        """The share of the moved bytes that have a path, between 0 and 1; 1 if nothing is moved."""
        total = sum(one.total for one in self.collectives)
        if total == 0:
            return 1.0
        return sum(one.total for one in self.collectives if one.paths) / total

    def summary(self) -> str:
        """The totals by kind and mesh axes, and the memory, in a few lines."""
        return summary_text(self.totals(), self.memory, self.attributed, self._where(), self.idle)

    def _where(self) -> str:
        """What it is compiled for."""
        if not self.sizes:
            return self.backend
        return f"{self.backend}, mesh {MeshView(self.sizes)}"

    def __str__(self) -> str:
        notes = [*self._notes(), *warning_lines(self.warnings)]
        return ledger_text(self.collectives, self.summary(), notes)

    def __repr__(self) -> str:
        return f"<Ledger of {len(self.collectives)} collectives for {self.backend}>"

    def diff(self, other: "Ledger") -> Diff:
        """What differs in another ledger.

        It compares what is moved, by parameter, kind, mesh axes and phase, and the memory.

        Raises:
            FunctreeError: the other value is not a ledger.
        """
        if not isinstance(other, Ledger):
            raise FunctreeTypeError(f"a ledger is compared with a ledger, not with {shown(other)}")
        rows: list[Change] = []
        if self.backend != other.backend:
            rows.append(Change(Path(), "backend", self.backend, other.backend))
        if self.sizes != other.sizes:
            rows.append(Change(Path(), "mesh", self.sizes, other.sizes))
        if self.idle != other.idle:
            before, after = ", ".join(self.idle), ", ".join(other.idle)
            rows.append(Change(Path(), "idle mesh axes", before or None, after or None))
        rows += moved_changes(self.collectives, other.collectives)
        rows += memory_changes(self.memory, other.memory)
        return Diff(by_bytes(rows), (moved_total(self.collectives, other.collectives),))

    def to_json(self) -> str:
        """The ledger as JSON."""
        return json_of("ledger", self)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """The ledger of a JSON, equal to the one that it was made from.

        Raises:
            FunctreeError: the text is not the JSON of a ledger.
        """
        return read_json(text, "ledger", cls)

    def html(self, plan: Plan | None = None) -> str:
        """The ledger as a HTML page: what is moved by mesh axis, kind, phase and parameter, and the
        memory by part. The page is one file, and asks for nothing from a network.

        Args:
            plan: the plan of one of the arguments. Its page is then a part of this one, in which
                each array also has the bytes that are moved for it.

        Raises:
            FunctreeError: `plan` is not a plan.

        Examples:
            >>> mesh = ft.make_mesh(data=2, model=4)
            >>> w, x = (
            ...     jax.ShapeDtypeStruct(shape, "float32")
            ...     for shape in [(64, 32), (16, 64)]
            ... )
            >>> layouts = (ft.P("model"), ft.P(None, "model"))
            >>> ledger = ft.ledger(
            ...     lambda w, x: x @ w, w, x, in_shardings=layouts, mesh=mesh
            ... )
            >>> report = ledger.html(plan=ft.plan(w, layouts[0], mesh))
            >>> report.startswith("<!doctype html>")
            True
        """
        if plan is None:
            return self._page(None).html(page=True)
        if not isinstance(plan, Plan):
            raise FunctreeTypeError(f"the page of a ledger shows a plan, not {shown(plan)}")
        argument = argument_of(plan.page(), self.memory)
        moved = {} if argument is None else moved_for(argument, self.collectives)
        return self._page(plan.page(moved)).html(page=True)

    def _repr_html_(self) -> str:
        return self._page(None).html(page=False)

    def _page(self, plan: PlanPage | None) -> LedgerPage:
        notes = self._notes()
        if self.idle:
            notes.insert(0, idle_text(self.idle))
        return LedgerPage(
            self.collectives,
            self.memory,
            self._where(),
            self.sizes,
            self.attributed,
            warning_lines(self.warnings),
            notes,
            plan,
        )

    def _notes(self) -> list[str]:
        """What a reader of the figures must know."""
        notes = [f"not understood: {what}" for what in self.not_understood]
        if not self.warnings_known:
            notes.append(_UNHEARD)
        if self.backend == "cpu" and self.collectives:
            notes.append(_CPU)
        return notes


_UNHEARD = (
    "it is not known what the compiler warns of: JAX had the program in a cache (make the ledger "
    "before the first call), or `TF_CPP_MIN_LOG_LEVEL` silences it"
)
# The compiler for CPUs has no reduce-scatter, and moves bfloat16 as float32.
_CPU = (
    "compiled for CPUs: for TPUs and GPUs the compiler chooses other collectives, and moves "
    "bfloat16 as it is (`ft.make_mesh(..., target=)`)"
)


class _Total(NamedTuple):
    """What collectives of one kind, mesh axes and phase move for one parameter."""

    runs: int
    bytes: int


def moved_changes(before: Sequence[Collective], after: Sequence[Collective]) -> Iterator[Change]:
    """What differs in what two programs move.

    Names of instructions and lines of source are not compared: both change when nothing else does.
    """
    return changes(
        _by_parameter(before),
        _by_parameter(after),
        _path,
        _properties,
        lambda key, total: (_what(key), Bytes(total.bytes)),
    )


def moved_total(before: Sequence[Collective], after: Sequence[Collective]) -> Change:
    """The bytes that two programs move to each device, all together."""
    old, new = (Bytes(sum(one.total for one in moved)) for moved in (before, after))
    return Change(Path(), "moved to each device", old, new)


def memory_changes(before: Memory, after: Memory) -> Iterator[Change]:
    """What differs in the memory of two programs."""
    for name in ("outputs", "aliases", "temporaries", "peak"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield Change(Path(), f"bytes of {name}", Bytes(old), Bytes(new))
    yield from changes(
        before.arguments,
        after.arguments,
        lambda path: path,
        lambda path, size: {"bytes on each device": Bytes(size)},
        lambda path, size: ("argument", Bytes(size)),
    )


_Key = tuple[tuple[Path, ...], str, tuple[str, ...] | None, str | None]
"""The parameters, the kind, the mesh axes and the phase of some collectives."""


def _by_parameter(collectives: Sequence[Collective]) -> dict[_Key, _Total]:
    found: dict[_Key, _Total] = {}
    for one in collectives:
        key = (tuple(full_paths(one)), one.kind, one.mesh_axes, one.phase)
        runs, size = found.get(key, (0, 0))
        if one.count is None:
            runs += 1  # as in `Ledger.totals`, a loop of unknown length counts once
        else:
            runs += one.count
        found[key] = _Total(runs, size + one.total)
    return found


def _path(key: _Key) -> Path:
    """The parameter that is served, if it is only one; of several, `_what` tells the paths."""
    paths, *_ = key
    if len(paths) != 1:
        return Path()
    return paths[0]


def _properties(key: _Key, total: _Total) -> dict[str, int]:
    return {_what(key, "bytes of "): Bytes(total.bytes), _what(key, "runs of "): total.runs}


def _what(key: _Key, of: str = "") -> str:
    paths, kind, axes, phase = key
    text = f"{of}{kind} over {axes_text(axes)}"
    if phase:
        text += f" ({phase})"
    return SharedWhat.of(f"{text} for ", paths) if len(paths) > 1 else text
