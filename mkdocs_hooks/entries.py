"""A page of the reference ─► the same, in which each entry begins with its sentence, and its
signature is below that."""

import re
from typing import Any

# As mkdocstrings writes an entry.
_ENTRY = re.compile(
    r'(?P<signature><div class="language-python doc-signature highlight"><pre>.*?</pre></div>)'
    r'(?P<begin>\s*<div class="doc doc-contents[^"]*">\s*)'
    r"(?P<sentence><p>(?!<span class=\"doc-section-title\">).*?</p>)",
    re.DOTALL,
)


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return _ENTRY.sub(_sentence_first, content)


def _sentence_first(found: re.Match[str]) -> str:
    sentence = found["sentence"].replace("<p>", '<p class="sentence">', 1)
    return sentence + found["signature"] + found["begin"]
