"""The public names: each has a docstring, a place in the documentation, and a type that a checker
knows."""

import importlib
import inspect
import json
import operator
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import functree
from tests.package.public import NAMES

ROOT = Path(__file__).parents[2]

SOURCES = [path.read_text(encoding="utf-8") for path in (ROOT / "functree").rglob("*.py")]


@pytest.mark.parametrize("module", [functree, functree.nn, functree.testing])
def test_completion_shows_the_public_names_alone(module: ModuleType) -> None:
    assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__)
    assert {"__doc__", "__name__", "__path__"} <= set(dir(module))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = operator.attrgetter(name)(functree)
    if inspect.isclass(value):
        # What `dataclass` writes by itself is a signature.
        doc = value.__dict__.get("__doc__") or ""
        assert doc and not doc.startswith(f"{value.__name__}(")
    elif inspect.isroutine(value):
        assert value.__doc__
    else:
        # In a string after its assignment.
        last = name.rpartition(".")[2]
        assigned = re.compile(rf'^{last}(: .*)? = .*\n([ )\]}}].*\n)*"""\S', re.MULTILINE)
        assert any(assigned.search(source) for source in SOURCES)


def test_a_star_imports_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from functree import *", found)
    assert found.keys() - {"__builtins__"} == set(functree.__all__)


def test_submodules_can_be_imported_by_their_names() -> None:
    assert importlib.import_module("functree.state.train").TrainState is functree.TrainState
    assert functree.nn.linear.Linear is functree.nn.Linear  # pyright: ignore


def test_help_lists_the_public_functions() -> None:
    text = pydoc.plain(pydoc.render_doc(functree))
    assert "shard_map(" in text and "class AxisRules(" in text


@pytest.mark.slow
def test_the_types_are_complete() -> None:
    """`pyright --verifytypes`: every public name, parameter and result has a type that is known."""
    # As an installed package: pyright looks for it where imports do, and a checkout need not be
    # installed. Of the interpreters, it asks the first on the path for what is installed.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    command = [sys.executable, "-m", "pyright", "--outputjson"]
    command += ["--verifytypes", "functree", "--ignoreexternal"]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    start = run.stdout.find("{")  # before it, what pyright's wrapper says when it installs itself
    assert start >= 0, f"pyright said nothing that can be read:\n{run.stdout}\n{run.stderr}"
    report = json.loads(run.stdout[start:])
    assert not report["generalDiagnostics"], report["generalDiagnostics"]
    completeness = report["typeCompleteness"]
    assert completeness["exportedSymbolCounts"]["withKnownType"] > 0
    assert completeness["completenessScore"] == 1, "\n".join(unknown_types(completeness))


def unknown_types(completeness: dict) -> list[str]:
    """A line for each thing that pyright knows no type of: the symbol, the place, what is
    missing."""

    def place(found: dict) -> str:
        line = found.get("range", {}).get("start", {}).get("line", 0)  # a base class has no range
        return f"{Path(found['file']).name}:{line + 1}"

    return [
        f"{symbol['name']} ({place(found)}): {found['message']}"
        for symbol in completeness["symbols"]
        if symbol["isExported"] and not (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"])
        for found in symbol["diagnostics"]
        if found["severity"] == "error"
    ]


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_when_it_is_needed():
    code = "import sys, functree; print([name for name in ('beartype', 'rich', 'hypothesis') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout == "[]\n"
