"""What a report says ─► HTML, for a notebook or as a page for a browser.

A page is one file: it has its style and its script in it, and asks for nothing. Without the script,
and in a notebook, all can be read and folded; the script searches.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from functree.errors import count
from functree.report.table import bytes_text, grouped


@cache
def _file(name: str) -> str:
    return files("functree.report").joinpath(name).read_text(encoding="utf-8")


def report_html(title: str, head: str, content: str, page: bool) -> str:
    """A report in its style.

    Args:
        title: the title of the page.
        head: the HTML above the search.
        content: the HTML below it.
        page: whether to return a whole page, and not a fragment for a notebook.
    """
    # The style is in the fragment, and bound to a class: a notebook has styles of its own.
    style = f"<style>{_file('page.css')}</style>"
    if not page:
        return f'{style}<div class="functree">{head}{content}</div>'
    name = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Of an own icon, or a browser asks for one.
        f'<link rel="icon" href="data:,"><title>{name}</title>{style}</head>'
        f'<body><div class="functree"><h1>{name}</h1>{head}{_TOOLS}{content}'
        f"<script>{_file('page.js')}</script></div></body></html>"
    )


_TOOLS = (
    '<div class="tools" hidden><input type="search" aria-label="search" '
    'placeholder="Search paths, axes, reasons" autocomplete="off" spellcheck="false">'
    '<button type="button" class="unfold">Unfold all</button>'
    '<button type="button" class="fold">Fold all</button><output aria-live="polite"></output></div>'
)
# The script shows it.


class Card(NamedTuple):
    """A figure at the head of a report."""

    value: str
    label: str


def cards_html(cards: Iterable[Card]) -> str:
    """The figures at the head."""
    content = ""
    for card in cards:
        value, label = html.escape(card.value), html.escape(card.label)
        content += f'<div class="card"><b>{value}</b><span>{label}</span></div>'
    return f'<div class="cards">{content}</div>'


def section_html(title: str, *content: str) -> str:
    """A part of a report with a title; nothing if there is no content."""
    if not any(content):
        return ""
    return f"<section><h2>{html.escape(title)}</h2>{''.join(content)}</section>"


def notes_html(problems: Iterable[str], notes: Iterable[str]) -> str:
    """A paragraph for each problem, in red, and for each note."""
    content = ""
    for text in problems:
        content += f'<p class="problem">{_with_code(text)}</p>'
    for text in notes:
        content += f'<p class="muted">{_with_code(text)}</p>'
    return content


def _with_code(text: str) -> str:
    """A text in which what is between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def code(text: str, kind: str = "") -> str:
    """A text as code, of a class of the style."""
    of_class = f' class="{kind}"' if kind else ""
    return f"<code{of_class}>{html.escape(text)}</code>"


def colour(index: int) -> int:
    """The number of the colour of the n-th mesh axis or part; the last one is for all others."""
    return min(index, 5)


def mesh_axes_html(axes: Sequence[str] | None, sizes: Mapping[str, int]) -> str:
    """The names of mesh axes, each in its colour."""
    if axes is None:
        return "?"
    colours = {name: colour(index) for index, name in enumerate(sizes)}
    return " ".join(code(axis, f"a{colours.get(axis, colour(len(sizes)))}") for axis in axes)


class Segment(NamedTuple):
    """A part of a bar.

    Attributes:
        name: what it is of.
        size: its bytes, or what else the bar is of.
        kind: the class that colours it.
        text: the text of the size, if that is not of bytes.
    """

    name: str
    size: int
    kind: str = "p0"
    text: str = ""


def bar_html(segments: Iterable[Segment], most: int) -> str:
    """A bar; `most` is the number of bytes of one of full length."""
    content = ""
    for one in segments:
        if one.size:
            # In a table of arrays without elements, the longest has none.
            width = 100 * one.size / max(most, 1)
            name = html.escape(f"{one.name}: {one.text or bytes_text(one.size)}")
            content += f'<i class="{one.kind}" style="width:{width:.3g}%" title="{name}"></i>'
    return f'<div class="bar">{content}</div>'


def key_html(segments: Iterable[Segment]) -> str:
    """What the colours of a bar are, with the bytes of each."""
    content = ""
    for one in segments:
        size = f'<span class="num muted">{bytes_text(one.size)}</span>'
        name = f'<span class="dot {one.kind}"></span>{html.escape(one.name)}'
        content += f"<span>{name} {size}</span>"
    return f'<div class="key">{content}</div>'


def list_html(title: str, sizes: Mapping[str, int]) -> str:
    """A list of bars.

    Args:
        title: its title.
        sizes: the bytes of each entry, whose key is HTML.
    """
    most = max(sizes.values(), default=0)
    items = ""
    for name, size in sizes.items():
        bar = bar_html([Segment("", size)], most)
        number = f'<span class="num">{bytes_text(size)}</span>'
        items += f'<div class="item"><span>{name}</span>{number}{bar}</div>'
    return f"<div><h3>{html.escape(title)}</h3>{items}</div>"


def table_html(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells of its rows are HTML."""
    head = f"<th>{'</th><th>'.join(map(html.escape, titles))}</th>"
    body = ""
    for cells in rows:
        body += f"<tr><td>{'</td><td>'.join(cells)}</td></tr>"
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


OPEN_LINES = 48
"""The number of lines that a tree shows at first, if that is possible by whole levels."""


class TreeLeaf(NamedTuple):
    """One line of a tree.

    Attributes:
        parts: the texts of the keys of its path.
        size: its bytes, as a bar.
        content: the HTML of what it says.
        number: the number of things that it stands for.
        picture: the HTML of a picture at its left; may be empty.
        copies: the bytes among `size` that other devices have too.
    """

    parts: tuple[str, ...]
    size: int
    content: str
    number: int = 1
    picture: str = ""
    copies: int = 0


@dataclass(frozen=True)
class _Node:
    """A subtree.

    Attributes:
        name: the text of its keys, from those of the subtree that it is in.
        depth: the number of keys of its path.
        leaves: all lines in it.
        inside: the lines and subtrees that are directly in it, in their order.
    """

    name: str
    depth: int
    leaves: Sequence[TreeLeaf]
    inside: "Sequence[_Node | TreeLeaf]"

    def subtrees(self) -> list["_Node"]:
        """The subtrees that are directly in it."""
        return [one for one in self.inside if isinstance(one, _Node)]


class _Look(NamedTuple):
    """What the lines of a tree depend on.

    Attributes:
        whole: the bytes of the whole.
        most: the bytes of the longest bar of a leaf.
        noun: what a leaf stands for.
        levels: the number of levels that are open.
    """

    whole: int
    most: int
    noun: str
    levels: int


def tree_html(
    leaves: Sequence[TreeLeaf],
    title: str,
    noun: str,
    *,
    named: bool = True,
    opened: bool = True,
) -> str:
    """A tree to fold; nothing if it has no leaves.

    Args:
        leaves: the leaves.
        title: the name of the whole.
        noun: what a leaf stands for.
        named: whether a leaf is named by the last key of its path; if not, the path is that of a
            subtree, which may have several leaves.
        opened: whether some levels are open.
    """
    if not leaves:
        return ""
    root = _node(title, leaves, 0, int(named))
    most = max(leaf.size for leaf in leaves)
    levels = _levels(root) if opened else 0
    look = _Look(sum(leaf.size for leaf in leaves), most, noun, levels)
    return f'<div class="tree">{_node_html(root, 0, look)}</div>'


def _node(name: str, leaves: Sequence[TreeLeaf], depth: int, own: int) -> _Node:
    """The subtree of some leaves, whose paths have the same keys up to a depth.

    A subtree with only one line is this line, and one that is all of another is one with it.

    Args:
        name: the name of the subtree.
        leaves: the leaves.
        depth: the depth.
        own: the number of keys of a path that are not those of a subtree.
    """

    def subtree(leaf: TreeLeaf) -> object:
        if depth < len(leaf.parts) - own:
            return leaf.parts[depth]
        return object()  # a line is in no subtree

    inside: list[_Node | TreeLeaf] = []
    for group in grouped(leaves, subtree):
        if len(group) == 1:
            inside += group
        else:
            inside.append(_node(group[0].parts[depth], group, depth + 1, own))
    only = inside[0]
    if depth and len(inside) == 1 and isinstance(only, _Node):
        return replace(only, name=f"{name}.{only.name}")
    return _Node(name, depth, leaves, inside)


def _levels(root: _Node) -> int:
    """The number of levels that can be open without too many lines."""
    shown, levels, level = 0, 0, [root]
    while level:
        shown += sum(len(node.inside) for node in level)
        if shown > OPEN_LINES and levels:
            break
        levels += 1
        level = list(chain.from_iterable(node.subtrees() for node in level))
    return levels


def _node_html(node: _Node, level: int, look: _Look) -> str:
    opened = " open" if level < look.levels else ""
    content = ""
    for inner in node.inside:
        if isinstance(inner, _Node):
            content += _node_html(inner, level + 1, look)
        else:
            content += _leaf_html(inner, node.depth, look)
    size = sum(leaf.size for leaf in node.leaves)
    number = count(sum(leaf.number for leaf in node.leaves), look.noun)
    bar = bar_html([Segment(node.name, size, "p5")], look.whole)
    title = f'<span>{code(node.name)} <span class="muted">{number}</span></span>'
    return (
        f"<details{opened}><summary>{title}"
        f'<span class="size num">{bytes_text(size)}{bar}</span></summary>{content}</details>'
    )


def _leaf_html(leaf: TreeLeaf, depth: int, look: _Look) -> str:
    path = ".".join(leaf.parts)
    name = ".".join(leaf.parts[depth:])
    if not leaf.parts:
        name = "(the array)"
    title = code(name, "name") if name else ""
    alone = Segment(path, leaf.size - leaf.copies)
    copied = Segment(f"{path}, copies", leaf.copies, "p0 copied")
    bar = bar_html([alone, copied], look.most)
    return leaf_html(path, title + leaf.content, bytes_text(leaf.size) + bar, leaf.picture)


def leaf_html(path: str, content: str, size: str, picture: str = "") -> str:
    """One line, which the search finds by its path and by what it says.

    Args:
        path: the path.
        content: the HTML of what it says.
        size: the HTML of its bytes, at the right.
        picture: the HTML of a picture at the left; may be empty.
    """
    kind = "leaf drawn" if picture else "leaf"
    return (
        f'<div class="{kind}" data-path="{html.escape(path)}">{picture}<div>{content}</div>'
        f'<div class="size num">{size}</div></div>'
    )


MOST = 8
"""The number of blocks along a dimension, and of devices in a block, that are drawn."""
WIDE, HIGH = 76, 48
_AREA = 72.0, 44.0  # of an array with two dimensions


class Pictures:
    """Pictures of arrays on one mesh. Arrays that are cut alike share a picture.

    A block has the colour of the device that has it, and diagonal stripes of all devices that have
    a copy.

    Args:
        sizes: the sizes of the mesh axes.
        prefix: the beginning of the names of the pictures in the page, which has no other ones.
    """

    def __init__(self, sizes: Mapping[str, int], prefix: str):
        self._sizes: dict[str, int] = dict(sizes)
        self._prefix: str = prefix
        self._symbols: dict[str, str] = {}  # their names, by what is drawn
        self._stripes: dict[tuple[int, ...], str] = {}  # their names, by the devices

    def of(self, shape: Sequence[int], cuts: Sequence[tuple[str, ...]]) -> str:
        """The picture of an array.

        Args:
            shape: its shape.
            cuts: for each dimension, the mesh axes that cut it.
        """
        rows, columns = _drawn(shape, cuts)
        blocks = self._blocks([cuts[dim] for dim in rows], [cuts[dim] for dim in columns])
        number, shown = blocks.shape[0] * blocks.shape[1], blocks[:MOST, :MOST]
        width, height = _extent([shape[dim] for dim in (*rows, *columns[:1])])
        left, top = (WIDE - width) / 2, (HIGH - height) / 2
        high, wide = height / shown.shape[0], width / shown.shape[1]
        gap = 1.5 if min(wide, high) > 4 else 0.5
        content = f"<title>{html.escape(_title(number, cuts, self._sizes))}</title>"
        for i, j in product(range(shown.shape[0]), range(shown.shape[1])):
            at = _rect(left + j * wide, top + i * high, wide - gap, high - gap)
            content += f'<rect {at} fill="{self._fill(shown[i, j])}"/>'
        return self._shared(content)

    def unknown(self, shape: Sequence[int]) -> str:
        """The picture of an array of which it is not known how it is cut."""
        width, height = _extent([size for size in shape if size > 1][-2:])
        at = _rect((WIDE - width) / 2, (HIGH - height) / 2, width, height)
        look = 'fill="none" stroke="currentColor" stroke-dasharray="3 3" opacity=".5"'
        return self._shared(f"<rect {at} {look}/>")

    def definitions(self) -> str:
        """The pictures themselves, which must be in the page once."""
        content = ""
        for devices, name in self._stripes.items():
            stops = ""
            for i, device in enumerate(devices):
                # Each colour from one point to another, without a transition.
                for end in (i, i + 1):
                    stops += (
                        f'<stop offset="{end / len(devices):.3g}" '
                        f'stop-color="{device_colour(device, self._sizes)}"/>'
                    )
            content += f'<linearGradient id="{name}" y2="1">{stops}</linearGradient>'
        for drawn, name in self._symbols.items():
            content += f'<symbol id="{name}" viewBox="0 0 {WIDE} {HIGH}">{drawn}</symbol>'
        # Not by `hidden`: what is not displayed cannot be used elsewhere either.
        return f'<svg class="symbols" aria-hidden="true">{content}</svg>'

    def _blocks(
        self, rows: Sequence[Sequence[str]], columns: Sequence[Sequence[str]]
    ) -> np.ndarray:
        """The devices that have each block, by its row and column."""
        names = list(self._sizes)
        # Along a dimension, the last of its mesh axes varies fastest.
        down = [axis for axis in chain.from_iterable(rows) if axis in names]
        across = [axis for axis in chain.from_iterable(columns) if axis in names]
        copies = [axis for axis in names if axis not in (*down, *across)]
        devices = np.arange(math.prod(self._sizes.values())).reshape(list(self._sizes.values()))
        devices = devices.transpose(list(map(names.index, (*down, *across, *copies))))
        return devices.reshape(_parts(down, self._sizes), _parts(across, self._sizes), -1)

    def _fill(self, devices: np.ndarray) -> str:
        if len(devices) > MOST:
            devices = devices[np.linspace(0, len(devices) - 1, MOST).round().astype(int)]
        if len(devices) == 1:
            return device_colour(int(devices[0]), self._sizes)
        key = tuple(devices.tolist())
        name = self._stripes.setdefault(key, f"{self._prefix}s{len(self._stripes)}")
        return f"url(#{name})"

    def _shared(self, drawn: str) -> str:
        name = self._symbols.setdefault(drawn, f"{self._prefix}{len(self._symbols)}")
        return f'<svg role="img"><use href="#{name}"/></svg>'


def device_colour(device: int, sizes: Mapping[str, int]) -> str:
    """The colour of a device: a hue for its position along all mesh axes but the first, and darker
    along the first."""
    first, *others = [size for size in sizes.values() if size > 1] or [1]
    inner = math.prod(others)
    if not others:
        first, inner = 1, first
    outer, hue = divmod(device, inner)
    lightness = 62 - 26 * outer / max(first - 1, 1)
    return f"hsl({205 + 300 * hue / inner:.0f} 62% {lightness:.0f}%)"


def _drawn(shape: Sequence[int], cuts: Sequence[tuple[str, ...]]) -> tuple[list[int], list[int]]:
    """The dimensions that are rows and columns of the picture: those that are cut, and then the
    largest. Cut dimensions beyond two are drawn along the columns too."""
    chosen = [dim for dim in range(len(shape)) if cuts[dim]]
    others = [dim for dim in range(len(shape)) if not cuts[dim] and shape[dim] > 1]
    others.sort(key=lambda dim: shape[dim], reverse=True)
    chosen += others[: max(0, 2 - len(chosen))]
    chosen.sort()
    if len(chosen) < 2:
        return [], chosen
    return chosen[:1], chosen[1:]


def _extent(sizes: Sequence[int]) -> tuple[float, float]:
    """The width and the height of the picture of an array: longer where it has more elements, as
    far as that can be drawn."""
    wide, high = _AREA
    if not sizes:
        return 14, 14
    if len(sizes) == 1:
        return wide, 14
    down, across = sizes
    ratio = math.log2(max(across, 1) / max(down, 1))
    # A factor of 16 is drawn as one of 2.
    squeeze = 2 ** min(abs(ratio) / 4, 1)
    return (wide, high / squeeze) if ratio > 0 else (wide / squeeze, high)


def _parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _rect(x: float, y: float, width: float, height: float) -> str:
    """Where a rectangle is."""
    return f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"'


def _title(blocks: int, cuts: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> str:
    used = {axis for axes in cuts for axis in axes}
    copies = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    if not copies:
        return f"{blocks} blocks, one on each device"
    what = "whole" if blocks == 1 else f"{blocks} blocks"
    return f"{what}, on {_parts(copies, sizes)} devices each: copies over {', '.join(copies)}"
