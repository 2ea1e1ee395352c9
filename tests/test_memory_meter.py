"""What a run uses, against what it is known to use; and the limits of containers, from files as the kernel writes
them."""

from __future__ import annotations

import pytest
from two_ranks import run_on_ranks

from gaccum_ms.memory.meter import ProcessMeter, container_limits

MB = 1_000_000


@pytest.mark.parametrize("size", [64 * 1024, 25 * MB])
def test_measures_what_a_run_uses_and_nothing_else(size, tmp_path):
    """Whatever was resident before. And memory that is freed and touched again, so that resident size does not grow:
    small blocks stay with the process or not, as the allocator likes; large ones go back to the system.

    In a process of its own: in the heap of an old one, blocks lie in holes and share pages with what the run does not
    use, and its other threads use memory meanwhile."""
    (results,) = run_on_ranks(1, "memory_meter_worker.py", tmp_path, str(size), time_limit=600)
    assert results["after"] == pytest.approx(results["before"], abs=3 * MB)
    assert results["used"] == pytest.approx(results["expected"], rel=0.2)
    assert results["grown"] < 10 * MB


def test_a_limit_is_at_least_what_the_process_holds():
    meter = ProcessMeter()
    assert meter.held() < meter.limit()


def test_says_what_is_missing_where_the_system_does_not_tell(monkeypatch):
    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ProcessMeter, "_forget", staticmethod(refuse))
    with pytest.raises(RuntimeError, match=r"needs /proc/self/clear_refs.*but got .*Permission denied"):
        ProcessMeter()


@pytest.fixture
def root(tmp_path):
    """A file system with these files, by path."""

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
    """The container sees its group as the root, whose file has the limit."""
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
