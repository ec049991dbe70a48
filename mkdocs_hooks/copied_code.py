"""This hook lets copy buttons copy the code of a Python session without prompts and output.

It also displays `<BLANKLINE>` in an output as an empty line.
"""

import doctest
import html
import re
from typing import Any

# The HTML that the theme writes for a block. A button copies `data-copy`, if present, instead of
# the text.
_SESSION = re.compile(r'<div class="language-pycon highlight">(?P<block><pre>.*?</pre>)', re.DOTALL)
_EMPTY = html.escape("<BLANKLINE>")
_TAG = re.compile("<[^>]*>")


def on_page_content(content: str, **_: Any) -> str:
    """Add the code of sessions to a page's HTML, which MkDocs passes."""
    return _SESSION.sub(_with_code, content)


def _with_code(found: re.Match[str]) -> str:
    session = html.unescape(_TAG.sub("", found["block"]))
    code = html.escape(code_of(session))
    shown = found["block"].replace(_EMPTY, "")
    return f'<div class="language-pycon highlight" data-copy="{code}">{shown}'


def code_of(session: str) -> str:
    """Return the statements of a Python session, ready to paste."""
    statements: list[str] = []
    for example in doctest.DocTestParser().get_examples(session):
        statement = example.source
        # In the interactive Python, an empty line ends a statement of several lines.
        if statement.count("\n") > 1:
            statement += "\n"
        statements.append(statement)
    return "".join(statements).rstrip("\n")
