"""Compiles training steps for eight GPUs and saves each finished graph: rank 0 of eight does, with a pipeline the first
rank of each stage, and the other ranks do nothing. They wait for names as files in ``OUT/wanted`` . There is no GPU:
the compiler runs all its passes and then fails to find the device. ``compile_worker.py OUT MODULE`` : the module has
the steps."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import create_group, get_rank, init

from gaccum_ms.backend import cell_graph_executor, fork_utils
from gaccum_ms.backend.micro_mirrors import unreduced
from gaccum_ms.launch.cluster import reserved_port
from gaccum_ms.semi_auto import compiled_once
from gaccum_ms.semi_auto.modes import settings_of
from tests.semi_auto.cases import SAMPLES
from tests.semi_auto.compiled import AGAIN, RANKS, TIME_LIMIT, folder_of, stages_of

# Parts of MindSpore's errors when the graph is finished and there is no device.
NO_DEVICE = ("cudaGetLastError", "CUDA driver", "no CUDA-capable device")
OF_CASES = ("shapes", "dtype", "gpu", "context by init")  # settings of a case that are not MindSpore's


def compile_case(name, make, settings, graphs, folder):
    """Compile a case; save the finished graph, the Parameters' values, and MindSpore's message."""
    ms.reset_auto_parallel_context()
    ms.set_seed(1)  # else the layers' weights, and what float16 rounds, would be others in each run
    if "AutoParallel" not in settings:
        mode = {"parallel_mode": "semi_auto_parallel", "gradients_mean": True}
        if "context by init" not in settings:
            mode |= {"device_num": RANKS, "global_rank": get_rank()}
        mode |= {key: value for key, value in settings.items() if key not in OF_CASES}
        ms.set_auto_parallel_context(**mode)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        step = make()
    except (RuntimeError, ValueError) as error:
        (folder / "message").write_text(str(error))
        return
    values = {parameter.name: parameter.asnumpy() for parameter in step.get_parameters()}
    np.savez(folder / "parameters.npz", **values)
    inputs = [Tensor(np.zeros(shape, settings.get("dtype", np.float32))) for shape in local_shapes(settings)]
    if not getattr(step, "spans_batches", False):
        compile_graph(step, inputs, graphs, folder)
        return
    with unreduced():
        compile_graph(step._runner._components.end_window, inputs, graphs, folder / "adding")
    np.savez(folder / "adding" / "parameters.npz", **values)
    vars(step)["called_by_python"] = True
    compile_graph(step, inputs, graphs, folder)


def compile_graph(step, inputs, graphs, folder):
    """Compile one graph, and save it with MindSpore's message."""
    folder.mkdir(exist_ok=True)
    shutil.rmtree(graphs, ignore_errors=True)
    gc.freeze()  # MindSpore collects garbage many times in each compilation; present objects are excluded
    # This is processor time: other programs on the machine would distort the clock's time.
    begin, message = time.process_time(), "the device was there"
    try:
        with settings_of(getattr(getattr(step, "_runner", None), "_network", step)):
            cell_graph_executor.compile(step, *inputs, phase="train")
    except Exception as error:
        message = str(error)
    seconds = time.process_time() - begin
    finished = sorted(graphs.glob("*_validate_*.ir")) if graphs.exists() else []
    if finished and any(part in message for part in NO_DEVICE):
        shutil.copy(finished[-1], folder / "finished.ir")
    (folder / "message").write_text(message)
    (folder / "seconds").write_text(str(seconds))
    copies = [parameter.name for parameter in step.get_parameters() if parameter.param_info.is_pipeline_shared_param]
    (folder / "copies").write_text("\n".join(copies))


def local_shapes(settings):
    """The shapes of one device's parts of the inputs."""
    samples = SAMPLES * (RANKS if settings.get("full_batch") else 2 if "dataset_strategy" in settings else 1)
    return settings.get("shapes", ((samples, 12), (samples, 1)))


def wanted(out):
    """The requested names, each once."""
    seen = set()
    while True:
        for file in (out / "wanted").iterdir():
            if file.name not in seen:
                seen.add(file.name)
                yield file.name
        time.sleep(0.05)


def compile_wanted(out, cases):
    """What each rank does. MindSpore's scheduler only lets them find one another."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_context(device_target="CPU")  # after set_device() MindSpore 2.7 and 2.8 would keep CPU
    init()
    if os.environ["MS_ROLE"] == "MS_SCHED":
        signal.pause()
    create_group("nccl_world_group", list(range(RANKS)))
    ms.set_context(device_target="GPU")
    rank, graphs = get_rank(), Path(os.environ["MS_DEV_SAVE_GRAPHS_PATH"])
    for name in wanted(out):
        make, settings = cases[name.partition(AGAIN)[0]]
        stage, place = divmod(rank, RANKS // stages_of(settings))
        if place == 0:
            folder = folder_of(out, name, stage)
            with mock.patch.object(compiled_once, "runs_on_device", return_value="gpu" not in settings):
                compile_case(name, make, settings, graphs / f"rank_{rank}", folder)
            (folder / "compiled").touch()
            print(name, flush=True)


def main(folder, module):
    """Fork MindSpore's scheduler and the ranks, so that MindSpore is imported once. All end with this process, which
    ends with the first of them, with the tests, or after `TIME_LIMIT` . MindSpore has run nothing yet. Its own
    preparation for a fork would keep the device CPU in version 2.7."""
    cases = importlib.import_module(module).CASES
    fork_utils.prctl_set_pdeathsig(signal.SIGKILL)
    signal.alarm(TIME_LIMIT)
    with reserved_port("127.0.0.1") as port:
        os.environ |= {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port), "MS_WORKER_NUM": str(RANKS)}
        for role, number in ("MS_SCHED", 0), *(("MS_WORKER", rank) for rank in range(RANKS)):
            if os.fork():
                continue
            fork_utils.prctl_set_pdeathsig(signal.SIGKILL)
            os.environ |= {"MS_ROLE": role, "MS_NODE_ID": str(number)}
            try:
                compile_wanted(Path(folder), cases)
            except BaseException:
                traceback.print_exc()
            os._exit(1)  # without a device MindSpore cannot end normally
        os.wait()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
