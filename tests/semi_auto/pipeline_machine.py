"""A pipeline in NumPy: one machine for each stage, each in a thread. Send and Receive are queues between two ranks, and
collectives over stages are meetings. A Send waits for its Receive. If no stage can go on, that is an error which says
what each waits for."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.semi_auto.finished_graph import Node
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


class Stage(Machine):
    """The devices of one stage. The arguments behind its number are a machine's."""

    meeting: Meeting

    def __init__(self, number: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.number, self.first_rank = number, number * self.ranks
        self.sums: defaultdict[tuple, int] = defaultdict(int)  # over each group, so far

    def join(self, meeting: Meeting) -> None:
        """Before a step: meet the other stages there."""
        self.meeting = meeting
        self.sums.clear()

    def _node(self, node: Node, arguments: list, environment: dict) -> list[Any]:
        if "pipeline_begin:" in node.attributes:  # a micro-batch, which is no redistribution
            node = node._replace(attributes=node.attributes.replace("redistribution_op", ""))
        return super()._node(node, arguments, environment)

    def _collective(self, node: Node, values: list[np.ndarray]) -> list[np.ndarray]:
        own = range(self.first_rank, self.first_rank + self.ranks)
        if node.op in ("Send", "Receive"):
            peer = self._peer(node)
            pairs = [(rank, peer + index) for index, rank in enumerate(own)]
            label = f"tag {node.attribute('sr_tag')}"
            if node.op == "Receive":
                return self.meeting.receive(self.number, [pair[::-1] for pair in pairs], label)
            self.meeting.send(self.number, dict(zip(pairs, values, strict=True)), label)
            return values
        ranks = _named(node) or node.group
        if set(ranks) <= set(own):
            inside = ", ".join(str(rank - self.first_rank) for rank in ranks)
            attributes = re.sub(r"(group_rank_ids|rank_list): \([\d, ]*\)", rf"\1: ({inside})", node.attributes)
            return super()._collective(node._replace(attributes=attributes), values)
        assert node.op == "AllReduce" and 'op: "sum"' in node.attributes, node
        # Of the first rank's group; with one rank of each stage, that of the others lies beside it.
        shifts = range(self.ranks) if len(set(ranks) & set(own)) == 1 else [0] * self.ranks
        groups = [tuple(rank + shift for rank in ranks) for shift in shifts]
        self.sums[groups[0]] += 1
        named = [((group, self.sums[groups[0]]), group) for group in groups]
        return self.meeting.sum(self.number, named, dict(zip(own, values, strict=True)))

    def _peer(self, node: Node) -> int:
        """The other end of the first rank's Send or Receive."""
        place = node.attribute("dest_rank" if node.op == "Send" else "src_rank")
        assert place is not None, node
        return node.group[place] if "group_rank_ids" in node.attributes else place


_GROUPS = [
    range(first, first + step * size, step)
    for step, size in ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2))
    for first in range(8 - step * (size - 1))
]
_NAMED = {hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:48]: tuple(ranks) for ranks in _GROUPS}


def _named(node: Node) -> tuple[int, ...] | None:
    """The ranks of a group that was made by `create_group` , which are in MindSpore's name for it: its nodes list all
    ranks."""
    name = re.search(r'\bgroup: "([^"]*)"', node.attributes)
    return _NAMED.get(name.group(1)) if name else None


class Pipeline:
    """The stages of a case, in their order, each with the graph of its first rank."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages

    def step(self, *batch: Sequence[np.ndarray]) -> list[list[Any]]:
        """Run all graphs once. `batch` has each device's part of each input, which all stages have. Returns each
        stage's results."""
        meeting = Meeting(len(self.stages))
        results: list[Any] = [None] * len(self.stages)

        def run(stage: Stage) -> None:
            stage.join(meeting)
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
