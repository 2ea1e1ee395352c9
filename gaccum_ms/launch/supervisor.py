"""Collects the reports of a launch's guards (see `guard.py` ), and finds success, or a failure and its cause."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gaccum_ms.launch.cluster import Cluster, LaunchError
from gaccum_ms.launch.guard import LET_GO, SCHEDULER, STARTER, bound, receive
from gaccum_ms.launch.logs import last_lines, launcher_folder, rank_folder

Message = dict[str, Any]

SCHEDULER_GRACE_SECONDS = 5.0  # a rank's failure may end the scheduler first, but the rank's error says more
EXIT_SECONDS = 5.0  # for the exit handlers of a script that has failed; then its process is ended
LONG_OVER_SECONDS = 2.0  # a rank that ended this long before another failed may be the cause
WRONG_ARGUMENT = 2  # the exit code
MESSAGES = 1000  # read at a time: another user may send without end
NAMES = 4  # the largest number of ranks named in an error


class Reports:
    """Receives the messages of one launch's guards and ranks."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._socket = bound(job)
        self._socket.setblocking(False)

    def close(self) -> None:
        """Receive no more."""
        self._socket.close()

    def read(self, seconds: float) -> list[Message]:
        """Return the messages that have arrived, after waiting at most `seconds` for one."""
        messages = []
        if select.select([self._socket], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(MESSAGES):
                    messages.append(receive(self._socket))
        return [json.loads(message) for message in messages if message]

    def let_go(self, ranks: Iterable[int]) -> None:
        """Tell ranks of this host that they may leave."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._socket.sendto(LET_GO, f"\0{self._job}-{rank}")


class Ranks:
    """The state of this host's ranks."""

    def __init__(self, cluster: Cluster, log_dir: Path) -> None:
        self._cluster, self._log_dir = cluster, log_dir
        self._pids: dict[int, int] = {}
        self._guards: dict[int, int] = {}  # the guards' processes
        self._without_guard: set[int] = set()  # ranks whose guard was gone at the last look
        self._in_init: set[int] = set()  # ranks that have reached init()
        self.over: dict[int, float] = {}  # ranks, of any host, whose script has ended well, and when
        self._fails: dict[int, tuple[int, float]] = {}  # the reported exit code, and when
        self._codes: dict[int, int] = {}
        self._error: LaunchError | None = None
        self._begin = time.monotonic()
        self._scheduler_failed = 0.0
        self._all_ended = f"all ranks{' of this host' * (cluster.nodes > 1)} were ended."

    def note_over(self, ranks: Iterable[int]) -> None:
        """Note that the scripts of these ranks, of any host, have ended well."""
        for rank in ranks:
            self.over.setdefault(rank, time.monotonic())

    def note(self, message: Message) -> None:
        """Process a message of a guard or of a rank."""
        rank, code = message["rank"], message.get("code", 0)
        if "guard" in message:
            self._guards[rank] = message["guard"]
        if "pid" in message:
            self._pids[rank] = message["pid"]
        if "at_end" in message or ("code" in message and code == 0 and rank >= 0):
            self.note_over([rank])
        if "fails" in message:
            self._fails.setdefault(rank, (message["fails"], time.monotonic()))
        if "code" in message:
            self._codes[rank] = code
            if code and rank == SCHEDULER:
                self._scheduler_failed = time.monotonic()
            elif code and rank >= 0:  # the first error usually causes the others
                self._error = self._error or self._why_failed(rank, code)

    def _why_failed(self, rank: int, code: int) -> LaunchError:
        """The error when this rank's process has failed. The cause may be a rank that failed or ended before."""
        now = since = time.monotonic()
        earlier = next(iter(self._fails), rank)
        if earlier != rank:
            rank, (code, since) = earlier, self._fails[earlier]
        why = f"{self._names([rank])} failed with {_exit_code(code)}"
        over = [other for other, end in sorted(self.over.items()) if now - end > LONG_OVER_SECONDS]
        if over:
            seconds = now - min(self.over.values())
            why += f", {seconds:.0f} s after {self._names(over)} had ended with exit code 0"
        # A script says so by 2, as argparse does. What is wrong then is wrong again after a restart. Once ranks are in
        # init(), 2 may be an error of the training.
        wrong_argument = code == WRONG_ARGUMENT and not self._in_init
        error = f"{why}; {self._all_ended}{self._log(rank)}"
        return LaunchError(error, WRONG_ARGUMENT if wrong_argument else 1, rank, since)

    def _log(self, rank: int) -> str:
        folder = rank_folder(self._log_dir, rank, self._cluster.attempt)
        return last_lines(folder / "stdout") + last_lines(folder / "stderr")

    def _names(self, ranks: list[int]) -> str:
        """The names of ranks, in an error."""
        several, size = self._cluster.nodes > 1, self._cluster.processes
        names = [f"rank {rank}{f' on host {rank // size}' * several}" for rank in ranks[:NAMES]]
        names += [f"{len(ranks) - NAMES} more"] * (len(ranks) > NAMES)
        return ", ".join(names)

    def running(self) -> list[int]:
        """This host's ranks that have not ended."""
        return [rank for rank in self._cluster.local_ranks if rank not in self._codes and rank not in self.over]

    def silent(self) -> list[int]:
        """This host's ranks without an exit code."""
        return [rank for rank in self._cluster.local_ranks if rank not in self._codes]

    def look(self) -> None:
        """Check the ranks: which have reached ``init()`` , have failed and do not end, or have no guard."""
        import psutil

        for rank, pid in self._pids.items():
            if rank in self._codes:
                continue
            if rank not in self._in_init:  # init() connects a rank to MindSpore's scheduler
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    connections = getattr(process, "net_connections", None) or process.connections  # in psutil 5
                    ports = [c.raddr.port for c in connections("tcp") if c.raddr]
                    if self._cluster.master_port in ports:
                        self._in_init.add(rank)
            code, since = self._fails.get(rank, (0, 0.0))
            if code and time.monotonic() - since > EXIT_SECONDS:
                self.note({"rank": rank, "code": code})
        gone = {rank for rank, guard in self._guards.items() if rank not in self._codes and _is_gone(guard)}
        if lost := sorted(gone & self._without_guard):  # whatever a guard has said has come since then
            names = "MindSpore's scheduler" if lost[0] == SCHEDULER else self._names(lost)
            why = f"{names} ended, because the launcher's process above it was killed; {self._all_ended}"
            alone = len(lost) == 1 and lost[0] != SCHEDULER
            self._error = self._error or LaunchError(why, rank=lost[0] if alone else None)
        self._without_guard = gone

    def check(self) -> None:
        """Raise the error that ends the attempt, if there is one."""
        now, limit = time.monotonic(), self._cluster.start_timeout
        if self._error:
            raise self._error
        if self._scheduler_failed and now - self._scheduler_failed > SCHEDULER_GRACE_SECONDS:
            log = launcher_folder(self._log_dir, self._cluster) / "scheduler.log"
            why = f"MindSpore's scheduler failed with {_exit_code(self._codes[SCHEDULER])}; {self._all_ended}"
            raise LaunchError(why + last_lines(log))
        if STARTER in self._codes and (silent := self.silent()):  # all that its guards have said has come before
            starter = self._cluster.launcher
            log = launcher_folder(self._log_dir, self._cluster) / f"{starter}.log"
            what = f"{starter} ended with {_exit_code(self._codes[STARTER])}; ranks {silent} never finished"
            raise LaunchError(what + last_lines(log))
        missing = [rank for rank in self.running() if rank not in self._in_init]
        if missing and now - self._begin > limit:
            why = f"did not come to init() within {limit:g} s: {self._names(missing)}; {self._all_ended}"
            if len(missing) == self._cluster.processes:
                why += " A script that never calls init() needs a longer --start-timeout."
            raise LaunchError("".join([why, *map(self._log, missing[:NAMES])]), code=124)
        limit, going = self._cluster.end_timeout, self.running()
        if limit and self.over and going and now - min(self.over.values()) > limit:
            why = f"{self._names(sorted(self.over))} ended with exit code 0, and {self._names(going)} did not end"
            raise LaunchError(f"{why} within {limit:g} s (--end-timeout); {self._all_ended}", code=124)


def _is_gone(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _exit_code(code: int) -> str:
    names = {128 + number: number.name for number in signal.Signals}
    return f"exit code {code}" + (f" ({names[code]})" if code in names else "")
