"""Decides after a failed attempt: another one, on as many ranks or on fewer, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gaccum_ms.launch.cluster import Cluster, LaunchError
from gaccum_ms.launch.output import say


class Restarts:
    """Decides as torchrun does.

    If a rank fails twice in succession, the second time within ``--start-timeout`` of the start, its device is
    probably broken: it is left out, if ``--min-processes`` allows. On several hosts, it is the host.
    """

    def __init__(self) -> None:
        self._failed: int | str | None = None  # the device, or the host, of the last rank that failed
        self.broken_hosts: set[str] = set()

    def after(self, cluster: Cluster, error: LaunchError, seconds: float, hosts: Sequence[str] = ()) -> Cluster | None:
        """Return the cluster of the next attempt, and print that all begin anew; None if there is none."""
        if error.code != 1 or cluster.attempt > cluster.max_restarts:
            return None
        say(f"{error}\nnote: all begin anew: restart {cluster.attempt} of {cluster.max_restarts}.\n")
        following, failed = dataclasses.replace(cluster, attempt=cluster.attempt + 1), None
        if error.rank is not None:
            failed = hosts[error.rank // cluster.processes] if hosts else cluster.device_of(error.rank)
        again, self._failed = failed is not None and failed == self._failed, failed
        if again and seconds <= cluster.start_timeout:
            if hosts:
                self.broken_hosts.add(str(failed))
            elif cluster.size > (cluster.min_processes or cluster.size):
                devices = [cluster.device_of(rank) for rank in range(cluster.size) if rank != error.rank]
                return dataclasses.replace(following, processes=len(devices), devices=tuple(devices))
        return following
