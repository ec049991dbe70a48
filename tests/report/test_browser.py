"""Pages in a browser: folding, searching, in any width, in light and dark, with nothing asked of a network.

The browser is Debian's Chromium with its driver. A test without it would say nothing, so it fails.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import functree as ft
from tests.lib.browsers import chromium
from tests.lib.meshes import SIZES

pytestmark = pytest.mark.slow  # a browser is a process


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


def make(key: jax.Array) -> ft.TrainState[Any]:
    config = ft.nn.TransformerConfig(
        vocab_size=64, embed=32, layers=2, heads=4, kv_heads=4, head_dim=8, hidden=64
    )
    model = ft.nn.Transformer.create(config, key=key)
    return ft.TrainState.create(model, optax.adam(1e-3))


RULES = ft.AxisRules(
    {"vocab": "model", "heads": "model", "kv_heads": "model", "hidden": "model", ...: None}
)
PLAN = ft.plan(ft.abstract(make)(jax.random.key(0)), RULES, SIZES)


def moved(path: str, kind: str, axis: str, phase: str) -> ft.Collective:
    source = f"/a/rather/long/folder/{path.replace('.', '_')}.py:120"
    paths = (ft.Path(f"model.{path}"),)
    return ft.Collective(kind, (axis,), 2, 2**20, 2, paths, ("ts",), phase, source, kind)


MOVED = [
    moved(f"blocks.layer.{path}", kind, axis, phase)
    for path in ("attn.query", "attn.key", "mlp.up", "mlp.down")
    for kind, axis, phase in (
        ("all-gather", "data", "forward"),
        ("reduce-scatter", "data", "backward"),
        ("all-reduce", "model", "forward"),
    )
]
ARGUMENTS = {ft.Path(("ts", *row.path)): row.bytes_per_device for row in PLAN}
LEDGER = ft.Ledger(
    tuple(MOVED), ft.Memory(ARGUMENTS, 2**20, 2**19, 2**22, 2**23), "tpu v5e", SIZES,
    warnings=("very slow compile",), idle=("x",),
)  # fmt: skip
OTHER = ft.Ledger(tuple(MOVED[3:]), LEDGER.memory, "tpu v5e", SIZES)
PAGES = {
    "plan": PLAN.html(),
    "ledger": LEDGER.html(),
    "diff": LEDGER.diff(OTHER).html(),
    "fragment": f"<!doctype html><meta charset=utf-8>{PLAN._repr_html_()}{LEDGER._repr_html_()}",
}


def opened(browser: webdriver.Chrome, folder: Path, name: str) -> None:
    """Open a page, and forget what was logged before."""
    file = folder / f"{name}.html"
    file.write_text(PAGES[name], encoding="utf-8")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(file.as_uri())


def shown(browser: webdriver.Chrome, css: str) -> list[str]:
    """The paths of the lines that are seen."""
    elements = browser.find_elements(By.CSS_SELECTOR, css)
    return [
        str(one.get_attribute("data-path") or one.text) for one in elements if one.is_displayed()
    ]


@pytest.mark.parametrize("name", PAGES)
def test_no_error_and_no_request(browser: webdriver.Chrome, tmp_path: Path, name: str) -> None:
    opened(browser, tmp_path, name)
    assert shown(browser, ".leaf")
    assert browser.get_log("browser") == []
    messages = [json.loads(one["message"])["message"] for one in browser.get_log("performance")]
    asked = {
        one["params"]["request"]["url"]
        for one in messages
        if one["method"] == "Network.requestWillBeSent"
    }
    # The page itself, and its icon, which is empty.
    page = (tmp_path / f"{name}.html").as_uri()
    assert page in asked and asked <= {page, "data:,"}


def test_search(browser: webdriver.Chrome, tmp_path: Path) -> None:
    opened(browser, tmp_path, "plan")
    everything = shown(browser, ".leaf")
    box = browser.find_element(By.CSS_SELECTOR, "input[type=search]")
    first = browser.find_elements(By.CSS_SELECTOR, ".tree details")[0]
    # What is folded is found too.
    browser.find_element(By.CSS_SELECTOR, ".fold").click()
    assert shown(browser, ".leaf") == [] and not first.get_property("open")
    box.send_keys("ATTN. model")
    found = shown(browser, ".leaf")
    assert found == [f"model.blocks.layer.attn.{name}" for name in ("query", "key", "value", "out")]
    assert shown(browser, "output") == [f"4 of {len(everything)}"]
    box.send_keys(" nowhere")
    assert shown(browser, ".leaf") == [] == shown(browser, ".tree summary")
    box.send_keys(Keys.ESCAPE)
    assert shown(browser, ".leaf") == [] and len(shown(browser, ".tree summary")) == 1
    assert shown(browser, "output") in ([], [""])
    # A slash is the way into the box from anywhere.
    browser.find_element(By.CSS_SELECTOR, ".unfold").click()
    assert shown(browser, ".leaf") == everything
    browser.find_element(By.TAG_NAME, "body").send_keys("/")
    assert browser.switch_to.active_element == box and box.get_property("value") == ""


def test_folding(browser: webdriver.Chrome, tmp_path: Path) -> None:
    opened(browser, tmp_path, "plan")
    before = shown(browser, ".leaf")
    (attention,) = (
        one
        for one in browser.find_elements(By.CSS_SELECTOR, ".tree summary")
        if one.text.startswith("attn")
    )
    attention.click()
    assert set(before) - set(shown(browser, ".leaf")) == {
        f"model.blocks.layer.attn.{name}" for name in ("query", "key", "value", "out")
    }
    attention.click()
    assert shown(browser, ".leaf") == before


def test_without_a_script(browser: webdriver.Chrome, tmp_path: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened(browser, tmp_path, "ledger")
        assert shown(browser, ".tools") == [] and shown(browser, ".leaf")
        browser.find_element(By.CSS_SELECTOR, ".tree summary").click()
        assert "model.blocks.layer.attn.query" not in shown(browser, ".leaf")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_pictures_are_drawn(browser: webdriver.Chrome, tmp_path: Path) -> None:
    opened(browser, tmp_path, "plan")
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('.leaf use')].map((one) => one.getBBox().width)"
    )
    assert len(boxes) > 10 and min(boxes) > 5


# The contrast of all texts against what is behind them, as WCAG has it.
CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (one) => {
  const color = getComputedStyle(one).backgroundColor;
  return /rgba\\(.*, 0\\)/.test(color) && one.parentElement ? behind(one.parentElement) : color;
};
return [...document.querySelectorAll(".functree *")]
  .filter((one) => [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
  .filter((one) => !one.closest("svg, script, style"))
  .map((one) => {
    const pair = [light(getComputedStyle(one).color), light(behind(one))].sort((a, b) => b - a);
    return [(pair[0] + 0.05) / (pair[1] + 0.05), one.outerHTML.slice(0, 80)];
  }).sort((a, b) => a[0] - b[0])[0];
"""


@pytest.mark.parametrize("name", PAGES)
def test_any_width_in_light_and_dark(browser: webdriver.Chrome, tmp_path: Path, name: str) -> None:
    opened(browser, tmp_path, name)
    backgrounds: list[str] = []
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for width in (400, 800, 1600):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} wide in a window of {width}"
        least, text = browser.execute_script(CONTRAST)
        assert least >= 4.5, f"{name}, {scheme}: {text}"
        backgrounds.append(
            browser.execute_script(
                "return getComputedStyle(document.querySelector('.functree')).backgroundColor"
            )
        )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(18, 22, 28)"]
