"""A real Chromium, for tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Context manager of a browser without a window. Where Chromium is not installed, the test is skipped."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is in the extra 'test'", exc_type=ImportError
    )
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield browser
    browser.quit()


def set_width(browser: Any, width: int) -> None:
    """The width of the page, which a window of a desktop may not have."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
