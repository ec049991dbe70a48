"""A ledger ─► HTML: what is moved by mesh axis, phase and parameter, and the memory by part."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from functree.compiled.collective import Collective, Memory
from functree.compiled.table import (
    NO_PARAMETER,
    TableRow,
    moves_text,
    rows_of_parameters,
)
from functree.layout.plan.page import PlanPage, parts_of
from functree.report.page import (
    Card,
    Segment,
    TreeLeaf,
    bar_html,
    cards_html,
    code,
    key_html,
    list_html,
    mesh_axes_html,
    notes_html,
    report_html,
    section_html,
    tree_html,
)
from functree.report.table import bytes_text, common_parts, grouped, pattern_of
from functree.tree.paths import Path

MOST_ROWS = 200
"""The number of lines of a ledger in a notebook; a page has all."""


class LedgerPage(NamedTuple):
    """What the page of a ledger says.

    Attributes:
        collectives: what is moved.
        memory: the memory.
        where: what it is compiled for.
        sizes: the sizes of the mesh axes.
        attributed: the share of the moved bytes that have a path.
        warnings: what the compiler said, and stands out.
        notes: the other lines at the head.
        plan: the page of the plan of an argument; None without one.
    """

    collectives: Sequence[Collective]
    memory: Memory
    where: str
    sizes: Mapping[str, int]
    attributed: float
    warnings: Sequence[str]
    notes: Sequence[str]
    plan: PlanPage | None = None

    def html(self, page: bool) -> str:
        """The whole page, or a fragment for a notebook."""
        what = "Ledger of a program"
        head = cards_html(self._cards()) + notes_html([], self.notes)
        content = self._moved(None if page else MOST_ROWS) + self._memory()
        if self.plan is not None:
            what = "Plan and ledger of a program"
            head = cards_html([*self.plan.cards()[:3], *self._cards()])
            head += notes_html(self.plan.problems, [*self.plan.notes, *self.notes])
            content = self.plan.devices() + self.plan.arrays() + content
        content += section_html("Warnings", notes_html(self.warnings, []))
        return report_html(f"{what} for {self.where}", head, content, page)

    def _cards(self) -> list[Card]:
        total = sum(one.total for one in self.collectives)
        return [
            Card(bytes_text(total), "moved to each device in a run"),
            Card(bytes_text(self.memory.peak), "of memory at the peak"),
            # Rounded down: 100 % is all.
            Card(f"{math.floor(1000 * self.attributed) / 10:g} %", "of it serves known parameters"),
        ]

    def _moved(self, most: int | None) -> str:
        if not self.collectives:
            return ""
        axes = self._totals(lambda one: self._axes(one.mesh_axes))
        kinds = self._totals(lambda one: one.kind)
        phases = self._totals(lambda one: one.phase or "not known")
        lists = (
            list_html("By mesh axis", axes)
            + list_html("By kind", kinds)
            + list_html("By phase", phases)
        )
        rows = rows_of_parameters(self.collectives)
        left_out = ""
        if most is not None and len(rows) > most:
            more = f"and {len(rows) - most:,} smaller ones, which `ledger.html()` has"
            left_out, rows = notes_html([], [more]), rows[:most]
        leaves = list(map(self._leaf, rows))
        tree = tree_html(leaves, "all parameters", "collective", named=False)
        return section_html(
            "Moved between devices", f'<div class="lists">{lists}</div>', tree, left_out
        )

    def _totals(self, key: Callable[[Collective], str]) -> dict[str, int]:
        """The bytes by a property, the largest first."""
        found: dict[str, int] = {}
        for one in self.collectives:
            found[key(one)] = found.get(key(one), 0) + one.total
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _axes(self, axes: tuple[str, ...] | None) -> str:
        return mesh_axes_html(axes, self.sizes)

    def _leaf(self, row: TableRow) -> TreeLeaf:
        one = row.collectives[0]
        parts: tuple[str, ...] = (NO_PARAMETER,)
        if row.paths:
            parts = tuple(common_parts(row.paths))
        elif one.paths:
            parts = ("several parameters",)
        content = f"{code(row.kind)} over {self._axes(one.mesh_axes)} "
        for text in filter(None, (one.phase, moves_text(one))):
            content += f'<span class="chip">{html.escape(text)}</span>'
        times = {"?": "an unknown number of times", "1": ""}.get(row.runs, f"×{row.runs}")
        content += f'<span class="muted num">{times}</span>'
        if not row.paths and one.paths:
            content += f'<div class="why">for {html.escape(row.title)}</div>'
        content += f'<div class="why">{html.escape(row.where)}</div>'
        return TreeLeaf(parts, row.total, content, len(row.collectives))

    def _memory(self) -> str:
        memory = self.memory
        parts = parts_of(memory.arguments)
        rest = (
            Segment("outputs", memory.outputs - memory.aliases, "p5 copied"),
            Segment("temporaries", memory.temporaries, "p5"),
        )
        whole = [*parts, *(one for one in rest if one.size > 0)]
        total = sum(one.size for one in whole)
        texts = [f"peak {bytes_text(memory.peak)}"]
        if memory.aliases:
            texts.append(f"{bytes_text(memory.aliases)} of the results are in donated arguments")
        tree = ""
        # With a plan, its tree has the arrays of the arguments.
        if memory.arguments and self.plan is None:
            tree = tree_html(self._arguments(), "all arguments", "array", opened=False)
        return section_html(
            "Memory of each device",
            bar_html(whole, max(total, memory.peak)),
            key_html(whole),
            notes_html([], [", ".join(texts)]),
            tree,
        )

    def _arguments(self) -> list[TreeLeaf]:
        """The arrays of the arguments; those of equal layers are one line."""
        leaves: list[TreeLeaf] = []
        sizes = self.memory.arguments
        for paths in grouped(sizes, lambda path: (pattern_of(path), sizes[path])):
            parts = tuple(common_parts(paths))
            content = f'<span class="muted">×{len(paths)}</span>' if len(paths) > 1 else ""
            size = len(paths) * sizes[paths[0]]
            leaves.append(TreeLeaf(parts, size, content, len(paths)))
        return leaves


def argument_of(plan: PlanPage, memory: Memory) -> str | None:
    """The name of the argument that a plan is of; None if none has its arrays, or several have."""
    by_argument: dict[str, dict[Path, int]] = {}
    for (name, *path), size in memory.arguments.items():
        by_argument.setdefault(str(name), {})[Path(path)] = size
    own = {row.path: row.bytes_per_device for row in plan.rows}
    found: list[str] = []
    for name, sizes in by_argument.items():
        # An array that the program does not use is not among its arguments.
        if all(own.get(path) == size for path, size in sizes.items()):
            found.append(name)
    return found[0] if len(found) == 1 else None


def moved_for(argument: str, collectives: Sequence[Collective]) -> dict[Path, int]:
    """The bytes that are moved for each array of an argument. What is moved for several together
    counts for none."""
    found: dict[Path, int] = {}
    for one in collectives:
        if one.path is not None and one.arguments == (argument,):
            found[one.path] = found.get(one.path, 0) + one.total
    return found
