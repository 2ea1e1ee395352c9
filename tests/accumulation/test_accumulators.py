"""Accumulators: their names and dtypes, rounding errors of low precision, and compensation."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import Accumulators
from gaccum_ms.accumulation import accumulators
from gaccum_ms.layers.sparse import refuse_sparse_gradients
from tests.support.reference import Regression, as_numpy, make_network, make_step, relative_error

DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32}


def step_of(weights=ms.float32, **options):
    network = nn.WithLossCell(make_network("dense", weights), nn.CrossEntropyLoss())
    return make_step(network, **{"micro_size": 3, **options})


def test_accumulators_are_named_parameters():
    step = step_of()
    assert [a.name for a in step.accu_grads] == ["accu_grads." + w.name for w in step.weights]
    assert not any(a.requires_grad for a in step.accu_grads)
    assert [a.shape for a in step.accu_grads] == [w.shape for w in step.weights]
    assert {a.name for a in step.accu_grads} <= {p.name for p in step.get_parameters()}
    assert not {a.name for a in step.accu_grads} & {p.name for p in step.trainable_params()}


def test_accumulators_only_for_the_weights_of_the_optimizer_and_if_there_is_something_to_accumulate_over():
    network = Regression()
    step = make_step(network, lambda _: nn.SGD([network.out], 0.1), micro_size=2)
    assert [a.name for a in step.accu_grads] == ["accu_grads.out"]
    step = make_step(network, micro_size=1)
    assert len(step.accu_grads) == 0
    assert not [p.name for p in step.get_parameters() if p.name.startswith(accumulators.PREFIX)]


@pytest.mark.parametrize("weights", [ms.float32, ms.float16])
def test_float32_by_default_the_weights_own_dtype_on_request(weights):
    assert {a.dtype for a in step_of(weights).accu_grads} == {ms.float32}
    assert {a.dtype for a in step_of(weights, accumulators=Accumulators(None)).accu_grads} == {weights}
    assert {a.dtype for a in step_of(weights, accumulators=Accumulators(ms.bfloat16)).accu_grads} == {ms.bfloat16}


def test_training_with_the_weights_own_dtype(pynative):
    """float16 accumulators round each sum to 11 bits, and train like float32 ones within this error."""
    weights = []
    for dtype in (ms.float32, None):
        step = step_of(ms.float16, accumulators=Accumulators(dtype))
        x = np.random.default_rng(0).normal(size=(9, 12)).astype(np.float32)
        for _ in range(3):
            step(Tensor(x), Tensor(np.arange(9, dtype=np.int32) % 5))
        weights.append(as_numpy(step.weights[0]))
    start = as_numpy(make_network("dense", ms.float16).hidden.weight)
    assert relative_error(weights[1], weights[0]) < 4e-3 < relative_error(weights[0], start)


class Chosen(nn.Cell):
    """A network whose gradient is its input's mean, so that a test can choose the accumulators' input."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(ops.zeros(1, ms.float32), name="weight")

    def construct(self, x):
        return (x * self.weight).mean()


LARGE_AND_TINY = np.concatenate([[1.0], np.full(1_000, 1e-5)]).astype(np.float32)


def accumulate(dtype: str, compensated: bool) -> float:
    """The sum of 1 large and 1,000 tiny gradients, each from a micro-batch, as the optimizer gets it. Afterwards the
    accumulators are zero."""
    network = Chosen()
    sums = Accumulators(DTYPES[dtype], compensated=compensated)
    step = make_step(
        network, lambda weights: nn.SGD(weights, 1.0), micro_batch_size=1, reduction="sum", accumulators=sums
    )
    step(Tensor(LARGE_AND_TINY.reshape(-1, 1)))
    cleared = [parameter for parameter in step.get_parameters() if parameter.name.startswith("accu_")]
    assert len(cleared) == 1 + compensated
    assert not any(as_numpy(parameter).any() for parameter in cleared)
    return -float(network.weight.asnumpy()[0])


TRUTH = float(LARGE_AND_TINY.astype(np.float64).sum())


@pytest.mark.core(dtype="bfloat16")
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_compensation_keeps_what_rounding_takes(dtype):
    """The sum is exact to float32 rounding for every dtype of the accumulators: the compensation is read, too."""
    assert abs(accumulate(dtype, compensated=True) - TRUTH) <= 1e-6


@pytest.mark.core(dtype="bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_negative_control_the_plain_sum_loses_every_tiny_gradient(dtype):
    assert accumulate(dtype, compensated=False) == 1.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": ms.int32}, ValueError, "'dtype' must be one of .* but got"),
        ({"dtype": "float32"}, ValueError, "'dtype' must be one of .* but got 'float32'"),
        ({"compensated": 1}, TypeError, "'compensated' must be a bool, but got 1"),
    ],
)
def test_refuses_bad_values(options, error, message):
    with pytest.raises(error, match=f"For 'Accumulators', the argument {message}"):
        Accumulators(**options)


def test_refuses_what_is_no_accumulators():
    with pytest.raises(TypeError, match=r"'accumulators' must be gaccum_ms.Accumulators\(...\), but got"):
        step_of(accumulators=ms.float32)


# -- sparse gradients --------------------------------------------------------------------------------------------------


class Lookup(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, tokens):
        return self.layer(tokens).mean()


class OwnLookup(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = ms.Parameter(ops.ones((9, 4)), name="table")
        self.gather = ops.SparseGatherV2()

    def construct(self, tokens):
        return self.gather(self.table, tokens, 0)


class MadeInMethod(nn.Cell):
    """Makes the primitive in a method that `construct` calls."""

    def __init__(self):
        super().__init__()
        self.table = ms.Parameter(ops.ones((9, 4)), name="table")

    def construct(self, tokens):
        return self.look_up(tokens)

    def look_up(self, tokens):
        return ops.SparseGatherV2()(self.table, tokens, 0)


SPARSE = {
    "lookup": lambda: nn.EmbeddingLookup(9, 4, target="DEVICE", sparse=True),
    "fields": lambda: nn.MultiFieldEmbeddingLookup(9, 4, 2),
    "attribute": OwnLookup,
    "made in a method": MadeInMethod,
}


@pytest.mark.parametrize("layer", SPARSE)
def test_sparse_gradients_are_refused_before_training(layer):
    with pytest.raises(ValueError, match=r"gradients must be dense, but got .* sparse ones: network.layer.* Use nn.E"):
        make_step(Lookup(SPARSE[layer]()), nn.Adam, micro_size=2)


PRIMITIVES = {"gather": ops.SparseGatherV2}


class HiddenLookup(nn.Cell):
    """Only the compiler can find the primitive that this makes."""

    def __init__(self):
        super().__init__()
        self.table = ms.Parameter(ops.ones((9, 4)), name="table")

    def construct(self, tokens):
        return ops.square(PRIMITIVES["gather"]()(self.table, tokens, 0))


def test_a_sparse_gradient_that_only_the_compiler_sees_is_refused_by_the_same_words():
    step = make_step(Lookup(HiddenLookup()), micro_size=2)
    with pytest.raises(ValueError, match=r"gradients must be dense, but got a sparse one, a RowTensor.* Use nn.Embedd"):
        step(Tensor([[1, 2], [2, 5]], ms.int32))


TABLE = np.ones((3, 3), np.float32)


class DenseWithGlobals(nn.Cell):
    """Code that names modules, arrays and functions, none of them sparse."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingLookup(9, 4, target="DEVICE", sparse=False)
        self.parts = (nn.Dense(4, 4), [nn.Dense(4, 4)])

    def construct(self, tokens):
        return np.linalg.norm(TABLE) * ops.relu(self.embedding(tokens)) + as_numpy(tokens)


def test_code_without_sparse_gradients_is_not_refused():
    refuse_sparse_gradients(Lookup(DenseWithGlobals()))


def test_dense_embeddings_are_not_refused(pynative):
    network = Lookup(nn.EmbeddingLookup(9, 4, target="DEVICE", sparse=False))
    step = make_step(network, lambda weights: nn.SGD(weights, 1.0), micro_size=2)
    before = as_numpy(network.layer.embedding_table)
    step(Tensor([[1, 2], [2, 5]], ms.int32))
    change = before - as_numpy(network.layer.embedding_table)
    np.testing.assert_allclose(change.sum(axis=1), np.array([0, 1, 2, 0, 0, 1, 0, 0, 0]) / 4, atol=1e-6)
