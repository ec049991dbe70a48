"""What the pages promise has a test that speaks of it, and figures are those of the package."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from functree.calls.checks import BIG_CONSTANT
from functree.errors import MAX_PATHS
from functree.io.checkpoints.folder import DAY, DEADLINE
from functree.io.weights.save import MOST_BYTES
from functree.layout.fsdp import FSDP
from functree.nn.attention.chunked import CHUNK
from functree.processes.exchange import LONG
from functree.testing.intermediates import KEPT_ITERATIONS
from tests.package import promised
from tests.package.promised import Promise, faults, fixed, promises


def test_each_promise_has_its_sentence_and_its_test() -> None:
    listed = promises()
    assert len(listed) >= 90
    assert list(faults(listed)) == [], "see `python -m tests.package.promised --help`"


FIGURES = [
    # on the page, with the figure in words where it has it so; and in the package
    ("docs/checkpoints.md", "does not answer for {} seconds", DEADLINE, 1),
    ("docs/debugging.md", "names the first six", MAX_PATHS, 6),
    ("docs/jit.md", "closes over an array of more than {} MiB", BIG_CONSTANT, 2**20),
    (
        "docs/layouts.md",
        "fewer than `min_size` elements (2¹⁸ by default)",
        FSDP("x").min_size,
        2**18,
    ),
    ("docs/models.md", "accumulates over chunks of {} keys", CHUNK, 1),
    ("docs/several-hosts.md", "A process that has waited for a minute", LONG, 60),
    ("docs/testing.md", "the first {} iterations", KEPT_ITERATIONS, 1),
    ("docs/weights.md", "are split into files of {} GB", MOST_BYTES, 10**9),
    ("functree/io/checkpoints/folder.py", "began more than {} hours ago may", DAY, 3600),
    ("functree/io/checkpoints/folder.py", "once they are {} hours old", DAY + 3600, 3600),
]


@pytest.mark.parametrize(("page", "text", "value", "unit"), FIGURES)
def test_a_figure_on_a_page_is_that_of_the_package(
    page: str, text: str, value: float, unit: int
) -> None:
    figure = f"{value / unit:.10g}"
    assert "{}" in text or figure == "1"
    assert any(text.replace("{}", figure) in sentence for sentence in promised.sentences(page))


# What is found in a list, on a page and in a test that are written here.

PAGE = """A page. Each array is traced, and no array is copied.

| a table | where each array is sharded |
"""
TESTS = """
CASES = {"sharded": 1}

def test_it_is_so(case):
    'No array is copied.'
    assert is_traced(CASES[case])

def helper(traced): ...
"""
TEST = "tests/test_it.py::test_it_is_so"
WRONG = {
    "a sentence that is gone": (Promise("page.md", "array was `traced`", TEST), "0 sentences"),
    "words in another order": (Promise("page.md", "array `traced` is", TEST), "0 sentences"),
    "words of two sentences": (Promise("page.md", "each `array` is", TEST), "2 sentences"),
    "a page that is gone": (Promise("gone.md", "array is `traced`", TEST), "0 sentences"),
    "a test that is gone": (Promise("page.md", "array is `traced`", f"{TEST}_not"), "there is no"),
    "a file that is gone": (Promise("page.md", "array is `traced`", "tests/test_no.py::test_it"), "there is no"),
    "a helper": (Promise("page.md", "array is `traced`", "tests/test_it.py::helper"), "there is no"),
    "a test of something else": (Promise("page.md", "array is `copied`", TEST), "does not have the words copied"),
    "nothing for the test": (Promise("page.md", "array is copied", TEST), "in backticks"),
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root with one page and one file of tests."""
    monkeypatch.setattr(promised, "ROOT", tmp_path)
    promised.sentences.cache_clear()
    (tmp_path / "tests").mkdir()
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    (tmp_path / "tests" / "test_it.py").write_text(TESTS, encoding="utf-8")
    yield tmp_path
    promised.sentences.cache_clear()


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_promise_is_found(case: str, written: Path) -> None:
    promise, said = WRONG[case]
    found = list(faults([promise]))
    assert any(said in fault for fault in found)


def test_a_right_promise_is_not(written: Path) -> None:
    """The words of the body and of the cases that it names are the words of a test."""
    for gist in ("array is `traced`", "each array is `sharded`"):
        assert list(faults([Promise("page.md", gist, TEST)])) == []
    [fault] = faults([Promise("page.md", "array is `traced`", TEST)] * 2)
    assert fault == f"{TEST} is listed 2 times"


def test_a_fix_follows_a_test_and_a_sentence(written: Path) -> None:
    moved = Promise("page.md", "array is `traced`", "tests/test_before.py::test_it_is_so")
    assert fixed(moved).test == TEST
    reworded = Promise("page.md", "each array was `traced`", TEST)
    assert fixed(reworded).gist == "each array is `traced`"
    another = Promise("page.md", "nothing of this `stands` there", TEST)
    assert fixed(another) == another
