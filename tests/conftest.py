"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os

import mindspore as ms
import pytest
from support import paths
from support.device import COUNT, DEVICE
from support.modes import MODES
from support.ranks import Ranks
from support.spread import Spread

paths.add_folders()


def pytest_configure(config):
    if DEVICE != "CPU":
        ms.set_device(DEVICE)
    config.pluginmanager.register(Spread())


def pytest_runtest_setup(item):
    mark = item.get_closest_marker("device")
    if mark is not None and mark.kwargs.get("devices", 1) > COUNT:
        pytest.skip(f"it needs {mark.kwargs['devices']} devices, and there are {COUNT}")


# Where one test has computed it is too late for the next one's convolutions, on a CPU with AVX-512, and it would be
# warned. test_cpu_instructions.py has processes in which nothing is set.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


def pytest_collection_finish():
    """MindSpore collects garbage with each compilation, of which there are thousands: what is there by now is none."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """MindSpore's destructor fails for each Cell that lives to the interpreter's end, when its module is gone already.
    Hundreds of messages would bury what the tests say."""
    del ms.nn.Cell.__del__


@pytest.fixture(scope="module", autouse=True)
def _recycled_memory():
    """MindSpore keeps each graph, some 11 MB, for as long as the process lives, unless it is told not to."""
    yield
    ms.ms_memory_recycle()


@pytest.fixture(autouse=True)
def _graph_mode():
    """Each test starts in graph mode, whatever the one before it did."""
    ms.set_context(mode=ms.GRAPH_MODE)


@pytest.fixture(params=list(MODES))
def mode(request) -> str:
    """Run the test in graph mode and in PyNative mode."""
    ms.set_context(mode=MODES[request.param])
    return request.param


@pytest.fixture
def pynative() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture(scope="session")
def rank_pair(tmp_path_factory):
    """Two ranks for all tests of this process."""
    with Ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
