"""What a report says ─► HTML, for a notebook or as a page for a browser.

A page is one file: it has its style and its script in it, and asks for nothing. Without the script,
and in a notebook, all can be read and folded; the script searches.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import product
from typing import NamedTuple

from functree.errors import count
from functree.report.table import bytes_text


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
    texts = [
        f'<div class="card"><b>{html.escape(card.value)}</b>'
        f"<span>{html.escape(card.label)}</span></div>"
        for card in cards
    ]
    return f'<div class="cards">{"".join(texts)}</div>'


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
    names = list(sizes)
    texts: list[str] = []
    for axis in axes:
        index = names.index(axis) if axis in names else len(names)
        texts.append(code(axis, f"a{colour(index)}"))
    return " ".join(texts)


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
    texts = [
        f'<span><span class="dot {one.kind}"></span>{html.escape(one.name)} '
        f'<span class="num muted">{bytes_text(one.size)}</span></span>'
        for one in segments
    ]
    return f'<div class="key">{"".join(texts)}</div>'


def list_html(title: str, sizes: Mapping[str, int]) -> str:
    """A list of bars.

    Args:
        title: its title.
        sizes: the bytes of each entry, whose key is HTML.
    """
    most = max(sizes.values(), default=0)
    items = [
        f'<div class="item"><span>{name}</span><span class="num">{bytes_text(size)}</span>'
        f"{bar_html([Segment('', size)], most)}</div>"
        for name, size in sizes.items()
    ]
    return f"<div><h3>{html.escape(title)}</h3>{''.join(items)}</div>"


def table_html(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells of its rows are HTML."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = ""
    for cells in rows:
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
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


@dataclass
class _Node:
    """A subtree: lines and other subtrees, in their order.

    Attributes:
        name: the text of its keys, from those of the subtree that it is in.
        depth: the number of keys of its path.
        inside: what is in it. A subtree has its key; a line has no key of its own.
    """

    name: str
    depth: int = 0
    inside: "dict[object, _Node | TreeLeaf]" = field(default_factory=dict)

    def subtree(self, key: str) -> "_Node":
        """The subtree with a key, which is made if there is none."""
        found = self.inside.setdefault(key, _Node(key, self.depth + 1))
        return found if isinstance(found, _Node) else self

    def leaves(self) -> list[TreeLeaf]:
        """All lines of the subtree."""
        found: list[TreeLeaf] = []
        for one in self.inside.values():
            found += one.leaves() if isinstance(one, _Node) else [one]
        return found

    def subtrees(self) -> list["_Node"]:
        """The subtrees that are directly in it."""
        return [one for one in self.inside.values() if isinstance(one, _Node)]


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
    root = _Node(title)
    for i, leaf in enumerate(leaves):
        node = root
        for part in leaf.parts[:-1] if named else leaf.parts:
            node = node.subtree(part)
        node.inside[i] = leaf
    root = _merged(root)
    most = max(leaf.size for leaf in leaves)
    levels = _levels(root) if opened else 0
    look = _Look(sum(leaf.size for leaf in leaves), most, noun, levels)
    return f'<div class="tree">{_node_html(root, 0, look)}</div>'


def _merged(node: _Node) -> _Node:
    """A tree without the levels that say nothing: a subtree with only one line, or that is all of
    the one above."""
    merged = _Node(node.name, node.depth)
    for key, inner in node.inside.items():
        if isinstance(inner, _Node):
            inner = _merged(inner)
            only, below = inner.leaves(), inner.subtrees()
            if len(only) == 1:
                inner = only[0]
            elif len(below) == len(inner.inside) == 1:
                inner = replace(below[0], name=f"{inner.name}.{below[0].name}")
        merged.inside[key] = inner
    return merged


def _levels(root: _Node) -> int:
    """The number of levels that can be open without too many lines."""
    shown, levels, level = 0, 0, [root]
    while level:
        shown += sum(len(node.inside) for node in level)
        if shown > OPEN_LINES and levels:
            break
        levels += 1
        level = [inner for node in level for inner in node.subtrees()]
    return levels


def _node_html(node: _Node, level: int, look: _Look) -> str:
    opened = " open" if level < look.levels else ""
    content = ""
    for inner in node.inside.values():
        if isinstance(inner, _Node):
            content += _node_html(inner, level + 1, look)
        else:
            content += _leaf_html(inner, node.depth, look)
    leaves = node.leaves()
    size = sum(leaf.size for leaf in leaves)
    number = count(sum(leaf.number for leaf in leaves), look.noun)
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
        down = [axis for dim in rows for axis in cuts[dim]]
        across = [axis for dim in columns for axis in cuts[dim]]
        parts = _parts(down, self._sizes), _parts(across, self._sizes)
        shown_down, shown_across = (min(number, MOST) for number in parts)
        width, height = _extent([shape[dim] for dim in (*rows, *columns[:1])])
        left, top = (WIDE - width) / 2, (HIGH - height) / 2
        wide, high = width / shown_across, height / shown_down
        gap = 1.5 if min(wide, high) > 4 else 0.5
        content = f"<title>{html.escape(_title(math.prod(parts), cuts, self._sizes))}</title>"
        for i, j in product(range(shown_down), range(shown_across)):
            at = {**_position(i, down, self._sizes), **_position(j, across, self._sizes)}
            content += (
                f'<rect x="{left + j * wide:.4g}" y="{top + i * high:.4g}" '
                f'width="{wide - gap:.4g}" height="{high - gap:.4g}" '
                f'fill="{self._fill(_devices(at, self._sizes))}"/>'
            )
        return self._shared(content)

    def unknown(self, shape: Sequence[int]) -> str:
        """The picture of an array of which it is not known how it is cut."""
        width, height = _extent([size for size in shape if size > 1][-2:])
        x, y = (WIDE - width) / 2, (HIGH - height) / 2
        return self._shared(
            f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" '
            'fill="none" stroke="currentColor" stroke-dasharray="3 3" opacity=".5"/>'
        )

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

    def _fill(self, devices: tuple[int, ...]) -> str:
        if len(devices) == 1:
            return device_colour(devices[0], self._sizes)
        name = self._stripes.setdefault(devices, f"{self._prefix}s{len(self._stripes)}")
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


def _position(index: int, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """The position of a block along the mesh axes that cut a dimension, of which the last varies
    fastest."""
    found: dict[str, int] = {}
    for axis in reversed(axes):
        index, found[axis] = divmod(index, sizes.get(axis, 1))
    return found


def _devices(at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The devices that have a block; of many, `MOST` from the first to the last."""
    ranges = [[at[axis]] if axis in at else range(size) for axis, size in sizes.items()]
    found: list[int] = []
    for position in product(*ranges):
        device = 0
        for index, size in zip(position, sizes.values(), strict=True):
            device = device * size + index
        found.append(device)
    last = len(found) - 1
    if last >= MOST:
        found = [found[round(i * last / (MOST - 1))] for i in range(MOST)]
    return tuple(found)


def _title(blocks: int, cuts: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> str:
    used = {axis for axes in cuts for axis in axes}
    copies = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    if not copies:
        return f"{blocks} blocks, one on each device"
    what = "whole" if blocks == 1 else f"{blocks} blocks"
    return f"{what}, on {_parts(copies, sizes)} devices each: copies over {', '.join(copies)}"
