"""Each text on the page "Troubleshooting" is what a user sees: it is provoked here, ours and MindSpore's.

Texts of Ascend and GPU cannot be provoked on CPU: on the page they have a link to their source.
"""

from __future__ import annotations

import re
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops, train

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell, resume
from gaccum_ms.callbacks.window_watch import WindowWatch
from gaccum_ms.distributed import ranks
from gaccum_ms.launch.cluster import Cluster, reserved_port
from gaccum_ms.launch.supervisor import Ranks
from gaccum_ms.memory.search import agreed_size

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
ENTRIES = re.findall(r"^\* (.*?)(?=^\* |^#|^\[|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
TEXTS = {
    " ".join(text.split()): entry
    for entry in ENTRIES
    for _, text in re.findall(r"\*\*(`+)(.+?)\1\*\*", entry, re.DOTALL)
}
X, Y = np.ones((6, 3), np.float32), np.zeros((6, 1), np.float32)
BATCH = Tensor(X), Tensor(Y)
PROVOKED: dict[str, Callable[[Any], Any]] = {}  # of each text, what makes it; by the request of a test


def says(*texts: str, eagerly: bool = True) -> Callable:
    def add(provoke: Callable[[Any], Any]) -> Callable:
        def run(request):
            ms.set_context(mode=ms.PYNATIVE_MODE if eagerly else ms.GRAPH_MODE)
            return provoke(request)

        PROVOKED.update(dict.fromkeys(texts, run))
        return provoke

    return add


def message_of(provoke: Callable[[Any], Any], request) -> str:
    """What is raised, said by warnings, or printed and returned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned = provoke(request)
        except Exception as error:
            returned = str(error)
    return " ".join(" ".join([*(str(warning.message) for warning in caught), str(returned)]).split())


def holds(message: str, text: str) -> bool:
    """Whether a message has the words of a text of the page, in which … stands for anything."""
    return re.search(".*".join(map(re.escape, text.split(" … "))), message) is not None


OF_A_PROGRAM = {
    "Memory isn't enough and alloc failed, kernel name",
    "can not compile temporary source code in terminal",
    "The … has been compiled again",
    "Maybe you are trying to call 'mindspore.communication.init()' without using 'mpirun'",
    "Invalid communication backend: CPU for semi_auto_parallel/auto_parallel mode",
    "Unsupported device target Ascend. This process only supports one of the",
}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=[pytest.mark.thorough] * (text in OF_A_PROGRAM))
        for text in TEXTS
        if "][" not in TEXTS[text]
    ],
)
def test_each_text_is_what_a_user_sees(text, request):
    message = message_of(PROVOKED[text], request)
    assert holds(message, text), message


def test_each_other_text_names_its_source():
    page = PAGE.read_text()
    others = TEXTS.keys() - PROVOKED.keys()
    assert len(others) == 7
    for text in others:
        names = re.findall(r"\]\[([\w-]+)\]", TEXTS[text])
        assert names and all(re.search(rf"^\[{name}\]: https://", page, re.MULTILINE) for name in names)


def test_all_that_is_provoked_is_on_the_page():
    assert PROVOKED.keys() <= TEXTS.keys()


def test_another_text_is_not_found(request):
    """The control."""
    text = "For 'Accuracy.update', it needs 2 inputs (predicted value, true value), but got 1"
    message = message_of(PROVOKED[text], request)
    assert [other for other in TEXTS if holds(message, other)] == [text]


def test_mindspores_own_cell_trains_nothing_and_reports_the_sum(mode):
    """The entries without a text."""
    net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
    cell = nn.GradAccumulationCell(with_loss(net), 3)
    step = ms.Model(cell, optimizer=sgd(net)).train_network.set_train()
    assert float(step(*BATCH)) == 27  # 9 for each micro-batch
    assert (net.weight.asnumpy() == 1).all()


# -- what provokes them ------------------------------------------------------------------------------------------------


def sgd(net, rate=0.1):
    return nn.SGD(net.trainable_params(), rate)


def with_loss(net):
    return nn.WithLossCell(net, nn.MSELoss())


def data_set(batch_size=6, y=Y):
    return ms.dataset.NumpySlicesDataset((X, y), shuffle=False).batch(batch_size)


def step_of(network, optimizer=None, **options):
    cell = GradAccumulationCell(network, **{"micro_size": 2, **options})
    return TrainOneStepWithGradAccumulationCell(cell, optimizer or sgd(network)).set_train()


@says("Allocate memory failed")
def _(request):
    ops.ones((1 << 30, 1 << 28), ms.float32)


@says("Unable to allocate … for an array with shape")
def _(request):
    np.ones(1 << 60, np.uint8)


@says("a micro-batch of one sample must fit, but got")
def _(request):
    agreed_size("find_micro_batch_size", 0, None)


@says("construct() takes 2 positional arguments but 3 were given")
def _(request):
    net = nn.Dense(3, 1)
    nn.TrainOneStepCell(net, sgd(net))(*BATCH)


@says("the network must take the … input(s) of the batch and return its loss")
def _(request):
    step_of(nn.Dense(3, 1))(*BATCH)


@says("the network must return a scalar loss of shape (), but got shape")
def _(request):
    step_of(nn.SequentialCell(nn.Dense(3, 1)))(BATCH[0])


@says("the loss must be one number, the mean or the sum of a batch, but got")
def _(request):
    step_of(nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss("none")))


@says("'reduction' must be what the loss says, but got")
def _(request):
    GradAccumulationCell(nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss("sum")), 2, reduction="mean")


@says("all gradients of an accumulator must be of means or all of sums")
def _(request):
    accumulator = GradAccumulator(sgd(nn.Dense(3, 1)), 2)
    for word in ("mean", "sum"):
        accumulator.value_and_grad(nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss(word)))


@says("'count' must be given with gradients that are computed from those of batches of several sizes")
def _(request):
    net = nn.Dense(3, 1)
    accumulator = GradAccumulator(sgd(net), 2)
    grad_fn = accumulator.value_and_grad(with_loss(net))
    for rows in (4, 2):
        _, gradients = grad_fn(Tensor(X[:rows]), Tensor(Y[:rows]))
    accumulator(tuple(gradients))


@says("the cell must be the outermost one when a model is built with an optimizer")
def _(request):
    net = nn.Dense(3, 1)
    ms.Model(with_loss(GradAccumulationCell(net, 2)), optimizer=sgd(net))


@says("but the cell itself is being trained")
def _(request):
    net = with_loss(nn.Dense(3, 1))
    nn.TrainOneStepCell(GradAccumulationCell(net, 2), sgd(net))


@says("the cell must not be differentiated, but a functional gradient of it is being taken")
def _(request):
    net = with_loss(nn.Dense(3, 1))
    ms.value_and_grad(GradAccumulationCell(net, 2), None, net.trainable_params())(*BATCH)


@says("Only `loss_scale_manager=None` or")
def _(request):
    net = nn.Dense(3, 1)
    manager = train.DynamicLossScaleManager()
    ms.Model(GradAccumulationCell(net, 2), nn.MSELoss(), sgd(net), loss_scale_manager=manager)  # works
    ms.Model(net, nn.MSELoss(), sgd(net), loss_scale_manager=manager)


@says("gradients must be dense, but got layers with sparse ones")
def _(request):
    step_of(nn.EmbeddingLookup(4, 2))


@says("the optimizer must have kernels on this device")
def _(request):
    net = nn.Dense(3, 1)
    step_of(with_loss(net), mint.optim.AdamW(net.trainable_params()))


@says("If `metrics` is set, `eval_network` must not be None")
def _(request):
    net = nn.Dense(3, 1)
    ms.Model(with_loss(net), optimizer=sgd(net), metrics={"accuracy"})


class LossOfItsOwn(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = nn.Dense(3, 1)

    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean()


@says("with 'metrics' ms.Model must know the network without its loss")
def _(request):
    net = LossOfItsOwn()
    ms.Model(GradAccumulationCell(net, 2), optimizer=sgd(net), metrics={"accuracy"})


@says("For 'Accuracy.update', it needs 2 inputs (predicted value, true value), but got 1")
def _(request):
    net = with_loss(nn.Dense(3, 1))
    ms.Model(net, eval_network=net, metrics={"accuracy"}).eval(data_set())


@says("WithLossCell.construct() missing 1 required positional argument: 'label'")
def _(request):
    ms.Model(with_loss(nn.Dense(3, 1))).predict(Tensor(X))


@says("For micro batch initialization, the 0th dimension shape of input … must be divided by micro size")
def _(request):
    net = with_loss(nn.Dense(3, 1))
    ms.Model(nn.GradAccumulationCell(net, 4), optimizer=sgd(net)).train(1, data_set())


@says("axis 0 of all inputs must have the same length, because all are split at the same boundaries")
def _(request):
    step_of(with_loss(nn.Dense(3, 1)))(Tensor(X), Tensor(Y[:4]))


@says("loss is NAN or INF, training process cannot continue")
def _(request):
    net = nn.Dense(3, 1)
    ms.Model(net, nn.MSELoss(), sgd(net)).train(1, data_set(y=Y * np.nan), callbacks=[train.LossMonitor()])


class Labelled(nn.Cell):
    """A network that all advice is about."""

    def __init__(self):
        super().__init__()
        self.net = nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4))
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, labels):
        return self.loss(self.net(x), labels)


@says(
    "is a mean over the labels that are not -100, which samples have in different numbers",
    "In training each normalises by the mean and variance of one micro-batch",
)
def _(request):
    step_of(Labelled(), check=None)(Tensor(X), Tensor(np.array([0, 1, 2, 3, -100, -100], np.int32)))


@says("the loss is not what the options say, as measured on the loss")
def _(request):
    step_of(Labelled())(Tensor(X), Tensor(np.array([0, 1, 2, 3, -100, -100], np.int32)))


def gradients_and_accumulator(**options):
    net = nn.Dense(3, 1)
    gradients = tuple(ops.ones_like(weight) for weight in net.trainable_params())
    return gradients, GradAccumulator(sgd(net), 2, **options)


@says("a window counted nothing on any rank, and made no update")
def _(request):
    gradients, accumulator = gradients_and_accumulator()
    for _ in range(2):
        accumulator(gradients, count=0.0)


@says("training ended in the middle of a window", "the optimizer's learning rate must be made for updates, of which")
def _(request):
    net = nn.Dense(3, 1)
    rates = [0.1] * 6
    model = ms.Model(GradAccumulationCell(net, accumulation_steps=4), nn.MSELoss(), sgd(net, rates))
    model.train(1, data_set(batch_size=1))


@says("the checkpoint must have all parameters of the network and the optimizer's state")
def _(request):
    file = str(request.getfixturevalue("tmp_path") / "other.ckpt")
    ms.save_checkpoint(nn.Dense(2, 1), file)
    resume(step_of(with_loss(nn.SequentialCell(nn.Dense(3, 1)))), file)


@says("with weights alone: the optimizer would begin anew")
def _(request):
    file, net = str(request.getfixturevalue("tmp_path") / "weights.ckpt"), nn.Dense(3, 1)
    ms.save_checkpoint(net, file)
    resume(step_of(with_loss(net)), file)


@says("a checkpoint must be a whole file")
def _(request):
    file = request.getfixturevalue("tmp_path") / "damaged.ckpt"
    file.write_bytes(b"damaged")
    resume(step_of(with_loss(nn.Dense(3, 1))), file)


@says("port … of 127.0.0.1 is taken. Name another --master-port")
def _(request):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with reserved_port("127.0.0.1", taken.getsockname()[1]):
            pass


@says("'msrun' is not installed")
def _(request):
    folder = request.getfixturevalue("tmp_path")
    Cluster().command(folder, {"PATH": str(folder)})


@says("rank … failed with exit code")
def _(request):
    launched = Ranks(Cluster(processes=4, master_port=1), request.getfixturevalue("tmp_path"))
    launched.note({"rank": 2, "code": 137})
    launched.check()


@says("did not come to init() within")
def _(request):
    launched = Ranks(Cluster(processes=4, master_port=1, start_timeout=-1.0), request.getfixturevalue("tmp_path"))
    launched.note({"rank": 2, "pid": 1})
    launched.check()


@says("all ranks must have the same number of batches in an epoch")
def _(request):
    """Two ranks raise it in `ranks/test_window_ranks.py` ."""
    return WindowWatch._check.__code__.co_consts


@says("each trains by itself, and their weights drift apart")
def _(request):
    """Two ranks train so in `ranks/real_use_worker.py` ."""
    request.getfixturevalue("monkeypatch").setattr(ranks, "get_group_size", lambda: 2)
    gradients, accumulator = gradients_and_accumulator()
    accumulator(gradients)


@says("semi-auto and auto parallel mode need GPUs or Ascend", eagerly=False)
def _(request):
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        step_of(with_loss(nn.Dense(3, 1)))(*BATCH)
    finally:
        ms.reset_auto_parallel_context()


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


@says(*OF_A_PROGRAM)
def _(request):
    return request.getfixturevalue("mindspores_texts")


@pytest.fixture(scope="module")
def mindspores_texts(programs, tmp_path_factory):
    """Texts of MindSpore whose causes would disturb other tests: from a process of its own."""
    folder = tmp_path_factory.mktemp("program")
    script = folder / "program.py"
    script.write_text(MINDSPORES)
    done = programs.run(script, folder=folder)
    return done.stdout + done.stderr
