"""What a report says ─► HTML, for a notebook or as a page for a browser."""

import html
from collections.abc import Iterable, Sequence

# Text and background are both set: a notebook may be dark. Bars are boxes of some width, since a
# notebook runs no script of a page that nobody trusts yet.
STYLE = """
.functree{font:14px/1.45 system-ui,sans-serif;color:#1c2430;background:#fff;padding:.5em}
.functree{overflow-x:auto}
.functree table{border-collapse:collapse;width:100%}
.functree th{text-align:left;color:#5b6675;font-weight:600;border-bottom:2px solid #dfe4ea}
.functree td,.functree th{padding:.3em .9em .3em 0;vertical-align:top;text-align:left}
.functree tr+tr td{border-top:1px solid #eef1f4}
.functree code{font:13px ui-monospace,monospace;background:none}
.functree .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.functree .bar{height:6px;background:#3b6fd4;border-radius:3px;margin-top:4px}
.functree .copied .bar{background:#d98324}
.functree .why{color:#5b6675}
.functree .problem{color:#b3261e}
"""


def report_html(content: str, title: str, page: bool) -> str:
    """Content of a report, in its style.

    Args:
        content: HTML.
        title: the title of the page.
        page: whether to return a whole page, and not a fragment for a notebook.
    """
    # The style is in the fragment, and bound to a class: a notebook has styles of its own.
    fragment = f'<style>{STYLE}</style><div class="functree">{content}</div>'
    if not page:
        return fragment
    head = f'<head><meta charset="utf-8"><title>{title}</title></head>'
    return f'<!doctype html><html lang="en">{head}<body>{fragment}</body></html>'


def notes_html(problems: Iterable[str], notes: Iterable[str]) -> str:
    """A paragraph for each problem, in red, and for each note."""
    content = ""
    for text in problems:
        content += f'<p class="problem">{html.escape(text)}</p>'
    for text in notes:
        content += f"<p>{html.escape(text)}</p>"
    return content


def table_html(titles: Sequence[str], rows: Iterable[str]) -> str:
    """A table with the titles of its columns.

    Args:
        titles: the titles.
        rows: the HTML of each row.
    """
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def code_cells(*texts: str) -> str:
    """A cell for each text, as code."""
    return "".join(f"<td><code>{html.escape(text)}</code></td>" for text in texts)


def comment_cell(text: str) -> str:
    """A cell with what is only a comment on its row."""
    return f'<td class="why">{html.escape(text)}</td>'


def bar_cell(text: str, size: int, most: int) -> str:
    """A cell with a number and a bar.

    Args:
        text: the text of the number.
        size: the number.
        most: the number of the longest bar.
    """
    # What is small has a bar too, and in a table of arrays without elements the longest is 0.
    width = max(1, round(100 * size / max(most, 1)))
    return f'<td class="n">{text}<div class="bar" style="width:{width}%"></div></td>'
