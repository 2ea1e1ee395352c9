"""Decides after a failed attempt: another one, on as many ranks or on fewer, or none."""

from __future__ import annotations

import dataclasses

from gaccum_ms.launch.cluster import Cluster, LaunchError


class Restarts:
    """Decides on host 0, as torchrun does for its agents; the other hosts follow host 0's decision.

    If a rank fails twice in succession, the second time within ``--start-timeout`` of the start, its device or host is
    probably broken: it is left out, if ``--min-processes`` allows. Lost hosts are not handled here: the next meeting
    goes on without them.
    """

    def __init__(self) -> None:
        self._failed: tuple[int, int] | None = None  # host and device of the last rank that failed

    def after(self, cluster: Cluster, error: LaunchError, seconds: float) -> Cluster | None:
        """Return the cluster of the next attempt; None if there is none.

        Args:
            cluster (Cluster): The cluster of the failed attempt.
            error (LaunchError): Its error.
            seconds (float): How long it ran.
        """
        anew = dataclasses.replace(cluster, attempt=cluster.attempt + 1)
        if cluster.node_rank != 0:
            return anew if error.again else None
        if error.again is False or error.code != 1 or cluster.attempt > cluster.max_restarts:
            return None
        failed = None if error.rank is None else (cluster.host_of(error.rank), cluster.device_of(error.rank))
        again, self._failed = failed is not None and failed == self._failed, failed
        least = cluster.min_processes or cluster.size
        if error.rank is None or not again or seconds > cluster.start_timeout:
            return anew
        if cluster.nodes > 1:
            host = cluster.host_of(error.rank)
            allowed = host != 0 and cluster.size - cluster.processes >= least  # all hosts connect to host 0
            return dataclasses.replace(anew, without=(*cluster.without, host)) if allowed else anew
        if cluster.hosts or cluster.size - 1 < least:  # the last one of several hosts keeps all its ranks
            return anew
        devices = [cluster.device_of(rank) for rank in range(cluster.size) if rank != error.rank]
        return dataclasses.replace(anew, processes=len(devices), devices=tuple(devices))
