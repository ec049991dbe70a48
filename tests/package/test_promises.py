"""What the pages promise: each sentence is on its page, and each test that checks it is there.

The lists are in `promises/`, a table for each sentence: its page (of the reference, the module whose
docstring it stands in), the words of it that are enough to find it, and the tests that fail if it is
not so, or the page itself, whose examples beside the sentence show just this. A sentence that is changed has to be changed there too, with a look at its
tests.
"""

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from functree.io.checkpoints.folder import DAY, DEADLINE
from functree.io.weights.save import MOST_BYTES
from functree.nn.attention.chunked import CHUNK
from functree.processes.exchange import LONG
from functree.testing.intermediates import KEPT_ITERATIONS

ROOT = Path(__file__).parents[2]


class Promise(NamedTuple):
    """A sentence of a page, and what checks it: tests, and pages whose examples do."""

    page: str
    sentence: str
    tests: tuple[str, ...]


def promises() -> list[Promise]:
    lists = sorted(Path(__file__).with_name("promises").glob("*.toml"))
    tables = [tomllib.loads(one.read_text(encoding="utf-8"))["promise"] for one in lists]
    return [
        Promise(one["page"], one["sentence"], tuple(one["tests"]))
        for table in tables
        for one in table
    ]


@functools.cache
def page_text(page: str) -> str:
    """In one line; nothing of a page that is not there."""
    path = ROOT / page
    return " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """The names of the tests of a file; none of one that is not there."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return frozenset(name for name in functions if name.startswith("test_"))


def faults(listed: Sequence[Promise]) -> Iterator[str]:
    """What is wrong with a list, a line for each."""
    for (page, sentence), number in Counter((one.page, one.sentence) for one in listed).items():
        if number > 1:
            yield f"{page}: {number} times in the list: {sentence}"
        if page_text(page).count(sentence) != 1:
            yield f"{page}: {page_text(page).count(sentence)} times on the page: {sentence}"
    for promise in listed:
        if not promise.tests or len(set(promise.tests)) < len(promise.tests):
            yield f"{promise.page}: no test, or one twice: {promise.sentence}"
        for test in promise.tests:
            if not is_there(test, promise.page):
                yield f"{promise.page}: {test} is not there: {promise.sentence}"


def is_there(test: str, page: str) -> bool:
    """Whether there is such a test; or examples, if it is the page of the sentence."""
    file, _, name = test.partition("::")
    if not name:
        return file == page and ">>> " in page_text(page)
    return name in names_in(file)


def test_each_sentence_is_on_its_page_and_each_test_is_there() -> None:
    assert list(faults(promises())) == []


def test_the_list_is_long_enough() -> None:
    listed = promises()
    tested = [one for one in listed if any("::" in test for test in one.tests)]
    assert len(listed) >= 150 and len(tested) >= 100


NUMBERS: dict[str, tuple[object, object]] = {
    # what the pages say, and the package has
    "what a writer left goes after a day": (DAY, 24 * 3600),
    "a bucket is waited for 60 seconds": (DEADLINE, 60),
    "a process that waits for others logs it after a minute": (LONG, 60),
    "attention is accumulated over chunks of 512 keys": (CHUNK, 512),
    "128 iterations of a while are told apart": (KEPT_ITERATIONS, 128),
    "weights are split into files of 5 GB": (MOST_BYTES, 5 * 10**9),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_that_a_page_names_is_that_of_the_package(case: str) -> None:
    found, said = NUMBERS[case]
    assert found == said


SENTENCE = "An axis without a rule is an error"
HERE = "tests/package/test_promises.py::test_the_list_is_long_enough"
WRONG: dict[str, tuple[list[Promise], str]] = {
    "another sentence": (
        [Promise("docs/tutorial.md", "Anything goes", (HERE,))],
        "docs/tutorial.md: 0 times on the page",
    ),
    "words of several sentences": (
        [Promise("docs/tutorial.md", "the", (HERE,))],
        "times on the page: the",
    ),
    "another page": (
        [Promise("docs/nowhere.md", SENTENCE, (HERE,))],
        "docs/nowhere.md: 0 times on the page",
    ),
    "another test": (
        [Promise("docs/tutorial.md", SENTENCE, (f"{HERE}_indeed",))],
        "_indeed is not there",
    ),
    "another file": (
        [Promise("docs/tutorial.md", SENTENCE, ("tests/nowhere.py::test_it",))],
        "tests/nowhere.py::test_it is not there",
    ),
    "no test but a helper": (
        [Promise("docs/tutorial.md", SENTENCE, ("tests/package/test_promises.py::faults",))],
        "::faults is not there",
    ),
    "the examples of another page": (
        [Promise("docs/tutorial.md", SENTENCE, ("docs/jit.md",))],
        "docs/jit.md is not there",
    ),
    "a page without examples": (
        [Promise("docs/glossary.md", "One line for each word", ("docs/glossary.md",))],
        "docs/glossary.md is not there",
    ),
    "no test": ([Promise("docs/tutorial.md", SENTENCE, ())], "no test"),
    "twice": ([Promise("docs/tutorial.md", SENTENCE, (HERE,))] * 2, "2 times in the list"),
}


def test_a_right_list_has_no_faults() -> None:
    assert not list(faults([Promise("docs/tutorial.md", SENTENCE, (HERE, "docs/tutorial.md"))]))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_list_is_found(case: str) -> None:
    listed, said = WRONG[case]
    [fault] = faults(listed)
    assert said in fault
