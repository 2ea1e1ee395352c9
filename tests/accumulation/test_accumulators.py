"""Accumulators: their names and dtypes, rounding errors of low precision, and compensation."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import Accumulators
from tests.support.reference import Regression, as_numpy, make_network, make_step


def step_of(weights=ms.float32, **options):
    network = nn.WithLossCell(make_network("dense", weights), nn.CrossEntropyLoss())
    return make_step(network, **{"micro_size": 3, **options})


def test_float32_by_default_the_weights_own_dtype_on_request():
    for dtype, options in (
        (ms.float32, {}),
        (ms.float16, {"accumulators": Accumulators(None)}),
        (ms.bfloat16, {"accumulators": Accumulators(ms.bfloat16)}),
    ):
        assert {one.dtype for one in step_of(ms.float16, **options).accu_grads} == {dtype}


def test_accumulators_are_named_parameters():
    step = step_of()
    assert [a.name for a in step.accu_grads] == ["accu_grads." + w.name for w in step.weights]
    assert not any(a.requires_grad for a in step.accu_grads)
    assert [a.shape for a in step.accu_grads] == [w.shape for w in step.weights]
    assert {a.name for a in step.accu_grads} <= {p.name for p in step.get_parameters()}
    assert not {a.name for a in step.accu_grads} & {p.name for p in step.trainable_params()}

    step = make_step(network := Regression(), lambda _: nn.SGD([network.out], 0.1), micro_size=2)
    assert [a.name for a in step.accu_grads] == ["accu_grads.out"]
    assert not len(make_step(Regression(), micro_size=1).accu_grads), "there is nothing to add up"


class Chosen(nn.Cell):
    """A network whose gradient is its input's mean, so that a test can choose the accumulators' input."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(ops.zeros(1, ms.float32), name="weight")

    def construct(self, x):
        return (x * self.weight).mean()


def test_compensation_keeps_what_rounding_takes():
    """The sum of 1 large and 1,000 tiny gradients, each from a micro-batch, is exact to float32 rounding. Afterwards
    the accumulators are zero."""
    network, gradients = Chosen(), np.array([1.0] + [1e-5] * 1_000, np.float32)
    options = {"reduction": "sum", "accumulators": Accumulators(ms.bfloat16, compensated=True)}
    step = make_step(network, lambda weights: nn.SGD(weights, 1.0), micro_batch_size=1, **options)
    step(Tensor(gradients.reshape(-1, 1)))
    cleared = [as_numpy(parameter) for parameter in step.get_parameters() if parameter.name.startswith("accu_")]
    assert len(cleared) == 2 and not np.any(cleared)
    assert abs(-as_numpy(network.weight).item() - gradients.astype(np.float64).sum()) <= 1e-6


def test_refuses_bad_values():
    with pytest.raises(ValueError, match=r"For 'Accumulators', .* 'dtype' must be one of .* but got 'float32'"):
        Accumulators("float32")
    with pytest.raises(TypeError, match=r"For 'Accumulators', .* 'compensated' must be a bool, but got 1"):
        Accumulators(compensated=1)
    with pytest.raises(TypeError, match=r"'accumulators' must be gaccum_ms.Accumulators\(...\), but got"):
        step_of(accumulators=ms.float32)


# -- sparse gradients --------------------------------------------------------------------------------------------------


class Lookup(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, tokens):
        return self.layer(tokens).mean()


def test_sparse_gradients_of_lookups_are_refused_before_training():
    for layer in (nn.EmbeddingLookup(9, 4, target="DEVICE", sparse=True), nn.MultiFieldEmbeddingLookup(9, 4, 2)):
        with pytest.raises(ValueError, match=r"must be dense, but got .* sparse ones: network.layer.* Use nn.E"):
            make_step(Lookup(layer), nn.Adam, micro_size=2)
    make_step(Lookup(nn.EmbeddingLookup(9, 4, target="DEVICE", sparse=False)), nn.Adam, micro_size=2)
