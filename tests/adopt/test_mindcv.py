"""mindcv's TrainStep and create_trainer: errors of its step, and correct results with ours."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import TrainOneStepWithGradAccumulationCell, resume
from gaccum_ms.adopt import mindcv as adopted
from tests.support.adopted import (
    ROUNDING,
    K,
    apart,
    assert_takes_arguments_of,
    few_batches,
    joined,
    losses,
    trained,
    trained_eagerly,
)
from tests.support.package import package
from tests.support.reference import CLASSES, FEATURES, DenseNet, as_numpy
from tests.support.versions import before

EXTRA = "mindcv is in the extra 'test'"
theirs = package("mindcv.utils.train_step", EXTRA)
factory = package("mindcv.utils.trainer_factory", EXTRA)
callbacks = package("mindcv.utils.callbacks", EXTRA)
ONE = Tensor(1.0, ms.float32)


def of_mindcv(steps=K, scale=ONE, **arguments):
    return lambda network, optimizer: theirs.TrainStep(
        network, optimizer, scale, gradient_accumulation_steps=steps, **arguments
    )


def of_ours(steps=K, scale=1.0, **arguments):
    return lambda network, optimizer: adopted.train_step(
        network, optimizer, scale, gradient_accumulation_steps=steps, **arguments
    )


@pytest.mark.thorough
def test_clipping_is_of_the_window_not_of_each_batch():
    batches = few_batches()
    clip = {"clip_grad": True, "clip_value": 0.3}
    whole = trained_eagerly(of_mindcv(1, **clip), joined(batches))
    ours = trained(of_ours(**clip), batches)
    assert isinstance(ours.step, TrainOneStepWithGradAccumulationCell)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert apart(trained(of_mindcv(**clip), batches).weights, whole.weights) > 5e-3
    windows = [np.mean(losses(ours.outputs)[start : start + K]) for start in (0, K)]
    np.testing.assert_allclose(windows, losses(whole.outputs), rtol=1e-5)


def averages(step) -> dict[str, np.ndarray]:
    return {one.name: as_numpy(one) for one in step.get_parameters() if one.name.startswith("ema.")}


@pytest.mark.thorough
def test_the_average_moves_once_per_update():
    batches = few_batches()
    ema = {"ema": True, "ema_decay": 0.9}
    whole = trained_eagerly(of_mindcv(1, **ema), joined(batches))
    micro = trained(of_mindcv(**ema), batches)
    ours = trained(of_ours(**ema), batches)
    assert apart(averages(ours.step), averages(whole.step)) < ROUNDING
    assert apart(averages(micro.step), averages(whole.step)) > 5e-5
    assert [int(one.step.updates.asnumpy()) for one in (whole, micro)] == [2, 2 * K]
    assert int(ours.step.update_count.asnumpy()) == 2
    names = {one.name for one in ours.step.get_parameters()}
    assert {"hidden", "ema.hidden"} <= names
    assert "hidden" not in {one.name for one in micro.step.get_parameters()}  # but optimizer.hidden, in files too
    with ours.step.averaged_weights():
        swapped = {f"ema.{one.name}": as_numpy(one) for one in ours.step.update.weights}
    assert apart(swapped, averages(whole.step)) < ROUNDING


@pytest.mark.thorough
def test_resume_goes_on_with_the_average(tmp_path, pynative):
    """The checkpoint is from the middle of a window."""
    batches, ema = few_batches(), {"ema": True, "ema_decay": 0.9}
    whole = trained(of_ours(**ema), batches)
    ms.save_checkpoint(trained(of_ours(**ema), batches[:4]).step, str(tmp_path / "four.ckpt"))

    def resumed(network, optimizer):
        step = of_ours(**ema)(network, optimizer)
        resume(step, str(tmp_path / "four.ckpt"))
        return step

    rest = trained(resumed, batches[4:])
    assert apart(rest.weights, whole.weights) < ROUNDING
    assert apart(averages(rest.step), averages(whole.step)) < ROUNDING


class TrainStepOnCpu(theirs.TrainStep):
    """mindcv's step, with a test for overflows that has kernels on CPU."""

    def start_overflow_check(self, pre_cond, compute_input):
        return pre_cond, compute_input

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(ms.amp.all_finite(compute_output))


@pytest.mark.thorough
def test_an_overflow_drops_its_window_and_does_not_lengthen_it():
    batches = few_batches()
    batches[1] = batches[1][0], np.full(4, np.inf, np.float32)
    micro = trained(
        lambda network, optimizer: TrainStepOnCpu(
            network, optimizer, nn.DynamicLossScaleUpdateCell(64.0, 2, 1000), gradient_accumulation_steps=K
        ),
        batches,
    )
    ours = trained(of_ours(scale=nn.DynamicLossScaleUpdateCell(64.0, 2, 1000)), batches)
    second = trained_eagerly(of_mindcv(1), joined(batches)[1:])
    assert apart(ours.weights, second.weights) < ROUNDING  # the window of batches 4 to 6
    assert apart(micro.weights, second.weights) > 1e-2  # its window has batches 1, 3 and 4; 5 and 6 remain
    assert int(micro.step.gradient_accumulation._accumulation_step.asnumpy()) == 2
    assert [bool(overflow.asnumpy()) for _, overflow, _ in ours.outputs] == [False, False, True, False, False, False]
    assert float(ours.step.scale_sense.asnumpy()) == 32.0


def test_pynative_mode(pynative):
    batches = few_batches(K)
    with pytest.raises(TypeError, match="_accumulation_step"):
        trained(of_mindcv(), batches)
    whole = trained(of_mindcv(1), joined(batches))
    assert apart(trained(of_ours(), batches).weights, whole.weights) < ROUNDING


def classified(number: int = 2 * K):
    random = np.random.default_rng(5)
    x = random.normal(size=(4 * number, FEATURES)).astype(np.float32)
    y = (np.abs(x).sum(axis=1) * 3).astype(np.int32) % CLASSES
    return x, y


def data_set(samples: int):
    return ms.dataset.NumpySlicesDataset(classified(), ["x", "y"], shuffle=False).batch(samples)


def fixed_network() -> nn.Cell:
    network = DenseNet()
    random = np.random.default_rng(7)
    for one in network.get_parameters():
        one.set_data(Tensor(random.normal(size=one.shape) * 0.4, ms.float32))
    return network


def arguments(network, **given):
    return {
        "network": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": nn.Momentum(network.trainable_params(), 0.1, 0.9),
        "metrics": {"accuracy"},
        "amp_level": "O0",
        "amp_cast_list": None,
        "loss_scale_type": "fixed",
        **given,
    }


def monitored(make_monitor, model, folder):
    return make_monitor(
        model, "net", model_ema=True, dataset_sink_mode=False, dataset_val=data_set(8), ckpt_save_dir=str(folder),
        summary_dir=str(folder / "summary"), save_best_ckpt=False, ckpt_save_interval=2, rank_id=0, device_num=1,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:getName:DeprecationWarning")  # raised by MindSpore when it saves a checkpoint
def test_create_trainer_and_state_monitor(tmp_path):
    """The monitor evaluates the averages, and changes no weight."""
    given = {"ema": True, "ema_decay": 0.9, "clip_grad": True, "clip_value": 0.3}
    networks = fixed_network(), fixed_network()
    whole = factory.create_trainer(**arguments(networks[0], **given))
    model = adopted.create_trainer(**arguments(networks[1], gradient_accumulation_steps=K, **given))
    assert isinstance(model.train_network, TrainOneStepWithGradAccumulationCell)
    assert factory.TrainStep is theirs.TrainStep, "mindcv is left as it was"
    own_monitor = monitored(callbacks.StateMonitor, whole, tmp_path)
    if before(2, 8):  # mindcv's own monitor runs, and changes weights
        whole.train(1, data_set(4 * K), dataset_sink_mode=False)
    else:  # it fails
        with pytest.raises(TypeError, match="'str' and 'Parameter'"):
            whole.train(1, data_set(4 * K), callbacks=[own_monitor], dataset_sink_mode=False)
    monitor = monitored(adopted.state_monitor, model, tmp_path)
    model.train(1, data_set(4), callbacks=[monitor], dataset_sink_mode=False)
    weights = [{one.name: as_numpy(one) for one in network.trainable_params()} for network in networks]
    assert apart(*weights) < ROUNDING
    assert apart(averages(model.train_network), averages(whole.train_network)) < ROUNDING
    with model.train_network.averaged_weights():
        accuracy = model.eval(data_set(8), dataset_sink_mode=False)["accuracy"]
    assert f"{accuracy:.4%}" in (tmp_path / "result.log").read_text()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"scale": "dynamic"}, TypeError, "'scale_sense' must be a number, a Tensor, a Cell"),
        ({"clip_grad": 1}, TypeError, "'clip_grad' must be a bool"),
        ({"steps": 0}, ValueError, "'gradient_accumulation_steps' must be at least 1"),
    ],
)
def test_errors(given, error, words):
    with pytest.raises(error, match=words):
        trained(of_ours(**given), [])


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, theirs.TrainStep.__init__)
