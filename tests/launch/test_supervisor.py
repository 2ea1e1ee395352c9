"""Which rank is named when ranks end or fail, decided from messages alone."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time

import psutil
import pytest

from gaccum_ms.launch.cluster import Cluster, LaunchError
from gaccum_ms.launch.supervisor import Ranks
from tests.launch.launched import wait_until


def why(tmp_path, *messages, **options) -> str:
    """The error that follows from messages to host 0."""
    ranks = Ranks(Cluster(processes=4, master_port=1, **options), tmp_path)
    for message in messages:
        ranks.note(message)
    with pytest.raises(LaunchError) as error:
        ranks.check()
    return str(error.value)


def test_the_rank_that_failed_first_is_named_though_another_ended_first(tmp_path):
    log = tmp_path / "1" / "rank.2" / "stderr"
    log.parent.mkdir(parents=True)
    log.write_text("its log")
    for rank, code in ((0, 1), (2, 3)):
        said = why(tmp_path, {"rank": 2, "fails": 3}, {"rank": rank, "code": code})
        assert said == f"rank 2 failed with exit code 3; all ranks were ended.\nthe end of {log}:\n    its log"


def test_a_rank_that_fails_after_another_ended_is_not_blamed_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("gaccum_ms.launch.supervisor.LONG_OVER_SECONDS", -1.0)
    said = why(tmp_path, {"rank": 1, "code": 0}, {"rank": 0, "code": 1})
    assert re.fullmatch(r"rank 0 failed with exit code 1, \d+ s after rank 1 had ended with exit code 0; all .*", said)
    monkeypatch.setattr("gaccum_ms.launch.supervisor.LONG_OVER_SECONDS", 1000.0)
    said = why(tmp_path, {"rank": 1, "at_end": True}, {"rank": 0, "code": 1})
    assert said == "rank 0 failed with exit code 1; all ranks were ended.", "they ended together"


def test_once_a_rank_has_ended_the_others_have_the_end_timeout(tmp_path):
    for seconds, ends in ((0, False), (3600, False), (1e-9, True)):
        ranks = Ranks(Cluster(processes=3, master_port=1, end_timeout=seconds), tmp_path)
        ranks.check()
        ranks.note({"rank": 1, "at_end": True})
        time.sleep(0.01)
        what = r"^rank 1 ended with exit code 0, and rank 0, rank 2 did not end within 1e-09 s \(--end-timeout\); all"
        with pytest.raises(LaunchError, match=what) if ends else contextlib.nullcontext():
            ranks.check()
        ranks.note({"rank": 0, "at_end": True})
        ranks.note({"rank": 2, "code": 0})
        ranks.check()


def test_a_rank_whose_guard_is_killed_is_named(tmp_path):
    """At the second look: what the guard has said before may still have been on its way at the first."""
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as zombie:
        zombie.stdout.read()  # it ends now, and is not waited for
        wait_until(lambda: psutil.Process(zombie.pid).status() == "zombie")
        ranks = Ranks(Cluster(processes=4, master_port=1), tmp_path)
        ranks.note({"rank": 0, "guard": os.getpid()})
        ranks.note({"rank": 1, "guard": zombie.pid})
        ranks.look()
        ranks.check()
        ranks.look()
        with pytest.raises(LaunchError, match=r"^rank 1 ended, because the launcher's process above") as error:
            ranks.check()
    assert (error.value.code, error.value.rank) == (1, 1)


def test_exit_code_2_before_init_is_a_wrong_argument(tmp_path):
    """No restart can mend it. Later, a script may say something else by 2."""
    for in_init, code in ((set(), 2), ({0}, 1)):
        ranks = Ranks(Cluster(processes=2, master_port=1), tmp_path)
        ranks._in_init |= in_init
        ranks.note({"rank": 1, "fails": 2})
        ranks.note({"rank": 0, "code": 1})  # whose collective that has broken
        with pytest.raises(LaunchError, match=r"^rank 1 failed with exit code 2;") as error:
            ranks.check()
        assert error.value.code == code


def test_a_rank_that_never_comes_is_named_after_the_start_timeout(tmp_path):
    """`init()` connects a rank to MindSpore's scheduler. Here, this process does. Of many ranks some are named."""
    log = tmp_path / "1" / "rank.1" / "stdout"
    log.parent.mkdir(parents=True)
    log.write_text("waiting for a disk")
    with socket.create_server(("127.0.0.1", 0)) as scheduler, socket.create_connection(scheduler.getsockname()):
        ranks = Ranks(Cluster(processes=2, master_port=scheduler.getsockname()[1], start_timeout=-1), tmp_path)
        ranks.note({"rank": 0, "pid": os.getpid()})
        ranks.note({"rank": 1, "pid": os.getppid()})
        ranks.look()
        with pytest.raises(LaunchError) as error:
            ranks.check()
    said = "did not come to init() within -1 s: rank 1; all ranks were ended."
    assert str(error.value) == f"{said}\nthe end of {log}:\n    waiting for a disk"
    assert error.value.code == 124
    ranks = Ranks(Cluster(processes=128, master_port=1, start_timeout=-1), tmp_path)
    with pytest.raises(LaunchError, match=r"within -1 s: rank 0, .*, rank 3, 124 more; all .* longer --start-"):
        ranks.check()
