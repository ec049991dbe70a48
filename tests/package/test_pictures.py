"""The pictures that the README shows are those that functree draws now."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "pictures"
PROGRAM = ROOT / "mkdocs_hooks" / "make_pictures.py"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    done = subprocess.run(
        [sys.executable, PROGRAM, folder, "--svg"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.slow
def test_the_pictures_in_the_repository_are_what_functree_draws(drawn: Path) -> None:
    names = {path.name for path in drawn.iterdir()}
    assert {path.name for path in STORED.glob("*.svg")} == names
    old = [
        name
        for name in sorted(names)
        if (drawn / name).read_bytes() != (STORED / name).read_bytes()
    ]
    again = "python mkdocs_hooks/make_pictures.py docs/pictures --svg"
    assert not old, f"{', '.join(old)} in docs/pictures is old: {again}"


def test_a_picture_says_what_it_shows_and_asks_for_nothing(drawn: Path) -> None:
    for path in drawn.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "<title>" in text
        assert text.count("http") == text.count('"http://www.w3.org/2000/svg"') == 1
