"""What the pages promise, and the test that holds each promise: the lists in `promises/`.

A list has a table for each page (of the reference: the module whose docstring has the sentence),
and in it a line for each promise: the gist of a sentence, and a test. The gist is a few words that
stand together in one sentence of the page only. Those in backticks stand in the code of the test
too, so a test that no longer has to do with its promise is found. A test is listed once.

    python -m tests.package.promised        # says what is wrong
    python -m tests.package.promised --fix  # follows tests that moved, and sentences that are reworded
"""

import argparse
import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).with_name("promises")
# At a blank line, an item of a list, a row of a table, and the end of a sentence.
SENTENCE_ENDS = re.compile(r"\n\s*\n|\n(?=\s*[-|#])|(?<=[.?!])\s")


class Promise(NamedTuple):
    page: str
    gist: str
    test: str


def promises() -> list[Promise]:
    tables = [
        tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(LISTS.glob("*.toml"))
    ]
    return [
        Promise(page, gist, test)
        for table in tables
        for page, lines in table.items()
        for gist, test in lines.items()
    ]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def words_for_the_test(gist: str) -> frozenset[str]:
    return words(" ".join(re.findall(r"`(.*?)`", gist)))


@cache
def sentences(page: str) -> tuple[str, ...]:
    """The sentences of a page; none of one that is not there."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return tuple(" ".join(sentence.split()) for sentence in SENTENCE_ENDS.split(text))


@cache
def definitions(file: Path) -> dict[str, ast.stmt]:
    """What a module defines at its top, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({one.id: node for one in targets if isinstance(one, ast.Name)})
    return found


def words_of_test(test: str) -> frozenset[str] | None:
    """The words of the body of a test, and of the cases and helpers of its module that it names;
    None if there is no such test. Its name and docstring say what it should do, and do not count."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not name.startswith("test_") or not path.is_file():
        return None
    defined = definitions(path)
    function = defined.get(name)
    if not isinstance(function, ast.FunctionDef):
        return None
    has_docstring = ast.get_docstring(function) is not None
    body = function.body[1:] if has_docstring else function.body
    named = {node.id for one in body for node in ast.walk(one) if isinstance(node, ast.Name)}
    helpers = [defined[one] for one in sorted(named & defined.keys())]
    text = " ".join(ast.unparse(node) for node in [*body, *helpers])
    return words(text) | words(text.replace("_", " "))


def faults(listed: Sequence[Promise]) -> Iterator[str]:
    """What is wrong with a list, a line for each."""
    for test, number in Counter(promise.test for promise in listed).items():
        if number > 1:
            yield f"{test} is listed {number} times"
    for promise in listed:
        found = sum(words(promise.gist) <= words(one) for one in sentences(promise.page))
        if found != 1:
            yield f"{promise.page}: {found} sentences have these words: {promise.gist}"
        in_test = words_of_test(promise.test)
        if in_test is None:
            yield f"{promise.page}: {promise.test} is not there: {promise.gist}"
        elif not words_for_the_test(promise.gist):
            yield f"{promise.page}: no word of the test is in backticks: {promise.gist}"
        elif missing := words_for_the_test(promise.gist) - in_test:
            yield f"{promise.page}: {promise.test} does not speak of {', '.join(sorted(missing))}"


def fixed(promise: Promise) -> Promise:
    """The promise with the file where a test of its name is now, and with those words of its gist
    that the sentence nearest to it has; the same where neither is certain."""
    gist, test = promise.gist, promise.test
    if words_of_test(test) is None:
        name = test.rpartition("::")[2]
        files = [path for path in (ROOT / "tests").rglob("test_*.py") if name in definitions(path)]
        if len(files) == 1:
            test = f"{files[0].relative_to(ROOT).as_posix()}::{name}"
    if not any(words(gist) <= words(one) for one in sentences(promise.page)):
        nearest = max(
            sentences(promise.page), key=lambda one: len(words(gist) & words(one)), default=""
        )
        kept = [word for word in gist.split() if words(word) <= words(nearest)]
        if 2 * len(kept) >= len(gist.split()):
            gist = " ".join(kept)
    return Promise(promise.page, gist, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="write what can be found into the lists")
    if parser.parse_args().fix:
        for path in LISTS.glob("*.toml"):
            text = path.read_text(encoding="utf-8")
            for old in promises():
                text = text.replace(line(old), line(fixed(old)))
            path.write_text(text, encoding="utf-8")
    print("\n".join(faults(promises())) or "Each promise has its sentence and its test.")


def line(promise: Promise) -> str:
    return f'"{promise.gist}" = "{promise.test}"\n'


if __name__ == "__main__":
    main()
