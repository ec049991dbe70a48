"""A page of the reference ─► the same page, in the words of its readers.

A heading is the name that users write, `ft.jit` or `ft.nn.Linear`. Each entry begins with its
sentence, and the signature follows.
"""

import re
from collections.abc import Iterable
from typing import Any

from mkdocs.structure.toc import AnchorLink

# As mkdocstrings writes an entry.
_ENTRY = re.compile(
    r'(?P<signature><div class="language-python doc-signature highlight"><pre>.*?</pre></div>)'
    r'(?P<begin>\s*<div class="doc doc-contents[^"]*">\s*)'
    r"(?P<sentence><p>(?!<span class=\"doc-section-title\">).*?</p>)",
    re.DOTALL,
)
_HEADING = re.compile(
    r'(<h2 id="(?P<path>functree[\w.]*)".*?<span class="doc doc-object-name[^"]*">)\w+(?=</span>)',
    re.DOTALL,
)
# Other objects are in modules that users do not import.
_PUBLIC = re.compile(r"functree\.((?:nn\.|testing\.)?\w+)")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Rewrite the HTML of a page, when MkDocs calls it."""
    _rename(page.toc)
    content = _HEADING.sub(lambda found: found[1] + _name(found["path"]), content)
    return _ENTRY.sub(_sentence_first, content)


def _name(path: str) -> str:
    public = _PUBLIC.fullmatch(path)
    return f"ft.{public[1]}" if public else path.rpartition(".")[2]


def _rename(links: Iterable[AnchorLink]) -> None:
    for link in links:
        if link.level == 2 and link.id.startswith("functree."):
            link.title = _name(link.id)
        _rename(link.children)


def _sentence_first(found: re.Match[str]) -> str:
    sentence = found["sentence"].replace("<p>", '<p class="sentence">', 1)
    return sentence + found["signature"] + found["begin"]
