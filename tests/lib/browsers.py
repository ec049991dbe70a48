"""Debian's Chromium without a window, driven by selenium."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver

MISSING = (
    "pages are tested in a browser: there is no `{}`; "
    "on Debian, run `apt-get update && apt-get install chromium chromium-driver` as root"
)


def program(name: str) -> str:
    """Where a program is. A test without it would say nothing, so it fails."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(MISSING.format(name), pytrace=False)
    return found


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser that logs its errors and its requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium")
    # Root, as which CI runs, has no sandbox; and a container has little shared memory.
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # What Chromium leaves in the folder of temporary files goes with that folder.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The driver by its path: selenium would look for one in the network.
        service = webdriver.ChromeService(
            program("chromedriver"), env={**os.environ, "TMPDIR": folder}
        )
        driver = webdriver.Chrome(options, service)
        try:
            yield driver
        finally:
            driver.quit()
