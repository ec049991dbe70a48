"""`Candidate`: a mesh and a layout, and what is known of a program on them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from functree.argument_checks import FILE, check
from functree.compiled.ledger import Ledger
from functree.errors import Problem, RuleError
from functree.explorer.hardware import MeshAxes
from functree.explorer.step import Laid
from functree.layout.rules_file import rules_text


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
    _laid: Laid | None = None

    def rules_file(self, path: str | os.PathLike[str]) -> None:
        """Write a `rules.toml` with the layout of the first argument that has rules.

        `functree ledger --rules` and the other commands read it. The layouts of other arguments are
        comments in it.

        Args:
            path: the path of the file.

        Raises:
            RuleError: no argument has rules, or the layout has something that such a file has no
                words for.
            OSError: the file cannot be written.
        """
        check("rules_file has nothing to write to", path=(path, FILE))
        laid = self._laid
        if laid is None or laid.main is None:
            raise RuleError(
                f"the layout {self.layout_name} has no rules that a file could have: a rules.toml "
                "is for `AxisRules` and `FSDP`"
            )
        comments = [f"{self.layout_name}, for the mesh {mesh_text(self.mesh)}"]
        comments += [f"not in this file: {other}" for other in laid.others]
        head = "".join(f"# {' '.join(one.split())}\n" for one in comments)
        Path(path).write_text(f"{head}{rules_text(laid.main)}", encoding="utf-8")

    def __repr__(self) -> str:
        return f"<Candidate {self.layout_name} on {mesh_text(self.mesh)}>"


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The sizes of a mesh as the command line takes them: `data=8,model=4`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())
