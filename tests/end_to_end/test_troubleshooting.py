"""Each text on the page "Troubleshooting" is what a user sees. Ours are literally in the package, whose tests raise
them; those that our code puts together, and MindSpore's, are provoked here.

Texts of Ascend and GPU cannot be provoked on CPU: on the page they have a link to their source.
"""

from __future__ import annotations

import ast
import re
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops, train

from gaccum_ms import GradAccumulationCell, GradAccumulator
from gaccum_ms.distributed import ranks
from gaccum_ms.launch.cluster import Cluster, reserved_port
from gaccum_ms.launch.supervisor import Ranks
from gaccum_ms.memory.search import agreed_size
from tests.support.reference import make_step

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ENTRIES = re.findall(r"^\* (.*?)(?=^\* |^#|^\[|\Z)", PAGE, re.DOTALL | re.MULTILINE)
TEXTS = {
    " ".join(text.split()): entry
    for entry in ENTRIES
    for _, text in re.findall(r"\*\*(`+)(.+?)\1\*\*", entry, re.DOTALL)
}
X, Y = np.ones((6, 3), np.float32), np.zeros((6, 1), np.float32)
BATCH = Tensor(X), Tensor(Y)


def sgd(net):
    return nn.SGD(net.trainable_params(), 0.1)


def with_loss(net):
    return nn.WithLossCell(net, nn.MSELoss())


def data_set(y=Y):
    return ms.dataset.NumpySlicesDataset((X, y), shuffle=False).batch(6)


def losses_that_are_sums_and_means(_):
    accumulator = GradAccumulator(sgd(nn.Dense(3, 1)), 2)
    for word in ("mean", "sum"):
        accumulator.value_and_grad(nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss(word)))


def gradients_of_other_batches(_):
    net = nn.Dense(3, 1)
    accumulator = GradAccumulator(sgd(net), 2)
    grad_fn = accumulator.value_and_grad(with_loss(net))
    for rows in (4, 2):
        _, gradients = grad_fn(Tensor(X[:rows]), Tensor(Y[:rows]))
    accumulator(tuple(gradients))


def ranks_that_do_not_know_of_each_other(request):
    request.getfixturevalue("monkeypatch").setattr(ranks, "get_group_size", lambda: 2)
    net = nn.Dense(3, 1)
    GradAccumulator(sgd(net), 2)(tuple(ops.ones_like(weight) for weight in net.trainable_params()))


def loss_scales(_):
    net, manager = nn.Dense(3, 1), train.DynamicLossScaleManager()
    ms.Model(GradAccumulationCell(net, 2), nn.MSELoss(), sgd(net), loss_scale_manager=manager)  # works
    ms.Model(net, nn.MSELoss(), sgd(net), loss_scale_manager=manager)


def evaluation_of_the_loss_alone(_):
    net = with_loss(nn.Dense(3, 1))
    ms.Model(net, eval_network=net, metrics={"accuracy"}).eval(data_set())


def mindspores_cell(_):
    net = with_loss(nn.Dense(3, 1))
    ms.Model(nn.GradAccumulationCell(net, 4), optimizer=sgd(net)).train(1, data_set())


def labels_of_minus_100(_):
    net = nn.WithLossCell(nn.Dense(3, 4), nn.CrossEntropyLoss())
    make_step(net, micro_size=2, check=None)(Tensor(X), Tensor(np.array([0, 1, 2, 3, -100, -100], np.int32)))


def a_loss_that_is_nan(_):
    net = nn.Dense(3, 1)
    ms.Model(net, nn.MSELoss(), sgd(net)).train(1, data_set(y=Y * np.nan), callbacks=[train.LossMonitor()])


def a_port_that_is_taken(_):
    with socket.create_server(("127.0.0.1", 0)) as taken, reserved_port(*taken.getsockname()):
        pass


def a_rank_that_failed(_):
    launched = Ranks(Cluster(processes=4, master_port=1), ROOT)
    launched.note({"rank": 2, "code": 137})
    launched.check()


def of_a_program(request):
    return request.getfixturevalue("mindspores_texts")


PROVOKED: dict[str, Callable[[Any], Any]] = {  # of each text, what makes it; by the request of a test
    "Allocate memory failed": lambda _: ops.ones((1 << 30, 1 << 28), ms.float32),
    "Unable to allocate … for an array with shape": lambda _: np.ones(1 << 60, np.uint8),
    "a micro-batch of one sample must fit, but got": lambda _: agreed_size("find_micro_batch_size", 0, None),
    "construct() takes 2 positional arguments but 3 were given": (
        lambda _: nn.TrainOneStepCell(nn.Dense(3, 1), sgd(nn.Dense(3, 1)))(*BATCH)
    ),
    "all gradients of an accumulator must be of means or all of sums": losses_that_are_sums_and_means,
    "'count' must be given with gradients that are computed from those of batches of several sizes": (
        gradients_of_other_batches
    ),
    "each trains by itself, and their weights drift apart": ranks_that_do_not_know_of_each_other,
    "Only `loss_scale_manager=None` or": loss_scales,
    "gradients must be dense, but got layers with sparse ones": lambda _: make_step(
        nn.EmbeddingLookup(4, 2), micro_size=2
    ),
    "If `metrics` is set, `eval_network` must not be None": (
        lambda _: ms.Model(with_loss(nn.Dense(3, 1)), optimizer=sgd(nn.Dense(3, 1)), metrics={"accuracy"})
    ),
    "For 'Accuracy.update', it needs 2 inputs (predicted value, true value), but got 1": evaluation_of_the_loss_alone,
    "WithLossCell.construct() missing 1 required positional argument: 'label'": (
        lambda _: ms.Model(with_loss(nn.Dense(3, 1))).predict(Tensor(X))
    ),
    "For micro batch initialization, the 0th dimension shape of input … must be divided by micro size": mindspores_cell,
    "axis 0 of all inputs must have the same length, because all are split at the same boundaries": (
        lambda _: make_step(with_loss(nn.Dense(3, 1)), micro_size=2)(Tensor(X), Tensor(Y[:4]))
    ),
    "loss is NAN or INF, training process cannot continue": a_loss_that_is_nan,
    "is a mean over the labels that are not -100, which samples have in different numbers": labels_of_minus_100,
    "port … of 127.0.0.1 is taken. Name another --master-port": a_port_that_is_taken,
    "'msrun' is not installed": lambda _: Cluster().command(ROOT, {"PATH": str(ROOT)}),
    "rank … failed with exit code": a_rank_that_failed,
    "Memory isn't enough and alloc failed, kernel name": of_a_program,
    "can not compile temporary source code in terminal": of_a_program,
    "The … has been compiled again": of_a_program,
    "Maybe you are trying to call 'mindspore.communication.init()' without using 'mpirun'": of_a_program,
    "Invalid communication backend: CPU for semi_auto_parallel/auto_parallel mode": of_a_program,
    "Unsupported device target Ascend. This process only supports one of the": of_a_program,
}

MINDSPORES = """
import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import init

ms.set_context(mode=ms.GRAPH_MODE)


class Large(nn.Cell):
    def construct(self, x):
        return ops.broadcast_to(x, (1 << 30, 1 << 28)) + 1


def add_one(x):
    return x + 1


def semi_auto():
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    Large()(Tensor([1.0]))


exec("class Typed(nn.Cell):\\n    def construct(self, x):\\n        return x")
for _ in range(2):
    ms.jit(add_one)(Tensor([1.0]))
for action in (
    lambda: Large()(Tensor([1.0])),
    lambda: Typed()(Tensor([1.0])),
    init,
    lambda: ms.set_device("Ascend"),
    semi_auto,
):
    try:
        action()
    except Exception as error:
        print(error)
"""


@pytest.fixture(scope="module")
def mindspores_texts(programs, tmp_path_factory):
    """Texts of MindSpore whose causes would disturb other tests: from a process of its own."""
    folder = tmp_path_factory.mktemp("program")
    script = folder / "program.py"
    script.write_text(MINDSPORES)
    done = programs.run(script, folder=folder, MS_DEV_HOST_BLOCKING_RUN="1")
    return done.stdout + done.stderr


def holds(message: str, text: str) -> bool:
    """Whether a message has the words of a text of the page, in which … stands for anything."""
    return re.search(".*".join(map(re.escape, text.split(" … "))), message) is not None


def strings_of_the_package() -> list[str]:
    """With … in place of what an f-string puts in."""
    nodes = [node for file in (ROOT / "gaccum_ms").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    joined = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    plain = [[node] for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [
        "".join(getattr(part, "value", "…") if isinstance(part, ast.Constant) else "…" for part in parts)
        for parts in joined + plain
    ]


def test_each_text_is_provoked_or_ours_or_names_its_source():
    of_others = {text for text, entry in TEXTS.items() if re.search(r"\]\[[\w-]+\]", entry)}
    for text in of_others:
        names = re.findall(r"\]\[([\w-]+)\]", TEXTS[text])
        assert all(re.search(rf"^\[{name}\]: https://", PAGE, re.MULTILINE) for name in names)
    assert len(of_others) == 7
    assert PROVOKED.keys() <= TEXTS.keys() - of_others
    strings = strings_of_the_package()
    ours = TEXTS.keys() - of_others - PROVOKED.keys()
    assert len(ours) >= 15
    assert [text for text in ours if not any(holds(string, text) for string in strings)] == []


@pytest.mark.parametrize("text", PROVOKED)
def test_what_is_provoked_says_the_text(text, request, pynative):
    """What is raised, said by warnings, or printed and returned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said = PROVOKED[text](request)
        except Exception as error:
            said = error
    message = " ".join(" ".join([*(str(warning.message) for warning in caught), str(said)]).split())
    assert holds(message, text), message


def test_mindspores_own_cell_trains_nothing_and_reports_the_sum(mode):
    """The entries without a text."""
    net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
    cell = nn.GradAccumulationCell(with_loss(net), 3)
    step = ms.Model(cell, optimizer=sgd(net)).train_network.set_train()
    assert float(step(*BATCH)) == 27  # 9 for each micro-batch
    assert (net.weight.asnumpy() == 1).all()
