"""A folder as a user has it: a module with factories and layouts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FILES = {
    "demo.py": Path(__file__).with_name("demo.py").read_text(encoding="utf-8"),
    "broken.py": "import functree_of_another_name\n",
    "wrong.py": "x = (\n",
    "ends.py": "import sys\nsys.exit(4)\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # where a command adds the folder
    before = set(sys.modules)
    yield tmp_path
    # Another test has another module of this name.
    for name in ("demo", "broken", "wrong", "ends", "shown_in_help"):
        if name not in before:
            sys.modules.pop(name, None)
