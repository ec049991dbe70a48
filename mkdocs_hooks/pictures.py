"""The pages of MkDocs ─► the same with pictures, which functree makes at each build.

A report of functree is embedded as an image is: `![The plan](pictures/plan.html){ height=400 }`.
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
# An embedded page is at most as high as its content, and scrolls with the page around it. A browser
# forbids this for a site that is opened as a file.
_FITTED = (
    "try { const page = this.contentDocument.documentElement; page.style.overflow = 'hidden'; "
    "this.style.height = Math.min(page.scrollHeight + 2, this.height) + 'px' } catch {}"
)
_REMAKE = "make it again: python mkdocs_hooks/make_pictures.py docs/pictures --svg"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs with all files of the site."""
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, which simulates eight devices.
        program = [sys.executable, _HERE / "make_pictures.py", folder]
        subprocess.run(program, check=True, cwd=_HERE.parent)
        for made in sorted(Path(folder).iterdir()):
            content = made.read_text(encoding="utf-8")
            _replace(files, config, f"pictures/{made.name}", content)
    return files


def _replace(files: Files, config: MkDocsConfig, uri: str, content: str) -> None:
    """Put a file into the site, in place of the one that is in the repository."""
    stored = files.get_file_from_path(uri)
    if stored is not None:
        if stored.content_string != content:
            # An error in a strict build.
            _LOG.warning("docs/%s is not what functree draws now; %s", uri, _REMAKE)
        files.remove(stored)
    files.append(File.generated(config, uri, content=content))


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return _EMBEDDED.sub(_frame, content)


def _frame(found: re.Match[str]) -> str:
    page, attributes = found["page"], found["attributes"].rstrip(" /")
    title = re.sub(r'\balt="', 'title="', attributes)
    return (
        f'<span class="live"><iframe {title} onload="{_FITTED}"></iframe>'
        f'<a href="{page}" target="_blank">Open the whole page</a></span>'
    )
