"""`gaccum-ms report`: pages of records of every kind, complete and broken."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gaccum_ms.report import command
from gaccum_ms.report.chart import Axis, Series, line_chart, standalone
from gaccum_ms.report.records import RecordError, read

VOID = {"meta"}
CHARTS = ("Loss", "Gradient norm", "Noise scale", "Window size", "Batches", "Learning rate", "Skipped updates")
CHARTS += ("Loss scale", "Time")


def line(update: int, updated: bool = True, **fields) -> str:
    numbers = {"update": update, "updated": updated, "epoch": 1, "batches": 4, "loss": 1 / (update + 1), "count": 64.0}
    numbers |= {"dropped_micro_batches": 0, "grad_norm": 2.0, "noise_scale": 300.0, "loss_scale": None}
    numbers |= {"learning_rate": 0.1, "seconds": 0.5, "loss_terms": None}
    return json.dumps(numbers | fields) + "\n"


@pytest.fixture
def record(tmp_path):
    def write(*lines: str, name: str = "windows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(lines))
        return path

    return write


class Page(HTMLParser):
    """Parses a page: checks that all elements are closed, and collects the sections and all addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []
        self.sections = {}
        for section in re.findall(r"<section>(.*?)</section>", text, re.DOTALL):
            self.sections[re.search("<h2>(.*?)</h2>", section)[1]] = section

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href") or "://" in (value or "")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for _, value in attrs if "://" in (value or "")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def lines(self, title: str) -> int:
        """The number of lines in a chart, without its legend."""
        chart = ElementTree.fromstring(re.search(r"<svg.*</svg>", self.sections[title], re.DOTALL)[0])
        paths = [one.get("d") for one in chart.iter("path") if one.get("class") == "line"]
        return sum("h18" not in path for path in paths)


def report(*paths: Path, capsys=None) -> Page:
    output = paths[0].parent / "out.html"
    assert command.main([*map(str, paths), "-o", str(output)]) == 0
    return Page(output.read_text())


def test_a_chart_for_each_number_and_no_address(record):
    page = report(record(*(line(n, loss_scale=1024.0) for n in range(1, 9)), line(8, False, loss=None), line(9)))
    assert tuple(page.sections) == CHARTS
    assert page.addresses == []
    assert {title: page.lines(title) for title in CHARTS if title != "Loss"} == dict.fromkeys(CHARTS[1:], 1)
    assert page.lines("Loss") == 1, "the point after the gap is a dot"
    assert page.sections["Loss"].count("<circle") == 1


def test_what_was_not_recorded_is_said_with_its_option(record):
    page = report(record(*(line(n, grad_norm=None, noise_scale=None, count=None) for n in range(1, 4))))
    assert "needs record_noise=True" in page.sections["Noise scale"]
    assert "needs max_grad_norm=" in page.sections["Gradient norm"]
    assert "every window made its update" in page.sections["Skipped updates"]
    assert "<svg" not in page.sections["Window size"]


def test_a_last_line_that_is_cut_short_is_left_out(record, capsys):
    whole = line(3)
    page = report(record(line(1), line(2), whole[: len(whole) // 2]))
    assert page.lines("Loss") == 1
    assert capsys.readouterr().err == "note: windows.jsonl: the last line is cut short, which was left out\n"


def test_a_line_that_a_crash_has_spoilt_is_left_out(record, capsys):
    report(record(line(1), line(2)[:30] + line(2), line(3)))
    assert capsys.readouterr().err == "note: windows.jsonl: no window in line 2, which was left out\n"


def test_a_resumed_training_replaces_what_came_after_its_checkpoint(record, capsys):
    """It writes update 3 again. A window that was dropped replaces nothing, and neither does the update after it."""
    path = record(line(1), line(1, False), line(1, False), line(2), line(3), line(4), line(3), line(4), line(5))
    found = read(path)
    assert [window.update for window in found.windows] == [1, 2, 2, 2, 3, 4, 5]
    assert [window.skipped for window in found.windows] == [0, 1, 2, 2, 2, 2, 2]
    assert [[window.update for window in piece] for piece in found.replaced] == [[3, 4]]
    page = report(path)
    assert page.lines("Loss") == 2
    assert "opacity" in page.sections["Loss"]
    capsys.readouterr()
    assert command.main([str(path), "-o", "-"]) == 0
    assert "windows.jsonl: the training was resumed" in capsys.readouterr().out


def test_a_training_that_began_anew_replaces_all(record):
    found = read(record(line(1), line(2), line(2, False), line(1), line(2)))
    assert [window.update for window in found.windows] == [1, 2]
    assert found.windows[-1].skipped == 0
    assert [len(piece) for piece in found.replaced] == [3]


def test_several_files_are_drawn_beside_each_other(record):
    a, b = (record(line(1), line(2), line(3), name=name) for name in ("a.jsonl", "b & c.jsonl"))
    page = report(a, b)
    assert page.lines("Loss") == 2
    assert "b &amp; c.jsonl</text>" in page.sections["Loss"]


def test_terms_of_several_losses_have_a_chart(record):
    page = report(record(*(line(n, loss_terms=[1.0, n], count=None) for n in range(1, 4))))
    assert page.lines("Loss terms") == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "it is empty: no window has ended yet"),
        (["\n"], "it is empty: no window has ended yet"),
        (["some text\n"], "line 1 is no window of a WindowMonitor"),
        (['{"update": 1, "accumulation_steps": 4}\n'], "line 1 is no window of a WindowMonitor"),
        (["[1]\n"], "line 1 is no window of a WindowMonitor"),
    ],
)
def test_a_file_without_a_window_is_one_line_and_no_page(record, lines, message, capsys):
    path = record(*lines)
    with pytest.raises(SystemExit) as ended:
        command.main([str(path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: '{path}' holds no record: {message}; see --help\n"
    assert not path.with_suffix(".html").exists()


def test_what_cannot_be_read_or_written_is_named(record, tmp_path, capsys):
    for words in ([str(tmp_path / "missing")], [str(record(line(1))), "--output", str(tmp_path / "no" / "page")], []):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2
        assert re.fullmatch("error: [^\n]*(cannot read|cannot write|required)[^\n]*\n", capsys.readouterr().err)
    with pytest.raises(RecordError, match="Is a directory"):
        read(tmp_path)


def test_a_record_is_not_overwritten(record, tmp_path, capsys):
    """A shell may put two records behind `-o` ."""
    first, second = (record(line(n), name=f"r{n}.jsonl") for n in (1, 2))
    as_page = record(line(3), name="r3.html")
    (tmp_path / "link").symlink_to(second)
    for words, why in (
        (["-o", first, second], "it exists and is no HTML page"),
        (["-o", tmp_path / "link", second], "it is a record"),
        ([as_page], "it is a record"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main([*map(str, words)])
        assert ended.value.code == 2
        assert re.fullmatch(f"error: cannot write '[^']*': {why}[^\n]*\n", capsys.readouterr().err)
    assert [path.read_text() for path in (first, second, as_page)] == [line(1), line(2), line(3)]


def test_a_page_is_written_anew(record, tmp_path):
    path, page = record(line(1)), tmp_path / "page.html"
    page.touch()  # as mktemp does
    for _ in range(2):
        assert command.main([str(path), "-o", str(page)]) == 0
    assert Page(page.read_text()).sections
    assert command.main([str(path), "-o", os.devnull]) == 0


def test_the_page_is_beside_the_record_by_default(record, capsys):
    path = record(line(1))
    assert command.main([str(path)]) == 0
    assert capsys.readouterr().out == f"1 windows: {path.with_suffix('.html')}\n"


def test_a_long_training_is_a_small_page(record):
    """The only peak of 50,000 windows is drawn."""
    lines = [line(n, loss=100.0 if n == 31_234 else 1 + math.sin(n) / 2) for n in range(1, 50_001)]
    path = record(*lines)
    page = report(path)
    assert path.with_name("out.html").stat().st_size < 300_000
    (drawn,) = re.findall(r'class="line"[^>]* d="M([^"]*)"', page.sections["Loss"])
    heights = [float(point.split()[1]) for point in drawn.split("L")]
    assert sum(height < 20 for height in heights) == 1


# -- charts ------------------------------------------------------------------------------------------------------------


def texts(chart: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)<", chart)


@pytest.mark.parametrize(
    ("values", "log", "ticks"),
    [
        ((0.0, 10.0), False, ["0", "2", "4", "6", "8", "10"]),
        ((0.1, 0.5), None, ["0.1", "0.2", "0.3", "0.4", "0.5"]),
        ((1e-4, 1.0), None, ["0.0001", "0.001", "0.01", "0.1", "1"]),
        ((3.0, 3.0), False, ["2", "3", "4"]),
        ((0.0, 0.0), None, ["-0.4", "-0.2", "0", "0.2", "0.4"]),
        ((1e9, 2e9), False, ["1e+09", "1.2e+09", "1.4e+09", "1.6e+09", "1.8e+09", "2e+09"]),
    ],
)
def test_ticks_are_round(values, log, ticks):
    chart = line_chart([Series("", list(enumerate(values)))], Axis("x", ticks=(0,)), Axis("y", log), "a title")
    assert texts(chart) == [*ticks, "0", "x", "y"]


def test_what_is_drawn_lies_in_the_chart():
    series = [Series(f"name {n}", [(x, x**n) for x in range(1, 50)], n) for n in range(4)]
    chart = standalone(line_chart(series, Axis("x", log=True), Axis("y", log=True), "<title> & more"))
    root = ElementTree.fromstring(chart)
    name = "{http://www.w3.org/2000/svg}"
    numbers = [
        tuple(map(float, point.split()))
        for path in root.iter(f"{name}path")
        if path.get("class") == "line" and "h18" not in path.get("d")
        for point in path.get("d")[1:].split("L")
    ]
    assert len(numbers) == 4 * 49
    assert all(0 <= x <= 480 and 0 <= y <= 260 for x, y in numbers)
    assert [one.text for one in root.iter(f"{name}text")][-4:] == ["name 0", "name 1", "name 2", "name 3"]
