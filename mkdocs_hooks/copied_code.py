"""A page ─► the same, whose copy buttons take the code of a session with Python, and neither its
prompts nor what it prints. An empty line of what it prints is shown as one."""

import doctest
import html
import re
from typing import Any

# As the theme writes a block. A button takes `data-copy`, where there is one, in place of the text.
_SESSION = re.compile(r'<div class="language-pycon highlight">(?P<block><pre>.*?</pre>)', re.DOTALL)
_EMPTY = html.escape("<BLANKLINE>")
_TAG = re.compile("<[^>]*>")


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return _SESSION.sub(_with_code, content)


def _with_code(found: re.Match[str]) -> str:
    session = html.unescape(_TAG.sub("", found["block"]))
    code = html.escape(code_of(session))
    shown = found["block"].replace(_EMPTY, "")
    return f'<div class="language-pycon highlight" data-copy="{code}">{shown}'


def code_of(session: str) -> str:
    """The statements of a session with Python, ready to be pasted."""
    statements: list[str] = []
    for example in doctest.DocTestParser().get_examples(session):
        statement = example.source
        # An empty line ends a statement of several lines where Python itself reads it.
        if statement.count("\n") > 1:
            statement += "\n"
        statements.append(statement)
    return "".join(statements).rstrip("\n")
