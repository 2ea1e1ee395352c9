"""The end of a launch when ranks end, fail, or stop: the error soon names the right one. No rank imports MindSpore."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from launched import Launched, ranks_that_wait, write

from gaccum_ms.launch.cluster import Cluster, LaunchError
from gaccum_ms.launch.supervisor import EXIT_SECONDS, Ranks

GO_ON = 'if rank != 1: open("waits", "w"); time.sleep(1000)\nwhile not os.path.exists("waits"): time.sleep(0.1)\n'
pytestmark = pytest.mark.distributed


def test_a_rank_that_fails_beside_a_thread_that_lives_on_ends_all(tmp_path):
    script = write(
        tmp_path / "script.py",
        f"import threading\n{GO_ON}threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        'raise ValueError("no such thing")',
    )
    begin = time.monotonic()
    done = Launched(script, "-n", "2").finish()
    assert time.monotonic() - begin < 30
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 failed with exit code 1; all ranks were ended.")
    assert "ValueError: no such thing" in done.stderr


@pytest.mark.thorough
def test_exit_handlers_of_a_rank_that_fails_have_time(tmp_path):
    script = write(
        tmp_path / "script.py",
        f'import atexit\n{GO_ON}def last(): time.sleep({EXIT_SECONDS / 2}); open("last", "x")\n'
        'atexit.register(last)\nraise ValueError("no such thing")',
    )
    done = Launched(script, "-n", "2").finish()
    assert done.stderr.startswith("error: rank 1 failed with exit code 1;")
    assert (tmp_path / "last").exists()


@pytest.mark.core("sys.exit(0)")
@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_while_others_wait_ends_all(tmp_path, how):
    script = write(tmp_path / "script.py", f"{GO_ON}{how}")
    begin = time.monotonic()
    done = Launched(script, "-n", "3", "--end-timeout", "3").finish()
    assert time.monotonic() - begin < 25
    assert done.returncode == 1
    what = "rank 1 ended with exit code 0, and rank 0, rank 2 have stood still for 3 s since"
    assert done.stderr.startswith(f"error: {what} (in {script}, line 4); all ranks were ended.")


@pytest.mark.thorough
def test_ranks_that_go_on_alone_may(tmp_path):
    """The rank computes for 4 s, waits 4 s for a child, and sleeps 1 s. It never stands still for 2.5 s."""
    script = write(
        tmp_path / "script.py",
        "import subprocess\nif rank: sys.exit()\nend = time.monotonic() + 4\n"
        'while time.monotonic() < end: sum(range(1000))\nsubprocess.run(["sleep", "4"])\ntime.sleep(1)',
    )
    done = Launched(script, "-n", "2", "--end-timeout", "2.5").finish()
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_stopped_rank_is_named(tmp_path):
    launched = ranks_that_wait(tmp_path, 2)
    begin = time.monotonic()
    os.kill(int((tmp_path / "pid.1").read_text() or 0), signal.SIGSTOP)
    done = launched.finish()
    assert time.monotonic() - begin < 30
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 is stopped (SIGSTOP) for 15 s, and others go on; all ranks were ended")


@pytest.mark.thorough
def test_no_rank_that_comes_to_init_in_time(tmp_path):
    script = write(tmp_path / "script.py", 'print("waiting for a disk", flush=True)\ntime.sleep(1000)')
    done = Launched(script, "-n", "2", "--start-timeout", "8").finish()
    assert done.returncode == 124
    what = "error: did not come to init() within 8 s: rank 0, rank 1; all ranks were ended."
    assert done.stderr.startswith(f"{what} A script that never calls init() needs a longer --start-timeout.")
    assert done.stderr.count("    waiting for a disk") == 2


# -- errors, decided from messages alone -------------------------------------------------------------------------------


def why(tmp_path, *messages, seconds=0.0, **options) -> str:
    """The error that follows from messages to host 0. The last message comes `seconds` after the others."""
    ranks = Ranks(Cluster(processes=4, master_port=1, **options), tmp_path)
    for message in messages[:-1]:
        ranks.note(message)
    time.sleep(seconds)
    ranks.note(messages[-1])
    with pytest.raises(LaunchError) as error:
        ranks.check()
    return str(error.value)


def test_the_rank_that_failed_first_is_named_though_another_ended_first(tmp_path):
    told = {"rank": 2, "fails": 3, "log": "\nits log"}
    said = why(tmp_path, told, {"rank": 0, "code": 1, "log": "\nanother"})
    assert said == "rank 2 failed with exit code 3; all ranks were ended.\nits log"
    said = why(tmp_path, told, {"rank": 2, "code": 3, "log": "\nits whole log"})
    assert said == "rank 2 failed with exit code 3; all ranks were ended.\nits whole log"


def test_a_rank_that_fails_while_another_is_stopped_is_not_blamed_alone(tmp_path):
    said = why(tmp_path, {"rank": 3, "stopped": True}, {"rank": 0, "code": 1})
    assert said == "rank 3 is stopped (SIGSTOP), and rank 0 failed with exit code 1; all ranks were ended."
    said = why(tmp_path, {"rank": 3, "stopped": True}, {"rank": 3, "stopped": False}, {"rank": 0, "code": 1})
    assert said == "rank 0 failed with exit code 1; all ranks were ended."
    said = why(tmp_path, {"rank": 3, "stopped": True}, {"rank": 3, "code": 137})
    assert said == "rank 3 failed with exit code 137 (SIGKILL); all ranks were ended."


def test_a_rank_that_fails_after_another_ended_is_not_blamed_alone(tmp_path):
    said = why(tmp_path, {"rank": 1, "code": 0}, {"rank": 0, "code": 1}, seconds=2.2)
    assert re.fullmatch(
        r"rank 0 failed with exit code 1, 2 s after rank 1 had ended with exit code 0; all ranks were ended\.", said
    )
    assert why(tmp_path, {"rank": 1, "at_end": True}, {"rank": 0, "code": 1}) == (
        "rank 0 failed with exit code 1; all ranks were ended."
    ), "they ended together"


def test_ranks_that_go_on_are_left_alone_unless_all_stand_still(tmp_path):
    ranks = Ranks(Cluster(processes=3, master_port=1, end_timeout=15), tmp_path)

    def say(**message):
        ranks.note(message)
        ranks.check()

    say(rank=0, still=20.0, place="a")
    say(rank=1, still=20.0, place="b")
    say(rank=2, still=20.0, place="c")
    say(rank=0, still=0.0, place="a")
    say(rank=2, at_end=True)
    say(rank=0, still=14.9, place="a")
    with pytest.raises(LaunchError, match=r"rank 2 ended .* rank 0, rank 1 have stood still for 15 s since \(in a\)"):
        say(rank=0, still=15.1, place="a")
    for_ever = Ranks(Cluster(processes=2, master_port=1, end_timeout=0), tmp_path)
    for_ever.note({"rank": 1, "code": 0})
    for_ever.note({"rank": 0, "still": 1e6, "place": "a"})
    for_ever.check()
    on_two_hosts = Ranks(Cluster(processes=2, nodes=2, master_port=1), tmp_path)
    on_two_hosts.note({"rank": 1, "code": 0})
    on_two_hosts.note({"rank": 0, "still": 1e6, "place": "a"})
    on_two_hosts.check()  # it may wait for a rank of the other host, which goes on


def test_a_launch_that_is_stopped_as_a_whole_may_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("gaccum_ms.launch.supervisor.STOPPED_SECONDS", -1.0)
    ranks = Ranks(Cluster(processes=2, master_port=1), tmp_path)
    ranks.note({"rank": 0, "stopped": True})
    ranks.note({"rank": 1, "stopped": True})
    ranks.check()
    ranks.note({"rank": 1, "stopped": False})
    with pytest.raises(LaunchError, match=r"^rank 0 is stopped \(SIGSTOP\)"):
        ranks.check()


def test_a_host_whose_ranks_are_all_stopped_is_not_the_whole_launch(tmp_path, monkeypatch):
    monkeypatch.setattr("gaccum_ms.launch.supervisor.STOPPED_SECONDS", -1.0)
    ranks = Ranks(Cluster(processes=1, nodes=2, node_rank=1, master_port=1), tmp_path)
    ranks.note({"rank": 1, "stopped": True})
    with pytest.raises(LaunchError, match=r"^rank 1 on host 1 is stopped \(SIGSTOP\)"):
        ranks.check()


def test_many_ranks_make_a_short_error(tmp_path):
    ranks = Ranks(Cluster(processes=128, master_port=1, start_timeout=0.01), tmp_path)
    time.sleep(0.05)
    with pytest.raises(LaunchError, match=r"within 0.01 s: rank 0, .*, rank 3, 124 more; all"):
        ranks.check()
