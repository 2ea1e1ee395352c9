"""The requirements of MindSpore's GPU back end, without a GPU: the libraries are real, the driver returns 'no
device'."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaccum_ms.launch import cuda
from tests.launch.launched import PYTHONPATH, ROOT
from tests.support import no_device


@pytest.fixture(scope="module")
def libraries() -> None:
    if missing := cuda.missing_packages():
        pytest.skip(f"the extra 'gpu' is not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """A folder with a driver for a machine that has no GPU."""
    if no_device.compiler() is None:
        pytest.skip("there is no C compiler to build a driver without a GPU with")
    folder = tmp_path_factory.mktemp("driver")
    no_device.make_driver(folder)
    return folder


def with_driver(driver: Path, *command: str, **variables: str) -> subprocess.CompletedProcess:
    env = {**{k: v for k, v in os.environ.items() if k != "CUDA_HOME"}, "LD_LIBRARY_PATH": str(driver)}
    env |= {"PYTHONPATH": PYTHONPATH, **variables}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=600)


def laid_out(tmp_path: Path, driver: Path, monkeypatch) -> dict[str, str]:
    """The environment that the launcher would make with that driver."""
    monkeypatch.setattr(cuda, "DRIVER", str(driver / cuda.DRIVER))
    return cuda.environment(tmp_path / "cu da", {"LD_LIBRARY_PATH": str(driver)})


def test_without_a_driver_nothing_is_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "DRIVER", "libcuda_that_is_not_there.so.1")
    assert cuda.environment(tmp_path / "cuda", {}) == {}
    assert not (tmp_path / "cuda").exists()


def test_a_cuda_of_the_users_own_is_kept(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "DRIVER", str(driver / cuda.DRIVER))
    assert cuda.environment(tmp_path / "cuda", {"CUDA_HOME": "/usr/local/cuda"}) == {}


def test_missing_packages_are_named_as_pip_knows_them(monkeypatch, tmp_path):
    for folder, library in (("cublas", "libcublas.so.11"), ("cudnn", "libcudnn.so.9")):
        (tmp_path / "nvidia" / folder / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / folder / "lib" / library).touch()
    monkeypatch.setattr(cuda, "folders", lambda name: [tmp_path / name])
    missing = cuda.missing_packages()
    assert "nvidia-cublas-cu11" not in missing
    assert "nvidia-cudnn-cu11" in missing, "version 9 is not version 8"
    assert len(missing) == len(cuda.LIBRARIES) - 1
    setup = (ROOT / "setup.py").read_text()
    assert all(f'"{package}' in setup for package in cuda.LIBRARIES.values())


@pytest.mark.thorough
def test_mindspore_loads_its_gpu_back_end_and_misses_nothing_but_the_device(libraries, driver, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import mindspore as ms\nms.set_device('GPU')\nprint(ms.Tensor([1.0]) + 1)")
    bare = with_driver(driver, str(script))
    assert "Unsupported device target GPU" in bare.stderr, "without the environment there is no such back end"
    variables = laid_out(tmp_path, driver, monkeypatch)
    done = with_driver(driver, str(script), **variables)
    assert done.returncode != 0
    assert "Unsupported device target" not in done.stderr
    assert "CUDA driver version is insufficient" in done.stderr
    assert "[WARNING]" not in done.stderr, "MindSpore's check of CUDA's version is content"


def test_the_launcher_hands_the_environment_to_the_ranks(libraries, driver, tmp_path):
    script = tmp_path / "script.py"
    script.write_text('import os\nprint(os.environ["CUDA_HOME"])\nprint(os.environ["LD_LIBRARY_PATH"])')
    options = ["-n", "1", "--timeout", "60", "--log-dir", str(tmp_path / "log")]
    done = with_driver(driver, "-m", "gaccum_ms.launch", *options, str(script))
    assert done.returncode == 0, done.stderr
    home, search, *_ = done.stdout.splitlines()
    assert home == f"{tmp_path}/log/.cuda"
    assert f"{home}/lib64" in search.split(os.pathsep)
