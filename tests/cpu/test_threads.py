"""tune_cpu, in separate processes: MindSpore accepts these numbers only once."""

from __future__ import annotations

import os

import pytest

from gaccum_ms import tune_cpu

# This counts the threads after a graph has run, by MindSpore's names.
_COUNT = """
import os
from pathlib import Path
import mindspore as ms
import mindspore.dataset as ds
import gaccum_ms
os.environ.pop("OMP_NUM_THREADS", None)
os.environ.update({environment})
{before}
threads = gaccum_ms.tune_cpu({argument})
ms.set_context(mode=ms.GRAPH_MODE)
from network_of_one_layer import net
net(ms.Tensor([[1.0]])).asnumpy()
names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print(*threads, ds.config.get_num_parallel_workers(), sum("ActorThread" in n for n in names),
      sum("KernelThread" in n for n in names))
"""


@pytest.fixture
def counted(programs, tmp_path):
    """A function that runs the program in a process of its own, and returns its numbers."""
    (tmp_path / "network_of_one_layer.py").write_text("from mindspore import nn\nnet = nn.Dense(1, 1)\n")

    def count(argument="", before="", **environment) -> list[int]:
        text = _COUNT.format(argument=argument, before=before, environment=environment)
        (tmp_path / "script.py").write_text(text)
        finished = programs.run(tmp_path / "script.py", folder=tmp_path)
        assert finished.returncode == 0, finished.stderr
        return [int(number) for number in finished.stdout.split()]

    return count


def test_threads_are_as_many_as_asked_for(counted):
    """MindSpore never has more threads than the host has cores, and at least one of each kind."""
    cores = len(os.sched_getaffinity(0))
    dispatch, kernels, data, workers, actors, helpers = counted()
    assert (dispatch, kernels, data, workers) == (1, cores, cores, cores)
    assert actors == 1
    assert actors + helpers == max(2, cores)


def test_cores_are_the_launchers_with_threads_for_each_level_of_nesting(counted):
    assert counted(OMP_NUM_THREADS="1,4")[:4] == [1, 1, 1, 1]


def test_the_programs_own_numbers_stay_and_a_second_call_is_allowed(counted):
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
    *numbers, actors, helpers = counted("1", before)
    assert numbers == [1, 1, 1, 1]
    assert (actors, helpers) == (1, 1)


def test_refuses_bad_cores_networks_and_variables(monkeypatch):
    for cores, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="For 'tune_cpu', the argument 'cores' must be"):
            tune_cpu(cores)
    with pytest.raises(TypeError, match="For 'tune_cpu', the argument 'network' must be a Cell, but got 'builtin"):
        tune_cpu(1, network=print)
    for number in ("two", "-1", "0", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        with pytest.raises(ValueError, match=f"OMP_NUM_THREADS must be a positive number, but got '{number}'"):
            tune_cpu()
