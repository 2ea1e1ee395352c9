"""`bash run.sh docs` builds the site, with all its parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gaccum_ms

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")]

pytestmark = pytest.mark.thorough

for module in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
    pytest.importorskip(module, reason=f"{module} is in the extras 'docs' and 'test'", exc_type=ImportError)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "the site"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(ROOT / "run.sh"), "docs", str(out)]
    env = {**os.environ, "PATH": path, "MPLBACKEND": "Agg"}
    done = subprocess.run(command, env=env, cwd=out.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def html(site: Path, page: str) -> str:
    return (site / f"{page}.html").read_text()


def missing_names(text: str) -> set[str]:
    return {name for name in gaccum_ms.__all__ if f'id="gaccum_ms.{name}"' not in text}


def test_each_page_is_there_and_can_be_reached(site):
    index = html(site, "index")
    for page in PAGES:
        assert (site / f"{page}.html").exists()
        assert page.name == "index" or f'href="{page}.html"' in index


def test_each_public_name_has_an_entry(site):
    text = html(site, "api")
    assert missing_names(text) == set()
    assert missing_names(text.replace('id="gaccum_ms.audit"', "")) == {"audit"}


def test_entries_have_their_sections_and_formulas(site):
    text = html(site, "api")
    for section in ("Parameters", "Inputs", "Outputs", "Raises", "Supported Platforms", "Examples"):
        assert f"{section}" in text
    cell = re.sub(r"<[^>]+>", "", text[text.index('id="gaccum_ms.GradAccumulationCell"') :])
    assert "(network, micro_size=None, *, micro_batch_size=None, " in cell[:200]
    assert "<math" in text
    assert ":math:" not in text
    assert re.search(r'href="#gaccum_ms.FlushAccumulation"', text), "no link from one entry to another"


def test_charts_are_drawn_of_the_pages_own_numbers(site):
    """The control: a changed number in the table moves a point."""
    sys.path.insert(0, str(DOCS))
    try:
        import charts
    finally:
        sys.path.remove(str(DOCS))
    text = (DOCS / "performance.md").read_text()
    rows = charts.time_rows(text)
    assert len(rows) == 4
    assert rows["CNN of eight convolutions, batch 256"]["gaccum_ms"] == [0.98, 1.00, 0.87, 1.13]
    assert {len(programs) for programs in rows.values()} == {5}
    page = html(site, "performance")
    for programs in rows.values():
        assert charts.time_chart(programs) in page
    changed = charts.time_rows(text.replace("| 0.98 | 1.00 | 0.87 | 1.13 |", "| 0.98 | 1.00 | 0.97 | 1.13 |"))
    network = "CNN of eight convolutions, batch 256"
    assert charts.time_chart(changed[network]) not in page


def test_the_front_page_has_the_picture_and_the_ways_in(site):
    index = html(site, "index")
    assert re.search('<img alt="Left: the losses[^>]*front.svg"', index)
    for page in ("memory", "devices", "tokens", "pytorch", "mindspore"):
        assert re.search(f'<a class="reference internal" href="howto/{page}.html"><[^>]*><strong>', index), page
    assert 'class="drawing"' in html(site, "how_it_works")


def test_nothing_is_loaded_from_elsewhere(site):
    for page in PAGES:
        for tag in re.findall(r"<(?:script|link|img)\b[^>]*>", html(site, str(page))):
            assert "://" not in tag, (page, tag)
