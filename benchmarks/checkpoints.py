"""This benchmark compares functree's checkpoints with orbax alone.

    python benchmarks/checkpoints.py [--gigabytes 1] [--rounds 5]

It measures the time to save and to load, and the peak memory while loading. Three ways run in turn:
orbax without compression, functree without digests, and functree. Loaded arrays are freed outside
the clock. Each peak is measured in its own process. It needs the extra `functree[checkpoint]`.
"""

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
from weights import Peak, held

import functree as ft
from functree.processes.digest import digests_of

LAYERS = 16
LAYOUT = ft.P(None, "data", "model")


def tree(gigabytes: float, mesh: jax.sharding.Mesh) -> Any:
    """Create a model and two moments, in 48 arrays."""
    return ft.init(arrays, LAYOUT, mesh)(gigabytes, jax.random.key(0))


def arrays(gigabytes: float, key: Any) -> Any:
    embed = int((gigabytes * 1e9 / 4 / (3 * LAYERS)) ** 0.5) // 8 * 8
    return {
        name: {
            f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (1, embed, embed))
            for i in range(LAYERS)
        }
        for name in ("model", "mu", "nu")
    }


def ways(folder: Path, state: Any) -> dict[str, tuple[Callable[[], None], Callable[[], Any]]]:
    """Return the functions that save and load, for each way."""
    from orbax.checkpoint import v1 as orbax

    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    context = orbax.Context()
    context.array.saving.use_compression = False

    def save() -> None:
        with context:
            orbax.save(folder / "orbax", state)

    def load() -> Any:
        with context:
            return orbax.load(folder / "orbax", like)

    def own(verify: bool) -> tuple[Callable[[], None], Callable[[], Any]]:
        path = folder / f"functree{verify}"
        return lambda: ft.save(path, state, verify=verify), lambda: ft.restore(
            path, like, verify=verify
        )

    return {"orbax": (save, load), "functree, verify=False": own(False), "functree": own(True)}


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    seconds = time.perf_counter() - start
    del result
    gc.collect()
    return seconds


def orders(ways: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """Yield the order of the ways in each round, rotated by one each time.

    There is one more round, which imports and compiles.
    """
    names = list(ways)
    for i in range(rounds + 1):
        yield names[i % len(names) :] + names[: i % len(names)]


def measure(gigabytes: float, rounds: int) -> None:
    """Print the table of times."""
    mesh = ft.make_mesh(data=2, model=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = tree(gigabytes, mesh)
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        all_ways = ways(folder, state)
        saves: dict[str, list[float]] = {way: [] for way in all_ways}
        loads: dict[str, list[float]] = {way: [] for way in all_ways}
        for order in orders(all_ways, rounds):
            for way in order:
                saves[way].append(timed(all_ways[way][0]))
                for path in folder.iterdir():
                    shutil.rmtree(path)
        for save, _ in all_ways.values():
            save()
        os.sync()  # otherwise the loads compete with pending writes to the disk
        for order in orders(all_ways, 3 * rounds):
            for way in order:
                loads[way].append(timed(all_ways[way][1]))
        for path in folder.iterdir():
            shutil.rmtree(path)
        print(
            f"{size / 1e9:.2f} GB, {rounds} saves and {3 * rounds} loads of each; medians of times and of ratios"
        )
        print("| way | save | load | save, ratio | load, ratio |\n|---|---|---|---|---|")
        for way in all_ways:
            columns = [statistics.median(found[way][1:]) for found in (saves, loads)]
            ratios = [
                statistics.median(
                    own / base for own, base in zip(found[way][1:], found["orbax"][1:], strict=True)
                )
                for found in (saves, loads)
            ]
            print(
                f"| {way} | {columns[0]:.2f} s | {columns[1]:.2f} s | {ratios[0]:.2f} | {ratios[1]:.2f} |"
            )
        digests = timed(
            lambda: digests_of({str(i): x for i, x in enumerate(jax.tree.leaves(state))})
        )
        print(f"the digests alone: {digests:.2f} s, {size / digests / 1e9:.1f} GB/s")
        for way, (save, _) in all_ways.items():
            save()
            subprocess.run(
                [sys.executable, __file__, "--gigabytes", str(gigabytes), "--peak", name, way],
                check=True,
            )
        del state, all_ways


def peak(gigabytes: float, folder: Path, way: str) -> None:
    """Print the peak memory while this way loads."""
    mesh = ft.make_mesh(data=2, model=4)
    small = tree(0.001, mesh)
    with tempfile.TemporaryDirectory() as other:  # imports everything that is imported on use
        save, load = ways(Path(other), small)[way]
        save()
        load()
    like = ft.abstract(arrays, LAYOUT, mesh)(gigabytes, jax.random.key(0))
    load = ways(folder, like)[way][1]
    before, watched = held(), Peak()
    watched.start()
    found = jax.block_until_ready(load())
    watched.ends.set()
    size = sum(x.nbytes for x in jax.tree.leaves(found))
    print(f"{way}: peak while loading {(watched.most - before) / size:.2f} times the data")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peak", nargs=2, metavar=("FOLDER", "WAY"), help="only measure one way's memory"
    )
    options = parser.parse_args()
    if options.peak:
        peak(options.gigabytes, Path(options.peak[0]), options.peak[1])
    else:
        measure(options.gigabytes, options.rounds)


if __name__ == "__main__":
    main()
