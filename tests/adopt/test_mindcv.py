"""mindcv's TrainStep and create_trainer: our step trains on batches as theirs on the batch that joins them."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import Tensor, nn

from gaccum_ms import TrainOneStepWithGradAccumulationCell
from gaccum_ms.adopt import mindcv as adopted
from tests.support.adopted import (
    ROUNDING,
    K,
    apart,
    assert_takes_arguments_of,
    averages,
    few_batches,
    joined,
    steps,
    trained,
)
from tests.support.package import package
from tests.support.reference import as_numpy, batches, make_network

EXTRA = "mindcv is in the extra 'test'"
theirs = package("mindcv.utils.train_step", EXTRA)
factory = package("mindcv.utils.trainer_factory", EXTRA)


def test_trains_as_mindcvs_step():
    data = few_batches(K)
    one = Tensor(1.0, ms.float32)
    whole = trained(lambda network, optimizer: theirs.TrainStep(network, optimizer, one), joined(data))
    assert apart(trained(steps(adopted.train_step)(), data).weights, whole.weights) < ROUNDING


def data_set(samples: int):
    return ms.dataset.NumpySlicesDataset(batches(8 * K, 1)[0], ["x", "y"], shuffle=False).batch(samples)


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


@pytest.mark.filterwarnings("ignore:getName:DeprecationWarning")  # raised by MindSpore when it saves a checkpoint
def test_create_trainer_and_state_monitor(tmp_path, pynative):
    """Clipping is of the window, and the average moves once for each. The monitor evaluates the averages, and changes
    no weight."""
    given = {"ema": True, "ema_decay": 0.9, "clip_grad": True, "clip_value": 0.3}
    networks = make_network("dense"), make_network("dense")
    whole = factory.create_trainer(**arguments(networks[0], **given))
    model = adopted.create_trainer(**arguments(networks[1], gradient_accumulation_steps=K, **given))
    assert isinstance(model.train_network, TrainOneStepWithGradAccumulationCell)
    assert factory.TrainStep is theirs.TrainStep, "mindcv is left as it was"
    whole.train(1, data_set(4 * K), dataset_sink_mode=False)
    monitor = adopted.state_monitor(
        model, "net", model_ema=True, dataset_sink_mode=False, dataset_val=data_set(8), ckpt_save_dir=str(tmp_path),
        summary_dir=str(tmp_path / "summary"), save_best_ckpt=False, ckpt_save_interval=2, rank_id=0, device_num=1,
    )  # fmt: skip
    model.train(1, data_set(4), callbacks=[monitor], dataset_sink_mode=False)
    weights = [{one.name: as_numpy(one) for one in network.trainable_params()} for network in networks]
    assert apart(*weights) < ROUNDING
    assert apart(averages(model.train_network), averages(whole.train_network)) < ROUNDING
    with model.train_network.averaged_weights():
        accuracy = model.eval(data_set(8), dataset_sink_mode=False)["accuracy"]
    assert f"{accuracy:.4%}" in (tmp_path / "result.log").read_text()


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, theirs.TrainStep.__init__)
