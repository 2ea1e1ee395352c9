"""README, docs and docstrings are correct: every example runs, and prints the output that they show."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
from pathlib import Path

import pytest
from mindspore import nn

import gaccum_ms
from tests.support.modes import MODES

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
HOWTO = ROOT / "docs" / "howto"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("name", gaccum_ms.__all__)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tests = doctest.DocTestFinder(recurse=False).find(getattr(gaccum_ms, name), name, globs={})
    assert sum(len(test.examples) for test in tests) > 0, f"{name} has no example"
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_docstrings_have_mindspores_form():
    for name in gaccum_ms.__all__:
        item = getattr(gaccum_ms, name)
        text = inspect.getdoc(item)
        is_cell = inspect.isclass(item) and issubclass(item, nn.Cell)
        results = ("Inputs:", "Outputs:") if is_cell else () if inspect.isclass(item) else ("Returns:",)
        for section in ("Args:", *results, "Raises:", "Supported Platforms:", "Examples:"):
            assert section in text, f"{name} lacks '{section}'"
        documented = set(re.findall(r"^    \**(\w+) \(", text, re.MULTILINE))
        assert documented == set(inspect.signature(item).parameters), name


def numbers_apart(text: str) -> tuple[str, list[float]]:
    """The text without its numbers, and the numbers, whose last digits depend on the machine."""
    number = r"\d+\.\d+"
    return re.sub(number, "#", text.strip()), [float(found) for found in re.findall(number, text)]


# A notebook of a page's programs: each has its own names, and MindSpore is imported once.
SESSION = """
import runpy, sys
import mindspore as ms

mode = ms.get_context("mode")
for program in sys.argv[1:]:
    sys.argv = [program]
    ms.set_context(mode=mode)
    print(end="\\f")
    runpy.run_path(program, run_name="__main__")
"""


@pytest.fixture
def run_programs(programs, tmp_path):
    """A function that runs programs, one after another in one process, and returns what each prints."""

    def run(*sources: str) -> list[str]:
        session = tmp_path / "session.py"
        session.write_text(SESSION)
        files = [tmp_path / f"program_{number}.py" for number in range(len(sources))]
        for file, source in zip(files, sources, strict=True):
            file.write_text(source)
        done = programs.run(session, *map(str, files), folder=tmp_path, MS_DEV_HOST_BLOCKING_RUN="1")
        assert done.returncode == 0, done.stderr[-2000:]
        assert "eliminated by mistake" not in done.stderr, "MindSpore warns of what a graph names and does not use"
        return done.stdout.split("\f")[1:]

    return run


def in_both_modes(source: str) -> list[str]:
    return [f"import mindspore\nmindspore.set_context(mode={int(mode)})\n{source}" for mode in MODES.values()]


def assert_prints(printed: str, shown: str) -> None:
    (shown_text, shown_numbers), (text, numbers) = numbers_apart(shown), numbers_apart(printed)
    assert text == shown_text
    assert numbers == pytest.approx(shown_numbers, rel=2e-3)
    assert len(numbers) >= 3


TESTED_BELOW = {"README.md", "flow.md", "language_model.md"}
WITH_PROGRAMS = [page for page in PAGES if code_blocks(page, "python") and page.name not in TESTED_BELOW]


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_programs_print_what_the_docs_show(page, run_programs):
    sources = code_blocks(page, "python")
    if any(re.search(r"^from mindcv", source, re.MULTILINE) for source in sources):
        pytest.importorskip("mindcv", reason="mindcv is in the extra 'test'", exc_type=ImportError)
    for printed, shown in zip(run_programs(*sources), code_blocks(page, "text"), strict=True):
        assert_prints(printed, shown)


def test_the_readmes_program_prints_the_same_in_both_modes(run_programs):
    (source,), (shown,) = code_blocks(README, "python"), code_blocks(README, "text")
    for printed in run_programs(*in_both_modes(source)):
        assert_prints(printed, shown)


def test_one_word_changes_a_script_that_trains_evaluates_predicts_and_exports(run_programs):
    page = ROOT / "docs" / "flow.md"
    (plain,), (diff,), (shown,) = (code_blocks(page, kind) for kind in ("python", "diff", "text"))
    ours, removed, added = re.fullmatch(r"\+(.*\n)\n-(.*\n)\+(.*\n)", diff).groups()
    assert plain.count(removed) == plain.count("Model(net,") == 1
    assert removed.replace("(net,", "(GradAccumulationCell(net, 4),") == added
    changed = plain.replace(removed, ours + added)
    printed, *printed_by_changed = run_programs(plain, *in_both_modes(changed))
    assert_prints(printed, shown)
    text, numbers = numbers_apart(printed)
    for changed_text, changed_numbers in map(numbers_apart, printed_by_changed):
        assert changed_text == text
        assert changed_numbers == pytest.approx(numbers, rel=1e-4)


def test_programs_and_what_they_print_come_in_pairs():
    """The tests would not run a program that has no output."""
    for page in PAGES:
        fences = [fence for fence in re.findall(r"```(\w+)", page.read_text()) if fence in ("python", "text")]
        assert fences == ["python", "text"] * (len(fences) // 2), page.name


def test_pytorchs_loop_prints_what_ours_prints(run_programs):
    pytest.importorskip("torch", reason="PyTorch is in the extra 'torch'", exc_type=ImportError)
    page = HOWTO / "pytorch.md"
    _, weights = numbers_apart(code_blocks(page, "text")[0])  # after each update of ours
    (printed,) = run_programs(*code_blocks(page, "py"))
    _, numbers = numbers_apart(printed)
    assert len(weights) == 12
    assert numbers == pytest.approx(weights, abs=1e-4)


def test_the_language_model_goes_on_after_a_kill_as_if_it_had_not_been(programs, tmp_path):
    """Both processes together print what the page shows. The first compiles nothing: it is in PyNative mode."""
    (script,), (shown,) = (code_blocks(ROOT / "docs" / "language_model.md", kind) for kind in ("python", "text"))
    assert script.endswith('.ckpt")\n')
    dies = """
            if batch == 25:
                print(end="", flush=True)
                __import__("os").kill(__import__("os").getpid(), 9)
"""
    printed = ""
    assert script.count("GRAPH_MODE") == 1
    for name, text in ("dies", script.replace("GRAPH_MODE", "PYNATIVE_MODE") + dies), ("goes_on", script):
        (tmp_path / f"{name}.py").write_text(text)
        done = programs.run(tmp_path / f"{name}.py", folder=tmp_path, MS_DEV_HOST_BLOCKING_RUN="1")
        assert (done.returncode == 0) == (name == "goes_on"), done.stderr[-2000:]
        printed += done.stdout
    assert_prints(printed, shown)
    assert len((tmp_path / "windows.jsonl").read_text().splitlines()) == 10


def test_both_readmes_say_the_same_in_the_same_order():
    """Headings, tables, code and links; so the programs, which run from README.md, need not run twice."""
    english, chinese = README.read_text(), (ROOT / "README_CN.md").read_text()
    assert "](README_CN.md)" in english and "](README.md)" in chinese
    for kind in (r"^#+ ", r"^\|", r"^```(\w*)\n((?:.*\n)*?)```", r"\]\(((?!README)[^)]+)\)"):
        found = [re.findall(kind, text, re.MULTILINE) for text in (english, chinese)]
        assert found[0] == found[1] != [], kind
    links = re.findall(r"\]\(([^)#]+)", english + chinese)
    assert all((ROOT / link).exists() for link in links)
    commands = "".join(code_blocks(README, "bash")).split("\n")
    assert {"pip install .", "gaccum-ms check", "bash run.sh", "bash run.sh test"} <= set(commands)
    assert max(len(text.splitlines()) for text in (english, chinese)) <= 130
    assert "Nothing has run on Ascend" in english and "尚未在昇腾上运行过" in chinese


def test_the_project_speaks_of_itself_alone():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the tracked files are not known")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".sh", ".toml", ".txt", ".yml", ""}:
            text = path.read_text(errors="ignore")
            assert not re.search(r"/wor[k]/|\.\./share[d]|/hom[e]/\w|/roo[t]/", text), name
