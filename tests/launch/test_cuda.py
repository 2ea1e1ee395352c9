"""The requirements of MindSpore's GPU back end, without a GPU: the libraries are real, the driver returns 'no
device'."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaccum_ms.launch import cuda
from tests.launch.launched import PYTHONPATH
from tests.support import no_device


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """A folder with a driver for a machine that has no GPU."""
    if no_device.compiler() is None:
        pytest.skip("there is no C compiler to build a driver without a GPU with")
    folder = tmp_path_factory.mktemp("driver")
    no_device.make_driver(folder)
    return folder


def test_without_a_driver_nothing_is_changed_and_a_cuda_of_the_users_own_is_kept(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "DRIVER", str(driver / cuda.DRIVER))
    assert cuda.environment(tmp_path / "cuda", {"CUDA_HOME": "/usr/local/cuda"}) == {}
    monkeypatch.setattr(cuda, "DRIVER", "libcuda_that_is_not_there.so.1")
    assert cuda.environment(tmp_path / "cuda", {}) == {}
    assert not (tmp_path / "cuda").exists()


def test_mindspore_loads_its_gpu_back_end_on_each_rank_and_misses_nothing_but_the_device(driver, tmp_path):
    if missing := cuda.missing_packages():
        pytest.skip(f"the extra 'gpu' is not installed: {', '.join(missing)}")
    script = tmp_path / "script.py"
    script.write_text(
        'import os\nprint(os.environ["CUDA_HOME"], os.environ["LD_LIBRARY_PATH"], flush=True)\n'
        'import mindspore as ms\nms.set_device("GPU")\nprint(ms.Tensor([1.0]) + 1)'
    )
    options = ["-n", "1", "--timeout", "300", "--log-dir", str(tmp_path / "lo g")]
    env = {**{k: v for k, v in os.environ.items() if k != "CUDA_HOME"}, "LD_LIBRARY_PATH": str(driver)}
    command = [sys.executable, "-m", "gaccum_ms.launch", *options, str(script)]
    env |= {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    home = f"{tmp_path}/lo g/.cuda"
    assert done.stdout.startswith(f"{home} "), done.stderr
    assert f"{home}/lib64" in done.stdout.splitlines()[0].removeprefix(f"{home} ").split(os.pathsep)
    said = (tmp_path / "lo g" / "1" / "rank.0" / "stderr").read_text()
    assert "CUDA driver version is insufficient" in said
    assert "Unsupported device target" not in said
    assert "[WARNING]" not in said, "MindSpore's check of CUDA's version is content"
