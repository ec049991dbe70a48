"""The recipe for data of the documentation: grain's batches, disjoint by process, and resumed where a run was."""

from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
from meshes import MESH

import functree as ft

EXAMPLES, BATCH = 64, 8


def batches(process: int, count: int) -> Any:
    """The batches of one process, as docs/processes.md makes them."""
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
