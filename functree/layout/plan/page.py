"""`PlanPage` renders a plan as HTML: a collapsible tree with a picture of each array's shards."""

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from functree.devices.meshes import MeshView
from functree.layout.plan.text import Group, Row, axes_of, groups_of, per_device, saved_by_sharding
from functree.report.page import (
    Card,
    Pictures,
    TreeLeaf,
    cards_html,
    code,
    device_color,
    notes_html,
    report_html,
    section_html,
    tree_html,
)
from functree.report.table import bytes_text

MOST_DEVICES = 16
"""The maximum number of devices in the pictures' color key."""
MOST_LINES = 200
"""The maximum number of lines in a notebook. A page shows all lines."""


class PlanPage(NamedTuple):
    """The content of a plan's page.

    Attributes:
        rows: the rows of the plan.
        sizes: the sizes of the mesh axes.
        problems: the lines about problems, which are highlighted.
        notes: the other lines about the plan.
    """

    rows: Sequence[Row]
    sizes: Mapping[str, int]
    problems: Sequence[str]
    notes: Sequence[str]

    def html(self, page: bool) -> str:
        """Render the page, or a fragment for a notebook.

        If a plan has many arrays, a fragment shows only the largest.
        """
        head = cards_html(self.cards()) + notes_html(self.problems, self.notes)
        if not page:
            return report_html("", head, self.arrays(MOST_LINES), page)
        title = f"Plan on the mesh {MeshView(self.sizes)}"
        return report_html(title, head, self.devices() + self.arrays(), page)

    def cards(self) -> list[Card]:
        """Return the figures at the top."""
        copies = sum(map(saved_by_sharding, self.rows))
        return [
            Card(bytes_text(self._each()), "on each device"),
            Card(
                bytes_text(sum(row.bytes_global for row in self.rows)),
                "in total, each array counted once",
            ),
            Card(bytes_text(copies), "redundant on each device"),
            Card(f"{len(self.rows):,}", f"arrays on {MeshView(self.sizes).devices:,} devices"),
        ]

    def devices(self) -> str:
        """Render the key to the pictures' colors. All devices hold the same number of bytes."""
        number = MeshView(self.sizes).devices
        devices = "".join(map(self._device, range(min(number, MOST_DEVICES))))
        if number > MOST_DEVICES:
            devices += f"<span>and {number - MOST_DEVICES:,} more</span>"
        return section_html(
            f"{number:,} {'device' if number == 1 else 'devices'}, {bytes_text(self._each())} each",
            f'<div class="key devices muted">{devices}</div>',
        )

    def _each(self) -> int:
        """Return the bytes on one device."""
        return per_device(self.rows)

    def _device(self, device: int) -> str:
        sizes = tuple(self.sizes.values())
        position: list[str] = []
        for axis, size, i in zip(self.sizes, sizes, np.unravel_index(device, sizes), strict=True):
            if size > 1:
                position.append(f"{axis}={i}")
        name = html.escape(", ".join([f"device {device}", *position]))
        dot = f'<span class="dot" style="background:{device_color(device, self.sizes)}"></span>'
        return f'<span class="device">{dot}{name}</span>'

    def arrays(self, at_most: int | None = None) -> str:
        """Render the tree of arrays; with `at_most`, only the largest."""
        groups = groups_of(self.rows)
        left_out = ""
        if at_most is not None and len(groups) > at_most:
            left_out = f"and {len(groups) - at_most:,} more lines for smaller arrays "
            left_out += "(`plan.html()` shows all lines)"
            least = sorted(group.per_device for group in groups)[-at_most]
            groups = [group for group in groups if group.per_device >= least][:at_most]
        pictures = Pictures(self.sizes)
        tree = tree_html([self._leaf(group, pictures) for group in groups], "all arrays", "array")
        notes = notes_html([], [left_out] if left_out else [])
        return section_html("Arrays", pictures.definitions(), tree, notes)

    def _leaf(self, group: Group, pictures: Pictures) -> TreeLeaf:
        row, number = group.rows[0], len(group.rows)
        content = code(group.array)
        if any(row.axes) and not group.follow:
            content += f' <span class="muted">{html.escape(str(row.axes))}</span>'
        if number > 1:
            content += f' <span class="muted">×{number}</span>'
        if row.reason and not group.follow:
            content += f'<div class="why">{html.escape(row.reason)}</div>'
        picture = ""
        if row.spec is not None and row.mesh is None and not group.follow:
            picture = pictures.of(row.shape, axes_of(row))
        copies = sum(map(saved_by_sharding, group.rows))
        return TreeLeaf(group.parts, group.per_device, content, number, picture, copies)
