"""The pages of the documentation: each can be found from another, and says what the package is."""

import inspect
import operator
import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

import functree as ft
from tests.package.public import NAMES

ROOT = Path(__file__).parents[2]
# By path from the root, as links are resolved: `docs/index.md`, `README.md`.
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}


def not_linked(pages: Mapping[str, str]) -> set[str]:
    """The pages under docs/ to which no other page has a link."""
    linked = set()
    for page, text in pages.items():
        targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text)
        linked |= {
            posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            for target in targets
        } - {page}
    return {page for page in pages if page.startswith("docs/")} - linked


def test_every_page_is_linked_from_another() -> None:
    missing = not_linked(PAGES)
    assert not missing, f"no other page has a link to: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_one_entry_in_the_reference_and_a_row_in_its_table(name: str) -> None:
    reference = {page: text for page, text in PAGES.items() if page.startswith("docs/reference/")}
    entries = [
        page
        for page, text in PAGES.items()
        if re.search(rf"^::: functree\.{re.escape(name)}$", text, re.M)
    ]
    assert len(entries) == 1 and entries[0] in reference, (
        f"`::: functree.{name}` stands in {entries or 'no page'}"
    )
    row = f"| [`ft.{name}`]({Path(entries[0]).name}#functree.{name}) |"
    assert row in reference["docs/reference/index.md"], (
        f"docs/reference/index.md has no row that begins {row!r}"
    )


def test_the_versions_that_pages_name_are_those_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = package["requires-python"].removeprefix(">=")
    [jax] = [one for one in package["dependencies"] if re.match(r"jax\W", one)]
    least, above = re.fullmatch(r"jax>=([\d.]+),<0\.(\d+)", jax).groups()  # pyright: ignore
    said = f"functree needs Python {python} or newer, and JAX {least} to 0.{int(above) - 1}."
    for page in ("README.md", "docs/index.md"):
        assert said in PAGES[page]
    for badge in (f"python-{python}+", f"JAX-{least}_to_0.{int(above) - 1}"):
        assert f"badge/{badge}-blue" in PAGES["README.md"]
    assert f"Python {python} or newer" in PAGES["docs/install.md"]


SIGNATURES = re.findall(r"^`([\w.]+)\((.*?)\)(?: -> \w+)?`", PAGES["docs/map.md"], re.MULTILINE)


@pytest.mark.parametrize(("name", "written"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_the_signatures_of_the_map_are_those_of_the_functions(name: str, written: str) -> None:
    given = written.removesuffix(", ...")
    said = inspect.signature(eval(f"lambda {given}: None", {"ft": ft})).parameters
    real = inspect.signature(operator.attrgetter(name)(ft)).parameters

    def told(one: inspect.Parameter) -> tuple[object, object]:
        # A function may be left out, for a decorator with options. A page need not say so.
        is_function = one.name in ("fun", "fn")
        return one.kind, one.empty if is_function else one.default

    assert {key: told(one) for key, one in said.items()} == {key: told(real[key]) for key in said}
    assert given != written or list(said) == list(real)


def test_the_map_has_fifteen_signatures() -> None:
    assert len(SIGNATURES) == 15
