"""The gallery's scripts share this module.

It simulates eight devices, parses the command line, runs a loop that
prints the loss, and writes pictures as small PNGs.
"""

import argparse
import os
import re
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

# Both variables must be set before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if not re.search("device_count", os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=8"
    )

from matplotlib.axes import Axes as Plot
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib


def options(doc: str | None, steps: int) -> argparse.Namespace:
    """Parse the command line: the steps, and the file of the picture."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=steps,
        help=f"training steps ({steps})",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="write a picture (PNG)",
    )
    return parser.parse_args()


def train(
    steps: int, state: Any, step: Callable[[Any, int], tuple[Any, Any]]
) -> Any:
    """Run the steps, and print the loss about ten times.

    Returns:
        The last state and all losses.
    """
    losses: list[float] = []
    start = time.perf_counter()
    for i in range(steps):
        state, loss = step(state, i)
        losses.append(float(loss))
        if i % max(1, steps // 10) == 0 or i == steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {i:5}: loss {losses[-1]:.4f}, {seconds:.0f} s")
    return state, losses


def figure(
    rows: int, columns: int, size: tuple[float, float]
) -> tuple[Figure, list[Plot]]:
    """Create a figure, and return it with its plots in reading order."""
    made = Figure(figsize=size, layout="constrained", facecolor="white")
    plots = made.subplots(rows, columns, squeeze=False)
    return made, list(plots.flat)


def bare(plot: Plot, title: str) -> Plot:
    """Remove a plot's ticks, and set its title."""
    plot.set(xticks=[], yticks=[])
    plot.set_title(title, fontsize=9)
    return plot


def curve(plot: Plot, losses: list[float], title: str) -> None:
    """Draw the losses over the steps."""
    plot.semilogy(losses, color="tab:blue", linewidth=0.8)
    plot.set_title(title, fontsize=9)
    plot.set_xlabel("step", fontsize=8)
    plot.tick_params(which="both", labelsize=7)


def save(made: Figure, file: Path | None) -> None:
    """Write the picture with 64 colors, for a third of the bytes."""
    if file is None:
        return
    pixels = BytesIO()
    made.savefig(pixels, format="png", dpi=100)
    Image.open(pixels).convert("RGB").quantize(
        64, dither=Image.Dither.NONE
    ).save(file, optimize=True)
    print(f"Picture: {file}")
