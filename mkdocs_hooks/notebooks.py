"""This hook executes notebooks and turns them into pages with outputs.

`docs/notebooks/x.ipynb` becomes the page `notebooks/x.md`, with cells as code blocks and outputs
below them. Plans and ledgers display as in a notebook. The site also offers the notebook itself as
a download. A cell that raises an error fails the build, unless it has the tag `raises-exception`.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from traitlets.config import Config

_SECONDS = 120  # the time limit for a cell
_DEVICES = "--xla_force_host_platform_device_count=8"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")

# Executed notebooks as Markdown, by a hash of their text, since `mkdocs serve` rebuilds often.
_executed: dict[str, str] = {}
# HTML outputs, by the mark that replaces each of them in the Markdown.
_shown: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook to the site's files, which MkDocs passes."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = f"{file.src_uri.removesuffix('.ipynb')}.md"
            text = Path(file.abs_src_path).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=page_of(text, file.name)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Insert the outputs into a page's HTML, which MkDocs passes."""
    for mark, shown in _shown.items():
        html = html.replace(f"<p>{mark}</p>", shown)
    return html


def page_of(text: str, name: str) -> str:
    """Return a notebook's page as Markdown."""
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _executed:
        _executed[key] = "\n\n".join(_cell(cell) for cell in _run(text).cells)
    link = f"[Download this notebook]({name}.ipynb). It was executed when this page was built."
    return f"{_executed[key]}\n\n---\n\n{link}\n"


def _run(text: str) -> Any:
    """Execute a notebook in a kernel that opens no port."""
    notebook = nbformat.reads(text, as_version=4)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _DEVICES}
    sockets = Config(KernelManager={"transport": "ipc"})
    client = NotebookClient(notebook, timeout=_SECONDS, coalesce_streams=True, config=sockets)
    return client.execute(env=environment)


def _cell(cell: Any) -> str:
    if cell.cell_type != "code":
        return cell.source
    return "\n\n".join([_block("python", cell.source), *map(_output, cell.outputs)])


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _output(output: Any) -> str:
    """Return an output as Markdown, or a mark for its HTML."""
    if output.output_type == "stream":
        return _block("text", output.text)
    if output.output_type == "error":
        return _block("text", _COLORS.sub("", f"{output.ename}: {output.evalue}"))
    if "text/html" in output.data:
        # A shadow tree keeps out the theme's styles for collapsible elements.
        tree = f'<template shadowrootmode="open">{output.data["text/html"]}</template>'
        return _mark(f'<div style="overflow-x: auto">{tree}</div>')
    if "image/png" in output.data:
        data = f"data:image/png;base64,{''.join(output.data['image/png'].split())}"
        return _mark(f'<img alt="Output of the cell above" src="{data}">')
    return _block("text", output.data["text/plain"])


def _mark(html: str) -> str:
    mark = f"notebook-output-{hashlib.sha256(html.encode()).hexdigest()[:16]}"
    _shown[mark] = html
    return mark
