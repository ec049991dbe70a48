"""The examples, run as a user runs them: in a process of their own, or, where only what they say
matters, in this one, which saves a start of Python and JAX."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import pytest

from tests.lib.launch import ROOT

EXAMPLES = ROOT / "examples"


def run(
    name: str, *arguments: str, around: tuple[str, ...] = (), **environment: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of an example in a process of its own.

    Args:
        name: the file.
        *arguments: of its command line.
        around: arguments of Python before the file, for code that runs it.
        **environment: further variables of its environment.
    """
    given = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environment}
    command = [sys.executable, *around, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=given, text=True, capture_output=True)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def as_a_script(name: str, *arguments: str) -> Iterator[str]:
    """What a script finds: its command line, its folder in front of the path, and JAX's own
    settings. Gives its file."""
    file = str(EXAMPLES / name)
    with (
        mock.patch.object(sys, "argv", [file, *arguments]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        mock.patch.dict(os.environ, COLUMNS="100"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield file


def variables_of(name: str, *arguments: str) -> dict[str, Any]:
    """The variables of an example that was run here, its own `main` aside."""
    with as_a_script(name, *arguments) as file:
        return runpy.run_path(file)


def run_here(
    capsys: pytest.CaptureFixture[str], name: str, *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of an example that is run in this process."""
    capsys.readouterr()
    code: Any = 0
    with as_a_script(name, *arguments) as file:
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err
