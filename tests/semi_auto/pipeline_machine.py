"""A pipeline in NumPy: one machine for each stage, each in a thread. Send and Receive are queues between two ranks, and
collectives over stages are meetings. A Send waits for its Receive. If no stage can go on, that is an error which says
what each waits for."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.semi_auto.machine import Machine


class Meeting:
    """What so many stages send one another."""

    def __init__(self, stages: int) -> None:
        self.changed = threading.Condition()
        self.running = set(range(stages))
        self.waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.failed: BaseException | None = None
        self.queues: defaultdict[tuple[int, int], deque] = defaultdict(deque)
        self.sums: defaultdict[Any, dict[int, np.ndarray]] = defaultdict(dict)

    def wait(self, stage: int, for_what: str, ready: Callable[[], bool]) -> None:
        """Let `stage` wait until it is ready. The condition is held."""
        self.waiting[stage] = for_what, ready
        self.look_for_deadlock()
        self.changed.wait_for(lambda: ready() or self.failed is not None)
        del self.waiting[stage]
        if self.failed is not None:
            raise self.failed

    def look_for_deadlock(self) -> None:
        """If all that run wait, and none is ready: fail."""
        blocked = set(self.waiting) == self.running and not any(ready() for _, ready in self.waiting.values())
        if blocked and self.running and self.failed is None:
            texts = [f"stage {stage} waits {text}" for stage, (text, _) in sorted(self.waiting.items())]
            self.fail(AssertionError("; ".join(texts)))

    def fail(self, error: BaseException) -> None:
        self.failed = self.failed or error
        self.changed.notify_all()

    def send(self, stage: int, values: dict[tuple[int, int], np.ndarray], label: str) -> None:
        """`values` : by sender and receiver."""
        with self.changed:
            for ends, value in values.items():
                self.queues[ends].append((label, value))
            self.changed.notify_all()
            (sender, receiver), *_ = values
            self.wait(
                stage,
                f"until rank {receiver} receives '{label}' from rank {sender}",
                lambda: not any(self.queues[ends] for ends in values),
            )

    def receive(self, stage: int, ends: Sequence[tuple[int, int]], label: str) -> list[np.ndarray]:
        with self.changed:
            (sender, receiver), *_ = ends
            self.wait(
                stage,
                f"for '{label}' from rank {sender} at rank {receiver}",
                lambda: all(self.queues[pair] for pair in ends),
            )
            values = []
            for pair in ends:
                sent, value = self.queues[pair].popleft()
                assert sent == label, f"rank {pair[1]} receives '{label}', but rank {pair[0]} sent '{sent}'"
                values.append(value)
            self.changed.notify_all()
            return values

    def sum(self, stage: int, groups: Sequence[tuple], values: dict[int, np.ndarray]) -> list[np.ndarray]:
        """`groups` : the name and the ranks of each rank's group."""
        with self.changed:
            for (name, _), (rank, value) in zip(groups, values.items(), strict=True):
                self.sums[name][rank] = value
            self.changed.notify_all()
            self.wait(
                stage,
                f"in an AllReduce over ranks {groups[0][1]}",
                lambda: all(len(self.sums[name]) == len(ranks) for name, ranks in groups),
            )
            return [
                np.sum([self.sums[name][rank] for rank in ranks], axis=0, dtype=next(iter(values.values())).dtype)
                for name, ranks in groups
            ]


class Pipeline:
    """The stages of a case, in their order."""

    def __init__(self, stages: Sequence[Machine]) -> None:
        self.stages = stages

    def step(self, *batch: Sequence[np.ndarray]) -> list[list[Any]]:
        """Run all graphs once. `batch` has each device's part of each input, which all stages have. Returns each
        stage's results."""
        meeting = Meeting(len(self.stages))
        results: list[Any] = [None] * len(self.stages)

        def run(stage: Machine) -> None:
            stage.meeting = meeting
            try:
                own = [batch[int(token.rsplit("inputs", 1)[1])] for token in stage.inputs]
                results[stage.number] = stage.step(*own)
            except BaseException as error:
                with meeting.changed:
                    meeting.fail(error)
            finally:
                with meeting.changed:
                    meeting.running.discard(stage.number)
                    meeting.look_for_deadlock()

        threads = [threading.Thread(target=run, args=(stage,), daemon=True) for stage in self.stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if meeting.failed is not None:
            raise meeting.failed
        assert not any(meeting.queues.values()), "something was sent and not received"
        return results
