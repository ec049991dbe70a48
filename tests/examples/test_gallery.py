"""The runs of the gallery, for two steps each: they train, and make their picture."""

import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, run_here
from tests.lib.launch import ROOT

pytestmark = pytest.mark.slow  # whole scripts

GALLERY = EXAMPLES / "gallery"
RUNS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "runs")
PICTURES = ROOT / "docs" / "pictures" / "gallery"
PNG = b"\x89PNG\r\n\x1a\n"
LARGEST = 60_000  # bytes of a picture


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_gallery(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(GALLERY)
    picture = tmp_path / "picture.png"
    given = ["--steps", "2", "--picture", str(picture)]
    code, out, err = run_here(capsys, f"gallery/{name}.py", *given)
    assert (code, err) == (0, "")
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss (\S+), \d+ s$", out, re.M)]
    assert len(losses) in (2, 8) and all(0 < loss < 10 for loss in losses)  # LoRA trains four times
    assert picture.read_bytes().startswith(PNG) and f"Picture: {picture}" in out


def test_each_run_has_a_small_picture_and_a_part_of_the_page() -> None:
    assert {path.name for path in PICTURES.iterdir()} == {f"{name}.png" for name in RUNS}
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for name in RUNS:
        assert len((PICTURES / f"{name}.png").read_bytes()) < LARGEST, name
        assert f"](pictures/gallery/{name}.png)" in page
        assert f'--8<-- "examples/gallery/{name}.py"' in page
