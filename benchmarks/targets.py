"""The targets, and whether one run meets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.networks import COMPARED
from benchmarks.rows import WHOLE, Row, beside, find, growth_ratio, round_ratios, time_ratio

SIZE = 16  # the number of micro-batches in most targets
_FEW, _MANY = 4, 64  # numbers of micro-batches whose first calls must take equal time


@dataclass(frozen=True)
class Target:
    """A measured ratio that must not exceed its limit. A ratio that was not measured fails. `rounds` : the ratios whose
    median it is, if one group has both programs."""

    text: str
    value: float | None
    limit: float | None
    rounds: Sequence[float] = ()

    @property
    def passed(self) -> bool:
        return self.value is not None and self.limit is not None and self.value <= self.limit

    def line(self) -> str:
        measured = self.value is not None and self.limit is not None
        verdict = ("PASS" if self.passed else "FAIL") if measured else "not measured"
        value = "-" if self.value is None else f"{self.value:.3f}"
        limit = "" if self.limit is None else f" (at most {self.limit:.3f})"
        spread = f", {len(self.rounds)} rounds: {min(self.rounds):.2f} to {max(self.rounds):.2f}" if self.rounds else ""
        return f"{verdict:<12}  {self.text}: {value}{limit}{spread}"


def targets(rows: Sequence[Row]) -> list[Target]:
    """The project's targets, computed from this run alone."""
    return [*_times(rows), *_processes(rows), *_first_calls(rows), *_memory(rows)]


def _divided(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _times(rows: Sequence[Row]) -> Iterator[Target]:
    def target(network: str, text: str, one: tuple[str, int], other: tuple[str, int], limit: float) -> Target:
        row = find(rows, network, *one)
        base = beside(rows, row, *other, 1) if row else None
        return Target(f"{network}: {text}", time_ratio(row, base), limit, round_ratios(row, base))

    for network, limit in {"mlp": 2, "cnn": 0.9, "resnet18": 1.02, "transformer": 1.02}.items():
        yield target(network, f"update at {SIZE}, of the whole batch's", ("ours", SIZE), (WHOLE, 1), limit)
    for network, limit in {"mlp": 1.1, "transformer": 1.0}.items():
        yield target(network, f"update at {SIZE}, of PyTorch's at {SIZE}", ("ours", SIZE), ("torch", SIZE), limit)
    for network in ("cnn", "resnet18"):  # convolutions dominate
        text = f"{network}: update at {SIZE}, of PyTorch's at {SIZE}; as a part of the same ratio of whole batches"
        at_16 = time_ratio(find(rows, network, "ours", SIZE), find(rows, network, "torch", SIZE))
        floor = time_ratio(find(rows, network, WHOLE), find(rows, network, "torch"))
        yield Target(text, _divided(at_16, floor), 1.05)
    for network in COMPARED:
        yield target(network, "update at 1, of nn.TrainOneStepCell's", ("ours", 1), (WHOLE, 1), 1.02)
    for network in COMPARED:
        for size in (1, SIZE):  # a graph without a loop, and one with
            text = f"PyNative mode with jit=True at {size}, of graph mode's"
            yield target(network, text, ("jit", size), ("ours", size), 1.1)
    for network in ("mlp", "cnn"):
        text = f"recording noise at {SIZE}, of the update without"
        yield target(network, text, ("noise", SIZE), ("ours", SIZE), 1.12)


def _processes(rows: Sequence[Row]) -> Iterator[Target]:
    for network in ("mlp", "cnn"):
        eight = find(rows, network, "ours", SIZE, 8)
        two = eight and beside(rows, eight, "ours", SIZE, 2)
        text = f"{network}: 8 processes, of 2 processes, the same batch, at {SIZE}"
        yield Target(text, time_ratio(eight, two), 1.5, round_ratios(eight, two))


def _first_calls(rows: Sequence[Row]) -> Iterator[Target]:
    def seconds(network: str, way: str, size: int) -> float | None:
        row = find(rows, network, way, size)
        return row and row.first_call

    for network in COMPARED:
        ratio = _divided(seconds(network, "ours", _MANY), seconds(network, "ours", _FEW))
        yield Target(f"{network}: first call at {_MANY}, of that at {_FEW}", ratio, 1.1)
    for network in COMPARED:
        ratio = _divided(seconds(network, "ours", SIZE), seconds(network, "mindspore", SIZE))
        yield Target(f"{network}: first call at {SIZE}, of MindSpore's own cell's", ratio, 0.4)
    for network in COMPARED:  # what takes less than 1 s may take 150 ms longer
        proved, unproved = (seconds(network, way, SIZE) for way in ("ours", "unchecked"))
        longer = None if proved is None or unproved is None else proved - unproved
        yield Target(
            f"{network}: by how much the proof makes the first call longer",
            _divided(longer, max(unproved or 0, 1)),
            0.15,
        )
    for network in COMPARED:  # two first calls in PyNative mode differ by more than that
        row = find(rows, network, "eager", SIZE)
        proof = row.details.get("proof") if row else None
        rest = None if row is None or row.first_call is None or proof is None else row.first_call - proof
        yield Target(
            f"{network}: the same in PyNative mode, the proof by itself", _divided(proof, max(rest or 0, 1)), 0.15
        )


def _memory(rows: Sequence[Row]) -> Iterator[Target]:
    growth = growth_ratio(find(rows, "cnn", "ours", SIZE), find(rows, "cnn", WHOLE))
    torch = growth_ratio(find(rows, "cnn", "torch", SIZE), find(rows, "cnn", "torch"))
    yield Target(f"cnn: memory growth at {SIZE}, of the whole batch's", growth, 0.1)
    yield Target(f"cnn: the same, at most PyTorch's own (growth at {SIZE}, of that at 1)", growth, torch)

    ours, plain = find(rows, "wide", "ours", _MANY), find(rows, "wide", WHOLE)
    value = None
    if ours and plain and ours.peak is not None and plain.base_peak is not None:
        value = (ours.peak - plain.base_peak) / ours.weight_bytes
    text = f"wide: memory at {_MANY} micro-batches of one sample, beyond nn.TrainOneStepCell's at a batch of one"
    yield Target(f"{text}, in weights", value, 1)
