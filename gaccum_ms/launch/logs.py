"""The log folder of a launch: locks it, replaces old logs, and reads the ends of new ones."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gaccum_ms.launch.cluster import Cluster, LaunchError

FOLDER = re.compile(r"(\d+)|(?:msrun|mpirun)(?:\.(\d+))?|\.cuda")  # in the log folder, with an attempt's number
MARK = ".made-by-gaccum_ms"  # a file in such folders; those without it are the user's, and stay
PROBE_BYTES = 65536
TAIL_LINES = 20
TAIL_BYTES = 40_000


@contextlib.contextmanager
def locked(log_dir: Path) -> Iterator[None]:
    """Make the log folder and keep other launches out of it."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = (log_dir / ".lock").open("a")
    except OSError as error:
        raise _unwritable(log_dir, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"another launch writes to '{log_dir}'. Name another --log-dir.", 2) from None
        yield


def prepare(cluster: Cluster, log_dir: Path) -> None:
    """Remove the logs of an older launch; those of earlier attempts of this launch stay."""
    old = []
    try:
        for entry in log_dir.iterdir():
            name = FOLDER.fullmatch(entry.name)
            attempt = int(name[1] or name[2] or 1) if name else 0
            if attempt < cluster.attempt:
                continue  # not even looked into: it may be another user's
            if (entry / MARK).is_file() and not entry.is_symlink():
                old.append(entry)
            elif attempt <= cluster.max_restarts + 1:
                why = f"'{entry}' was not made by a launch, and would have to be replaced"
                raise LaunchError(f"{why}. Name another --log-dir, or move it away.", code=2)
        for entry in old:
            shutil.rmtree(entry)
    except OSError as error:
        raise _unwritable(log_dir, error) from error


def make_folders(cluster: Cluster, log_dir: Path) -> None:
    """Make the folders of this host's ranks, for one attempt."""
    ranks = [rank_folder(log_dir, number, cluster.attempt) for number in cluster.local_ranks]
    try:
        for folder in (launcher_folder(log_dir, cluster), ranks[0].parent):
            folder.mkdir()
            mark(folder)
        for folder in ranks:
            folder.mkdir()
    except OSError as error:
        raise _unwritable(log_dir, error) from error
    if full := why_full(log_dir):
        raise LaunchError(full, 2)


def mark(folder: Path) -> None:
    """Mark a folder as made by a launch."""
    (folder / MARK).write_text("The next launch with the same --log-dir replaces this folder.\n")


def why_full(log_dir: Path) -> str:
    """Why the log folder takes no more data, or an empty string. Ranks that cannot write fail without an error."""
    try:
        with tempfile.TemporaryFile(dir=log_dir) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return str(_unwritable(log_dir, error))
    return ""


def _unwritable(log_dir: Path, error: OSError) -> LaunchError:
    why = f"cannot write logs to '{log_dir}': {error.strerror}"
    remedy = "Make room there, or name" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Name"
    return LaunchError(f"{why}. {remedy} another --log-dir.", code=2)


def rank_folder(log_dir: Path, rank: int | str, attempt: int = 1) -> Path:
    """Return the folder with one rank's ``stdout`` and ``stderr``."""
    return log_dir / str(attempt) / f"rank.{rank}"


def launcher_folder(log_dir: Path, cluster: Cluster) -> Path:
    """Return the folder with the output of msrun or mpirun."""
    later = f".{cluster.attempt}" if cluster.attempt > 1 else ""
    return log_dir / f"{cluster.launcher}{later}"


def last_lines(path: Path) -> str:
    """Return the end of a log, indented, under its path; an empty string if the log is empty."""
    end = b""
    if path.exists():
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            end = log.read()
    lines = end.decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(["", f"the end of {path}:", *(f"    {line}" for line in lines)]) if lines else ""
