"""`Candidate`: a mesh and a layout, and what is known of a program on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from functree.compiled.ledger import Ledger
from functree.errors import Problem
from functree.explorer.hardware import MeshAxes
from functree.layout.layout import LayoutTree


@dataclass(frozen=True, repr=False)
class Candidate:
    """A mesh and a layout, and what is known of the program on them: a row of a `Ranking`.

    All figures are those of one device. What was not found out is None.

    Attributes:
        mesh: the sizes of the mesh axes.
        layout_name: the name of the layout.
        problems: why it cannot run; empty if it can.
        bytes_per_device: the bytes of the arguments, by the plan.
        peak_bytes: the most bytes at one time, as the compiler says.
        flops: the products and sums of the program, with what is computed again.
        wire_bytes: the bytes that are sent, by mesh axis, largest first; those of collectives over
            several mesh axes are under their tuple.
        compute_seconds: what the flops take.
        wire_seconds: what the bytes take, one mesh axis after the other.
        score: the sum of both: a score to compare layouts by, and no forecast.
        tied: whether it is within 15 % of the best, and another one is too. Between these the score
            does not tell which is faster.
        is_frontier: whether no other candidate has both a lower score and a lower peak.
        notes: what is not a part of the figures, a sentence for each thing.
        ledger: what the program moves, and keeps in memory.
        layout: the layout as it was given. Its text can be pasted into a program.
    """

    mesh: Mapping[str, int] = field(hash=False)  # a dict has no hash
    layout_name: str
    problems: tuple[Problem, ...] = ()
    bytes_per_device: int | None = None
    peak_bytes: int | None = None
    flops: int | None = None
    wire_bytes: Mapping[MeshAxes, int] = field(default_factory=dict, hash=False)
    compute_seconds: float | None = None
    wire_seconds: float | None = None
    score: float | None = None
    tied: bool = False
    is_frontier: bool = False
    notes: tuple[str, ...] = ()
    ledger: Ledger | None = None
    layout: LayoutTree = field(default=None, hash=False)  # a tree of layouts may have no hash

    def __repr__(self) -> str:
        return f"<Candidate {self.layout_name} on {mesh_text(self.mesh)}>"


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The sizes of a mesh as the command line takes them: `data=8,model=4`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())
