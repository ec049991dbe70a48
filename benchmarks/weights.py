"""This benchmark measures the peak memory and the time of loading published weights.

    python benchmarks/weights.py [--gigabytes 2]

It loads them onto 8 simulated devices. The model is written first, and loaded in a new process. The
memory that this process holds before it loads is subtracted. It needs the extra
`functree[weights]`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LIMIT = 1.3
DEVICES = "--xla_force_host_platform_device_count=8"


def write(folder: Path, gigabytes: float) -> None:
    """Write a model with Llama's shapes and about this size, in bfloat16."""
    import jax

    import functree as ft

    sizes: dict[str, Any] = {
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "hidden": 5632,
        "param_dtype": "bfloat16",
    }
    of_a_layer = 2 * (3 * 2048 * 5632 + 2 * 2048 * 2048 + 2 * 2048 * 1024)
    layers = max(1, round(gigabytes * 1e9 / of_a_layer))
    config = ft.nn.TransformerConfig(1024, 2048, layers, **sizes)
    ft.save_weights(
        folder, ft.jit(lambda key: ft.nn.Transformer.create(config, key=key))(jax.random.key(0))
    )


def held() -> int:
    """Return the bytes that this process holds.

    Pages of mapped files do not count, because the kernel can drop them.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """A thread that checks the process's memory every few milliseconds; `most` is the maximum."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ends = 0, threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.003):
            self.most = max(self.most, held())


def load(folder: Path) -> None:
    """Load the model, and print a row of the table."""
    import jax

    import functree as ft

    tensor = {axis: "model" for axis in ("heads", "kv_heads", "hidden", "vocab")}
    layout = ft.AxisRules({**tensor, ...: None}) | ft.FSDP("data")
    mesh = ft.make_mesh(data=2, model=4)
    # Load a small model first, to import everything that is imported on use.
    ft.load_weights(Path(__file__).parents[1] / "tests" / "fixtures" / "hf" / "llama", ft.P(), mesh)
    before, peak = held(), Peak()
    peak.start()
    start = time.perf_counter()
    model = jax.block_until_ready(ft.load_weights(folder, layout, mesh))
    seconds = time.perf_counter() - start
    peak.ends.set()
    most = peak.most - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    print(
        f"| {size / 1e9:.2f} GB | {most / 1e9:.2f} GB | {most / size:.2f} | {LIMIT} | {seconds:.1f} s |"
    )


def main() -> None:
    """Write a model, and load it in another process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="only load the model there")
    options = parser.parse_args()
    if options.load is not None:
        load(options.load)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.gigabytes)
        print("| weights | peak memory | ratio | limit | time |\n|---|---|---|---|---|", flush=True)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES}
        command = [sys.executable, __file__, "--load", folder]
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
