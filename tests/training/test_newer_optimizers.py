"""The optimizers of `mindspore.experimental.optim` and `mindspore.mint.optim` , whose rates schedulers change."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler

from gaccum_ms import FlushAccumulation, GradAccumulationCell, GradAccumulator, UpdateScheduler, WindowMonitor, resume
from tests.support import reference
from tests.support.reference import FEATURES, Regression, as_numpy
from tests.support.state import assert_close, assert_identical, everything
from tests.support.versions import before

SAMPLES, UPDATES = 6, 3
_RANDOM = np.random.default_rng(3)
X = _RANDOM.normal(size=(2 * UPDATES, SAMPLES, FEATURES)).astype(np.float32)
Y = _RANDOM.normal(size=(2 * UPDATES, SAMPLES)).astype(np.float32)
BATCH = Tensor(X[0]), Tensor(Y[0])


def _groups(weights):
    return [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "weight_decay": 0.05}]


KINDS = {
    "SGD": lambda weights: optim.SGD(_groups(weights), 0.05, momentum=0.9),
    "Adam": lambda weights: optim.Adam(_groups(weights), 0.05),
    "mint Adam": lambda weights: mint.optim.Adam(weights, 0.05, amsgrad=True),
}


def values_of(network, optimizer):
    return {one.name: as_numpy(one) for one in (*network.get_parameters(), *optimizer.get_parameters())}


def train(make_train, kind):
    """Train with a rate that halves after each update; returns weights and the optimizer's state."""
    network = Regression()
    optimizer = KINDS[kind](network.trainable_params())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    update = make_train(network, optimizer)
    for x, y in zip(X[:UPDATES], Y[:UPDATES], strict=True):
        update(Tensor(x), Tensor(y))
        scheduler.step()
    return values_of(network, optimizer)


def by_step(network, optimizer, **options):
    return reference.make_step(network, lambda weights: optimizer, **(options or {"micro_size": 3}))


def by_loop(network, optimizer):
    accumulator = GradAccumulator(optimizer, 2, jit=False)
    gradients_of = ms.value_and_grad(network, None, optimizer.parameters)

    def update(x, y):
        for half in (slice(0, 3), slice(3, 6)):
            accumulator(gradients_of(x[half].copy(), y[half].copy())[1])

    return update


@pytest.mark.parametrize(
    ("kind", "mode", "make_train"),
    [("SGD", ms.GRAPH_MODE, by_step), ("Adam", ms.PYNATIVE_MODE, by_loop), ("mint Adam", ms.GRAPH_MODE, by_step)],
)
def test_updates_are_those_of_the_whole_batch_at_the_schedulers_rates(kind, mode, make_train):
    """MindSpore's own step is the reference. PyNative mode compiles nothing, but there some write nothing, on CPU."""
    ms.set_context(mode=ms.GRAPH_MODE if "mint" in kind else ms.PYNATIVE_MODE)
    expected = train(nn.TrainOneStepCell, kind)
    ms.set_context(mode=mode)
    values = train(make_train, kind)
    assert_close({name: values[name] for name in expected}, expected, 2e-5)


def test_an_optimizer_without_kernels_is_refused():
    network = Regression()
    optimizer = mint.optim.AdamW(network.trainable_params(), lr=0.1)
    error = r"must have kernels on this device, but got mint.optim.AdamW on CPU.* Use mindspore.experimental.optim"
    for make in (lambda: by_step(network, optimizer), lambda: GradAccumulator(optimizer, 2)):
        with pytest.raises(ValueError, match=error):
            make()


def test_settings_that_a_compiled_update_does_not_read_are_refused(pynative):
    """MindSpore's own graphs ignore them. What is written into a rate's Parameter is read."""
    network = Regression()
    optimizer = optim.SGD(network.trainable_params(), lr=0.5, weight_decay=1.0)
    step, group = by_step(network, optimizer, accumulation_steps=2, jit=True), optimizer.param_groups[0]
    group["weight_decay"] = 0.0  # before the first batch, all may be set
    step(*BATCH)
    weights = everything(network)
    for name, value in (("lr", 0.0), ("weight_decay", 0.5), ("lr", ms.Parameter(Tensor(0.0)))):
        right, group[name] = group[name], value
        message = rf"param_groups\[0\]\['{name}'\] = .* instead of .*Nothing was trained. .*mindspore.ops.assign"
        for call in (lambda: step(*BATCH), step.flush):
            with pytest.raises(RuntimeError, match=message):
                call()
        assert int(step.window_position.asnumpy()) == 1, "the window is still open"
        group[name] = right
    ms.ops.assign(group["lr"], 0.0)
    step(*BATCH)
    assert int(step.update_count.asnumpy()) == 1
    assert_identical(everything(network), weights)


def test_an_optimizer_that_writes_nothing_is_refused_before_the_first_batch(pynative):
    """MindSpore's own step silently trains nothing with it."""
    network = Regression()
    optimizer = mint.optim.SGD(network.trainable_params(), lr=0.1)
    if before(2, 8):
        with pytest.raises(ValueError, match=r"writes none on CPU\. Use nn.SGD"):
            GradAccumulator(optimizer, 2)
        return
    accumulator, step = GradAccumulator(optimizer, 2, jit=False), by_step(network, optimizer)
    error = "but got mint.optim.SGD in PyNative mode, in which it writes none on CPU. Use jit=True or graph mode"
    with pytest.raises(RuntimeError, match=error):
        accumulator(ms.grad(network, None, optimizer.parameters)(*BATCH))
    with pytest.raises(RuntimeError, match=error):
        step(*BATCH)
    assert int(step.batch_count.asnumpy()) == int(accumulator.batch_count.asnumpy()) == 0


def model_of_two():
    network = Regression()
    optimizer = optim.Adam(network.trainable_params(), 0.05, amsgrad=True)
    model = ms.Model(GradAccumulationCell(network, 2, accumulation_steps=2), optimizer=optimizer)
    schedulers = lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2, 0.5)
    return model, UpdateScheduler(*schedulers)


def data_set():
    """Five batches: with a flush 2 + 2 + 1, three updates an epoch."""
    return NumpySlicesDataset((X.reshape((-1, FEATURES))[:30], Y.ravel()[:30]), shuffle=False).batch(SAMPLES)


def fit(model, scheduler):
    monitor = WindowMonitor()
    model.train(1, data_set(), callbacks=[FlushAccumulation(), scheduler, monitor])
    return [record.learning_rate for record in monitor.records]


def test_schedulers_step_once_per_update_and_go_on_from_a_checkpoint(tmp_path, pynative):
    model, scheduler = model_of_two()
    rates, file = fit(model, scheduler), str(tmp_path / "step.ckpt")
    ms.save_checkpoint(model.train_network, file)
    rates += fit(model, scheduler)
    np.testing.assert_allclose(rates, [0.05 * 0.9**k * 0.5 ** (k // 2) for k in range(6)], rtol=1e-5)
    resumed, its_scheduler = model_of_two()
    resume(resumed, file)
    np.testing.assert_allclose(fit(resumed, its_scheduler), rates[3:], rtol=1e-5)
    states = [everything(one.train_network) for one in (resumed, model)]
    assert_identical(*states, but=[name for name in states[0] if "random_state" in name])


def test_bad_schedulers_are_refused_before_training(pynative):
    network = Regression()
    weights = network.trainable_params()
    one, other = optim.SGD(weights, 0.1), optim.SGD(weights, 0.1)
    exponential = lr_scheduler.ExponentialLR(one, 0.5)
    unread = lr_scheduler.ExponentialLR(mint.optim.SGD(weights, 0.1), 0.5)
    for schedulers, error, message in (
        ([lr_scheduler.ReduceLROnPlateau(one)], TypeError, r"must be LRSchedulers of .* got \['ReduceLROnPlateau'\]"),
        ([], TypeError, r"but got \[\]"),
        ([exponential, lr_scheduler.ExponentialLR(other, 0.5)], ValueError, "must be of one optimizer"),
        ([unread], ValueError, "'UpdateScheduler', the optimizer must read its learning rate at each update"),
    ):
        with pytest.raises(error, match=message):
            UpdateScheduler(*schedulers)
    model = ms.Model(GradAccumulationCell(network, 2), optimizer=other)
    with pytest.raises(ValueError, match="must be of the optimizer that a GradAccumulationCell is trained with"):
        model.train(1, data_set(), callbacks=[UpdateScheduler(exponential)])
    assert int(model.train_network.batch_count.asnumpy()) == 0


class Stretched(lr_scheduler.LRScheduler):
    """A scheduler of a user's, whose state is in Parameters, or in a Python number."""

    def __init__(self, optimizer, in_parameter=True):
        self.calls = ms.Parameter(Tensor(0.0, ms.float32), name="calls") if in_parameter else 0
        super().__init__(optimizer)

    def get_lr(self):
        if isinstance(self.calls, ms.Parameter):
            self.calls.set_data(self.calls + 1)
        else:
            self.calls += 1
        return [rate / (1 + self.calls) for rate in self.base_lrs]


# Schedulers that differ in their state, with what of it is saved besides the rates, as docs/how_it_works.md says.
SAVED = {
    "LambdaLR": (lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch), ["last_epoch"]),
    "CosineAnnealingWarmRestarts": (
        lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 2, 2),
        ["T_0", "T_cur", "T_i", "last_epoch"],
    ),
    "SequentialLR": (
        lambda one: lr_scheduler.SequentialLR(
            one, [lr_scheduler.ConstantLR(one, 0.1, 2), lr_scheduler.ExponentialLR(one, 0.9)], [2]
        ),
        ["last_epoch"] * 3,
    ),
    "your own `LRScheduler`": (Stretched, ["calls", "last_epoch"]),
}


def looped(make_scheduler):
    """A loop with one weight, whose gradient is 1: a function that adds a batch, and whether it updated, and the rate.
    Two batches make an update."""
    weight = ms.Parameter(Tensor([0.0, 0.0], ms.float32), name="weight")
    optimizer = optim.SGD([{"params": [weight], "lr": 0.1}], 0.1)
    accumulator = GradAccumulator(optimizer, 2, scheduler=make_scheduler(optimizer), jit=False)

    def add():
        return accumulator((Tensor([1.0, 1.0]),)), float(as_numpy(optimizer.lrs[0]))

    return accumulator, add


@pytest.mark.parametrize("name", SAVED)
def test_a_loops_scheduler_steps_at_updates_and_goes_on_from_a_checkpoint(name, tmp_path, pynative):
    make, state = SAVED[name]
    alone = optim.SGD([{"params": [ms.Parameter(Tensor([0.0]), name="weight")], "lr": 0.1}], 0.1)
    scheduler, expected = make(alone), []
    for _ in range(7):
        scheduler.step()
        expected.append(float(as_numpy(alone.lrs[0])))
    accumulator, add = looped(make)
    rates = [add() for _ in range(6)]
    assert [updated for updated, _ in rates] == [False, True] * 3
    assert [rate for _, rate in rates[1::2]] == expected[:3]
    names = [one.name for one in accumulator.get_parameters() if one.name.startswith("gaccum_ms.scheduler.")]
    assert sorted(one.split(".")[-1] for one in names if not one.endswith("scheduler.updates")) == state
    assert len(set(names)) == len(state) + 1
    add()
    ms.save_checkpoint(accumulator, str(tmp_path / "loop.ckpt"))
    resumed, add = looped(make)
    resume(resumed, tmp_path / "loop.ckpt")
    assert [add()[1] for _ in range(7)][::2] == expected[3:]


def test_a_loops_bad_schedulers_are_refused(pynative):
    weight = ms.Parameter(Tensor([0.0]), name="weight")
    one, other = optim.SGD([weight], 0.1), optim.SGD([weight], 0.1)
    for scheduler, error, words in (
        (lr_scheduler.ReduceLROnPlateau(one), TypeError, r"but got \['ReduceLROnPlateau'\]. .* needs a metric: call"),
        (0.1, TypeError, r"LRSchedulers of .*, but got \['float'\]"),
        (lr_scheduler.StepLR(other, 2), ValueError, "be of the optimizer that the accumulator calls, but got"),
        (Stretched(one, in_parameter=False), ValueError, "keep its state in Parameters, .*'Stretched', .*'calls'"),
    ):
        with pytest.raises(error, match=rf"For 'GradAccumulator', the argument 'scheduler' must .*{words}"):
            GradAccumulator(one, 2, scheduler=scheduler)
    accumulator = GradAccumulator(one, 2, scheduler=lr_scheduler.StepLR(one, 2))

    @ms.jit
    def add(gradient):
        return accumulator((gradient,))

    with pytest.raises(RuntimeError, match="For 'GradAccumulator', with 'scheduler' the accumulator must be called by"):
        add(Tensor([1.0]))
    assert int(accumulator.batch_count.asnumpy()) == 0


def test_resume_warns_where_a_loops_scheduler_is_not_in_the_checkpoint(tmp_path, pynative):
    """With `LambdaLR` , the next rate was silently the first one's."""

    def make(saves):
        optimizer = optim.SGD([ms.Parameter(Tensor([0.0, 0.0]), name="weight")], 0.1)
        scheduler = SAVED["LambdaLR"][0](optimizer)
        accumulator = GradAccumulator(optimizer, 1, scheduler=scheduler if saves else None, jit=False)
        accumulator((Tensor([1.0, 1.0]),))
        return accumulator, scheduler

    without, scheduler = make(False)
    scheduler.step()
    ms.save_checkpoint(without, str(tmp_path / "False.ckpt"))
    ms.save_checkpoint(make(True)[0], str(tmp_path / "True.ckpt"))
    for file, saves, words in (
        ("False.ckpt", False, "has another 'learning_rate_group_0' than the optimizer, and no scheduler's state"),
        ("False.ckpt", True, "has no scheduler's state, so the scheduler begins anew"),
        ("True.ckpt", False, "has a scheduler's state, but the accumulator has no scheduler"),
    ):
        with pytest.warns(UserWarning, match=f"For 'resume', the checkpoint {words}.* Give GradAccumulator"):
            resume(make(saves)[0], tmp_path / file)
