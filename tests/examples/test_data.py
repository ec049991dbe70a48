"""The recipe for data of the documentation: grain's batches, disjoint by process, and resumed where
a run was."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from tests.lib.launch import ROOT, ended, started
from tests.lib.meshes import MESH

pytestmark = pytest.mark.slow  # whole scripts

EXAMPLES, BATCH = 64, 8


def batches(process: int, count: int) -> Any:
    """The batches of one process, by the recipe of docs/processes.md."""
    return iter(
        grain.MapDataset.source(np.arange(EXAMPLES))
        .seed(7)
        .shuffle()[process::count]
        .repeat()
        .map(lambda i: np.full((4,), i, np.int32))
        .batch(BATCH // count, drop_remainder=True)
        .to_iter_dataset()
    )


def test_the_parts_of_the_processes_are_disjoint() -> None:
    seen = [set[int](), set[int]()]
    for process in range(2):
        rows = batches(process, 2)
        for _ in range(EXAMPLES // BATCH):
            seen[process] |= set(next(rows)[:, 0].tolist())
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(EXAMPLES))


def test_a_run_that_goes_on_has_the_same_batches(tmp_path: Path) -> None:
    """The iterator's state is in the `meta` of each checkpoint."""
    rules = ft.AxisRules({"batch": "data", ...: None})

    def run(steps: int) -> list[float]:
        rows, total, seen = batches(0, 1), ft.shard(jnp.zeros(4), ft.P(), MESH), list[float]()
        with ft.Checkpoints(tmp_path) as checkpoints:
            if checkpoints.latest is not None:
                total = checkpoints.restore({"total": total})["total"]
                rows.set_state(ft.inspect(tmp_path / str(checkpoints.latest)).meta["data"])
            for step in range((checkpoints.latest or 0) + 1, steps + 1):
                x = ft.shard(next(rows), rules, MESH, axes="batch seq", local=True)
                total = total + x.sum(0).astype(jnp.float32) * step
                seen.append(float(total[0]))
                checkpoints.save(step, {"total": total}, meta={"data": rows.get_state()})
        return seen

    first, rest = run(5), run(20)
    expected, total, rows = list[float](), 0.0, batches(0, 1)
    for step in range(1, 21):
        total += float(next(rows)[:, 0].sum()) * step
        expected.append(total)
    assert len(rest) == 15 and first + rest == expected


def test_the_run_of_the_documentation(tmp_path: Path) -> None:
    """`train.py` of docs/processes.md: stopped by SIGTERM and started again, it has the state of an
    unbroken run."""
    page = (ROOT / "docs" / "processes.md").read_text()
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
