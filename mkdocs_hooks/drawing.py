"""Shapes and texts ─► an SVG, which is read in light and in dark, and on a phone."""

import html
from collections.abc import Iterable
from dataclasses import dataclass, field

WIDTH = 600
"""Of a picture: narrow, so that its text can be read on a phone, which scales it down."""

# It has a background of its own: some browsers show a picture in another scheme than its page.
_STYLE = """
  svg { color-scheme: light dark; --bg: #ffffff; --raised: #f6f7f9; --fg: #1b2330; --muted: #5d6878;
    --line: #d5dbe2; --bar: #3f6fd1; --bad: #b3261e; --good: #127a53; }
  @media (prefers-color-scheme: dark) { svg { --bg: #12161c; --raised: #1a2028; --fg: #e4e9ef;
    --muted: #97a3b2; --line: #333d49; --bar: #6c97f0; --bad: #ff8a80; --good: #57c79b; } }
  text { font: 15px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--fg); }
  .code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 14px; }
  .muted { fill: var(--muted); } .bad { fill: var(--bad); } .good { fill: var(--good); }
  .strong { font-weight: 650; } .light { fill: #ffffff; font-weight: 600; }
  .bg { fill: var(--bg); } .box { fill: var(--raised); stroke: var(--line); }
  .bar { fill: var(--bar); } .line { stroke: var(--muted); fill: none; stroke-width: 1.5; }
""".strip()


@dataclass
class Drawing:
    """What is drawn so far.

    Args:
        title: what the picture shows, for those who do not see it.
    """

    title: str
    _parts: list[str] = field(default_factory=list)

    def add(self, *parts: str) -> None:
        """Draw an SVG element."""
        self._parts += parts

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text, whose baseline begins at a point, or ends or is centred there."""
        self.add(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}" '
            f'xml:space="preserve">{html.escape(text)}</text>'
        )

    def code(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of code."""
        self.text(x, y, text, f"code {kind}".strip(), anchor)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """A rectangle with round corners."""
        self.add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" '
            f'class="{kind}"/>'
        )

    def block(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A rectangle of a colour."""
        self.add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
            f'fill="{colour}"/>'
        )

    def arrow(self, points: Iterable[tuple[float, float]]) -> None:
        """A line through points, with a head at the last."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.add(f'<path d="M{path}" class="line" marker-end="url(#head)"/>')

    def svg(self, height: float) -> str:
        """The picture as a file."""
        title = html.escape(self.title)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" role="img">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">',
            '<path d="M0 0 L8 4 L0 8" class="line"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height:g}" rx="12" class="bg"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
