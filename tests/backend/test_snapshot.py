"""What a snapshot restores, and what it does not change."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.backend.snapshot import Snapshot, as_numpy


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.odd = ms.Parameter(Tensor([np.nan, np.inf, -0.0], ms.float32), name="odd", requires_grad=False)
        self.half = ms.Parameter(Tensor([1.0, 2.0], ms.bfloat16), name="half", requires_grad=False)

    def construct(self, x):
        return self.norm(self.dense(x))


def values(net):
    return {one.name: as_numpy(one).tobytes() for one in net.get_parameters()}


def test_puts_back_values_bit_for_bit_but_those_that_are_left_out():
    net = Net()
    before = values(net)
    every, but_one = Snapshot(net), Snapshot(net, leave_out=[net.dense.weight])
    for one in net.get_parameters():
        overwrite(one, Tensor(np.full(one.shape, 7.0), one.dtype))
    changed = values(net)
    assert all(value != before[name] for name, value in changed.items())
    but_one.restore()
    assert values(net) == before | {"dense.weight": changed["dense.weight"]}
    every.restore()
    assert values(net) == before


def test_puts_back_each_cells_flags_and_the_generator():
    """Each cell gets its own flags back: a BatchNorm that is kept out of training must stay so."""
    net = Net().set_train()
    net.norm.set_train(False)
    state = ms.get_rng_state().asnumpy().copy()
    snapshot = Snapshot(net)
    net.set_train(False).set_grad()
    net.norm.set_train()
    ms.manual_seed(12345)
    snapshot.restore()
    assert (net.training, net.dense.training, net.norm.training, net.requires_grad) == (True, True, False, False)
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), state)


class Keeping(nn.Cell):
    """Writes into all kinds of attributes."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 2)
        self.register_buffer("calls", Tensor(np.zeros(2), ms.float32))
        self.mean = Tensor(0.0, ms.float32)
        self.count = 0

    def construct(self, x):
        ops.assign(self.calls, self.calls + 1)
        self.mean = x.mean()
        self.count = self.count + 1
        return self.dense(x)


def state_of(net):
    return net.calls.asnumpy().tolist(), float(net.mean), net.count


def test_puts_back_buffers_and_attributes_that_construct_writes(mode):
    net = Keeping()
    x = Tensor(np.ones((2, 3)), ms.float32)
    net(x)
    before = state_of(net)
    snapshot = Snapshot(net)
    net(2 * x)
    assert state_of(net) != before
    unchanged = [id(one) for one in snapshot.unchanged()]
    assert id(net.dense.weight) in unchanged and id(net.calls) not in unchanged
    snapshot.restore()
    assert state_of(net) == before
    net(2 * x)  # the compiled graph goes on from the restored values
    assert (net.calls.asnumpy().tolist(), net.count) == ([2.0, 2.0], 2)


def test_puts_back_arrays_and_containers_of_tensors():
    net = Net()
    net.table, net.array = {"seen": [], "means": [Tensor(np.ones(2), ms.float32)]}, np.zeros(3)
    snapshot = Snapshot(net)
    net.table["seen"].append(1)
    overwrite(net.table["means"][0], Tensor(np.zeros(2), ms.float32))
    net.table["more"] = net.fresh = 3
    net.array[1] = 5
    snapshot.restore()
    assert net.table.keys() == {"seen", "means"} and net.table["seen"] == []
    assert net.table["means"][0].asnumpy().tolist() == [1.0, 1.0]
    assert net.array.tolist() == [0.0, 0.0, 0.0]
    assert not hasattr(net, "fresh")
