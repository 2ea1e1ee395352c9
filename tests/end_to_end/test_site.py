"""`bash run.sh docs` builds the site, with all its parts, in English and in Chinese."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gaccum_ms
from tests.support.chromium import set_width

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")]
CATALOGS = DOCS / "locale" / "zh_CN" / "LC_MESSAGES"
TRANSLATED = {page for page in PAGES if (CATALOGS / f"{page}.po").exists()}
LANGUAGES = ("", "zh_CN/")  # the folders of the sites

for module in ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "sphinx_reredirects"):
    pytest.importorskip(module, reason=f"{module} is in the extras 'docs' and 'test'", exc_type=ImportError)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "the site"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(ROOT / "run.sh"), "docs", str(out)]
    env = {**os.environ, "PATH": path, "MPLBACKEND": "Agg"}
    done = subprocess.run(command, env=env, cwd=out.parent, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def html(site: Path, page: str) -> str:
    return (site / f"{page}.html").read_text()


def test_each_page_can_be_reached_and_leads_to_itself_in_the_other_language(site):
    """Nothing is loaded from elsewhere."""
    for language, other in (LANGUAGES, LANGUAGES[::-1]):
        index = html(site, f"{language}index")
        for page in PAGES:
            assert page.name == "index" or f'href="{page}.html"' in index
            for tag in re.findall(r"<(?:script|link|img)\b[^>]*>", html(site, f"{language}{page}")):
                assert "://" not in tag, (page, tag)
            (link,) = re.findall('<p class="language"><a href="([^"]*)"', html(site, f"{language}{page}"))
            assert (site / f"{language}{page}").parent.joinpath(link).resolve() == site / f"{other}{page}.html"


def test_pages_are_chinese_or_say_that_they_are_not(site):
    howtos = {page for page in PAGES if page.parent.name == "howto"}
    depth = ("how_it_works", "options", "split", "windows", "outputs", "transforms", "batch_size", "hardware")
    others = ("index", "flow", "language_model", "troubleshooting")
    assert howtos | set(map(Path, depth + others)) <= TRANSLATED
    contents = html(site, "zh_CN/index")
    assert "（英文）" not in html(site, "index")
    for page in PAGES:
        chinese = html(site, f"zh_CN/{page}")
        assert ("<p>本页只有英文版。</p>" in chinese) == (page not in TRANSLATED), page
        titles = set(re.findall(f'<a class="reference internal" href="{page}.html">([^<]*)</a>', contents))
        assert page in TRANSLATED or titles == {re.search("<h1>(.*?)<a", chinese)[1] + "（英文）"}, page
        programs, chinese_programs = (re.findall("(?s)<pre>.*?</pre>", text) for text in (html(site, page), chinese))
        assert chinese_programs == programs
        if page in TRANSLATED:
            heading = re.search("<h1>(.*?)<a", chinese)[1]
            assert heading == "gaccum_ms" or re.search("[一-鿿]", heading), page
            labels = re.findall("<text[^>]*>([^<]*[a-z][^<]*)<", chinese)
            names = "FlushAccumulation|MicroBatch"
            assert [label for label in labels if not re.search(f"[一-鿿]|{names}", label)] == [], page


def test_a_catalog_that_does_not_fit_its_page_ends_the_build(tmp_path):
    """A changed sentence, a changed drawing, and an emptied entry. The catalogs that still fit their pages are no
    fault."""
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    (copy / "api.md").unlink()  # it takes most of the time
    catalog = copy / CATALOGS.relative_to(DOCS) / "flow.po"
    tokens = catalog.with_name("howto") / "tokens.po"
    for path, old, new in (
        (copy / "flow.md", "With and without this change,", "With and without that change,"),
        (copy / "pictures" / "ranks.svg", ">one reduction per", ">a reduction per"),
        (tokens, '"对什么计数"', '""'),
    ):
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    command = [sys.executable, "-m", "sphinx", "-qN", "-b", "dummy", "-D", "language=zh_CN", copy, tmp_path / "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1600)
    faults = re.findall(r"docs/(\S+): WARNING: locale/\S+ (.*? of '.{,23})", done.stderr)
    assert faults == [
        ("flow.md", "has no translation, or a fuzzy one, of 'With and without that c"),
        ("flow.md", "still had a translation of 'With and without this c"),
        ("howto/devices.md", "has no translation, or a fuzzy one, of 'a reduction per update:"),
        ("howto/devices.md", "still had a translation of 'one reduction per updat"),
        ("howto/tokens.md", "has no translation, or a fuzzy one, of 'What to count'"),
    ]
    assert "-m sphinx -W " in (ROOT / "run.sh").read_text()
    changed = catalog.read_text()
    assert re.search(r"#, fuzzy\nmsgid \"\"\n\"With and without that change", changed) and "this change" not in changed


def test_each_public_name_has_an_entry_with_sections_and_formulas(site):
    text = html(site, "api")
    assert [name for name in gaccum_ms.__all__ if f'id="gaccum_ms.{name}"' not in text] == []
    for section in ("Parameters", "Inputs", "Outputs", "Raises", "Supported Platforms", "Examples"):
        assert f"{section}" in text
    cell = re.sub(r"<[^>]+>", "", text[text.index('id="gaccum_ms.GradAccumulationCell"') :])
    assert "(network, micro_size=None, *, micro_batch_size=None, " in cell[:200]
    assert "<mtext>min_count</mtext>" in text
    assert r"\_" not in text
    assert ":math:" not in text
    assert re.search(r'href="#gaccum_ms.FlushAccumulation"', text), "no link from one entry to another"


@pytest.mark.parametrize("language", LANGUAGES)
def test_old_addresses_lead_to_headings(site, language):
    conf = ast.parse((DOCS / "conf.py").read_text())
    (redirects,) = (ast.literal_eval(node.value) for node in conf.body if ast.unparse(node).startswith("redirects:"))
    for old, new in redirects.items():
        page, _, heading = new.partition("#")
        target = (site / language / old).parent / page
        assert f'"{new}"' in html(site / language, old), old
        assert f'id="{heading}"' in target.read_text() + 'id=""', new


CUT_OFF = """
const wide = [];
const clips = node => ["hidden", "clip"].includes(getComputedStyle(node).overflowX);
const scrolls = node => ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
for (const cell of document.querySelectorAll("td, th, pre, math, article img, article svg, p, li")) {
  if (cell.getBoundingClientRect().right <= innerWidth || !cell.checkVisibility()) continue;
  let node = cell.closest("article table") ? null : cell;
  while (node && !scrolls(node) && !clips(node)) node = node.parentElement;
  if (!node || node === document.body || clips(node)) wide.push(cell.outerHTML.slice(0, 120));
}
for (const formula of document.querySelectorAll(".math-wrapper")) {
  if (formula.scrollWidth > formula.clientWidth) wide.push(formula.innerHTML);
}
const width = document.documentElement.scrollWidth;
if (width > innerWidth) wide.push("the page is as wide as " + width);
return wide;
"""


@pytest.mark.parametrize("width", [390, 1280])  # pixels: a phone, a screen
def test_nothing_is_cut_off(browser, site, width):
    set_width(browser, width)
    cut_off = {}
    for page in [*map(str, PAGES), *(f"zh_CN/{page}" for page in TRANSLATED), "genindex", "zh_CN/genindex"]:
        browser.get((site / f"{page}.html").as_uri())
        assert browser.execute_script("return innerWidth") == width
        cut_off |= {page: nodes} if (nodes := browser.execute_script(CUT_OFF)) else {}
    assert cut_off == {}


def test_the_search_finds_chinese_words(browser, site):
    summary = "return document.querySelector('#search-results p.search-summary')?.innerText ?? ''"
    links = "return [...document.querySelectorAll('#search-results li > a')].map(link => link.href)"

    def searched(words: str) -> list[str]:
        """The pages that the search of the Chinese site finds."""
        browser.get(f"{(site / 'zh_CN' / 'search.html').as_uri()}?q={words}")
        for _ in range(3000):
            if re.search("搜索完成|没有匹配", browser.execute_script(summary)):
                break
            time.sleep(0.1)
        return [re.sub("[?#].*|.*/zh_CN/", "", link) for link in browser.execute_script(links)]

    for words in ("梯度累积", "昇腾", "910B", "GradAccumulationCell"):
        assert "index.html" in searched(words)
    assert searched("梯度累度") == [], "all characters are in the pages, and 累度 is not"
