"""The folders in which the compilers of this process write their logs."""

from pathlib import Path

log_folders: list[Path] = []
"""The folders in which a compiler of this process writes its log, instead of to standard error."""
