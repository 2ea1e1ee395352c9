"""A pipeline in NumPy: one machine for each stage, each in a thread. Send and Receive are queues between two ranks, and
collectives over stages are meetings. A Send waits for its Receive. A stage that waits for ever is an error."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.semi_auto.machine import Machine

FOR_EVER = 120  # seconds; a run takes less than ten


class Meeting:
    """What stages send one another."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failed: BaseException | None = None
        self.queues: defaultdict[tuple[int, int], deque] = defaultdict(deque)
        self.sums: defaultdict[Any, dict[int, np.ndarray]] = defaultdict(dict)

    def wait(self, what_for: str, is_ready: Callable[[], bool]) -> None:
        """Tell the other stages what this one has done, and wait. The condition is held."""
        self.changed.notify_all()
        assert self.changed.wait_for(lambda: is_ready() or self.failed is not None, FOR_EVER), f"waits {what_for}"
        if self.failed is not None:
            raise self.failed

    def send(self, values: dict[tuple[int, int], np.ndarray], label: str) -> None:
        """`values` : by sender and receiver."""
        with self.changed:
            for ends, value in values.items():
                self.queues[ends].append((label, value))
            self.wait(f"until '{label}' is received", lambda: not any(self.queues[ends] for ends in values))

    def receive(self, ends: Sequence[tuple[int, int]], label: str) -> list[np.ndarray]:
        with self.changed:
            self.wait(f"for '{label}' by {ends}", lambda: all(self.queues[pair] for pair in ends))
            received = [self.queues[pair].popleft() for pair in ends]
            self.changed.notify_all()
        assert {sent for sent, _ in received} == {label}, f"'{label}' is received, but '{received[0][0]}' was sent"
        return [value for _, value in received]

    def sum(self, groups: Sequence[tuple], values: dict[int, np.ndarray]) -> list[np.ndarray]:
        """`groups` : the name and the ranks of each rank's group."""
        with self.changed:
            for (name, _), (rank, value) in zip(groups, values.items(), strict=True):
                self.sums[name][rank] = value
            what_for = f"in an AllReduce over ranks {groups[0][1]}"
            self.wait(what_for, lambda: all(len(self.sums[name]) == len(ranks) for name, ranks in groups))
        members = ([self.sums[name][rank] for rank in ranks] for name, ranks in groups)
        return [np.sum(each, axis=0, dtype=each[0].dtype) for each in members]


def step_together(stages: Sequence[Machine], batch: Sequence[Sequence[np.ndarray]]) -> list[list[Any]]:
    """Run all graphs once. `batch` has each device's part of each input, which all stages have. Returns each stage's
    results."""
    meeting = Meeting()

    def run(stage: Machine) -> list[Any]:
        stage.meeting = meeting
        try:
            return stage.step(*(batch[int(token.rsplit("inputs", 1)[1])] for token in stage.inputs))
        except BaseException as error:
            with meeting.changed:
                meeting.failed = meeting.failed or error
                meeting.changed.notify_all()
            raise

    with ThreadPoolExecutor(len(stages)) as pool:
        results = list(pool.map(run, stages))
    assert not any(meeting.queues.values()), "something was sent and not received"
    return results
