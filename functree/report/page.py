"""What a report says ─► HTML, for a notebook or as a page for a browser.

A page is one file: it has its style and its script in it, and asks for nothing. Without the script,
and in a notebook, all can be read and folded; the script searches.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from functree.report.byte_sizes import bytes_text


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
