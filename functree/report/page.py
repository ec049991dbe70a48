"""Reports are rendered as HTML, for notebooks and for browsers.

A page is one file that includes its style and script, and loads nothing from a network. Without the
script, as in a notebook, the report can still be read and folded. The script adds search.
"""

import html
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from functree.devices.meshes import parts_over
from functree.errors import count
from functree.report.table import bytes_text, grouped


@cache
def _file(name: str) -> str:
    return files("functree.report").joinpath(name).read_text(encoding="utf-8")


class Report(ABC):
    """Base class of results that can be shown as an HTML page, and in a notebook."""

    def html(self) -> str:
        """Render an HTML page. The page is one file, and loads nothing from a network."""
        return self._html(page=True)

    def _repr_html_(self) -> str:
        return self._html(page=False)

    @abstractmethod
    def _html(self, page: bool) -> str:
        """Render the page, or a fragment for a notebook."""


def report_html(title: str, head: str, content: str, page: bool) -> str:
    """Render a report with its style.

    Args:
        title: the title of the page.
        head: the HTML above the search.
        content: the HTML below the search.
        page: whether to return a full page, not a fragment for a notebook.
    """
    # A fragment includes the style, bound to a class, since a notebook has its own styles.
    style = f"<style>{_file('page.css')}</style>"
    if not page:
        return f'{style}<div class="functree">{head}{content}</div>'
    name = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Without an icon, a browser would request one.
        f'<link rel="icon" href="data:,"><title>{name}</title>{style}</head>'
        f'<body><div class="functree"><h1>{name}</h1>{head}{_TOOLS}{content}'
        f"<script>{_file('page.js')}</script></div></body></html>"
    )


_TOOLS = (
    '<div class="tools" hidden><input type="search" aria-label="search" '
    'placeholder="Search paths, axes, reasons" autocomplete="off" spellcheck="false">'
    '<button type="button" class="unfold">Expand all</button>'
    '<button type="button" class="fold">Collapse all</button>'
    '<output aria-live="polite"></output></div>'
)
# The tools are hidden until the script runs.


class Card(NamedTuple):
    """A number with a label, at the head of a report."""

    value: str
    label: str


def cards_html(cards: Iterable[Card]) -> str:
    """Render the cards at the head of a report."""
    content = ""
    for card in cards:
        value, label = html.escape(card.value), html.escape(card.label)
        content += f'<div class="card"><b>{value}</b><span>{label}</span></div>'
    return f'<div class="cards">{content}</div>'


def section_html(title: str, *content: str) -> str:
    """Render a section with a title, or nothing if there is no content."""
    if not any(content):
        return ""
    return f"<section><h2>{html.escape(title)}</h2>{''.join(content)}</section>"


def notes_html(problems: Iterable[str], notes: Iterable[str]) -> str:
    """Render a paragraph for each problem, in red, and for each note."""
    content = ""
    for text in problems:
        content += f'<p class="problem">{_with_code(text)}</p>'
    for text in notes:
        content += f'<p class="muted">{_with_code(text)}</p>'
    return content


def _with_code(text: str) -> str:
    """Escape a text, and render the parts between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def code(text: str, kind: str = "") -> str:
    """Render a text as code, with a CSS class."""
    of_class = f' class="{kind}"' if kind else ""
    return f"<code{of_class}>{html.escape(text)}</code>"


def mesh_axes_html(axes: Sequence[str] | None, sizes: Mapping[str, int]) -> str:
    """Render the names of mesh axes, each in its color. The sixth and later ones share a color."""
    if axes is None:
        return "?"
    colors = {name: min(index, 5) for index, name in enumerate(sizes)}
    return " ".join(code(axis, f"a{colors.get(axis, 5)}") for axis in axes)


class Segment(NamedTuple):
    """A part of a bar.

    Attributes:
        name: the name of the part.
        size: its bytes.
        kind: the CSS class that colors it.
    """

    name: str
    size: int
    kind: str = "p0"


def bar_html(segments: Iterable[Segment], most: int) -> str:
    """Render a bar. A bar of `most` bytes has the full length."""
    content = ""
    for segment in segments:
        if segment.size:
            # If no array has elements, `most` is 0.
            width = 100 * segment.size / max(most, 1)
            name = html.escape(f"{segment.name}: {bytes_text(segment.size)}")
            content += f'<i class="{segment.kind}" style="width:{width:.3g}%" title="{name}"></i>'
    return f'<div class="bar">{content}</div>'


def key_html(segments: Iterable[Segment]) -> str:
    """Render the legend of a bar, with the color and the bytes of each part."""
    content = ""
    for segment in segments:
        size = f'<span class="num muted">{bytes_text(segment.size)}</span>'
        name = f'<span class="dot {segment.kind}"></span>{html.escape(segment.name)}'
        content += f"<span>{name} {size}</span>"
    return f'<div class="key">{content}</div>'


def list_html(title: str, sizes: Mapping[str, int]) -> str:
    """Render a list of bars.

    Args:
        title: the title of the list.
        sizes: the bytes of each entry, by the HTML of its name.
    """
    most = max(sizes.values(), default=0)
    items = ""
    for name, size in sizes.items():
        bar = bar_html([Segment("", size)], most)
        number = f'<span class="num">{bytes_text(size)}</span>'
        items += f'<div class="item"><span>{name}</span>{number}{bar}</div>'
    return f"<div><h3>{html.escape(title)}</h3>{items}</div>"


def table_html(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table whose cells are HTML."""
    head = f"<th>{'</th><th>'.join(map(html.escape, titles))}</th>"
    body = ""
    for cells in rows:
        body += f"<tr><td>{'</td><td>'.join(cells)}</td></tr>"
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


OPEN_LINES = 48
"""The maximum number of lines of a tree that is shown open.

Of a larger tree, only the first level is open.
"""


class TreeLeaf(NamedTuple):
    """A line of a tree.

    Attributes:
        parts: the texts of the keys of its path.
        size: its bytes, shown as a bar.
        content: the HTML of its text.
        number: the number of items that the line stands for, such as arrays.
        picture: the HTML of a picture on its left; may be empty.
        copies: the bytes among `size` that other devices also hold.
    """

    parts: tuple[str, ...]
    size: int
    content: str
    number: int = 1
    picture: str = ""
    copies: int = 0


class _Look(NamedTuple):
    """The settings for a tree's lines.

    Attributes:
        whole: the bytes of the whole tree.
        most: the bytes of a leaf's longest bar.
        noun: the noun for an item that a leaf stands for: `array`.
        own: the number of keys at the end of a path that belong to the leaf.
        inside: the attribute that opens the subtrees below the root, or an empty string.
    """

    whole: int
    most: int
    noun: str
    own: int
    inside: str


def tree_html(
    leaves: Sequence[TreeLeaf],
    title: str,
    noun: str,
    *,
    named: bool = True,
    opened: bool = True,
) -> str:
    """Render a collapsible tree, or nothing if there are no leaves.

    Args:
        leaves: the leaves.
        title: the name of the root.
        noun: the noun for an item that a leaf stands for: `array`.
        named: whether the last key of a leaf's path names the leaf. Otherwise, the path belongs to
            a subtree, which may have several leaves.
        opened: whether the tree is open, as far as `OPEN_LINES` allows.
    """
    if not leaves:
        return ""
    sizes = [leaf.size for leaf in leaves]
    is_open = " open" if opened else ""
    inside = is_open if len(leaves) <= OPEN_LINES else ""
    look = _Look(sum(sizes), max(sizes), noun, int(named), inside)
    return f'<div class="tree">{_subtree_html(title, leaves, 0, look, is_open)}</div>'


def _subtree_html(
    name: str, leaves: Sequence[TreeLeaf], depth: int, look: _Look, is_open: str
) -> str:
    """Render the subtree of some leaves whose paths have the same keys up to a depth.

    A subtree with one line becomes that line. A subtree that contains only one subtree merges with
    that subtree.
    """

    def key(leaf: TreeLeaf, depth: int) -> object:
        if depth < len(leaf.parts) - look.own:
            return leaf.parts[depth]
        return object()  # a leaf without a subtree

    content = ""
    for group in grouped(leaves, lambda leaf: key(leaf, depth)):
        if len(group) == 1:
            content += _leaf_html(group[0], depth, look)
            continue
        end = depth + 1
        while len({key(leaf, end) for leaf in group}) == 1:
            end += 1
        inner = ".".join(group[0].parts[depth:end])
        content += _subtree_html(inner, group, end, look, look.inside)
    size = sum(leaf.size for leaf in leaves)
    number = count(sum(leaf.number for leaf in leaves), look.noun)
    bar = bar_html([Segment(name, size, "p5")], look.whole)
    title = f'<span>{code(name)} <span class="muted">{number}</span></span>'
    return (
        f"<details{is_open}><summary>{title}"
        f'<span class="size num">{bytes_text(size)}{bar}</span></summary>{content}</details>'
    )


def _leaf_html(leaf: TreeLeaf, depth: int, look: _Look) -> str:
    path = ".".join(leaf.parts)
    name = ".".join(leaf.parts[depth:])
    if not leaf.parts:
        name = "(the root)"
    title = code(name, "name") if name else ""
    alone = Segment(path, leaf.size - leaf.copies)
    copied = Segment(f"{path}, copies", leaf.copies, "p0 copied")
    bar = bar_html([alone, copied], look.most)
    return leaf_html(path, title + leaf.content, bytes_text(leaf.size) + bar, leaf.picture)


def leaf_html(path: str, content: str, size: str, picture: str = "") -> str:
    """Render a line, which the search finds by its path and its text.

    Args:
        path: the path.
        content: the HTML of its text.
        size: the HTML of its bytes, on the right.
        picture: the HTML of a picture on the left; may be empty.
    """
    kind = "leaf drawn" if picture else "leaf"
    return (
        f'<div class="{kind}" data-path="{html.escape(path)}">{picture}<div>{content}</div>'
        f'<div class="size num">{size}</div></div>'
    )


MOST = 8
"""The maximum number of blocks drawn along a dimension, and of devices drawn in a block."""
WIDE, HIGH = 76, 48


class Pictures:
    """Pictures of arrays on one mesh. Arrays that are sharded alike share a picture.

    A block has the color of its device. If several devices hold a copy, the block has diagonal
    stripes in the colors of at most `MOST` of them.

    Args:
        sizes: the sizes of the mesh axes.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self._sizes: dict[str, int] = dict(sizes)
        self._definitions: dict[str, str] = {}  # by name

    def of(self, shape: Sequence[int], cuts: Sequence[tuple[str, ...]]) -> str:
        """Draw the picture of an array.

        Args:
            shape: its shape.
            cuts: the mesh axes that shard each dimension.
        """
        rows, columns = _drawn(shape, cuts)
        blocks = self._blocks([cuts[dim] for dim in rows], [cuts[dim] for dim in columns])
        number, shown = blocks.shape[0] * blocks.shape[1], blocks[:MOST, :MOST]
        # An array with one dimension is drawn as a line, and a scalar as a dot.
        width = 72 if columns else 14
        height = 44 if rows else 14
        left, top = (WIDE - width) / 2, (HIGH - height) / 2
        high, wide = height / shown.shape[0], width / shown.shape[1]
        gap = 1.5 if min(wide, high) > 4 else 0.5
        content = f"<title>{html.escape(_title(number, cuts, self._sizes))}</title>"
        for i, j in product(range(shown.shape[0]), range(shown.shape[1])):
            at = _rect(left + j * wide, top + i * high, wide - gap, high - gap)
            content += f'<rect {at} fill="{self._fill(shown[i, j])}"/>'
        name = self._defined("symbol", f'viewBox="0 0 {WIDE} {HIGH}"', content)
        return f'<svg role="img"><use href="#{name}"/></svg>'

    def definitions(self) -> str:
        """Render the definitions of the pictures, which the page must include once."""
        # The attribute `hidden` would not work: a symbol that is not displayed cannot be used
        # elsewhere.
        content = "".join(self._definitions.values())
        return f'<svg class="symbols" aria-hidden="true">{content}</svg>'

    def _defined(self, tag: str, attributes: str, content: str) -> str:
        """Define an element, and return its name."""
        # A notebook may show several reports. Equal names in them stand for equal elements.
        name = f"cut{zlib.crc32(content.encode()):x}"
        self._definitions[name] = f'<{tag} id="{name}" {attributes}>{content}</{tag}>'
        return name

    def _blocks(
        self, rows: Sequence[Sequence[str]], columns: Sequence[Sequence[str]]
    ) -> np.ndarray:
        """Return the devices of each block, by row and column."""
        names = list(self._sizes)
        # Along a dimension, its last mesh axis varies fastest.
        down = [axis for axis in chain.from_iterable(rows) if axis in names]
        across = [axis for axis in chain.from_iterable(columns) if axis in names]
        copies = [axis for axis in names if axis not in (*down, *across)]
        devices = np.arange(math.prod(self._sizes.values())).reshape(list(self._sizes.values()))
        devices = devices.transpose(list(map(names.index, (*down, *across, *copies))))
        return devices.reshape(parts_over(down, self._sizes), parts_over(across, self._sizes), -1)

    def _fill(self, devices: np.ndarray) -> str:
        if len(devices) == 1:
            return device_color(int(devices[0]), self._sizes)
        if len(devices) > MOST:
            devices = devices[np.linspace(0, len(devices) - 1, MOST).round().astype(int)]
        stops = ""
        for i, device in enumerate(devices.tolist()):
            stripe = device_color(device, self._sizes)
            # Each color has two stops, so there is no transition.
            for end in (i, i + 1):
                stops += f'<stop offset="{end / len(devices):.3g}" stop-color="{stripe}"/>'
        name = self._defined("linearGradient", 'y2="1"', stops)
        return f"url(#{name})"


def device_color(device: int, sizes: Mapping[str, int]) -> str:
    """Return the color of a device.

    The lightness shows its position along the first mesh axis, and the hue its position along the
    other axes.
    """
    first, *others = [size for size in sizes.values() if size > 1] or [1]
    inner = math.prod(others)
    if not others:
        first, inner = 1, first
    outer, hue = divmod(device, inner)
    lightness = 62 - 26 * outer / max(first - 1, 1)
    return f"hsl({205 + 300 * hue / inner:.0f} 62% {lightness:.0f}%)"


def _drawn(shape: Sequence[int], cuts: Sequence[tuple[str, ...]]) -> tuple[list[int], list[int]]:
    """Choose the dimensions for the rows and columns: sharded dimensions, then the largest.

    If more than two dimensions are sharded, all but the first are drawn along the columns.
    """
    chosen = [dim for dim in range(len(shape)) if cuts[dim]]
    others = [dim for dim in range(len(shape)) if not cuts[dim] and shape[dim] > 1]
    others.sort(key=lambda dim: shape[dim], reverse=True)
    chosen += others[: max(0, 2 - len(chosen))]
    chosen.sort()
    if len(chosen) < 2:
        return [], chosen
    return chosen[:1], chosen[1:]


def _rect(x: float, y: float, width: float, height: float) -> str:
    """Return the attributes of a rectangle."""
    return f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"'


def _title(blocks: int, cuts: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> str:
    used = {axis for axes in cuts for axis in axes}
    copies = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    if not copies:
        return f"{blocks} blocks, one on each device"
    what = "whole array on each of" if blocks == 1 else f"{blocks} blocks, each on"
    return f"{what} {parts_over(copies, sizes)} devices: copies over {', '.join(copies)}"
