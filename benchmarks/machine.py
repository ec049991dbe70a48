"""`machine` describes the machine and versions of a run, for the line above a benchmark's table."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine(*packages: str) -> str:
    """Return the processor, the number of cores, and the versions of Python and packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"
