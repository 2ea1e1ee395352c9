"""A simulation of several devices in NumPy, which runs a finished graph and computes each device's numbers.

All ranks of a stage run the graph of its first rank in lockstep, each with its own inputs and its own part of each
Parameter, and meet at collectives. The groups of the other ranks are the first one's, shifted by the device matrix.
The stages of a pipeline are machines in threads: Send and Receive are queues between two ranks, and collectives over
stages are meetings. A Send waits for its Receive. A stage that waits for ever is an error.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tests.semi_auto.finished_graph import COLLECTIVES, Graph, Node, Program, split_top
from tests.semi_auto.operators import OPERATORS, Elided


class Ref(NamedTuple):
    """A Parameter, not its value: later reads see what was written to it."""

    name: str


class Closure(NamedTuple):
    """A graph with its first arguments."""

    graph: str
    arguments: tuple


def groups_like(group: Sequence[int], ranks: int) -> list[list[int]]:
    """Every rank's group. Rank 0's group has a stride, from which all others follow."""
    stride = group[1] - group[0] if len(group) > 1 else 1
    assert list(group) == [index * stride for index in range(len(group))], f"rank 0's group {group} is irregular"
    return [
        [rank - (rank // stride % len(group)) * stride + index * stride for index in range(len(group))]
        for rank in range(ranks)
    ]


_SCALAR = re.compile(r"^(I64|I32|F32|F64|F16|Bool)\((.+)\)$")
_TENSOR = re.compile(r"^Tensor\(shape=\[([\d, ]*)\], dtype=(\w+), value=(.*)\)$")
_UNIQUE = re.compile(r'[{ ]unique_id: "(\d+)"')
_FORWARD = re.compile(r'forward_unique_id: "(\d+)"')


def constant(text: str) -> Any:
    """A constant as the file writes it."""
    if found := _SCALAR.match(text):
        kind, value = found.groups()
        return bool(int(value)) if kind == "Bool" else int(value) if kind.startswith("I") else np.float32(value)
    if found := _TENSOR.match(text):
        shape = tuple(int(axis) for axis in found.group(1).split(",") if axis.strip())
        dtype = np.dtype(found.group(2).lower())
        numbers = found.group(3).lower().replace("true", "1").replace("false", "0").replace("...", "")
        values = [float(one) for one in re.findall(r"[-+.\w]+", numbers)]
        if "..." not in found.group(3):
            return np.array(values, dtype).reshape(shape)
        # Of a long constant the file has the first and last numbers; if they are equal, it is a `fill` .
        if len(set(values)) == 1:
            return np.full(shape, values[0], dtype)
        # `SkipSpikes` numbers its places.
        return np.arange(*shape, dtype=dtype) if dtype == np.int32 else Elided(shape, dtype)
    if text.startswith("("):
        return tuple(constant(one) for one in split_top(text[1:-1]))
    if text.startswith("@"):
        return Closure(text[1:].lstrip("@"), ())
    return None  # monads, None, strings


class Machine:
    """So many devices (`ranks` ) of a stage, which run its graph, with their parts of the Parameters' whole values.

    `parts[name](whole, rank)` : the part of a weight that is split; by default, if the graph's own shape is smaller,
    equal parts along axis 0. `samples_in` : in how many parts the samples lie; neighbours have the same part.
    """

    meeting: Meeting  # with the other stages

    def __init__(
        self,
        number: int,
        program: Program,
        ranks: int,
        parameters: Mapping[str, np.ndarray],
        parts: Mapping[str, Callable[[np.ndarray, int], np.ndarray]],
        samples_in: int,
    ) -> None:
        self.program, self.ranks, self.first_rank = program, ranks, number * ranks
        self.sums: defaultdict[tuple, int] = defaultdict(int)  # over each group of several stages, in this step
        self.state: dict[str, list[np.ndarray]] = {}
        self.places: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {}
        self.executed: list[Node] = []  # in the last step
        self.samples_in = samples_in
        # By MindSpore's ids of the slices that cut a rank's own part: whether the value has all samples.
        self._own_parts: dict[str, bool] = {}
        self.inputs: list[str] = []
        for token, shape in program.shapes.items():
            name = token.split("_", 1)[1]
            if re.fullmatch(r"inputs\d+", name):
                self.inputs.append(token)
                continue
            weight = re.sub(r"^(accum|stat|accu_grads|gaccum_ms\.(average|moment))\.", "", name)
            is_whole = parameters[name].shape == shape
            self.places[name] = rows(shape) if is_whole else parts.get(weight, rows(shape))
            self.state[name] = [np.array(self.places[name](parameters[name], rank)) for rank in range(ranks)]
            assert self.state[name][0].shape == shape, f"{name}: {self.state[name][0].shape}, not {shape}"

    def step(self, *batch: Sequence[np.ndarray]) -> list[Any]:
        """Run the graph once. `batch` has each rank's part of each input. Returns each rank's result."""
        self.executed = []
        self.sums.clear()
        environment: dict[str, list[Any]] = {
            token: [Ref(token.split("_", 1)[1])] * self.ranks for token in self.program.shapes
        }
        environment |= {token: list(value) for token, value in zip(self.inputs, batch, strict=True)}
        self._outer = environment
        return [self._value(one, rank) for rank, one in enumerate(self._run(self.program.entry, environment))]

    def _run(self, graph: Graph, environment: dict[str, list[Any]]) -> list[Any]:
        for node in graph.nodes:
            arguments = [self._resolve(text, environment) for text in node.arguments]
            environment[node.name] = self._node(node, arguments, environment)
        return self._resolve(graph.result, environment)

    def _resolve(self, text: str, environment: dict[str, list[Any]]) -> list[Any]:
        if text.startswith("%"):
            return environment[text] if text in environment else self._outer[text]
        return [constant(text)] * self.ranks

    def _call(self, closures: Sequence[Closure], arguments: list[list[Any]]) -> list[Any]:
        names = {closure.graph for closure in closures}
        assert len(names) == 1, f"ranks disagree which way to go: {names}"
        graph = self.program.graphs[names.pop()]
        bound = [[closure.arguments[index] for closure in closures] for index in range(len(closures[0].arguments))]
        return self._run(graph, dict(zip(graph.parameters, [*bound, *arguments], strict=True)))

    def _node(self, node: Node, arguments: list[list[Any]], environment: dict[str, list[Any]]) -> list[Any]:
        if node.op == "call":
            return self._call([Closure(str(node.callee), ())] * self.ranks, arguments)
        if node.op == "call value":
            return self._call(self._resolve(str(node.callee), environment), arguments)
        if node.op == "Load":
            return [self._value(one, rank) for rank, one in enumerate(arguments[0])]
        if node.op in _PLUMBING:
            return [_PLUMBING[node.op](*one) for one in zip(*arguments, strict=True)]
        self.executed.append(node)
        if node.op in ("Assign", "AssignAdd", "SGD", "Momentum"):
            with np.errstate(all="ignore"):  # devices do not warn
                return [self._write(node, one, rank) for rank, one in enumerate(zip(*arguments, strict=True))]
        values = [[self._value(one, rank) for rank, one in enumerate(argument)] for argument in arguments]
        if node.op == "StridedSlice" and _takes_own_part(node.attributes):
            of_samples = values[0][:: self.ranks // self.samples_in]  # of ranks with different samples
            has_all = all(np.array_equal(value, of_samples[0]) for value in of_samples)
            self._own_parts |= dict.fromkeys(_UNIQUE.findall(node.attributes), has_all)  # none if without backward
            return [self._own_part(*one[:3], rank, has_all) for rank, one in enumerate(zip(*values, strict=True))]
        forward = self._own_parts.keys() & _FORWARD.findall(node.attributes)
        if node.op == "StridedSliceGrad" and forward:
            has_all = self._own_parts[forward.pop()]
            return [self._from_own_part(*one[:4], rank, has_all) for rank, one in enumerate(zip(*values, strict=True))]
        if node.op in COLLECTIVES:
            return self._collective(node, values[0])
        with np.errstate(all="ignore"):
            results = [OPERATORS[node.op](*one) for one in zip(*values, strict=True)]
        return [result if isinstance(result, tuple) else np.asarray(result) for result in results]

    def _own_part(self, value: np.ndarray, begin: tuple, end: tuple, rank: int, has_all_samples: bool) -> np.ndarray:
        """The part that a rank takes of a value; rank 0's graph takes the first part. If there are fewer parts than
        ranks, neighbours take different parts, but the same part if it has all samples and these are the parts."""
        (axis,) = (index for index, last in enumerate(end) if last < value.shape[index])
        parts = value.shape[axis] // end[axis]
        assert not any(begin) and end[axis] * parts == value.shape[axis] and self.ranks % parts == 0, "no equal parts"
        own = rank * parts // self.ranks if has_all_samples and parts == self.samples_in else rank % parts
        return np.split(value, parts, axis)[own]

    def _from_own_part(self, gradient: np.ndarray, shape: tuple, begin: tuple, *own: Any) -> np.ndarray:
        """The backward of `_own_part` ."""
        whole = np.zeros(shape, gradient.dtype)
        self._own_part(whole, begin, *own)[...] = gradient
        return whole

    def _value(self, one: Any, rank: int) -> Any:
        if isinstance(one, Ref):
            return self.state[one.name][rank].copy()
        if type(one) is tuple:
            return tuple(self._value(part, rank) for part in one)
        return one

    def _write(self, node: Node, arguments: tuple, rank: int) -> Any:
        ref, *values = arguments
        if not isinstance(ref, Ref):
            return ref  # MindSpore's own step also clears values computed from its accumulators
        state = {key: self.state[key] for key in (one.name for one in arguments if isinstance(one, Ref))}
        old, value = state[ref.name][rank], self._value(values[0], rank)
        if isinstance(value, Elided):
            assert "accu_grads." in ref.name, f"{node} writes what the file does not hold"
            value = np.zeros(value.shape, value.dtype)  # with which a step clears
        assert np.shape(value) == old.shape, f"{node.op} of {np.shape(value)} to {ref.name} of {old.shape}"
        if node.op in ("Assign", "AssignAdd"):
            new = value if node.op == "Assign" else old + value
        else:  # SGD(weight, gradient, rate, accumulation, momentum, stat), without momentum
            rate, momentum = (float(self._value(values[index], rank)) for index in (1, 3))
            assert node.op == "SGD" and momentum == 0.0, "only SGD without momentum is known here"
            new = old - np.float32(rate) * value
        self.state[ref.name][rank] = np.asarray(new, old.dtype)
        return ref

    def _collective(self, node: Node, values: list[np.ndarray]) -> list[np.ndarray]:
        own = range(self.first_rank, self.first_rank + self.ranks)
        if node.op in ("Send", "Receive"):
            peer = self._peer(node)
            pairs = [(rank, peer + index) for index, rank in enumerate(own)]
            label = f"tag {node.attribute('sr_tag')}"
            if node.op == "Receive":
                return self.meeting.receive([pair[::-1] for pair in pairs], label)
            self.meeting.send(dict(zip(pairs, values, strict=True)), label)
            return values
        ranks = _named(node) or node.group
        assert node.op == "AllGather" or 'op: "sum"' in node.attributes, node
        if set(ranks) <= set(own):
            groups = groups_like([rank - self.first_rank for rank in ranks], self.ranks)
            members = [[values[one] for one in group] for group in groups]
            return [_joined(node.op, members[rank], group.index(rank)) for rank, group in enumerate(groups)]
        assert node.op == "AllReduce", node
        # Of the first rank's group; with one rank of each stage, that of the others lies beside it.
        shifts = range(self.ranks) if len(set(ranks) & set(own)) == 1 else [0] * self.ranks
        over_stages = [tuple(rank + shift for rank in ranks) for shift in shifts]
        self.sums[over_stages[0]] += 1
        named = [((group, self.sums[over_stages[0]]), group) for group in over_stages]
        return self.meeting.sum(named, dict(zip(own, values, strict=True)))

    def _peer(self, node: Node) -> int:
        """The other end of the first rank's Send or Receive."""
        place = node.attribute("dest_rank" if node.op == "Send" else "src_rank")
        assert place is not None, node
        return node.group[place] if "group_rank_ids" in node.attributes else place


def _joined(op: str, members: list[np.ndarray], place: int) -> np.ndarray:
    """What a rank at this place in its group gets."""
    if op == "AllGather":
        return np.concatenate(members)
    total = np.sum(members, axis=0, dtype=members[0].dtype)
    return total if op == "AllReduce" else np.split(total, len(members))[place]


_GROUPS = [
    range(first, first + step * size, step)
    for step, size in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2))
    for first in range(8 - step * (size - 1))
]
_NAMED = {hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:48]: tuple(ranks) for ranks in _GROUPS}


def _named(node: Node) -> tuple[int, ...] | None:
    """The ranks of a group that was made by `create_group` , which are in MindSpore's name for it: its nodes list all
    ranks."""
    name = re.search(r'\bgroup: "([^"]*)"', node.attributes)
    return _NAMED.get(name.group(1)) if name else None


def _takes_own_part(attributes: str) -> bool:
    """Whether a slice is a rank's own part, not a micro-batch. In a graph that micro-batches share, the compiler does
    not mark it."""
    is_shared = "forward_comm_node_unique_id" in attributes and "in_strategy" not in attributes
    return ("redistribution_op" in attributes or is_shared) and "pipeline_begin" not in attributes


def rows(shape: tuple[int, ...]) -> Callable[[np.ndarray, int], np.ndarray]:
    """A function for a rank's part, which has this shape: the whole value, or one of equal parts along axis 0."""

    def part(whole: np.ndarray, rank: int) -> np.ndarray:
        if whole.shape == shape:
            return whole
        parts = len(whole) // shape[0]
        return np.split(whole, parts)[rank % parts]

    return part


_PLUMBING: dict[str, Callable] = {
    "UpdateState": lambda *_: None,
    "Depend": lambda value, *_: value,
    "MakeTuple": lambda *values: values,
    "TupleGetItem": lambda values, index: values[index],
    "Switch": lambda condition, yes, no: yes if condition else no,
    "Partial": lambda closure, *arguments: Closure(closure.graph, (*closure.arguments, *arguments)),
}


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
