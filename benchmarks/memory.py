"""How well `memory_report` predicts: ``python -m benchmarks.memory``.

The report is made in one process, from micro-steps of 1, 4 and 16 samples, of 64 too for the CNN. What it is compared
with is the training itself: the growth of a process's peak resident size, above that of the same program at
micro-batches of one sample, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import controller, report
from benchmarks.networks import NETWORKS
from benchmarks.targets import Target
from benchmarks.ways import LEARNING_RATE, MOMENTUM, Setting

_PREDICTED = ("cnn", "resnet18", "transformer")
_AT_MOST = 0.15
_UPDATES = 3


def _report(setting: Setting, micro_sizes: Sequence[int]) -> dict[int, int]:
    """The predicted peak at each number of micro-batches; in a process of its own."""
    import mindspore as ms
    from mindspore import nn

    from gaccum_ms import GradAccumulationCell, memory_report, tune_cpu

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    network = NETWORKS[setting.network]
    net = network.mindspore()
    tune_cpu(network=net)
    optimizer = nn.Momentum(net.trainable_params(), LEARNING_RATE, MOMENTUM)
    cell = GradAccumulationCell(nn.WithLossCell(net, network.mindspore_loss()), 2)
    batch = map(ms.Tensor, setting.data(0))
    found = memory_report(cell, optimizer, *batch, micro_sizes=micro_sizes, measure=False)
    return {row.micro_size: row.peak for row in found.rows}


def _predicted(setting: Setting, micro_sizes: Sequence[int], limit: float) -> dict[int, int]:
    question = json.dumps([setting.network, setting.batch, list(micro_sizes)])
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_memory_") as folder:  # MindSpore leaves files where it runs
        answer = subprocess.run(
            [sys.executable, __file__, "--report", question],
            env=controller.environment(setting),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit,
            check=True,
        )
    return {int(size): peak for size, peak in json.loads(answer.stdout.splitlines()[-1]).items()}


def _measured(setting: Setting, limit: float) -> int:
    """The peak of training, in a fresh process."""
    with controller.Worker(setting, limit) as worker:
        worker.updates(_UPDATES)
        return worker.peak()


def _lines(network: str, batch: int, micro_sizes: Sequence[int], limit: float) -> Iterator[str]:
    yield f"{network}, batch {batch}"
    yield "micro_size  samples  predicted MB  measured MB  predicted / measured"
    predicted = _predicted(Setting(network, "ours", 1, batch), [*micro_sizes, batch], limit)
    ratios = {}
    for micro_size in micro_sizes:
        setting = Setting(network, "ours", micro_size, batch)
        base = _measured(Setting(network, "ours", micro_size, micro_size), limit)
        growth = _measured(setting, limit) - base
        expected = predicted[micro_size] - predicted[batch]
        ratios[micro_size] = expected / growth
        yield (
            f"{micro_size:10}  {batch // micro_size:7}  {expected / 1e6:12.1f}  {growth / 1e6:11.1f}  "
            f"{ratios[micro_size]:20.3f}"
        )
    for micro_size, ratio in ratios.items():
        name = f"{network}: predicted growth of the peak at {micro_size}, of the measured, off by"
        yield Target(name, abs(ratio - 1), _AT_MOST).line()
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=_PREDICTED)
    parser.add_argument("--micro-sizes", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: each network's own)")
    parser.add_argument("--limit", type=float, default=170, help="seconds a program may take (default: 170)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    parser.add_argument("--report", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        network, batch, micro_sizes = json.loads(options.report)
        print(json.dumps(_report(Setting(network, "ours", 1, batch), micro_sizes)))
        return
    lines = [
        report.machine("memory_report: predicted and measured growth of the peak", ("mindspore", "numpy"), "tuned"),
        "growth    of the peak resident size, above that of micro-batches of one sample",
        "",
    ]
    print("\n".join(lines), flush=True)
    for network in options.networks:
        for line in _lines(network, options.batch or NETWORKS[network].batch, options.micro_sizes, options.limit):
            print(line, flush=True)
            lines.append(line)
    output = options.output or report.place("memory")
    report.keep("".join(f"{line}\n" for line in lines), output)
    print(f"kept in {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
