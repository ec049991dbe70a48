"""The code of the README, as a reader pastes it: each block gives the output that is shown below it."""

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Runs blocks one after the other, as a session does, and returns what each of them prints or raises.
SESSION = """
import contextlib, io, json, sys, traceback

names, outputs = {}, []
for code in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "<stdin>", "exec"), names)
        except Exception as error:
            printed.write("".join(traceback.format_exception_only(error)))
    outputs.append(printed.getvalue())
json.dump(outputs, sys.stdout)
"""


@pytest.mark.slow  # it starts a process
def test_each_block_gives_the_output_below_it(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [language for language, _ in blocks] == ["python", "text"] * 3
    programs, shown = [text for _, text in blocks[::2]], [text for _, text in blocks[1::2]]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    session = subprocess.run(
        [sys.executable, "-c", SESSION],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    checker = doctest.OutputChecker()
    for text, output in zip(shown, json.loads(session.stdout), strict=True):
        assert checker.check_output(text, output, doctest.ELLIPSIS), output
