"""Measured memory of runs whose memory is known, and limits of containers, from files in the kernel's format."""

from __future__ import annotations

import subprocess

import pytest
from support.no_device import compiler
from support.two_ranks import run_on_ranks

from gaccum_ms.memory.meter import ProcessMeter, container_limits, device_memory_free
from gaccum_ms.memory.proc import own

MB = 1_000_000


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """From a separate process, which has no other memory to free."""
    (results,) = run_on_ranks(1, "memory_meter_worker.py", tmp_path_factory.mktemp("meter"), time_limit=100)
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("size", [64 * 1024, 25 * MB])
def test_measures_what_a_run_reaches(measured, size):
    """100 MB, in blocks that the process keeps when they are freed, and in blocks that it returns."""
    assert measured[f"peak_{size}"] == pytest.approx(100 * MB, rel=0.1)


def test_a_run_leaves_nothing_in_this_process(measured):
    assert measured["grown"] < 5 * MB
    assert measured["weight_unchanged"]


def test_large_parameters_that_a_run_writes_do_not_count_twice(measured):
    """The run writes 100 MB of weights. Both processes together then have little more memory than before."""
    assert measured["written_together"] < 30 * MB


def test_a_run_ends_before_it_has_too_much(measured):
    """The run would take 1 GB, in blocks of 1 MB; its limit is 130 MB above the process's memory."""
    assert "may have" in str(measured["too_much"])
    assert 100 * MB < measured["reached"] < 200 * MB


def test_a_run_that_is_looked_at_rarely_stops_itself_until_then(measured):
    """It takes 1 GB as fast as it can, and is looked at every 0.3 s. The control is not looked at before it has all."""
    assert 100 * MB < measured["rarely"] < 200 * MB
    assert measured["rarely_without_turns"] > 900 * MB


def test_on_a_busy_machine_both_processes_share_a_core_close_to_the_limit(measured):
    """Within 100 MB: after 150 of 200 MB, but not after 5 MB. Afterwards this process has all its cores again."""
    for name in ("busy", "loaded"):
        assert [measured[f"{name}_cores_{where}"] for where in ("far", "close")] == [measured["cores"], 1]
    assert [measured[f"idle_cores_{where}"] for where in ("far", "close")] == [measured["cores"], measured["cores"]]
    assert measured["own_cores_again"]


def test_on_a_busy_machine_the_reserve_is_four_times_as_large(measured):
    """20 MB in place of 5 MB. The run is looked at after each MB."""
    for name in ("busy", "loaded"):
        assert measured["idle_reached"] - measured[f"{name}_reached"] == pytest.approx(15 * MB, abs=3 * MB)


def test_errors_come_back_as_they_are(measured):
    assert str(measured["error"]) == "ValueError: as it is"
    assert str(measured["killed"]) == "TooMuchMemory"
    assert "exit code 3" in str(measured["left"])


def test_a_copy_that_waits_for_a_thread_that_it_lacks_is_replaced(measured):
    """Twice; a third copy's error is raised."""
    assert str(measured["stuck_1"]) == "none"
    assert "StuckError" in str(measured["stuck_3"])
    assert "has none of its other threads, but got a copy that waits for something for 1 s" in str(measured["stuck_3"])


def test_a_limit_is_at_least_what_the_process_holds():
    assert own("VmRSS") < ProcessMeter().limit()


def test_says_what_is_missing_where_the_system_does_not_tell(monkeypatch):
    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gaccum_ms.memory.meter.forget_peak", refuse)
    with pytest.raises(RuntimeError, match=r"needs /proc/self/clear_refs.*but got .*Permission denied"):
        ProcessMeter()


# -- accelerators, simulated -------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path):
    """A library in place of a vendor's runtime: 5,000 bytes free on device 3, an error on all other devices."""
    source = """
    #include <stddef.h>
    static int device = -1;
    int %s(int number) { device = number; return 0; }
    int %s(%s size_t *free, size_t *total) { *free = 5000; *total = 9000; return device == 3 ? 0 : 100; }
    """

    def make(name, *names):
        (tmp_path / "driver.c").write_text(source % names)
        subprocess.run([compiler(), "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "driver.c"], check=True)
        lines = [f"7f00-7f01 r-xp 0 00:00 1   {path}" for path in ("/usr/lib/libc.so.6", tmp_path / name)]
        (tmp_path / "maps").write_text("\n".join(lines))
        return tmp_path / "maps"

    return make


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to make a runtime with")
@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("libcudart.so.11.0", ("cudaSetDevice", "cudaMemGetInfo", "")),
        ("libascendcl.so", ("aclrtSetDevice", "aclrtGetMemInfo", "int kind,")),
    ],
)
def test_free_memory_by_the_vendors_runtime(driver, name, functions):
    maps = driver(name, *functions)
    assert device_memory_free(3, maps) == 5000
    with pytest.raises(RuntimeError, match=r"free memory of device 1, but got error 100.* Give 'memory_limit'"):
        device_memory_free(1, maps)


def test_says_that_there_is_no_runtime(tmp_path):
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 00:00 1   /usr/lib/libc.so.6")
    with pytest.raises(RuntimeError, match=r"a process without any of .*libascendcl.* Give 'memory_limit'"):
        device_memory_free(0, tmp_path / "maps")


@pytest.fixture
def root(tmp_path):
    """Writes a file system with these files, by path."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_limits_of_version_2(root):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "3000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert container_limits(root(files)) == [3000]


def test_limits_of_version_2_inside_a_container(root):
    """The container sees its group as the root; the root's file has the limit."""
    assert container_limits(root({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "500\n"})) == [500]


def test_limits_of_version_1(root):
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/x\n0::/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "700\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert container_limits(root(files)) == [700]


def test_no_limits(root):
    assert container_limits(root({"proc/self/cgroup": "0::/\n"})) == []
    assert container_limits(root({}) / "nothing") == []
