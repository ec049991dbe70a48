"""The rows of a plan ─► HTML, for a notebook or a browser."""

import html
from collections.abc import Sequence

from functree.layout.plan.fold import Line, bytes_text, fold
from functree.layout.plan.row import Row

STYLE = """
.functree{font:14px/1.45 system-ui,sans-serif;color:#1c2430;background:#fff;padding:.5em;overflow-x:auto}
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


def plan_html(rows: Sequence[Row], notes: Sequence[str], devices: int, page: bool) -> str:
    """The plan as HTML, with a bar for the bytes on each device. The bar of a replicated array is orange.

    Args:
        rows: the rows of the plan.
        notes: the lines about the whole plan.
        devices: the number of devices.
        page: whether to return a whole page, and not a fragment for a notebook.
    """
    lines = fold(rows)
    most = max((line.each for line in lines), default=1) or 1
    titles = "".join(f"<th>{title}</th>" for title in ("path", "array", "axes", "spec", "per device", "why"))
    body = "".join(_html_row(line, most, devices) for line in lines)
    told = "".join(f"<p{' class=problem' if n.startswith('PROBLEM') else ''}>{html.escape(n)}</p>" for n in notes)
    fragment = in_style(f"{told}<table><tr>{titles}</tr>{body}</table>")
    return whole_page(fragment, "functree plan") if page else fragment


def in_style(content: str) -> str:
    """Content of ours with its style, for a notebook."""
    return f'<style>{STYLE}</style><div class="functree">{content}</div>'


def whole_page(fragment: str, title: str) -> str:
    """A fragment as a page for a browser."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>'
    return f"{head}<body>{fragment}</body></html>"


def _html_row(line: Line, most: int, devices: int) -> str:
    """One row of the table; `most` is the number of bytes of the longest bar."""
    copied = devices > 1 and line.copies == devices
    texts = (line.title, line.array, line.axes, line.spec)
    cells = "".join(f"<td><code>{html.escape(text)}</code></td>" for text in texts)
    width = max(1, round(100 * line.each / most))
    bar = f'<td class="n">{bytes_text(line.each)}<div class="bar" style="width:{width}%"></div></td>'
    title = f"{bytes_text(line.total)} in all, each byte on {line.copies} device{'s' if line.copies > 1 else ''}"
    why = f'<td class="why">{html.escape(line.reason)}</td>'
    return f'<tr title="{title}"{" class=copied" if copied else ""}>{cells}{bar}{why}</tr>'
