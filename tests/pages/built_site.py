"""The repository ─► its documentation, built and served, with the addresses of its pages."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def build(folder: Path) -> None:
    """Build the documentation into a folder. A warning is an error."""
    # Not `--quiet`, with which MkDocs counts no warnings, and `--strict` does nothing.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the documentation was not built:\n{done.stderr}")


def build_once(folder: Path) -> Path:
    """Build into a folder, if no other process has done so or is about to."""
    done = folder.with_suffix(".done")
    try:
        folder.mkdir()
    except FileExistsError:
        while not done.exists():
            time.sleep(0.2)
    else:
        try:
            build(folder)
        finally:
            done.touch()
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder is served."""
    server = ThreadingHTTPServer(("localhost", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def page_names(docs: Path = ROOT / "docs") -> list[str]:
    """The pages, as they are called in `docs/`, without the suffix; those of notebooks too, which are
    made when the site is built."""
    pages = sorted([*docs.rglob("*.md"), *docs.rglob("*.ipynb")])
    return [page.relative_to(docs).with_suffix("").as_posix() for page in pages]


def address(name: str) -> str:
    """Where a page is, from the address of the site."""
    if name == "index":
        return "/"
    if name.endswith("/index"):
        return f"/{name.removesuffix('index')}"
    return f"/{name}/"
