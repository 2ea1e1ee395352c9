"""The adapters in general: they are imported at their first use, without their packages, and have complete
docstrings."""

from __future__ import annotations

import inspect
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.amp import DynamicLossScaler, StaticLossScaler

from gaccum_ms import ClipByValue, adopt
from gaccum_ms.adopt import common

FUNCTIONS = [
    *(getattr(adopt, name).train_step for name in dir(adopt)),
    *(adopt.mindcv.create_trainer, adopt.mindcv.state_monitor),
    *(adopt.mindone.transformers_train_step, adopt.mindone.diffusers_train_step),
]


def test_each_module_is_imported_when_it_is_first_used_and_without_its_package(programs, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "names = ('mindcv', 'mindformers', 'mindocr', 'mindone', 'mindyolo')\n"
        "sys.modules.update(dict.fromkeys(names))\n"
        "import gaccum_ms\n"
        "print([name in sys.modules for name in map('gaccum_ms.adopt.{}'.format, names)])\n"
        "print([callable(getattr(gaccum_ms.adopt, name).train_step) for name in names])\n"
    )
    result = programs.run(script, folder=tmp_path)
    assert result.stdout.split("\n")[:2] == [str([False] * 5), str([True] * 5)], result.stderr[-2000:]


def test_another_name():
    with pytest.raises(AttributeError, match="it has mindcv, mindformers, mindocr, mindone, mindyolo"):
        adopt.mindspore  # noqa: B018
    assert dir(adopt) == ["mindcv", "mindformers", "mindocr", "mindone", "mindyolo"]


def test_docstrings_name_all_arguments():
    for function in FUNCTIONS:
        text = inspect.getdoc(function)
        documented = set(re.findall(r"^    \**(\w+) \(", text, re.MULTILINE))
        assert documented == set(inspect.signature(function).parameters), function
        assert all(section in text for section in ("Args:", "Returns:", "Raises:")), function


class Line(nn.Cell):
    """A loss whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor([1.0]), name="weight")

    def construct(self, x):
        return (self.weight * x).mean()


def trained(train_step, x=2.0, **given):
    """The weight of a `Line` after one update with a rate of 1, and what the step returned."""
    network = Line()
    step = train_step(network, nn.SGD(network.trainable_params(), 1.0), **given).set_train()
    outputs = step(Tensor([x]))
    return network.weight.asnumpy().item(), outputs


def test_mindformers_skips_an_update_whose_norm_is_the_threshold(pynative):
    """As its own step, which updates if the norm is less."""
    for threshold, weight in ((2.0, 1.0), (float(np.nextafter(np.float32(2), np.float32(3))), -1.0)):
        given = {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": threshold}
        assert trained(adopt.mindformers.train_step, **given)[0] == weight


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (adopt.mindcv.train_step, {"scale_sense": "dynamic"}, "'scale_sense' must be a number, a Tensor, a Cell"),
        (adopt.mindcv.train_step, {"gradient_accumulation_steps": 0}, "'accumulation_steps' must be at least"),
        (adopt.mindformers.train_step, {"local_norm": True}, "'local_norm' must be left out"),
        (adopt.mindocr.train_step, {"clip_grad": "norm"}, "'clip_grad' must be a bool"),
        (adopt.mindone.train_step, {"zero_helper": object()}, "'zero_helper' must be left out.*ShardedOptimizer"),
        (adopt.mindone.train_step, {"ema": 0.9}, "'ema' must be"),
        (adopt.mindone.transformers_train_step, {"clip_grad": "most"}, "'clip_grad' must be one of"),
    ],
)
def test_errors(function, given, words, pynative):
    with pytest.raises((TypeError, ValueError), match=words):
        trained(function, **given)


def test_loss_scales_of_mindspore_become_ours():
    manager = common.scale_of(DynamicLossScaler(64.0, 2, 100))
    assert (manager.loss_scale_value, float(manager.scale_factor), float(manager.scale_window)) == (64.0, 2.0, 100.0)
    for scale in (8, 8.0, StaticLossScaler(8.0), Tensor(8.0)):
        assert float(common.scale_of(scale)) == 8.0


def test_the_users_transforms_are_kept(pynative):
    assert trained(adopt.mindocr.train_step, transforms=(ClipByValue(0.5),))[0] == 0.5


def test_updates_in_spite_of_an_overflow_are_a_choice(pynative):
    assert trained(adopt.mindocr.train_step, np.inf)[0] == 1.0
    assert not np.isfinite(trained(adopt.mindocr.train_step, np.inf, drop_overflow_update=False)[0])
    manager = nn.DynamicLossScaleUpdateCell(64.0, 2, 100)
    with pytest.raises(ValueError, match="need a fixed loss scale"):
        trained(adopt.mindocr.train_step, scale_sense=manager, drop_overflow_update=False)


def test_mindcvs_outputs_are_a_loss_or_three_values(pynative):
    assert float(trained(adopt.mindcv.train_step)[1]) == 2.0
    assert [float(value) for value in trained(adopt.mindcv.train_step, scale_sense=4.0)[1]] == [2.0, 0.0, 4.0]


def test_mindones_outputs_have_the_overflow_last(pynative):
    _, outputs = trained(adopt.mindone.transformers_train_step, scaler="static")
    assert [float(value) for value in outputs] == [2.0, 1024.0, 0.0]


class YOLOv7Loss(nn.Cell):
    def construct(self, predicted, labels, images):
        return predicted.sum(), ops.stack((predicted.sum(),))


class YOLOXLoss(YOLOv7Loss):
    pass


@pytest.mark.parametrize(("loss", "reduction"), [(YOLOv7Loss, "sum"), (YOLOXLoss, "mean")])
def test_mindyolos_losses_are_sums_or_means(loss, reduction):
    network = Line()
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    step = adopt.mindyolo.train_step("detect", network, loss(), optimizer, 1.0, StaticLossScaler(1.0))
    assert step.options.reduction == reduction
    with pytest.raises(ValueError, match="'reduction' must be given for a loss that is not mindyolo's, but got a 'Li"):
        adopt.mindyolo.train_step("detect", network, Line(), optimizer, 1.0, StaticLossScaler(1.0))


class Average(nn.Cell):
    """As mindone's and mindocr's EMA, or by another name of its method mindyolo's."""

    def __init__(self):
        super().__init__()
        self.moves = ms.Parameter(Tensor(0, ms.int32), name="moves")

    def ema_update(self):
        return ops.assign_add(self.moves, Tensor(1, ms.int32))


def test_averages_of_the_packages_move_once_per_update(pynative):
    network, average, moves = Line(), Average(), []
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    step = adopt.mindocr.train_step(network, optimizer, ema=average, gradient_accumulation_steps=2).set_train()
    for _ in range(4):
        step(Tensor([2.0]))
        moves.append(int(average.moves.asnumpy()))
    assert moves == [0, 1, 1, 2]
