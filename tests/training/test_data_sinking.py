"""The training step's graph with data sinking: a loop that fetches its own batches, without Python between them.

MindSpore sinks data only on Ascend and GPU: on CPU ``Model.train(dataset_sink_mode=True)`` feeds batches from Python,
`ms.data_sink` refuses, and the operator that reads the device's queue has no kernel. Here MindSpore's real wrapper is
around the step, but it reads Parameters instead of the queue. The queue itself, and callbacks between two sinks, are
not tested.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.train.dataset_helper import _DataWrapper

from gaccum_ms import CountMask
from tests.support import window_oracle as oracle
from tests.support.reference import as_numpy


class Queue(nn.Cell):
    """Each call in the graph gives the next batch."""

    def __init__(self, batches):
        super().__init__(auto_prefix=False)
        self.columns = tuple(Tensor(np.stack(column)) for column in zip(*batches, strict=True))
        self.number = ms.Parameter(Tensor(0, ms.int32), name="queue_number", requires_grad=False)

    def construct(self):
        number = self.number + 0
        batch = ()
        for column in self.columns:
            batch = (*batch, column[number])
        return ops.depend(batch, ops.assign(self.number, ops.depend(number + 1, batch)))


class Sink(nn.Cell):
    """A sink of several batches, as the device runs it; returns the last step's outputs."""

    def __init__(self, step, batches, size):
        super().__init__(auto_prefix=False)
        first = batches[0]
        self.step = _DataWrapper(step, [ms.float32] * len(first), [list(one.shape) for one in first], "queue")
        self.step.get_next = Queue(batches)
        self.size = size
        self.set_train()

    def construct(self):
        outputs = self.step()
        done = Tensor(1, ms.int32)
        while done < self.size:
            outputs = self.step()
            done = done + 1
        return outputs


CASE = oracle.Case(oracle.Masked, "graph", [(1, 3)], micro_size=3, count=CountMask(), scale=1024.0)
BATCHES = 6


def test_the_graph_of_a_sink_trains_as_the_whole_batches_do():
    """The second batch counts NaN: it does not update, and no Python runs that could raise an error."""
    batches = CASE.batches((5,) * BATCHES)
    good = [batches[0], *batches[2:]]
    records, weight = CASE.expected_records([good])
    batches[1][2][0] = np.nan
    step = CASE.make_model().train_network
    loss, *_ = Sink(step, batches, BATCHES)()
    np.testing.assert_allclose(as_numpy(step.weights[0]), weight, rtol=1e-5)
    np.testing.assert_allclose(as_numpy(loss), records[-1]["losses"][-1], rtol=1e-5)
    assert int(step.update_count.asnumpy()) == records[-1]["update"] == BATCHES - 1
    assert int(step.batch_count.asnumpy()) == BATCHES
