"""The notebooks of the documentation: without outputs in the repository, with them on their pages."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "mkdocs_hooks"))

import nbformat  # noqa: E402
import notebooks  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402

NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
# Of the kernel's client, which is not ours.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def notebook(*sources: str, tags: tuple[str, ...] = ()) -> str:
    """The text of a notebook with these cells."""
    made = nbformat.v4.new_notebook()
    for source in sources:
        cell = nbformat.v4.new_code_cell(source)
        cell.metadata["tags"] = list(tags)
        made.cells.append(cell)
    return nbformat.writes(made)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_repository_has_no_outputs(path: Path) -> None:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3 and cells[0]["source"][0].startswith("# ")
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_a_page_has_what_the_cells_show() -> None:
    html = "class Shown:\n    def _repr_html_(self): return '<b>bold</b>'\nprint('said')\nShown()"
    page = notebooks.page_of(
        notebook(html, "1 + 1", "raise ValueError('wrong')", tags=("raises-exception",)), "name"
    )
    assert "```python\nclass Shown:" in page and "```text\nsaid\n```" in page
    assert "```text\n2\n```" in page and "```text\nValueError: wrong\n```" in page
    mark = next(line for line in page.splitlines() if line.startswith("notebook-output-"))
    shown = notebooks.on_page_content(f"<p>{mark}</p>")
    assert re.fullmatch("<div [^>]+><template [^>]+><b>bold</b></template></div>", shown)


def test_a_cell_that_fails_fails_the_build() -> None:
    with pytest.raises(CellExecutionError, match="wrong"):
        notebooks.page_of(notebook("raise ValueError('wrong')"), "name")
