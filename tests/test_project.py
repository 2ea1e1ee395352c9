"""Files around the code agree with it: versions, the workflow, the templates."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import gaccum_ms
from tests.support.spread import weekly_tests

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra 'test'")
ROOT = Path(__file__).resolve().parents[1]


def read(path: str) -> str:
    return (ROOT / path).read_text()


def test_the_version_is_the_same_everywhere():
    version = gaccum_ms.__version__
    assert f'version="{version}"' in read("setup.py")
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    assert re.findall(r"^## \[([\d.]+)\] - (?:Unreleased|\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.M)[0] == version


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/README.md"])
def test_links_lead_to_files(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)", read(page)) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_workflow_calls_run_sh_and_nothing_else():
    """It covers each Python that setup.py accepts, and MindSpore from the oldest version that setup.py accepts."""
    jobs = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["bash run.sh lint", "bash run.sh docs", 'bash run.sh test --mindspore "$MINDSPORE"']
    matrix = jobs["tests"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", read("setup.py"))
    least, above = re.search(r"mindspore>=([\d.]+),<([\d.]+)", read("setup.py")).groups()
    versions = [tuple(map(int, version.split("."))) for version in matrix["mindspore"]]
    assert versions[0] == tuple(map(int, least.split(".")))
    assert all(version < tuple(map(int, above.split("."))) for version in versions)


def test_the_weekly_tests_and_all_faults_run_by_schedule():
    workflow = yaml.safe_load(read(".github/workflows/weekly.yml"))
    assert "schedule" in workflow[True], "YAML reads the key `on` as true"
    commands = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert {f"bash run.sh test {word}" for word in ("weekly", "mutations")} <= set(commands)


def test_the_weekly_tests_are_few_and_exist():
    assert 0 < len(weekly_tests(ROOT / "tests" / "weekly.txt")) <= 40
    for name in weekly_tests(ROOT / "tests" / "weekly.txt"):
        file, function = name.partition("[")[0].split("::")
        assert f"\ndef {function}(" in read(f"tests/{file}"), name


def test_whatever_the_package_prints_is_ascii():
    """So a terminal, a log or a pipe of any encoding can take it. Docstrings and comments are not printed."""
    for file in (ROOT / "gaccum_ms").rglob("*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert node.value.isascii(), f"{file}, line {node.lineno}: {node.value!r}"


def test_scripts_keep_their_line_ends_on_windows():
    """With others, bash says `set: pipefail: invalid option name`."""
    scripts = [
        str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.sh"), *ROOT.glob("sample_code/*/*.sh"), ROOT / ".ci/run"]
    ]
    command = ["git", "check-attr", "eol", *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this folder is no git checkout")
    assert done.stdout.splitlines() == [f"{script}: eol: lf" for script in scripts]
