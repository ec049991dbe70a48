"""The machine and the versions that a benchmark ran on, for the line above its table."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine(*packages: str) -> str:
    """The processor, the number of cores, and the versions of Python and of some packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"
