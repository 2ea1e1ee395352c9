"""`gaccum-ms report`: pages of records of every kind, complete and broken."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gaccum_ms.report import command
from gaccum_ms.report.records import read

for module in ("jinja2", "matplotlib"):
    pytest.importorskip(module, reason=f"{module} is in the extra 'test'")

VOID = {"meta"}
FIELDS = {
    "Loss": "loss",
    "Gradient norm": "grad_norm",
    "Noise scale": "noise_scale",
    "Window size": "count",
    "Samples per second": "rate",  # derived
    "Batches": "batches",
    "Learning rate": "learning_rate",
    "Skipped updates": None,
    "Loss scale": "loss_scale",
    "Time": "seconds",
}


def line(update: int, updated: bool = True, **fields) -> str:
    return json.dumps({"update": update, "updated": updated, "loss": 1 / (update + 1)} | fields) + "\n"


@pytest.fixture
def record(tmp_path):
    def write(*lines: str, name: str = "windows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(lines))
        return path

    return write


class Page(HTMLParser):
    """A page whose elements are all closed: its sections by title, its facts, its names of elements and addresses."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.names, self.addresses, self.text = [], set(), [], path.read_text()
        self.feed(self.text)
        assert self.open == []
        self.sections = dict(re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", self.text, re.DOTALL))
        self.facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", self.text)

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def curves(self, title: str) -> list[list[tuple[float, ...]]]:
        """The points of each drawn line; y grows downwards."""
        paths = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="[^"]*stroke-width: 1.5', self.sections[title])
        return [[tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]] for path in paths]


def error_of(capsys, *words: object) -> str:
    """What the command says as it fails."""
    with pytest.raises(SystemExit) as ended:
        command.main([*map(str, words)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def report(*paths: Path) -> Page:
    output = paths[0].parent / "out.html"
    assert command.main([*map(str, paths), "-o", str(output)]) == 0
    return Page(output)


def test_each_chart_shows_its_own_number_and_nothing_is_loaded(record):
    rising = {"loss", "noise_scale", "batches", "seconds"}
    numbers = [{field: n if field in rising else 9 - n for field in filter(None, FIELDS.values())} for n in range(1, 9)]
    lines = [line(n, counted="samples", updated=n % 4 > 0, **fields) for n, fields in enumerate(numbers, start=1)]
    page = report(record(*lines))
    assert list(page.sections) == list(FIELDS)
    for title, field in FIELDS.items():
        (curve,) = page.curves(title)
        (left, first), (right, last) = curve[0], curve[-1]
        assert left < right
        assert (last < first) == (field in rising or field is None), title
    assert not page.names & {"script", "link", "img", "iframe"}
    assert all(address.startswith("#") for address in page.addresses)


def test_the_facts_of_a_training(record):
    recorded = {"seconds": 0.5, "count": 3.0, "grad_norm": 1.0}
    lines = [
        line(1, loss=0.5, **recorded),
        line(2, loss=0.25, **recorded),
        line(2, False, loss=None, dropped_micro_batches=2, **recorded),
        line(3, loss=0.75, epoch=2, **recorded | {"count": 7.0}),
    ]
    page = report(record(*lines))
    assert page.facts == [
        ("updates", "3"),
        ("epochs", "2"),
        ("last loss", "0.75"),
        ("least loss", "0.25 at update 2"),
        ("skipped updates", "1"),
        ("dropped micro-batches", "2"),
        ("items per second, overall", "8.0"),
        ("time in windows", "2.0 s"),
    ]
    assert len(page.curves("Loss")) == 1
    assert page.sections["Loss"].count("<use") - page.sections["Gradient norm"].count("<use") == 1, "a point alone"
    assert report(record(line(1), line(1, False))).facts[0] == ("updates", "1"), "the last window made none"


@pytest.mark.parametrize("slow", [[], [1, 5, 6]], ids=["none", "of each start and shape"])
def test_windows_that_compile_are_marked_and_do_not_rule_the_scale(record, slow):
    """The windows of a larger size are no slower."""
    lines = []
    for n, size in enumerate([2] * 4 + [16] * 4, start=1):
        seconds = size + n / 10 + 2000 * (n in slow)
        lines.append(line(n, counted="samples", seconds=seconds, batches=size, count=3.0 * size))
    page = report(record(*lines))
    for title, least in (("Samples per second", 20), ("Time", 80)):
        assert ("<b>×</b> more than 5 times slower than most" in page.sections[title]) == bool(slow)
        (curve,) = page.curves(title)
        assert len(curve) == 8 - len(slow)
        assert np.ptp([y for _, y in curve]) > least, title
    assert "<b>×</b>" not in page.sections["Loss"]


def test_what_was_counted_has_its_word(record):
    """Samples are in the test of each chart. Where not all windows count the same, it is items."""
    windows = {word: line(1, count=6.0, seconds=2.0, counted=word) for word in ("samples", "batches", "items")}
    for words, shown in ((["batches"], "batches"), (["samples", "items"], "items")):
        page = report(*(record(windows[word], name=f"{word}.jsonl") for word in words))
        assert (f"{shown} per second, overall", "3.0") in page.facts
        assert f">{shown}/s</text>" in page.sections[f"{shown.capitalize()} per second"]
        assert ("such as tokens" in page.sections["Window size"]) == (shown == "items")


def test_what_was_not_recorded_has_no_chart_and_no_fact(record):
    page = report(record(line(1, noise_scale=None, batches=1, seconds=0.0)))
    assert list(page.sections) == ["Loss", "Batches", "Time"]
    facts = ["updates", "last loss", "least loss", "skipped updates", "dropped micro-batches", "time in windows"]
    assert [fact for fact, _ in page.facts] == facts
    assert "the noise scale record_noise=True" in page.text


def test_lines_that_are_no_whole_window_are_left_out(record, capsys):
    """One was cut short, one is too deep, and one has true for an update."""
    deep = f'{{"update": 2, "loss": 1, "counted": {100_000 * "["}{100_000 * "]"}}}\n'
    path = record(line(1), line(2)[:9] + "\n", deep, '{"update": true, "loss": 1}\n', line(3))
    report(path)
    assert len(read(path).windows) == 2
    assert capsys.readouterr().err == f"note: {path}: 3 line(s) left out, from line 2 on: no whole window\n"


def test_a_resumed_training_replaces_what_came_after_its_checkpoint(record, capsys):
    """It writes update 3 again. A window that was dropped replaces nothing, and neither does the update after it."""
    path = record(line(1), line(1, False), line(1, False), line(2), line(3), line(4), line(3), line(4), line(5))
    found = read(path)
    assert [window.update for window in found.windows] == [1, 2, 2, 2, 3, 4, 5]
    assert [window.lost[0] for window in found.windows] == [0, 1, 2, 2, 2, 2, 2]
    assert [[window.update for window in piece] for piece in found.replaced] == [[3, 4]]
    page = report(path)
    assert len(page.curves("Loss")) == 2
    assert "stroke-opacity: 0.35" in page.sections["Loss"]
    assert capsys.readouterr().err.startswith(f"note: {path}: the training was resumed")


def test_a_training_that_began_anew_is_another_one(record, capsys):
    """It is not called resumed, and its facts are its own. The first one was resumed."""
    first = [line(1), line(2, seconds=5.0, count=5.0), line(2, False), line(2, seconds=5.0, count=5.0)]
    path = record(*first, line(1), line(2, seconds=1.0, count=3.0))
    found = read(path)
    assert [window.update for window in found.windows] == [1, 2]
    assert found.windows[-1].lost == (0, 0)
    assert found.replaced == []
    assert [[window.update for window in part] for part in found.earlier] == [[2, 3], [1, 2]]
    page = report(path)
    assert ("items per second, overall", "3.0") in page.facts and ("time in windows", "1.0 s") in page.facts
    assert "stroke-opacity: 0.35" in page.sections["Loss"]
    note = f"note: {path}: another training has begun in this file; those before it are faint, and not in the facts.\n"
    assert capsys.readouterr().err == note


def test_numbers_that_no_training_has_are_not_drawn(record):
    """Also as a number of seconds or items, by which others are divided."""
    fields = ("loss", "grad_norm", "count", "seconds", "epoch", "loss_terms", "dropped_micro_batches", "learning_rate")
    lines = []
    for number in ("1e308", "-1e308", "1" * 400, "5e-324", "1e999", "NaN", '"1"', "[[1]]", "{}", "true"):
        values = ", ".join(f'"{field}": {number}' for field in fields)
        lines.append(f'{{"update": {len(lines) + 1}, {values}}}\n')
    page = report(record(*lines))
    assert "Loss" in page.sections
    assert not re.search(r'd="[^"]*(nan|inf)', page.text)


def test_several_files_are_drawn_beside_each_other(record):
    a, b = (record(line(1), line(2), line(3), name=name) for name in ("a.jsonl", "_b & $c$ <b>.jsonl"))
    page = report(a, b)
    assert len(page.curves("Loss")) == 2
    assert page.text.count("a.jsonl</dd>") == 1 and page.text.count("<dd>3</dd>") == 2
    assert "a.jsonl</span>" in page.sections["Loss"]
    assert "_b &amp; $c$ &lt;b&gt;.jsonl</span>" in page.sections["Loss"]


def test_a_file_without_a_window_is_one_line_and_no_page(record, capsys):
    for text, message in (
        ("\n", "it is empty: no window has ended yet"),
        ('{"update": 1, "accumulation_steps": 4}\n', "line 1 is no window of a WindowMonitor"),
    ):
        path = record(text)
        assert error_of(capsys, path) == f"error: '{path}' holds no record: {message}; see --help\n"
        assert not path.with_suffix(".html").exists()


def test_what_cannot_be_read_or_written_is_named(record, tmp_path, capsys):
    for words in ((tmp_path / "missing",), (record(line(1)), "--output", tmp_path / "no" / "page"), (), (tmp_path,)):
        assert re.fullmatch("error: [^\n]*(cannot read|cannot write|required)[^\n]*\n", error_of(capsys, *words))


def test_a_record_is_not_overwritten(record, tmp_path, capsys):
    """A shell may put two records behind `-o` ."""
    first, second = (record(line(n), name=f"r{n}.jsonl") for n in (1, 2))
    as_page = record(line(3), name="r3.html")
    (tmp_path / "link").symlink_to(second)
    for words in (["-o", first, second], ["-o", tmp_path / "link", second], [as_page]):
        message = "error: cannot write '[^']*': it exists and is no HTML page[^\n]*\n"
        assert re.fullmatch(message, error_of(capsys, *words))
    assert [path.read_text() for path in (first, second, as_page)] == [line(1), line(2), line(3)]


def test_a_page_is_written_anew_beside_the_record_by_default(record, capsys):
    path = record(line(1))
    page = path.with_suffix(".html")
    page.touch()  # as mktemp does
    for _ in range(2):
        assert command.main([str(path)]) == 0
        assert capsys.readouterr().out == f"1 windows: {page}\n"
    assert Page(page).sections
    assert command.main([str(path), "-o", "-"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("</html>")


def test_without_the_extra_there_is_one_clear_error(record, monkeypatch, capsys):
    for importing in ("page", "plots"):
        monkeypatch.delitem(sys.modules, f"gaccum_ms.report.{importing}", raising=False)
    for module in ("jinja2", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    path = record(line(1))
    error = error_of(capsys, path)
    assert error.startswith("error: matplotlib and Jinja2 must be installed, but")
    assert error.endswith(" (pip install 'gaccum_ms[report]'); see --help\n")
    assert error.count("\n") == 1
    assert "jinja2" in error
    assert not path.with_suffix(".html").exists()
