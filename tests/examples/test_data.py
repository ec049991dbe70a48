"""The recipe for data of the documentation: grain's batches, disjoint by process, and resumed where
a run was."""

import re
import signal
import time
from pathlib import Path

import pytest

import functree as ft
from tests.lib.launch import ROOT, ended, started

pytestmark = pytest.mark.slow  # whole scripts


def test_the_run_of_the_documentation(tmp_path: Path) -> None:
    """`train.py` of docs/several-hosts.md: stopped by SIGTERM and started again, it gets the batches and
    has the state of an unbroken run."""
    page = (ROOT / "docs" / "several-hosts.md").read_text()
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "STEPS" in block
    ]
    for old, new in (
        ("STEPS, BATCH, SEQ = 1000", "STEPS, BATCH, SEQ = 20"),
        ("every=100", "every=5"),
    ):
        assert old in code
        code = code.replace(old, new)
    results = []
    for name, broken in (("broken", True), ("whole", False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "text.txt").write_bytes(Path(__file__).read_bytes() * 4)
        (folder / "train.py").write_text(code)
        start = ["-c", f"import os, runpy; os.chdir({str(folder)!r}); runpy.run_path('train.py')"]
        if broken:
            first = started(start)
            while (
                not (folder / "run" / "5" / "functree.json").is_file() and first[0].poll() is None
            ):
                time.sleep(0.01)
            first[0].send_signal(signal.SIGTERM)
            [(status, _, err)] = ended(first, 100)
            assert status == 143, err
            assert ft.Checkpoints(folder / "run").latest < 20  # it was stopped, and not at its end
        [(status, _, err)] = ended(started(start), 100)
        assert status == 0, err
        rows = ft.inspect(folder / "run" / "20").rows
        results.append([(str(row.path), row.digest) for row in rows])
    assert results[0] == results[1]
