"""tune_cpu, in separate processes: MindSpore accepts these numbers only once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaccum_ms import tune_cpu

ROOT = Path(__file__).resolve().parents[2]

# This counts the threads after a graph has run, by MindSpore's names.
_COUNT = """
from pathlib import Path
import mindspore as ms
import mindspore.dataset as ds
import gaccum_ms
{before}
threads = gaccum_ms.tune_cpu({argument})
ms.set_context(mode=ms.GRAPH_MODE)
from network_of_one_layer import net
net(ms.Tensor([[1.0]])).asnumpy()
names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print(*threads, ds.config.get_num_parallel_workers(), sum("ActorThread" in n for n in names),
      sum("KernelThread" in n for n in names))
"""
_NETWORK = "from mindspore import nn\nnet = nn.Dense(1, 1)\n"


def printed(tmp_path, argument="", before="", **environment) -> list[int]:
    (tmp_path / "network_of_one_layer.py").write_text(_NETWORK)
    (tmp_path / "script.py").write_text(_COUNT.format(argument=argument, before=before))
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), **environment}
    command = [sys.executable, str(tmp_path / "script.py")]
    finished = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    return [int(number) for number in finished.stdout.split()]


def test_threads_are_as_many_as_asked_for(tmp_path):
    """MindSpore never has more threads than the host has cores, and at least one of each kind."""
    cores = len(os.sched_getaffinity(0))
    dispatch, kernels, data, workers, actors, helpers = printed(tmp_path)
    assert (dispatch, kernels, data, workers) == (1, cores, cores, cores)
    assert actors == 1
    assert actors + helpers == max(2, cores)


@pytest.mark.parametrize(
    ("argument", "environment", "cores"),
    [("1", {}, 1), ("", {"OMP_NUM_THREADS": "1"}, 1), ("", {"OMP_NUM_THREADS": "999"}, os.cpu_count())],
)
def test_cores_are_an_argument_or_the_launchers(tmp_path, argument, environment, cores):
    assert printed(tmp_path, argument, **environment)[:4] == [1, cores, cores, cores]


def test_the_programs_own_numbers_are_kept_and_a_second_call_is_allowed(tmp_path):
    """MindSpore keeps them: it refuses a second number with the error that the program expects."""
    before = (
        "ms.runtime.dispatch_threads_num(2); ms.device_context.cpu.op_tuning.threads_num(1)\n"
        "for again in ms.runtime.dispatch_threads_num, ms.device_context.cpu.op_tuning.threads_num:\n"
        "    try:\n"
        "        again(3)\n"
        "    except RuntimeError:\n"
        "        continue\n"
        "    raise AssertionError(again)\n"
        "gaccum_ms.tune_cpu(1)"
    )
    *numbers, actors, helpers = printed(tmp_path, "1", before)
    assert numbers == [1, 1, 1, 1]
    assert (actors, helpers) == (1, 1)


@pytest.mark.parametrize(("cores", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_refuses_what_is_no_number_of_cores(cores, error):
    with pytest.raises(error, match="For 'tune_cpu', the argument 'cores' must be"):
        tune_cpu(cores)


def test_refuses_what_is_no_network():
    with pytest.raises(TypeError, match="For 'tune_cpu', the argument 'network' must be a Cell, but got 'function'"):
        tune_cpu(1, network=printed)


@pytest.mark.parametrize("given", ["two", "-1", "0", ""])
def test_refuses_a_variable_that_is_no_number(monkeypatch, given):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS must be a positive number, but got '{given}'"):
        tune_cpu()


def test_training_sets_no_threads(tmp_path):
    """Only tune_cpu sets them: a training program may still set them, which MindSpore allows once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import mindspore as ms\n"
        "import mindspore.dataset as ds\n"
        "from mindspore import nn\n"
        "from mindspore._c_expression import RuntimeConf\n"
        "from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell\n"
        "workers = ds.config.get_num_parallel_workers()\n"
        "net = nn.Dense(2, 1)\n"
        "cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2)\n"
        "step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params()))\n"
        "step(ms.ops.ones((4, 2)), ms.ops.ones((4, 1))).asnumpy()\n"
        "conf = RuntimeConf.get_instance()\n"
        "print(conf.is_dispatch_threads_num_configured(), conf.is_op_threads_num_configured(),\n"
        "      ds.config.get_num_parallel_workers() == workers)\n"
        "import gaccum_ms\n"
        "gaccum_ms.tune_cpu(1)\n"
        "print(conf.is_dispatch_threads_num_configured(), conf.is_op_threads_num_configured())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=600)
    assert finished.stdout.split() == ["False", "False", "True", "True", "True"], finished.stderr
