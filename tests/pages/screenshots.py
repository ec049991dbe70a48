"""The documentation ─► a picture of each page, on a phone and on a desk, light and dark.

`python -m tests.pages.screenshots FOLDER` builds the site and writes `FOLDER/<width>-<scheme>/`. It
needs the extra `docs` and Chromium.
"""

import argparse
import base64
import fnmatch
import tempfile
import time
from itertools import product
from pathlib import Path

from selenium import webdriver

from tests.lib.browsers import chromium
from tests.pages.built_site import address, build, page_names, served

WIDTHS = (400, 1400)
SCHEMES = ("light", "dark")
LONGEST = 12_000  # pixels of a page that are shown


def screenshot(browser: webdriver.Chrome, width: int, scheme: str, url: str, file: Path) -> None:
    """Write a picture of a whole page."""
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 800}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    browser.execute_script("localStorage.clear()")  # the scheme of the page before
    browser.refresh()
    time.sleep(0.4)  # what fades in
    height = browser.execute_script("return document.scrollingElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, LONGEST), "scale": 1}
    options = {"captureBeyondViewport": True, "clip": clip}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", options)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(base64.b64decode(taken["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the pictures")
    parser.add_argument("--pages", default="*", metavar="GLOB", help="only these: `reference/*`")
    parser.add_argument("--site", type=Path, help="a site that is built already")
    parser.add_argument("--width", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--scheme", nargs="*", default=SCHEMES, choices=SCHEMES)
    options = parser.parse_args()
    pages = fnmatch.filter(page_names(), options.pages)
    with tempfile.TemporaryDirectory() as built:
        site = options.site or Path(built)
        if options.site is None:
            build(site)
        with served(site) as root, chromium() as browser:
            for width, scheme, page in product(options.width, options.scheme, pages):
                file = options.folder / f"{width}-{scheme}" / f"{page.replace('/', '-')}.png"
                screenshot(browser, width, scheme, root + address(page), file)
                print(file)


if __name__ == "__main__":
    main()
