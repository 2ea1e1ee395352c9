"""The limits of memory: of the process, of containers, from files in the kernel's format, and of devices."""

from __future__ import annotations

import subprocess

import pytest

from gaccum_ms.memory import limit
from gaccum_ms.memory.limit import container_limits, default_limit, device_memory_free
from tests.support.no_device import compiler


def test_ranks_share_a_containers_limit(monkeypatch):
    monkeypatch.setattr(limit, "container_limits", lambda: [2_000_000])
    assert default_limit() == 2_000_000
    monkeypatch.setattr(limit, "rank_and_ranks", lambda: (1, 4))
    assert default_limit() == 500_000


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to make a runtime with")
@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("libcudart.so.11.0", ("cudaSetDevice", "cudaMemGetInfo", "")),
        ("libascendcl.so", ("aclrtSetDevice", "aclrtGetMemInfo", "int kind,")),
    ],
)
def test_free_memory_by_the_vendors_runtime(name, functions, tmp_path):
    """A library in place of the runtime: 5,000 bytes are free on device 3; there is an error on all other devices."""
    source = """
    #include <stddef.h>
    static int device = -1;
    int %s(int number) { device = number; return 0; }
    int %s(%s size_t *free, size_t *total) { *free = 5000; *total = 9000; return device == 3 ? 0 : 100; }
    """
    (tmp_path / "driver.c").write_text(source % functions)
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "driver.c"], check=True)
    lines = [f"7f00-7f01 r-xp 0 00:00 1   {path}" for path in ("/usr/lib/libc.so.6", tmp_path / name)]
    (maps := tmp_path / "maps").write_text("\n".join(lines))
    assert device_memory_free(3, maps) == 5000
    with pytest.raises(RuntimeError, match=r"device 1 must be known, but got error 100.* Give 'memory_limit'"):
        device_memory_free(1, maps)


def test_says_that_there_is_no_runtime(tmp_path):
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 00:00 1   /usr/lib/libc.so.6")
    with pytest.raises(RuntimeError, match=r"a process without any of .*libascendcl.* Give 'memory_limit'"):
        device_memory_free(0, tmp_path / "maps")


HUGE = 9223372036854771712  # version 1 writes it for no limit


@pytest.mark.parametrize(
    ("group", "files", "limits"),
    [
        ("0::/a/b\n", {"a/memory.max": "3000\n", "a/b/memory.max": "2000\n"}, [2000, 3000]),
        ("0::/\n", {"memory.max": "500\n"}, [500]),
        (
            "9:name=systemd:/\n4:cpu,memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "700\n", "memory/memory.limit_in_bytes": f"{HUGE}\n"},
            [700, HUGE],
        ),
        (None, {}, []),
    ],
    ids=["two limits", "version 2 in a container", "version 1", "no groups"],
)
def test_limits_of_containers(group, files, limits, tmp_path):
    """In a container of version 2, the process's group looks like the root, whose file has the limit."""
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (texts | ({} if group is None else {"proc/self/cgroup": group})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_limits(tmp_path) == limits
