"""This benchmark compares one model and training step in functree and four other libraries.

    python benchmarks/peers/side_by_side              # Writes the tables into this folder.
    python benchmarks/peers/side_by_side --rounds 20  # Measures fewer rounds.

The extra `bench` has the other libraries. `test_side_by_side.py` checks the tables against the
programs, except for the times.
"""

import argparse
import datetime
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]
os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads both variables once
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)

from machine import machine  # noqa: E402

from side_by_side import (  # noqa: E402
    CACHED,
    FLOOR,
    LIBRARIES,
    MISTAKES,
    lines,
    said,
    times,
)
from tables import said_table  # noqa: E402


def when_and_where() -> str:
    """Return the versions, the machine and the date."""
    where = machine("jax", "equinox", "flax", "haliax", "optax")
    return f"On 8 simulated devices. {where}; {datetime.date.today():%Y-%m-%d}."


def time_table(found: dict[str, float]) -> list[str]:
    """Return the rows of the table of lines and times."""
    rows = [
        "| | lines | µs per call | × `jax.jit` |",
        "|---|--:|--:|--:|",
    ]
    counted = {name: str(lines(name)) for name in LIBRARIES}
    for name in [*LIBRARIES, CACHED, FLOOR]:
        title, ratio = (
            LIBRARIES.get(name, name),
            found[name] / found[FLOOR],
        )
        rows.append(
            f"| {title} | {counted.get(name, '')} | {found[name]:,.0f} | {ratio:.2f} |"
        )
    return rows


def main() -> None:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=shown
    )
    parser.add_argument(
        "--rounds", type=int, default=400, help="rounds of measurement"
    )
    options = parser.parse_args()
    found = {
        name: {mistake: said(name, mistake) for mistake in MISTAKES}
        for name in LIBRARIES
    }
    (HERE / "said.md").write_text(
        "\n".join(said_table(found)) + "\n", encoding="utf-8"
    )
    rows = [*time_table(times(options.rounds)), "", when_and_where()]
    (HERE / "times.md").write_text(
        "\n".join(rows) + "\n", encoding="utf-8"
    )
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
