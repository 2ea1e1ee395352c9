"""The data set's position in resumed hand-written loops, compared with the same loop without interruption."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset

from gaccum_ms import FlushAccumulation, GradAccumulator, WindowMonitor, resume
from tests.support.reference import Line, make_step

pytestmark = pytest.mark.usefixtures("pynative")
SIZE, EPOCHS = 6, 4  # batches of an epoch, of two samples each
X = np.arange(1, 2 * SIZE + 1, dtype=np.float32) / 10


def make_data_set(shuffle: bool = False) -> Any:
    ms.dataset.config.set_seed(3)
    return NumpySlicesDataset((X, X), ["x", "y"], shuffle=shuffle).batch(2)


def make_generator(shuffle: bool = False) -> Any:
    ms.dataset.config.set_seed(3)
    return GeneratorDataset(list(zip(X, X, strict=True)), ["x", "y"], shuffle=shuffle).batch(2).repeat(1)


def stepped() -> tuple[Any, Callable]:
    """What resumes, and what trains on a batch."""
    step = make_step(Line(1.0), lambda weights: nn.SGD(weights, 0.01), accumulation_steps=4)
    return step, step


def accumulated() -> tuple[Any, Callable]:
    """A hand-written training: a function computes gradients for a GradAccumulator."""
    network = Line(1.0)
    accumulator = GradAccumulator(nn.SGD(network.trainable_params(), 0.01), 4)
    gradients = ms.value_and_grad(network, None, network.trainable_params())
    return accumulator, lambda x, y: accumulator(gradients(x, y)[1])


@functools.cache
def shared(kind: Callable) -> tuple[Any, Callable]:
    """One model for all tests: it can resume at any time."""
    return kind()


Loop = Callable[[Any, int], Iterator[Any]]  # yields, from epoch `first` on, an epoch's batches


def tuples(data_set, first):
    """Reads a batch before the loop, as for find_micro_batch_size."""
    next(iter(data_set.create_tuple_iterator()))
    for _ in range(first, EPOCHS):
        yield data_set.create_tuple_iterator()


def dicts(data_set, first):
    for _ in range(first, EPOCHS):
        assert data_set.get_dataset_size() == SIZE
        iterator = data_set.create_dict_iterator(output_numpy=True, num_epochs=1)
        yield ((ms.Tensor(row["x"]), ms.Tensor(row["y"])) for row in iterator)


def one_iterator(data_set, first):
    iterator = data_set.create_tuple_iterator(num_epochs=EPOCHS)
    for _ in range(first, EPOCHS):
        yield iterator


def train(train_on: Any, loop: Loop, data_set: Any, first: int = 0) -> list[list[float]]:
    """The first sample of each batch, epoch by epoch."""
    seen = []
    for epoch in loop(data_set, first):
        seen.append([])
        for x, y in epoch:
            train_on(x, y)
            seen[-1].append(round(float(x.asnumpy()[0]), 3))
    return seen


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints after numbers of batches, for each kind of training."""
    folder, files = tmp_path_factory.mktemp("checkpoints"), {}
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for kind, saved in ((stepped, (2, 6, 8, 15)), (accumulated, (8,))):
        trainer, train_on = shared(kind)
        batches = [batch for _ in range(EPOCHS) for batch in make_data_set()]
        for number, batch in enumerate(batches[: saved[-1]], start=1):
            train_on(*batch)
            if number in saved:
                files[kind, number] = str(folder / f"{kind.__name__}-{number}.ckpt")
                ms.save_checkpoint(trainer, files[kind, number])
    return files


@pytest.mark.parametrize(
    ("kind", "loop", "saved", "make"),
    [
        (stepped, tuples, 6, make_data_set),
        (accumulated, dicts, 8, make_data_set),
        (stepped, tuples, 2, make_generator),
        (stepped, one_iterator, 15, make_generator),
    ],
)
def test_a_resumed_loop_sees_what_the_uninterrupted_one_would_have(kind, loop, saved, make, checkpoints):
    whole = train(lambda *_: None, one_iterator if loop is one_iterator else tuples, make(shuffle=True))
    assert len({tuple(epoch) for epoch in whole}) == (EPOCHS if loop is one_iterator else 1)
    (trainer, train_on), data_set = shared(kind), make(shuffle=True)
    finished = resume(trainer, checkpoints[kind, saved], data_set)
    assert finished == saved // SIZE
    expected = [whole[finished][saved % SIZE :], *whole[finished + 1 :]]
    assert train(train_on, loop, data_set, finished) == expected
    assert data_set.get_dataset_size() == SIZE


def test_model_train_after_a_resumed_loop_begins_at_the_beginning(checkpoints):
    (step, _), data_set, monitor = shared(stepped), make_data_set(), WindowMonitor()
    resume(step, checkpoints[stepped, 2], data_set)
    for batch in data_set.create_tuple_iterator():
        step(*batch)
    ms.Model(step).train(2, data_set, callbacks=[monitor, FlushAccumulation()])
    assert int(step.batch_count.asnumpy()) == 3 * SIZE
    # After six batches, two are in the window.
    assert [(record.epoch, record.batches) for record in monitor.records] == [(1, 4), (1, 4), (2, 4), (2, 2)]


def test_model_fit_that_evaluates_on_the_data_set_it_resumes_flushes_at_its_epochs_ends(checkpoints):
    evaluated = nn.WithEvalCell(nn.Identity(), nn.MSELoss())
    model = ms.Model(shared(stepped)[0], eval_network=evaluated, metrics={"mse"}, eval_indexes=[0, 1, 2])
    data_set, monitor = make_data_set(), WindowMonitor()
    resume(model, checkpoints[stepped, 2], data_set)
    model.fit(2, data_set, data_set, callbacks=[monitor, FlushAccumulation()], dataset_sink_mode=False)
    assert [(record.epoch, record.batches) for record in monitor.records] == [(1, 4), (1, 2), (2, 4), (2, 2)]


def test_an_iterator_of_fewer_epochs_than_are_finished_is_refused(checkpoints):
    (step, _), data_set = shared(stepped), make_data_set()
    resume(step, checkpoints[stepped, 15], data_set)
    message = r"'num_epochs' of 'create_tuple_iterator' must be .* but got 2 where 2 are finished"
    with pytest.raises(ValueError, match=message):
        data_set.create_tuple_iterator(num_epochs=2)
    assert len(list(data_set.create_tuple_iterator())) == SIZE - 15 % SIZE
