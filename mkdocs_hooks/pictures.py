"""This hook adds the pictures that functree draws in each build to the pages.

A page embeds a report of functree like an image: `![The plan](pictures/plan.html){ height=400 }`.
"""

import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_HERE = Path(__file__).parent
_LOG = logging.getLogger("mkdocs.hooks.pictures")
_EMBEDDED = re.compile(r'<img (?P<attributes>[^>]*src="(?P<page>[^"]+\.html)"[^>]*)>')
# An embedded page is at most as high as its content, and scrolls with the page around it. Narrow
# pages are longer, so they may be twice as high. A browser forbids this if a site is a file.
_FITTED = (
    "try { const page = this.contentDocument; page.documentElement.style.overflow = 'hidden'; "
    "const most = this.height * (this.clientWidth < 600 ? 2 : 1); "
    "this.style.height = Math.min(page.body.offsetHeight + 2, most) + 'px' } catch {}"
)
_REMAKE = "redraw it: python mkdocs_hooks/make_pictures.py docs/pictures --svg"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures to the site's files, which MkDocs passes."""
    with tempfile.TemporaryDirectory() as folder:
        # A separate process simulates eight devices.
        program = [sys.executable, _HERE / "make_pictures.py", folder]
        subprocess.run(program, check=True, cwd=_HERE.parent)
        for made in sorted(Path(folder).iterdir()):
            content = made.read_text(encoding="utf-8")
            _replace(files, config, f"pictures/{made.name}", content)
    return files


def _replace(files: Files, config: MkDocsConfig, uri: str, content: str) -> None:
    """Add a file to the site, and remove the repository's version of it."""
    stored = files.get_file_from_path(uri)
    if stored is not None:
        if stored.content_string != content:
            # A strict build makes this warning an error.
            _LOG.warning("docs/%s is out of date; %s", uri, _REMAKE)
        files.remove(stored)
    files.append(File.generated(config, uri, content=content))


def on_page_content(content: str, **_: Any) -> str:
    """Turn embedded reports into frames in a page's HTML, which MkDocs passes."""
    return _EMBEDDED.sub(_frame, content)


def _frame(found: re.Match[str]) -> str:
    page, attributes = found["page"], found["attributes"].rstrip(" /")
    title = re.sub(r'\balt="', 'title="', attributes)
    return (
        f'<span class="live"><iframe {title} onload="{_FITTED}"></iframe>'
        f'<a href="{page}" target="_blank">Open the whole page</a></span>'
    )
