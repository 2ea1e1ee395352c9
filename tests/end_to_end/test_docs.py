"""README, docs and docstrings are correct: every example runs, and prints the output that they show."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
from pathlib import Path

import numpy as np
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


@pytest.mark.core(name="GradAccumulationCell")
@pytest.mark.parametrize("name", gaccum_ms.__all__)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    item = getattr(gaccum_ms, name)
    tests = doctest.DocTestFinder(recurse=False).find(item, name, globs={})
    assert sum(len(test.examples) for test in tests) > 0, f"{name} has no example"
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", gaccum_ms.__all__)
def test_docstrings_have_mindspores_form(name):
    item = getattr(gaccum_ms, name)
    text = inspect.getdoc(item)
    is_cell = inspect.isclass(item) and issubclass(item, nn.Cell)
    results = ("Inputs:", "Outputs:") if is_cell else () if inspect.isclass(item) else ("Returns:",)
    for section in ("Args:", *results, "Raises:", "Supported Platforms:", "Examples:"):
        assert section in text, f"{name} lacks '{section}'"
    documented = set(re.findall(r"^    \**(\w+) \(", text, re.MULTILINE))
    parameters = set(inspect.signature(item).parameters)
    assert documented == parameters


def test_everything_exported_exists_and_nothing_else_is_public():
    assert sorted(gaccum_ms.__all__) == list(gaccum_ms.__all__)
    assert all(getattr(gaccum_ms, name) is not None for name in gaccum_ms.__all__)
    public = {name for name, value in vars(gaccum_ms).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(gaccum_ms.__all__)


def numbers_apart(text: str) -> tuple[str, list[float]]:
    """The text without its numbers, and the numbers, whose last digits depend on the machine."""
    number = r"\d+\.\d+"
    return re.sub(number, "#", text.strip()), [float(found) for found in re.findall(number, text)]


PROGRAMS = [
    pytest.param(source, shown, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (source, shown) in enumerate(
        zip(code_blocks(page, "python"), code_blocks(page, "text"), strict=True), start=1
    )
]


@pytest.fixture
def run_program(programs, tmp_path):
    """A function that runs a program and returns its output."""

    def run(source: str) -> str:
        script = tmp_path / "program.py"
        script.write_text(source)
        result = programs.run(script, folder=tmp_path)
        assert result.returncode == 0, result.stderr[-2000:]
        assert "eliminated by mistake" not in result.stderr, "MindSpore warns of what a graph names and does not use"
        return result.stdout

    return run


@pytest.mark.core("README.md-1", "tokens.md-2")
@pytest.mark.parametrize(("source", "shown"), PROGRAMS)
def test_programs_print_what_the_docs_show(source, shown, run_program):
    if re.search(r"^from mindcv", source, re.MULTILINE):
        pytest.importorskip("mindcv", reason="mindcv is in the extra 'test'", exc_type=ImportError)
    (shown_text, shown_numbers), (text, numbers) = numbers_apart(shown), numbers_apart(run_program(source))
    assert text == shown_text
    assert numbers == pytest.approx(shown_numbers, rel=2e-3)
    assert len(numbers) >= 3


@pytest.fixture
def changed_script(run_program):
    """A function that runs the script of docs/flow.md in a mode, with this around the network in its one changed line;
    it returns the output without its numbers, and the numbers."""
    page = ROOT / "docs" / "flow.md"
    (plain,), (diff,) = code_blocks(page, "python"), code_blocks(page, "diff")
    ours, removed, added = re.fullmatch(r"\+(.*\n)\n-(.*\n)\+(.*\n)", diff).groups()

    def run(mode: str, around: str | None) -> tuple[str, list[float]]:
        script = plain.replace("ms.set_seed(1)", f"ms.set_context(mode={int(MODES[mode])})\nms.set_seed(1)")
        if around is not None:
            assert script.count(removed) == script.count("Model(net,") == 1
            assert removed.replace("(net,", f"({WORD},") == added
            script = script.replace(removed, ours + added.replace(WORD, around))
        return numbers_apart(run_program(script))

    return run


WORD = "GradAccumulationCell(net, 4)"


@pytest.mark.core("graph")
@pytest.mark.parametrize("mode", MODES)
def test_one_word_changes_a_script_that_trains_evaluates_predicts_and_exports(mode, changed_script):
    text, numbers = changed_script(mode, None)
    changed_text, changed_numbers = changed_script(mode, WORD)
    assert changed_text == text
    assert changed_numbers == pytest.approx(numbers, rel=1e-4)
    assert len(numbers) == 9


@pytest.mark.thorough
def test_another_loss_prints_other_numbers(changed_script):
    """So that the test above finds a wrong update."""
    _, numbers = changed_script("graph", WORD)
    _, others = changed_script("graph", "GradAccumulationCell(net, 4, max_grad_norm=0.01)")
    assert others != pytest.approx(numbers, rel=1e-2)


def test_programs_and_what_they_print_come_in_pairs():
    """The tests would not run a program that has no output."""
    for page in PAGES:
        fences = [fence for fence in re.findall(r"```(\w+)", page.read_text()) if fence in ("python", "text")]
        assert fences == ["python", "text"] * (len(fences) // 2), page.name


def test_what_is_read_first_is_short():
    for page in HOWTO.glob("*.md"):
        for program in code_blocks(page, "python"):
            assert len(program.splitlines()) <= 40, page.name
            assert "matplotlib" not in program, page.name


def test_the_way_to_a_first_training_of_ones_own_is_short():
    """README until after its example and what starts a script, then the page that shows the change in a whole script.
    English words, code included; Chinese characters."""
    pofile = pytest.importorskip("babel.messages.pofile", reason="babel comes with Sphinx, of the extra 'test'")
    page = ROOT / "docs" / "flow.md"
    english, script = README.read_text().split("\n## When")[0], page.read_text().split("\n## Where")[0]
    assert "gaccum-ms run --processes 8 train.py" in english and "(docs/flow.md)" in README.read_text()
    assert 400 < len((english + script).split()) <= 900
    catalog = ROOT / "docs" / "locale" / "zh_CN" / "LC_MESSAGES" / "flow.po"
    texts = [message.string for message in pofile.read_po(catalog.read_text().splitlines(True)) if message.id]
    chinese = (ROOT / "README_CN.md").read_text().split("\n## 遇到")[0]
    assert "gaccum-ms run --processes 8 train.py" in chinese
    chinese += "".join(texts[: texts.index("损失在哪里计算")])
    assert 400 < len(re.findall("[一-鿿]", chinese)) <= 1500


def test_pytorchs_loop_prints_what_ours_prints(run_program):
    pytest.importorskip("torch", reason="PyTorch is in the extra 'torch'", exc_type=ImportError)
    page = HOWTO / "pytorch.md"
    (torchs,) = code_blocks(page, "py")
    _, weights = numbers_apart(code_blocks(page, "text")[0])  # after each update of ours
    _, numbers = numbers_apart(run_program(torchs))
    assert len(weights) == 12
    assert numbers == pytest.approx(weights, abs=1e-4)


def whole_windows(samples, window, epochs, rate, momentum=0.0, decay=1.0, max_norm=np.inf) -> np.ndarray:
    """The weight of a linear network after each update with a whole window, in NumPy."""
    x = np.random.default_rng(0).normal(size=(samples, 3)).astype(np.float32)
    x, y = np.column_stack((x, np.ones(samples))), x.sum(axis=1)
    weight, moment, weights = np.zeros(4), np.zeros(4), []
    for rows in [slice(start, start + window) for start in range(0, samples, window)] * epochs:
        gradient = 2 * x[rows].T @ (x[rows] @ weight - y[rows]) / len(x[rows])
        moment = momentum * moment + gradient * min(1, max_norm / np.linalg.norm(gradient))
        weight = weight - rate * decay ** len(weights) * moment
        weights.append(weight[:3])
    return np.concatenate(weights)


@pytest.mark.core(page="windows.md")
@pytest.mark.parametrize(
    ("page", "samples", "expected"),
    [
        ("windows.md", (38, 38), lambda: whole_windows(38, 20, 1, 0.1)),
        ("howto/pytorch.md", (64, 61), lambda: whole_windows(61, 32, 2, 0.1, 0.9, 0.8, 1.0)),
    ],
)
def test_loops_of_the_docs_are_right_on_a_short_last_batch(page, samples, expected, run_program):
    loop = code_blocks(ROOT / "docs" / page, "python")[0]
    assert loop.count(f"({samples[0]}, 3)") == loop.count("accumulator(gradients)") == 1
    loop = loop.replace(f"({samples[0]}, 3)", f"({samples[1]}, 3)")
    _, weights = numbers_apart(run_program(loop))
    assert weights == pytest.approx(expected(), abs=2e-4)
    mindspores = re.sub(
        r"accumulator\.value_and_grad\((.*)\)", r"ms.value_and_grad(\1, None, accumulator.weights)", loop
    )
    assert mindspores != loop
    _, alike = numbers_apart(run_program(mindspores))
    assert alike != pytest.approx(expected(), abs=2e-3)


@pytest.mark.thorough
def test_the_language_model_goes_on_after_a_kill_as_if_it_had_not_been(programs, tmp_path):
    (script,), (shown,) = (code_blocks(ROOT / "docs" / "language_model.md", kind) for kind in ("python", "text"))
    assert script.endswith('.ckpt")\n')
    dies = "            if batch == 25:\n                __import__('os').kill(__import__('os').getpid(), 9)\n"
    outputs = []
    for name, text in ("dies", script + dies), ("goes_on", script):
        (tmp_path / f"{name}.py").write_text(text)
        result = programs.run(tmp_path / f"{name}.py", folder=tmp_path)
        assert (result.returncode == 0) == (name == "goes_on"), result.stderr[-2000:]
        outputs.append(result.stdout)
    (shown_text, shown_numbers), (text, numbers) = map(numbers_apart, ("".join(shown.splitlines(True)[3:]), outputs[1]))
    assert text == shown_text
    assert numbers == pytest.approx(shown_numbers, rel=2e-3)
    assert len((tmp_path / "windows.jsonl").read_text().splitlines()) == 10
    scheduler = re.sub(", scheduler=scheduler", "", script)
    (tmp_path / "forgets.py").write_text(scheduler)
    result = programs.run(tmp_path / "forgets.py", folder=tmp_path)
    assert "has a scheduler's state, but the accumulator has no scheduler" in result.stderr


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
