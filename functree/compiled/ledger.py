"""`Ledger`: what a compiled program moves between devices, and what it keeps in their memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from functree.argument_checks import shown
from functree.compiled.codec import LedgerParts, ledger_json, read_ledger_json
from functree.compiled.collective import Collective
from functree.compiled.diff import memory_changes, moved_changes
from functree.compiled.memory import Memory
from functree.compiled.page import ledger_html
from functree.compiled.text import ledger_text, summary_text
from functree.devices.meshes import MeshView
from functree.errors import FunctreeTypeError
from functree.report.diff import Change, Diff
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

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> layouts = (ft.P("model"), ft.P(None, "model"))
        >>> @ft.jit(in_shardings=layouts, out_shardings=ft.P(), mesh=mesh)
        ... def project(w, x):
        ...     return x @ w
        >>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 32), (16, 64)]]
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
        where = self.backend
        if self.sizes:
            where += f", mesh {MeshView(self.sizes)}"
        return summary_text(self.totals(), self.memory, self.attributed, where)

    def __str__(self) -> str:
        notes = [*self._warning_texts(), *self._notes()]
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
        rows += moved_changes(self.collectives, other.collectives)
        rows += memory_changes(self.memory, other.memory)
        return Diff(tuple(rows))

    def to_json(self) -> str:
        """The ledger as JSON."""
        parts = LedgerParts(
            self.collectives,
            self.memory,
            self.backend,
            self.sizes,
            self.warnings,
            self.warnings_known,
            self.not_understood,
        )
        return ledger_json(parts)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """The ledger of a JSON, equal to the one that it was made from.

        Raises:
            FunctreeError: the text is not the JSON of a ledger.
        """
        parts = read_ledger_json(text)
        return cls(
            tuple(parts.collectives),
            parts.memory,
            parts.backend,
            parts.sizes,
            tuple(parts.warnings),
            parts.warnings_known,
            tuple(parts.not_understood),
        )

    def html(self) -> str:
        """The ledger as a HTML page, with a bar for the bytes of each collective and argument."""
        return self._html(page=True)

    def _repr_html_(self) -> str:
        return self._html(page=False)

    def _html(self, page: bool) -> str:
        notes = [*self._notes(), *self.summary().splitlines()]
        return ledger_html(self.collectives, self.memory, self._warning_texts(), notes, page)

    def _warning_texts(self) -> list[str]:
        return [f"WARNING of the compiler: {warning}" for warning in self.warnings]

    def _notes(self) -> list[str]:
        """What a reader must know before the figures."""
        notes = [f"not understood: {what}" for what in self.not_understood]
        if not self.warnings_known:
            notes.append(_UNHEARD)
        if self.backend == "cpu" and self.collectives:
            notes.append(_CPU)
        return notes


_UNHEARD = (
    "it is not known what the compiler warns of: JAX had the program in a cache, or "
    "`TF_CPP_MIN_LOG_LEVEL` silences it"
)
# The compiler for CPUs has no reduce-scatter, and moves bfloat16 as float32.
_CPU = (
    "compiled for CPUs: for TPUs and GPUs the compiler chooses other collectives, and moves "
    "bfloat16 as it is (`ft.make_mesh(..., target=)`)"
)
