"""Names of records: a weight of the same name keeps its value in checkpoints."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from tests.support import reference

PREFIX = "gaccum_ms."
X = np.random.default_rng(0).normal(size=(3, 4, 3)).astype(np.float32)


class Named(nn.Cell):
    """A network whose weights have the names in `names` ."""

    def __init__(self, names):
        super().__init__()
        random = np.random.default_rng(1)
        self.held = ms.ParameterTuple([ms.Parameter(Tensor(random.normal(size=3), ms.float32), name) for name in names])

    def construct(self, x):
        total = x.sum(axis=1) * 0
        for weight in self.held:
            total = total + (x * weight).sum(axis=1) ** 2
        return total.mean()


def make_step(names):
    options = {"micro_size": 2, "accumulation_steps": 3, "record_noise": True, "max_grad_norm": 1.0}
    scale = nn.DynamicLossScaleUpdateCell(8.0, 2, 100)
    return reference.make_step(Named(names), lambda weights: nn.Momentum(weights, 0.05, 0.9), scale, **options)


def test_weights_that_are_named_as_records_train_and_are_saved(pynative, tmp_path):
    """The weights have the names of all records. Each gets the same value as in a network with other names. No record
    is without the prefix."""
    step = make_step(["weight"])
    users = {one.name for cell in (step.network, step.optimizer) for one in cell.get_parameters()}
    records = {one.name for one in step.get_parameters()} - users
    managers = {one.name for one in step.loss_scaling_manager.get_parameters()}
    assert all(name.startswith((PREFIX, "accu_grads.")) for name in records - managers), records
    names = sorted(name.removeprefix(PREFIX) for name in records if name.startswith(PREFIX))
    assert {"update_count", "batch_count", "grad_norm", "random_state", "scale_sense"} <= set(names)
    assert len(names) > 20
    steps = [make_step(names), make_step([f"weight_{name}" for name in names])]
    for step in steps:
        for batch in X:
            step(Tensor(batch))
    loaded = Named(names)
    ms.save_checkpoint(steps[0], str(tmp_path / "step.ckpt"))
    missing, _ = ms.load_param_into_net(loaded, ms.load_checkpoint(str(tmp_path / "step.ckpt")))
    assert not missing
    for weight, other in zip(loaded.held, steps[1].network.held, strict=True):
        np.testing.assert_array_equal(weight.asnumpy(), other.asnumpy(), weight.name)
        assert np.abs(other.asnumpy() - Named(names).held[names.index(weight.name)].asnumpy()).max() > 1e-4
