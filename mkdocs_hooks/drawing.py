"""A `Drawing` turns shapes and texts into an SVG for light and dark pages, and for phones."""

import html
from collections.abc import Iterable
from dataclasses import dataclass, field

WIDTH = 600
"""The width of a picture: narrow, so that its text stays readable when a phone scales it down."""

# A picture has its own background, because some browsers render it in a different color scheme
# than its page.
_STYLE = """
  svg { color-scheme: light dark; --bg: #ffffff; --raised: #f6f7f9; --fg: #1b2330; --muted: #5d6878;
    --line: #d5dbe2; --bar: #3f6fd1; --bad: #b3261e; --good: #127a53; }
  @media (prefers-color-scheme: dark) { svg { --bg: #12161c; --raised: #1a2028; --fg: #e4e9ef;
    --muted: #97a3b2; --line: #333d49; --bar: #6c97f0; --bad: #ff8a80; --good: #57c79b; } }
  text { font: 15px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--fg); }
  .code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 14px; }
  .muted { fill: var(--muted); } .bad { fill: var(--bad); } .good { fill: var(--good); }
  .strong { font-weight: 650; } .light, .dark { font-weight: 600; }
  .light { fill: #ffffff; } .dark { fill: #101418; }
  .bg { fill: var(--bg); } .box { fill: var(--raised); stroke: var(--line); }
  .bar { fill: var(--bar); } .line { stroke: var(--muted); fill: none; stroke-width: 1.5; }
""".strip()


@dataclass
class Drawing:
    """A picture that is being drawn.

    Args:
        title: a description of the picture, for people who cannot see it.
    """

    title: str
    _parts: list[str] = field(default_factory=list)

    def add(self, *parts: str) -> None:
        """Add SVG elements."""
        self._parts += parts

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Draw a line of text, whose baseline starts, ends or is centered at a point."""
        self.add(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}" '
            f'xml:space="preserve">{html.escape(text)}</text>'
        )

    def code(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Draw a line of code."""
        self.text(x, y, text, f"code {kind}".strip(), anchor)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """Draw a rectangle with round corners."""
        self.add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" '
            f'class="{kind}"/>'
        )

    def block(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draw a rectangle of one color."""
        self.add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
            f'fill="{color}"/>'
        )

    def arrow(self, points: Iterable[tuple[float, float]]) -> None:
        """Draw a line through points, with an arrowhead at the last point."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.add(f'<path d="M{path}" class="line" marker-end="url(#head)"/>')

    def svg(self, height: float) -> str:
        """Return the picture as the text of an SVG file."""
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
