"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import inspect
import os
from pathlib import Path

import mindspore as ms
import psutil
import pytest

from tests.support import environment, second_runs
from tests.support.chromium import chromium
from tests.support.device import COUNT, DEVICE
from tests.support.modes import MODES
from tests.support.programs import Programs
from tests.support.ranks import Ranks
from tests.support.spread import Spread

environment.of_tests()


def pytest_addoption(parser):
    parser.addoption("--rounds", type=int, default=1, help="how often a launch is ended in each way")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two processes more than cores, because the launcher's tests mostly wait. Each may need 3 GB."""
    return max(1, min(len(os.sched_getaffinity(0)) + 2, psutil.virtual_memory().available // 3_000_000_000))


def pytest_configure(config):
    if DEVICE != "CPU":
        ms.set_device(DEVICE)
    config.pluginmanager.register(Spread())
    config.pluginmanager.register(second_runs)
    remember_sources()


def pytest_runtest_setup(item):
    mark = item.get_closest_marker("device")
    if mark is not None and mark.kwargs.get("devices", 1) > COUNT:
        pytest.skip(f"it needs {mark.kwargs['devices']} devices, and there are {COUNT}")


def pytest_collection_finish():
    exclude_from_collection()


def exclude_from_collection() -> None:
    """Exclude the present objects from garbage collection, which MindSpore starts at each of many compilations."""
    gc.collect()
    gc.freeze()


def remember_sources() -> None:
    """Keep the source of each function, which MindSpore would split into tokens at each of many compilations."""
    read, known = inspect.getsourcelines, {}

    def remembered(thing):
        code = getattr(inspect.unwrap(thing), "__code__", None)
        if code is None:  # a class or a module
            return read(thing)
        key = code.co_filename, code
        if key not in known:
            known[key] = read(thing)
        lines, number = known[key]
        return list(lines), number

    inspect.getsourcelines = remembered


def pytest_unconfigure():
    """MindSpore's destructor fails for each Cell that exists at the interpreter's end, when its module is gone already.
    Hundreds of messages would hide the tests' output."""
    del ms.nn.Cell.__del__


@pytest.fixture(scope="module", autouse=True)
def _recycled_memory():
    """Free MindSpore's graphs, about 11 MB each, which it would keep until the process ends."""
    yield
    ms.ms_memory_recycle()
    exclude_from_collection()


@pytest.fixture(autouse=True)
def _graph_mode():
    """Each test starts in graph mode, even if the test before it has changed the mode."""
    ms.set_context(mode=ms.GRAPH_MODE)


@pytest.fixture(params=list(MODES))
def mode(request) -> str:
    """Run the test in graph mode and in PyNative mode."""
    ms.set_context(mode=MODES[request.param])
    return request.param


@pytest.fixture
def pynative() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture
def parallel_context():
    """Sets MindSpore's parallel settings; after the test they are the defaults again."""
    yield ms.set_auto_parallel_context
    ms.reset_auto_parallel_context()


@pytest.fixture(scope="session")
def programs():
    """Users' programs, for all tests of this process."""
    with Programs() as programs:
        yield programs


@pytest.fixture(scope="module")
def browser():
    """A Chromium, for tests of pages."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def rank_pair(tmp_path_factory):
    """Two ranks for all tests of this process."""
    with Ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The folder of a module's cases on ranks."""
    return tmp_path_factory.mktemp("ranks")
