"""The documentation as it is built: what its copy buttons give runs, nothing is cut off, and nothing
is asked of another host.

It is built and opened in a browser, so these tests need the extra `docs` and Chromium. `.ci/run` has both.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.lib.browsers import chromium
from tests.pages.built_site import ROOT, address, build_once, page_names, served

pytestmark = pytest.mark.slow  # the site is built, and opened in a browser

HERE = Path(__file__).parent
PAGES = page_names()
SESSION = re.compile("^ *```pycon", re.MULTILINE)


def sessions(page: str) -> int:
    """The number of blocks of a session with Python of a page."""
    file = ROOT / "docs" / f"{page}.md"
    if not file.exists():
        return 0  # a notebook, whose cells are Python alone
    return len(SESSION.findall(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return build_once(tmp_path_factory.mktemp("site") / "site")
    # One for all processes of the tests.
    return build_once(tmp_path_factory.getbasetemp().parent / f"site-{run}")


@pytest.fixture(scope="session")
def site(folder: Path) -> Iterator[str]:
    """The address of the built pages."""
    with served(folder) as root:
        yield root


@pytest.fixture(scope="session")
def browser(site: str) -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        asked = {"origin": site, "permissions": permissions}
        driver.execute_cdp_cmd("Browser.grantPermissions", asked)
        yield driver


@pytest.fixture(scope="session")
def ipython() -> Iterator[subprocess.Popen[str]]:
    """What runs the blocks of each page in a process of its own."""
    program = [sys.executable, HERE / "run_blocks.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as running:
        yield running
        assert running.stdin is not None
        running.stdin.close()


# Blocks


def copied(browser: webdriver.Chrome) -> list[dict[str, Any]]:
    """The blocks of a session with Python of a page, each as its copy button gives it.

    A block of Python alone is a part of a program that runs elsewhere: on accelerators, in processes.
    """
    blocks: list[dict[str, Any]] = []
    for block in browser.find_elements(By.CSS_SELECTOR, ".language-pycon"):
        button = block.find_element(By.CSS_SELECTOR, "[data-clipboard-target]")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
        code = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
        shown = block.find_element(By.TAG_NAME, "code").text
        blocks.append({"code": code, "shown": shown})
    return blocks


@pytest.mark.parametrize("page", [page for page in PAGES if sessions(page)])
def test_blocks_run_as_they_are_copied(
    browser: webdriver.Chrome, site: str, ipython: subprocess.Popen[str], page: str
) -> None:
    resize(browser, 1400)
    browser.get(site + address(page))
    blocks = copied(browser)
    assert len(blocks) == sessions(page)
    assert not any("BLANKLINE" in block["shown"] for block in blocks)
    assert ipython.stdin is not None and ipython.stdout is not None
    print(json.dumps(blocks), file=ipython.stdin, flush=True)
    assert json.loads(ipython.stdout.readline()) == []


def test_a_whole_script_is_copied_as_it_is_in_its_file(
    browser: webdriver.Chrome, site: str
) -> None:
    resize(browser, 1400)
    browser.get(site + address("training-script"))
    button = browser.find_element(By.CSS_SELECTOR, ".language-python [data-clipboard-target]")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    code = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert code.strip() == (ROOT / "examples" / "train.py").read_text(encoding="utf-8").strip()


# What is seen


def resize(browser: webdriver.Chrome, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


# All boxes, also those of the outputs of a notebook, each of which is a tree of its own.
BOXES = """
document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
const boxes = [...document.querySelectorAll(".md-content *, .md-footer *")];
for (const box of [...boxes]) if (box.shadowRoot) boxes.push(...box.shadowRoot.querySelectorAll("*"));
const around = (box) => box.parentElement ?? box.getRootNode().host;
const scrolls = (box) => ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
"""
# What is in a box that hides the rest of it, or beyond the edge of the window, where nothing scrolls.
CUT = (
    BOXES
    + """
const cut = [];
for (const box of boxes) {
  const hides = ["hidden", "clip"].includes(getComputedStyle(box).overflowX);
  if (hides && box.clientWidth > 1 && box.scrollWidth > box.clientWidth + 1) cut.push(box);
  let outer = box;
  while (outer && !scrolls(outer)) outer = around(outer);
  if (!outer && box.getBoundingClientRect().right > innerWidth + 1) cut.push(box);
}
return cut.filter((box) => !box.closest(".md-clipboard, .md-code__nav"))
  .map((box) => box.outerHTML.slice(0, 120));
"""
)


# What one has to scroll to see the end of.
WIDE = (
    BOXES
    + """
return boxes.filter((box) => scrolls(box) && box.scrollWidth > box.clientWidth + 1)
  .map((box) => box.textContent.trim().slice(0, 120));
"""
)
# What a cell prints is as wide as functree makes it.
PRINTED = {"notebooks/tutorial": ["ShardingError: 7 leaves cannot be laid out"]}


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_cut_off_on_a_phone_and_nothing_has_to_be_scrolled_on_a_desk(
    browser: webdriver.Chrome, site: str, page: str
) -> None:
    resize(browser, 400)
    browser.get(site + address(page))
    width = browser.execute_script("return document.scrollingElement.scrollWidth")
    assert width <= 400
    assert browser.execute_script(CUT) == []
    resize(browser, 1400)
    printed = tuple(PRINTED.get(page, []))
    wide: list[str] = browser.execute_script(WIDE)
    assert [text for text in wide if not (printed and text.startswith(printed))] == []


PICTURES = sorted(path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg"))
OUTSIDE = """
const {width, height} = document.documentElement.viewBox.baseVal;
return [...document.querySelectorAll("text")].filter((text) => {
  const box = text.getBBox();
  return box.x < 0 || box.y < 0 || box.x + box.width > width || box.y + box.height > height;
}).map((text) => text.textContent);
"""


@pytest.mark.parametrize("picture", PICTURES)
def test_the_text_of_a_picture_is_inside_of_it(
    browser: webdriver.Chrome, site: str, picture: str
) -> None:
    browser.get(f"{site}/pictures/{picture}.svg")
    assert browser.execute_script(OUTSIDE) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_of_functree_has_the_colors_of_the_page_around_it(
    browser: webdriver.Chrome, site: str, scheme: str
) -> None:
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get(site + address("plan"))
    frame = browser.find_element(By.CSS_SELECTOR, ".live iframe")
    assert int(frame.get_attribute("clientHeight") or 0) > 300
    browser.switch_to.frame(frame)
    background = "return getComputedStyle(document.querySelector('.functree')).backgroundColor"
    dark = browser.execute_script(background) == "rgb(18, 22, 28)"
    browser.switch_to.default_content()
    assert dark == (scheme == "dark")


# The contrast of a link in code with what is behind it, as WCAG defines it.
CONTRAST = """
const luminance = (color) => {
  const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05;
};
const link = document.querySelector(".md-content td a code");
const both = [getComputedStyle(link).color, getComputedStyle(link).backgroundColor].map(luminance);
return Math.max(...both) / Math.min(...both);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_link_in_code_can_be_read(browser: webdriver.Chrome, site: str, scheme: str) -> None:
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get(site + address("reference/index"))
    assert browser.execute_script(CONTRAST) >= 4.5


# What is in the files

ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\b(?:src|srcset)="?(?:https?:)?//"""
    r"""|<link\b[^>]*\bhref="?(?:https?:)?//"""
    r"""|url\(\s*["']?(?:https?:)?//|@import"""
)


def test_no_page_asks_another_host(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert len(files) > len(PAGES)
    asking = {
        path.relative_to(folder).as_posix(): found
        for path in files
        if (found := ELSEWHERE.findall(path.read_text(encoding="utf-8")))
    }
    assert asking == {}


def test_a_browser_asks_no_other_host(browser: webdriver.Chrome, site: str) -> None:
    browser.get_log("performance")  # of the pages before
    browser.get(site + address("index"))
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert any(url.endswith("plan.html") for url in asked)
    assert [url for url in asked if not url.startswith((site, "data:", "blob:"))] == []


@pytest.mark.parametrize(
    ("html", "asks"),
    [
        ('<script src="https://a.org/x.js">', True),
        ('<link rel="stylesheet" href="//a.org/x.css">', True),
        ("a { background: url(https://a.org/x.png) }", True),
        ('<a href="https://a.org">', False),
        ('<img alt="x" src="../pictures/mesh.svg">', False),
    ],
)
def test_what_asks_another_host_is_found(html: str, asks: bool) -> None:
    assert bool(ELSEWHERE.search(html)) == asks


ENTRY = re.compile(r'class="doc doc-heading">.*?</h\d>(.*?)(?=<h\d|\Z)', re.DOTALL)


def test_an_entry_of_the_reference_begins_with_its_sentence(folder: Path) -> None:
    """And it has one signature, also of a function with overloads. None is a module: functions that
    have the name of theirs are found under it."""
    entries = 0
    for page in (folder / "reference").rglob("index.html"):
        text = page.read_text(encoding="utf-8")
        assert "doc-module-name" not in text, page
        for found in ENTRY.findall(text):
            if not re.search("<p[ >]", found):
                continue  # an attribute of which its class tells
            entries += 1
            begin = re.search(r"<p\b|<pre\b", found)
            assert begin is not None and begin[0] == "<p", found[:300]
            assert found.count("doc-signature") <= 1, found[:300]
    assert entries > 100


SIGNATURE = re.compile(
    r'<div class="language-python doc-signature highlight">(.*?)</div>', re.DOTALL
)
STRING = re.compile(r"""(["']).*?\1""")


def test_signatures_have_no_private_types(folder: Path) -> None:
    pages = [
        page.read_text(encoding="utf-8") for page in (folder / "reference").rglob("index.html")
    ]
    signatures = [
        unescape(re.sub("<[^>]+>", "", found))
        for page in pages
        for found in SIGNATURE.findall(page)
    ]
    assert any(signature.startswith("jit(\n    fun: Callable[P, T]") for signature in signatures)
    private = [
        s for s in signatures if re.search(r"(?<![\w.*])_[^_\W]|Annotated", STRING.sub("", s))
    ]
    assert private == []


def test_a_title_of_the_reference_is_the_name_that_users_write(folder: Path) -> None:
    page = (folder / "reference" / "layers" / "index.html").read_text(encoding="utf-8")
    titles = re.findall(
        r'<h2 id="functree\.([\w.]+)".*?doc-object-name[^>]*>(.*?)<', page, re.DOTALL
    )
    assert ("nn.Linear", "ft.nn.Linear") in titles
    assert [title for path, title in titles if title != f"ft.{path}"] == []


def test_a_button_hides_the_prompts_on_all_pages(browser: webdriver.Chrome, site: str) -> None:
    prompt, button = ".language-pycon .gp", ".language-pycon .prompts"
    browser.get(site + address("plan"))
    assert browser.find_element(By.CSS_SELECTOR, prompt).is_displayed()
    browser.find_element(By.CSS_SELECTOR, button).click()
    browser.get(site + address("layouts"))
    assert not browser.find_element(By.CSS_SELECTOR, prompt).is_displayed()
    browser.find_element(By.CSS_SELECTOR, button).click()
    assert browser.find_element(By.CSS_SELECTOR, prompt).is_displayed()


CODE = re.compile(r"<code>[^<]*?</code>")


def test_no_code_shows_what_escapes_it(folder: Path) -> None:
    """In a table, a bar inside of code needs no backslash."""
    shown = {
        path.relative_to(folder).as_posix(): found
        for path in folder.rglob("*.html")
        if (found := [c for c in CODE.findall(path.read_text(encoding="utf-8")) if "\\|" in c])
    }
    assert shown == {}


def test_what_a_function_returns_is_one_sentence(folder: Path) -> None:
    """Griffe would read each line of it as a value of its own."""
    page = (folder / "reference" / "layers" / "index.html").read_text(encoding="utf-8")
    [returns] = re.findall(
        r"(<li[^>]*>(?:(?!</?li).)*an int32 array with(?:(?!</?li).)*</li>)", page, re.DOTALL
    )
    words = " ".join(re.sub("<[^>]+>", "", returns).split())
    assert "The rest of that row’s new tokens are then -1" in words.replace("'", "’")
