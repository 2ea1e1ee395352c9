"""The log folder: only one launch at a time uses it, and files that no launch made are kept."""

from __future__ import annotations

import pytest

from tests.launch.launched import Launched, in_mounts_of_its_own, write

pytestmark = pytest.mark.distributed


def test_a_log_folder_serves_one_launch_at_a_time(tmp_path):
    script = write(tmp_path / "script.py", 'open(f"up.{rank}", "x")\nwhile not os.path.exists("go"): time.sleep(0.1)')
    first = Launched(script, "-n", "1")
    first.wait_for(tmp_path / "up.0")
    second = Launched(script, "-n", "1").finish()
    assert second.returncode == 2
    assert "another launch writes to" in second.stderr
    (tmp_path / "go").touch()
    assert first.finish().returncode == 0


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = Launched(write(tmp_path / "script.py", ""), "--log-dir", "file/logs").finish()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot write logs to '{tmp_path}/file/logs': Not a directory. Name another")
    assert done.stderr.count("\n") == 2


def test_a_full_disk_is_named(tmp_path):
    script = write(tmp_path / "script.py", 'if rank == 1: time.sleep(1000)\nwhile True: print("x" * 1000)')
    (tmp_path / "mount").mkdir()
    prefix = in_mounts_of_its_own(f"mount -t tmpfs -o size=512k none '{tmp_path}/mount'")
    done = Launched(script, "-n", "2", "--log-dir", "mount/logs", prefix=prefix).finish()
    assert done.returncode == 1
    assert f"cannot write logs to '{tmp_path}/mount/logs': No space left on device. Make room there" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "rank 0 failed with exit code" in done.stderr


@pytest.mark.parametrize("path", ["1/rank.0/results.txt", "msrun/notes.txt", "1"])
def test_a_folder_that_no_launch_made_is_not_replaced(tmp_path, path):
    """The files beside it are kept too. The launch reports the error before it starts or removes anything."""
    script, runs = write(tmp_path / "script.py", ""), tmp_path / "runs"
    (runs / "1" / "rank.7").mkdir(parents=True) if path != "1" else runs.mkdir()
    files = [runs / path, *(runs / name for name in (".lock", ".probe", "msrun.log", "scheduler.log"))]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    done = Launched(script, "-n", "1", "--log-dir", "runs").finish()
    assert done.returncode == 2
    assert f"'{runs / path.split('/')[0]}' was not made by a launch, and would have to be replaced" in done.stderr
    assert [file.read_text() for file in files] == ["mine"] * len(files)
    assert path == "1" or (runs / "1" / "rank.7").exists()
