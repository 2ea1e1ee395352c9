"""`gaccum-ms run` , or ``python -m gaccum_ms.launch`` : starts one tree of processes, and ends them together.

    this program ── a keeper ── msrun or mpirun ── one guard per rank ── the rank, which runs the script

The keeper and the guards ( `guard.py` ) leave no process behind, whichever of them is killed. The guards report to this
program, so it finds the rank that failed first in the same way with either launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
import time

from gaccum_ms.launch.cluster import Cluster, LaunchError, left_out
from gaccum_ms.launch.dry_run import DryRun
from gaccum_ms.launch.job import SIGNALS, Job
from gaccum_ms.launch.logs import rank_folder
from gaccum_ms.launch.options import parse
from gaccum_ms.launch.output import say, show
from gaccum_ms.launch.ray_engine import OnRay
from gaccum_ms.launch.restarts import Restarts


def main(argv: list[str] | None = None, prog: str = "python -m gaccum_ms.launch") -> int:
    """Read the command line of `prog` , launch, and return the exit code."""
    options = parse(sys.argv[1:] if argv is None else argv, prog)
    if options.print_script:
        show(f"{options.script}\n")
        return 0
    fields = {field.name for field in dataclasses.fields(Cluster)}
    cluster = Cluster(**{name: value for name, value in vars(options).items() if name in fields})
    log_dir, command = options.log_dir.resolve(), [options.script, *options.args]
    if options.dry_run:
        text = DryRun(cluster, command, log_dir, options.hosts, options.words).text(options.dry_run)
        return 0 if show(text) else 1
    if importlib.util.find_spec("psutil") is None:
        say("error: 'psutil' is not installed (pip install psutil).\n")
        return 2
    for number in SIGNALS:
        # nohup has this program ignore SIGHUP. Ctrl-C is ignored too in a background job of a script, but ends it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    for name, why in left_out(os.environ).items():
        show(f"note: {name}={os.environ[name]} is not passed on: {why}\n")
    begin = time.monotonic()
    try:
        if options.on:
            ray = OnRay(options.ray_address, options.ray_resources, options.ray_working_dir, options.checkpoints)
            cluster = ray.run(cluster, command, log_dir, options.timeout)
            ranks, logs = cluster.size, log_dir / "host.N"
        else:
            restarts = Restarts() if options.restarts_here else None
            job = Job(command, log_dir, options.timeout, restarts=restarts)
            with contextlib.closing(job.run(cluster)) as steps:
                for attempt, _ in steps:
                    cluster = attempt
            ranks, logs = cluster.processes, log_dir
    except LaunchError as error:
        say(f"error: {error}\nlogs: {log_dir}\n")
        return error.code
    folder = rank_folder(logs, "N", cluster.attempt)
    host = f" of host {cluster.node_rank}" * (cluster.nodes > 1 and not options.on)
    show(f"{ranks} ranks{host} finished in {time.monotonic() - begin:.0f} s; logs: {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
