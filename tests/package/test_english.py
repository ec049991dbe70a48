"""The English of pages, docstrings, comments and messages: no refused words, no long sentences."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("benchmarks", "examples", "functree", "mkdocs_hooks")
MODULES = [module for folder in FOLDERS for module in sorted((ROOT / folder).rglob("*.py"))]
# Words of sentences that have to be read twice, and what takes their place in most of them.
REFUSED = re.compile(
    r"\bthat of\b|\bthose of\b"  # the noun again
    r"|\bas by\b|\bas of a\b"  # as if
    r"|\bbehind\b"  # after
    r"|, also |\bnobody has\b|\bnot there\b|\bso many\b|\bin the place of\b"
    r"|\bfor ever\b|\bif need be\b|\bbegins? anew\b|\bpasses over\b|\ball the same\b|\bElse\b"
    r"|\botherwise than\b|\bis no [a-z]+ of\b|\bnone but\b|\bwhat is done with\b"
    r"|\btakes? for\b"  # treats as
)
MOST_WORDS = 30
CODE = re.compile(r"```.*?```|^( *)>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`|\{[^}\n]*\}")
# At a blank line, an item of a list, a row of a table, a heading, and the end of a sentence.
SENTENCE_ENDS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\. ))|\|| ─► |(?<=[.?!:])[)\"”*]*\s")


def prose(text: str) -> str:
    """The text without its code, which counts as one word where it stands in a sentence."""
    return INLINE_CODE.sub("code", CODE.sub("", text))


def texts_of_module(source: str) -> Iterator[tuple[str, int, str]]:
    """The docstrings, the other strings and the comments of a module, each with its line."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if id(node) in docstrings else "string"
            yield kind, node.lineno, node.value
    begin, comment = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if not comment:
                begin = token.start[0]
            comment += token.string.lstrip("#") + "\n"
        elif token.type != tokenize.NL and comment:
            yield "comment", begin, comment
            comment = ""


def all_texts() -> Iterator[tuple[str, str, str]]:
    """Each text with its kind and its place."""
    for page in PAGES:
        yield "page", page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    for module in MODULES:
        name = module.relative_to(ROOT).as_posix()
        for kind, line, text in texts_of_module(module.read_text(encoding="utf-8")):
            yield kind, f"{name}:{line}", text


TEXTS = [(kind, place, prose(text)) for kind, place, text in all_texts()]


def refused(text: str) -> list[str]:
    return REFUSED.findall(" ".join(text.split()))


def long_sentences(text: str) -> list[str]:
    sentences = (" ".join(sentence.split()) for sentence in SENTENCE_ENDS.split(text))
    return [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


def test_no_text_has_refused_words() -> None:
    found = {place: words for _, place, text in TEXTS if (words := refused(text))}
    assert found == {}


def test_no_sentence_is_long() -> None:
    found = {
        place: sentences
        for kind, place, text in TEXTS
        if kind != "string" and (sentences := long_sentences(text))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The norm is that of all\ngradients.", ["that of"]),
        ("The norm covers all gradients.", []),
        ("Use `behind` after ```\nbehind\n``` it.", []),
    ],
)
def test_refused_words_are_found(text: str, words: list[str]) -> None:
    assert refused(prose(text)) == words


def test_long_sentences_are_found() -> None:
    longest = " ".join(["word"] * MOST_WORDS)
    assert long_sentences(f"One {longest}. Short.\n\n{longest}.") == [f"One {longest}."]


def test_all_texts_of_a_module_are_read() -> None:
    source = '"""A module."""\n\n# A\n# comment.\nx = f"a message {1}"  # and one beside it\n'
    assert [(kind, " ".join(text.split())) for kind, _, text in texts_of_module(source)] == [
        ("docstring", "A module."),
        ("string", "a message"),
        ("comment", "A comment."),
        ("comment", "and one beside it"),
    ]
