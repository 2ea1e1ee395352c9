"""The site in a real browser: no word of code is broken in a table, and nothing is cut off, on phones too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.test_site import PAGES, site  # noqa: F401, the fixture

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is in the extra 'test'", exc_type=ImportError)
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="Chromium is not installed: apt-get install chromium chromium-driver",
    ),
]

WIDTHS = (390, 768, 1280)  # pixels: a phone, a tablet, a screen

BROKEN_WORDS = """
const words = [];
for (const code of document.querySelectorAll("table code .pre")) {
  for (const text of [...code.childNodes].filter(node => node.nodeType === Node.TEXT_NODE)) {
    for (const match of text.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(text, match.index);
      range.setEnd(text, match.index + match[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) words.push(match[0]);
    }
  }
}
return words;
"""
CUT_OFF = """
const wide = [];
const clips = node => ["hidden", "clip"].includes(getComputedStyle(node).overflowX);
const scrolls = node => ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
for (const cell of document.querySelectorAll("td, th, pre, article img, article svg, p, li")) {
  if (cell.getBoundingClientRect().right <= innerWidth || !cell.checkVisibility()) continue;
  let node = cell.closest("article table") ? null : cell;
  while (node && !scrolls(node) && !clips(node)) node = node.parentElement;
  if (!node || node === document.body || clips(node)) wide.push(cell.outerHTML.slice(0, 120));
}
const width = document.documentElement.scrollWidth;
if (width > innerWidth) wide.push("the page is as wide as " + width);
return wide;
"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    chromium = webdriver.Chrome(options=options, service=service)
    yield chromium
    chromium.quit()


def set_width(browser, width: int) -> None:
    """The width of the page, which a window of a desktop may not have."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_of_code_is_broken_and_nothing_is_cut_off(browser, site, width):  # noqa: F811
    set_width(browser, width)
    broken, cut_off = {}, {}
    for page in map(str, PAGES):
        browser.get((Path(site) / f"{page}.html").as_uri())
        assert browser.execute_script("return innerWidth") == width
        broken |= {page: words} if (words := browser.execute_script(BROKEN_WORDS)) else {}
        cut_off |= {page: nodes} if (nodes := browser.execute_script(CUT_OFF)) else {}
    assert broken == {}
    assert cut_off == {}


def test_the_checks_see_what_is_broken(browser, tmp_path):
    """The control: a narrow cell that breaks words anywhere, and a box that hides what is too wide."""
    (tmp_path / "page.html").write_text(
        "<table><td style='max-width: 3em; overflow-wrap: anywhere'><code><span class='pre'>WithBatchLossCell</span>"
        "</code></td></table><div style='overflow-x: hidden'><p style='width: 2000px'>wide</p></div>"
    )
    set_width(browser, 390)
    browser.get((tmp_path / "page.html").as_uri())
    assert browser.execute_script(BROKEN_WORDS) == ["WithBatchLossCell"]
    assert [node[:2] for node in browser.execute_script(CUT_OFF)] == ["<p"]
