"""The blocks of the documentation: each fits beside the menus of a page, and half of it on a phone."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = 74
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "functree").rglob("*.py"))


def block_lines(page: str) -> Iterator[str]:
    """The lines inside of the fences of a page, from where their fence is."""
    opened: re.Match[str] | None = None
    for line in page.splitlines():
        fence = re.match(r"^( *)(```+|~~~+)(.*)$", line)
        if opened is None:
            opened = fence
        elif fence and fence[2].startswith(opened[2]) and not fence[3].strip():
            opened = None
        else:
            yield line.removeprefix(opened[1])


def example_lines(docstring: str) -> Iterator[str]:
    """The lines of the examples of a docstring, with what they print."""
    inside = False
    for line in docstring.splitlines():
        text = line.lstrip()
        inside = text.startswith(">>> ") or (inside and bool(text))
        if inside:
            yield text


def docstrings(module: str) -> Iterator[str]:
    """All docstrings of a module, also those below an assignment."""
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield inspect.cleandoc(node.value.value)


def too_wide(lines: Iterator[str]) -> list[str]:
    return [line for line in lines if len(line) > COLUMNS]


def test_blocks_of_pages_are_narrow() -> None:
    wide = {
        page.relative_to(ROOT).as_posix(): found
        for page in PAGES
        if (found := too_wide(block_lines(page.read_text(encoding="utf-8"))))
    }
    assert not wide, f"blocks with more than {COLUMNS} columns: {wide}"


def test_examples_of_docstrings_are_narrow() -> None:
    wide: dict[str, list[str]] = {}
    for module in MODULES:
        for docstring in docstrings(module.read_text(encoding="utf-8")):
            if found := too_wide(example_lines(docstring)):
                wide.setdefault(module.relative_to(ROOT).as_posix(), []).extend(found)
    assert not wide, f"examples with more than {COLUMNS} columns: {wide}"


# The checks themselves

WIDE = "x" * (COLUMNS + 1)


def test_what_is_wide_is_found() -> None:
    page = f"{WIDE}\n```pycon\n>>> 1\n{WIDE}\n```\n{WIDE}\n    ```text\n    {WIDE[1:]}\n    ```\n"
    assert too_wide(block_lines(page)) == [WIDE]
    docstring = f"{WIDE}\n    >>> {WIDE}\n{WIDE}\n\n{WIDE}"
    assert too_wide(example_lines(docstring)) == [f">>> {WIDE}", WIDE]
