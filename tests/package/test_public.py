"""The public names: each has a docstring, a place in the documentation, and a type that a checker
knows."""

import ast
import importlib
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

import functree

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Re-exports that belong to others, and are documented there.
FOREIGN = {"P"}


def public_names(init: Path) -> set[str]:
    """What the `__init__.py` of a package makes public: its `__all__`, and its `import X as X`."""
    names = set()
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.name == alias.asname)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names.update(ast.literal_eval(node.value))
    return {name for name in names if not name.startswith("_")}


def qualified_names() -> list[str]:
    """Every public name, those of public subpackages with the subpackage's before them
    (`nn.Linear`)."""
    out = []
    for name in sorted(public_names(ROOT / "functree" / "__init__.py")):
        out.append(name)
        value = getattr(functree, name)
        if inspect.ismodule(value) and hasattr(value, "__path__"):
            init = Path(inspect.getfile(value))
            out.extend(f"{name}.{inner}" for inner in sorted(public_names(init)))
    return [name for name in out if name not in FOREIGN]


def docstring(module: ModuleType, name: str) -> str | None:
    """A function's or class's own docstring; for any other value, the string below its
    assignment."""
    value = getattr(module, name)
    if inspect.isclass(value):
        # What `dataclass` writes by itself is a signature.
        doc = value.__dict__.get("__doc__")
        return None if doc is not None and doc.startswith(f"{value.__name__}(") else doc
    if inspect.isroutine(value) or inspect.ismodule(value):
        return value.__doc__
    return _below_assignment(module, name)


def _below_assignment(module: ModuleType, name: str) -> str | None:
    body = ast.parse(inspect.getsource(module)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom):
            original = next((a.name for a in node.names if (a.asname or a.name) == name), None)
            if original is not None:
                package = module.__package__ if node.level else None
                source = importlib.import_module("." * node.level + (node.module or ""), package)
                return _below_assignment(source, original)
        elif name in _assigned(node) and isinstance(following, ast.Expr):
            text = following.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                return text.value
    return None


def _assigned(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    return {ast.unparse(node.target)} if isinstance(node, ast.AnnAssign) else set()


def undocumented(names: list[str], pages: Mapping[str, str]) -> list[str]:
    """The names that no page mentions, as `ft.name` or as `functree.name`."""
    text = "\n".join(pages.values())
    return [
        name for name in names if not re.search(rf"\b(?:ft|functree)\.{re.escape(name)}\b", text)
    ]


def table_of_names() -> set[str]:
    """The names that the table of all public names has."""
    text = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| \[?`ft\.([\w.]+)`", text, re.M))


@pytest.mark.parametrize("package", ["", "nn.", "testing."])
def test_completion_shows_the_public_names_alone(package: str) -> None:
    module = functree if package == "" else getattr(functree, package[:-1])
    rows = {name.removeprefix(package) for name in table_of_names() if name.startswith(package)}
    public = {name for name in rows if "." not in name}
    if package == "":
        public |= {"nn", "testing"}
    assert {name for name in dir(module) if not name.startswith("__")} == public
    assert sorted(module.__all__) == sorted(public)
    assert {"__doc__", "__name__", "__path__"} <= set(dir(module))


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


def test_there_are_public_names() -> None:
    assert {"plan", "AxisRules", "shard"} <= set(qualified_names())


@pytest.mark.parametrize("name", qualified_names())
def test_a_public_name_has_a_docstring(name: str) -> None:
    *above, last = name.split(".")
    module = importlib.import_module(".".join(["functree", *above]))
    doc = docstring(module, last)
    assert doc is not None and doc.strip(), (
        f"ft.{name} has no docstring; a value that is neither a class nor a function has its own "
        "in a string on the line after its assignment"
    )


def test_every_public_name_is_in_the_documentation() -> None:
    pages = {str(path): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    missing = undocumented(qualified_names(), pages)
    assert not missing, (
        f"no page under docs/ mentions: {', '.join('ft.' + name for name in missing)}"
    )


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


# The checks themselves


def test_public_names_are_those_of_all_and_of_x_as_x(tmp_path: Path) -> None:
    init = tmp_path / "__init__.py"
    init.write_text(
        "from pkg.a import f as f, g, h as k\nimport b as b\n__all__ = ['c']\nfrom d import _e as _e\n"
    )
    assert public_names(init) == {"f", "b", "c"}


def test_docstrings_are_found_through_re_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "__init__.py").write_text("from .inner import a as a, b, C, D\n")
    (tmp_path / "shown" / "inner.py").write_text(
        "from dataclasses import dataclass\n"
        "a = 1\n'''About a.'''\nb: int = 2\n#: not a docstring\n"
        "@dataclass\nclass C:\n    x: int\nclass D:\n    '''About D.'''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shown")
    found = {name: docstring(module, name) for name in "abCD"}
    assert found == {"a": "About a.", "b": None, "C": None, "D": "About D."}


def test_a_name_must_stand_in_the_documentation_whole() -> None:
    pages = {"a.md": "Use `ft.shard_map`.", "b.md": "::: functree.nn.Linear\n"}
    names = ["shard", "shard_map", "nn.Linear", "nn.Lin", "Linear"]
    assert undocumented(names, pages) == ["shard", "nn.Lin", "Linear"]


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_when_it_is_needed():
    code = "import sys, functree; print([name for name in ('beartype', 'rich', 'hypothesis') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout == "[]\n"
