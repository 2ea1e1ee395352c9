"""Decides after a failed attempt: another one, on as many ranks or on fewer, or none."""

from __future__ import annotations

import dataclasses

from gaccum_ms.launch.cluster import Cluster, LaunchError


class Restarts:
    """Decides as torchrun does.

    If a rank fails twice in succession, the second time within ``--start-timeout`` of the start, its device is
    probably broken: it is left out, if ``--min-processes`` allows.
    """

    def __init__(self) -> None:
        self._failed: int | None = None  # the device of the last rank that failed

    def after(self, cluster: Cluster, error: LaunchError, seconds: float) -> Cluster | None:
        """Return the cluster of the next attempt; None if there is none."""
        if error.code != 1 or cluster.attempt > cluster.max_restarts:
            return None
        anew = dataclasses.replace(cluster, attempt=cluster.attempt + 1)
        failed = None if error.rank is None else cluster.device_of(error.rank)
        again, self._failed = failed is not None and failed == self._failed, failed
        least = cluster.min_processes or cluster.size
        if not again or seconds > cluster.start_timeout or cluster.size - 1 < least:
            return anew
        devices = [cluster.device_of(rank) for rank in range(cluster.size) if rank != error.rank]
        return dataclasses.replace(anew, processes=len(devices), devices=tuple(devices))
