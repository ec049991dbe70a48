"""The promises of the pages, and the test that holds each promise: `promises.toml`.

It has a table for each page. A promise in a docstring has its module as the page. A line of a
table has a promise: a few successive words of one sentence, and a test. No other sentence of the
page has these words. Words in backticks occur in the code of the test too, so a test that no longer
has to do with its promise is found. A test is listed once.

    python -m tests.package.promised        # prints what is wrong
    python -m tests.package.promised --fix  # follows renamed tests and rewritten sentences
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
LIST = Path(__file__).with_name("promises.toml")
# At a blank line, an item of a list, a row of a table, and the end of a sentence.
SENTENCE_ENDS = re.compile(r"\n\s*\n|\n(?=\s*[-|#])|(?<=[.?!])\s")


class Promise(NamedTuple):
    page: str
    gist: str
    test: str


def promises() -> list[Promise]:
    tables = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [
        Promise(page, gist, test) for page, lines in tables.items() for gist, test in lines.items()
    ]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def words_for_the_test(gist: str) -> list[str]:
    return words(" ".join(re.findall(r"`(.*?)`", gist)))


def has(sentence: str, gist: str) -> bool:
    """Whether the words of a gist follow each other in a sentence."""
    return f" {' '.join(words(gist))} " in f" {' '.join(words(sentence))} "


@cache
def sentences(page: str) -> tuple[str, ...]:
    """Return the sentences of a page, or nothing if there is no such page."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return tuple(" ".join(sentence.split()) for sentence in SENTENCE_ENDS.split(text))


@cache
def definitions(file: Path) -> dict[str, ast.stmt]:
    """Return the definitions of a module by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({one.id: node for one in targets if isinstance(one, ast.Name)})
    return found


def words_of_test(test: str) -> frozenset[str] | None:
    """Return the words in the body of a test, and in the cases and helpers that it names.

    Its name and docstring do not count. None if there is no such test.
    """
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
    return frozenset(words(text) + words(text.replace("_", " ")))


def faults(listed: Sequence[Promise]) -> Iterator[str]:
    """Yield a line for each mistake in a list."""
    for test, number in Counter(promise.test for promise in listed).items():
        if number > 1:
            yield f"{test} is listed {number} times"
    for promise in listed:
        found = sum(has(sentence, promise.gist) for sentence in sentences(promise.page))
        if found != 1:
            yield f"{promise.page}: {found} sentences have these words: {promise.gist}"
        in_test = words_of_test(promise.test)
        if in_test is None:
            yield f"{promise.page}: there is no {promise.test}: {promise.gist}"
        elif not words_for_the_test(promise.gist):
            yield f"{promise.page}: no word of the test is in backticks: {promise.gist}"
        elif missing := set(words_for_the_test(promise.gist)) - in_test:
            yield f"{promise.page}: {promise.test} does not have the words {', '.join(sorted(missing))}"


def drawn(promise: Promise) -> str | None:
    """Draw a gist from the sentence of the page that shares most words with the gist of a promise.

    A gist has four words or more, with one in backticks. It begins and ends with a long word, so
    that it reads as a phrase. None if half of the words are gone.
    """
    page = sentences(promise.page)
    old, guards = set(words(promise.gist)), set(words_for_the_test(promise.gist))
    nearest = max(page, key=lambda sentence: len(old & set(words(sentence))), default="")
    left = words(nearest)
    if 2 * len(old & set(left)) < len(old):
        return None
    for length in range(4, len(left) + 1):
        for begin in range(len(left) - length + 1):
            part = left[begin : begin + length]
            gist = " ".join(f"`{word}`" if word in guards else word for word in part)
            is_phrase = min(len(part[0]), len(part[-1])) >= 4
            is_here_alone = sum(has(sentence, gist) for sentence in page) == 1
            if guards & set(part) and is_phrase and is_here_alone:
                return gist
    return None


def fixed(promise: Promise) -> Promise:
    """Return the promise with the file where its test is now, and with words that are on the page.

    What cannot be found stays as it is.
    """
    gist, test = promise.gist, promise.test
    if words_of_test(test) is None:
        name = test.rpartition("::")[2]
        files = [path for path in (ROOT / "tests").rglob("test_*.py") if name in definitions(path)]
        if len(files) == 1:
            test = f"{files[0].relative_to(ROOT).as_posix()}::{name}"
    if not any(has(sentence, gist) for sentence in sentences(promise.page)):
        gist = drawn(promise) or gist
    return Promise(promise.page, gist, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="write what can be found into the list")
    if parser.parse_args().fix:
        text = LIST.read_text(encoding="utf-8")
        for old in promises():
            text = text.replace(line(old), line(fixed(old)))
        LIST.write_text(text, encoding="utf-8")
    print("\n".join(faults(promises())) or "Each promise has its sentence and its test.")


def line(promise: Promise) -> str:
    return f'"{promise.gist}" = "{promise.test}"\n'


if __name__ == "__main__":
    main()
