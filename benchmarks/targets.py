"""What must hold, and whether it does in one run. The shares of kernels are another command's: kernels.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.networks import COMPARED
from benchmarks.rows import WHOLE, FirstCalls, Row, find, growth_ratio, time_ratio

FIRST_CALL_SIZES = (2, 64)
_SIZE = 16  # the number of micro-batches that most targets are about


@dataclass(frozen=True)
class Target:
    """A measured ratio that must not exceed its limit. Not measured is not passed."""

    text: str
    value: float | None
    limit: float | None

    @property
    def passed(self) -> bool:
        return self.value is not None and self.limit is not None and self.value <= self.limit

    def line(self) -> str:
        measured = self.value is not None and self.limit is not None
        verdict = ("PASS" if self.passed else "FAIL") if measured else "not measured"
        value = "-" if self.value is None else f"{self.value:.3f}"
        return f"{verdict:<12}  {self.text}: {value}" + ("" if self.limit is None else f" (at most {self.limit:.3f})")


def targets(rows: Sequence[Row], first_calls: FirstCalls) -> list[Target]:
    """The project's targets, computed from this run alone."""
    return [*_times(rows), *_first_calls(rows, first_calls), *_memory(rows), *_processes(rows)]


def _divided(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _times(rows: Sequence[Row]) -> Iterator[Target]:
    def ratio(network: str, one: tuple[str, int], other: tuple[str, int]) -> float | None:
        return time_ratio(rows, find(rows, network, *one), find(rows, network, *other))

    for network, limit in {"mlp": 2, "cnn": 0.9, "resnet18": 1.02, "transformer": 1.02}.items():
        text = f"{network}: update at {_SIZE}, of the whole batch's"
        yield Target(text, ratio(network, ("ours", _SIZE), (WHOLE, 1)), limit)
    for network, limit in {"mlp": 1.1, "transformer": 1.0}.items():
        text = f"{network}: update at {_SIZE}, of PyTorch's at {_SIZE}"
        yield Target(text, ratio(network, ("ours", _SIZE), ("torch", _SIZE)), limit)
    for network in ("cnn", "resnet18"):  # where convolutions set the floor
        text = f"{network}: update at {_SIZE}, of PyTorch's at {_SIZE}; as a part of the same ratio of whole batches"
        at_16, floor = ratio(network, ("ours", _SIZE), ("torch", _SIZE)), ratio(network, (WHOLE, 1), ("torch", 1))
        yield Target(text, _divided(at_16, floor), 1.05)
    for network in COMPARED:
        text = f"{network}: update at 1, of nn.TrainOneStepCell's"
        yield Target(text, ratio(network, ("ours", 1), (WHOLE, 1)), 1.02)
    for network in COMPARED:
        text = f"{network}: PyNative mode with jit=True at {_SIZE}, of graph mode's"
        yield Target(text, ratio(network, ("jit", _SIZE), ("ours", _SIZE)), 1.1)
    for network in ("mlp", "cnn"):
        text = f"{network}: recording noise at {_SIZE}, of the update without"
        yield Target(text, ratio(network, ("noise", _SIZE), ("ours", _SIZE)), 1.05)


def _first_calls(rows: Sequence[Row], first_calls: FirstCalls) -> Iterator[Target]:
    few, many = FIRST_CALL_SIZES
    for network in COMPARED:
        seconds = first_calls.get(network, {})
        medians = {size: median(times) for size, times in seconds.items() if times}
        text = f"{network}: first call at {many}, of that at {few}"
        yield Target(text, _divided(medians.get(many), medians.get(few)), 1.1)
    for network in COMPARED:
        ours, own = (find(rows, network, way, _SIZE) for way in ("ours", "mindspore"))
        text = f"{network}: first call at {_SIZE}, of MindSpore's own cell's"
        yield Target(text, _divided(ours and ours.first_call, own and own.first_call), 0.4)


def _memory(rows: Sequence[Row]) -> Iterator[Target]:
    growth = growth_ratio(find(rows, "cnn", "ours", _SIZE), find(rows, "cnn", WHOLE))
    torch = growth_ratio(find(rows, "cnn", "torch", _SIZE), find(rows, "cnn", "torch"))
    yield Target(f"cnn: memory growth at {_SIZE}, of the whole batch's", growth, 0.1)
    yield Target(f"cnn: the same, at most PyTorch's own (growth at {_SIZE}, of that at 1)", growth, torch)

    # One accumulator for each weight, and the batch, which a plain step of one sample has not got. Compiling the loop
    # costs the narrow network as much.
    wide, narrow = find(rows, "wide", "ours", 64), _beyond_plain(rows, "narrow")
    value = limit = None
    if wide and narrow is not None and (beyond := _beyond_plain(rows, "wide")) is not None:
        value = (beyond - narrow) / wide.weight_bytes
        limit = 1 + wide.batch_bytes / wide.weight_bytes
    text = "wide: memory at 64 micro-batches of one sample, beyond nn.TrainOneStepCell's at a batch of one, in weights"
    yield Target(text, value, limit)


def _beyond_plain(rows: Sequence[Row], network: str) -> int | None:
    ours, plain = find(rows, network, "ours", 64), find(rows, network, WHOLE)
    return None if not ours or not plain or None in (ours.peak, plain.base_peak) else ours.peak - plain.base_peak  # type: ignore[operator]


def _processes(rows: Sequence[Row]) -> Iterator[Target]:
    for network in ("mlp", "cnn"):
        two, eight = (find(rows, network, "ours", _SIZE, processes) for processes in (2, 8))
        text = f"{network}: 8 processes, of 2 processes, the same batch, at {_SIZE}"
        yield Target(text, time_ratio(rows, eight, two), 1.5)
