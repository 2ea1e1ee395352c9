"""Semi-auto and auto parallel mode in Python: errors before anything is compiled. The compiled graphs are tested in
test_graphs.py."""

from __future__ import annotations

import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.train import serialization

from gaccum_ms import (
    Accumulators,
    ClipByGlobalNorm,
    ClipByValue,
    GradAccumulationCell,
    SkipSpikes,
    WindowBatchNorm,
    resume,
)
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.semi_auto.compiled_once import CompiledOnce
from tests.support import reference
from tests.support.modes import eagerly
from tests.support.reference import batches, make_network


@pytest.fixture(autouse=True)
def _parallel_mode():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    yield
    ms.reset_auto_parallel_context()


def step_of(network, **options):
    return reference.make_step(nn.WithLossCell(network, nn.CrossEntropyLoss()), **options)


def make_step(**options):
    return step_of(make_network("dense"), **options)


def tensors(samples):
    return tuple(map(Tensor, batches(samples, 1)[0]))


def test_a_bad_count_is_one_clear_error():
    """After the graph, which needs devices and is not run, has noted that the count was bad."""

    def count(x, y):
        return -1.0

    step = make_step(micro_size=2, count=count, accumulation_steps=2)
    step.window.open.batch_items.set_data(Tensor(np.nan, ms.float32))
    words = r"'count' must return .* got \[\[-1.0, -1.0\]\].*The window that the batch is in does not update"
    with pytest.raises(ValueError, match=words):
        step._counts.check(step._runner.prepare(tensors(4)))


ONE_NORM = r"one norm is taken of the gradient, .*behind other norms or changes"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (ONE_NORM, {"transforms": (ClipByValue(1.0), ClipByGlobalNorm(1.0))}),
        (ONE_NORM, {"transforms": (SkipSpikes(norm=2.0), ClipByGlobalNorm(1.0), ClipByGlobalNorm(0.5))}),
        ("precision of the weights at least, but got Accumulators", {"accumulators": Accumulators(ms.float16)}),
    ],
)
def test_refused_before_anything_is_built(words, options):
    with pytest.raises(ValueError, match=words):
        make_step(micro_size=2, **options)


def test_refuses_window_batch_norm():
    network = nn.SequentialCell(WindowBatchNorm(4), nn.Dense(4, 2))
    with pytest.raises(ValueError, match=r"must have no WindowBatchNorm, .*Use nn\.GroupNorm"):
        step_of(network, micro_size=2)


def test_refuses_ragged_batches_before_compiling():
    step = make_step(micro_size=4)
    with pytest.raises(ValueError, match=r"must divide by 'micro_size', .*but got 10 samples and micro_size=4"):
        step(*tensors(10))
    assert not step.compile_cache


def test_windows_of_batches_cut_each_into_two_at_least():
    """The compiler fills accumulators for two or more micro-batches."""
    step = make_step(micro_size=1)
    step.set_accumulation_steps(2)
    batch = step._runner.prepare(tensors(8))
    assert [part.shape[0] for part, _ in batch.micro_batches()] == [4, 4]


@pytest.fixture
def compiled(monkeypatch):
    """Saves as MindSpore does once its compiler has laid a step out: the Parameters that its graph has."""
    monkeypatch.setattr(serialization, "_is_auto_parallel_mode", lambda step: True)

    def save(step, file, saved=None):
        for parameter in step.get_parameters():
            if parameter.name.startswith(("hidden.", "out.", "accum.", "stat.", "learning_rate", "momentum")):
                parameter.init_data()
                parameter.sliced = True
        ms.save_checkpoint(saved or step, str(file))

    return save


def test_the_adding_graph_and_the_updating_one_take_turns(monkeypatch, compiled, tmp_path):
    """The graphs need devices, and are not run; the order of their calls is Python's."""
    step = make_step(micro_size=2, accumulation_steps=3)
    calls = []

    def added(*inputs):
        calls.append("add")
        open_window = step.window.open
        open_window.window_sums.set_data(open_window.window_sums + Tensor([0.0, 0.0, 0.0, 1.0]))

    def updated(*inputs):
        calls.append(f"update {float(step.window.batch_weight.asnumpy())}")
        step.window.open.reset_eagerly()

    step._lifecycle.begin_call()
    runner = step._runner
    runner._add, runner._run_graph = added, lambda: updated
    monkeypatch.setattr(auto_parallel, "check_device", lambda: None)
    batch = runner.prepare(tensors(4))
    for _ in range(4):
        runner.run(batch)
    with pytest.raises(RuntimeError, match=r"must be saved between two windows, .*Call step\.flush\(\)"):
        compiled(step, tmp_path / "in_window.ckpt")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # MindSpore saves with `exception_save`
        compiled(step, tmp_path / "after_error.ckpt")
    step.run_record.training_ended = True  # a Model has warned of the open window: its last checkpoint has the weights
    compiled(step, tmp_path / "at_end.ckpt")
    step.flush()
    assert calls == ["add", "add", "update 1.0", "add", "update 0.0"]
    compiled(step, tmp_path / "between_windows.ckpt")
    os.utime(tmp_path / "at_end.ckpt")
    later = make_step(micro_size=2, accumulation_steps=3)
    resume(later, tmp_path)  # not from the newest file, which has an open window
    assert not int(later.window_position.asnumpy())


def test_resumes_from_a_folder_of_checkpoints_after_compiling(compiled, tmp_path):
    """They have the records that no graph reads, and the state of random numbers, also if MindSpore saves the wrapper
    of data sinking, which runs no hook of the step."""
    step = make_step(micro_size=2, accumulation_steps=2, max_grad_norm=1.0)
    step.update_count.set_data(Tensor(3, ms.int32))
    step.keep_records()
    wrapper = nn.Cell(auto_prefix=False)
    wrapper.network = step
    for saved in (step, wrapper):
        ms.set_seed(5)
        compiled(step, tmp_path / "saved.ckpt", saved)
        state = ms.get_rng_state()
        ms.set_seed(6)
        later = make_step(micro_size=2, accumulation_steps=2)
        resume(later, tmp_path)
        assert int(later.update_count.asnumpy()) == 3
        np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), state.asnumpy())


def in_another_mode(**options):
    """A step after its first batch."""
    ms.reset_auto_parallel_context()
    with eagerly():
        step = make_step(micro_size=2, **options)
        step(*tensors(4))
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    return step


def test_a_checkpoint_of_an_open_window_is_refused(tmp_path):
    """It is of a device's own sums, or of a window of another mode, whose sums are of one rank."""
    file = str(tmp_path / "open.ckpt")
    ms.save_checkpoint(in_another_mode(accumulation_steps=2), file)
    step = make_step(micro_size=2, accumulation_steps=2)
    refused = r"must be from between two windows, .* saved 1 batch.*FlushAccumulation"
    with pytest.raises(ValueError, match=refused):
        resume(step, file)
    ms.load_checkpoint(file, step)
    with pytest.raises(ValueError, match=refused):
        step(*tensors(4))


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_checkpoints_of_other_modes_are_loaded_before_the_first_step(tmp_path, form):
    """And those that this mode saves before it: later ones have each device's parts, which MindSpore joins."""
    first = saved = in_another_mode()
    for load in (resume, lambda step, file: ms.load_checkpoint(file, step, format=form)):
        file = str(tmp_path / f"saved.{form}")
        ms.save_checkpoint(saved, file, format=form)
        saved = make_step(micro_size=2)
        load(saved, file)
        for weight, other in zip(saved.weights, first.weights, strict=True):
            np.testing.assert_array_equal(weight.asnumpy(), other.asnumpy())
        assert int(saved.update_count.asnumpy()) == 1


def test_batch_norm_is_warned_about_and_cpu_is_refused_with_the_remedy():
    step = step_of(nn.SequentialCell(nn.Dense(12, 8), nn.BatchNorm1d(8), nn.Dense(8, 5)), micro_size=2)
    refusal = r"need GPUs or Ascend, but got the device target 'CPU'.*data_parallel"
    with pytest.warns(UserWarning, match="BatchNorm"), pytest.raises(RuntimeError, match=refusal):
        step(*tensors(8))


class Lazy(nn.Cell):
    @ms.lazy_inline
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(12, 5).to_float(ms.float16)

    def construct(self, x):
        return self.layer(x)


def network_of(network):
    return step_of(network, micro_size=2).window.measure.network


def test_networks_that_cast_weights_are_compiled_once():
    assert not isinstance(network_of(Lazy()), CompiledOnce)
    for dtype in (ms.float16, ms.bfloat16):
        assert isinstance(network_of(nn.Dense(12, 5).to_float(dtype)), CompiledOnce)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_model_with_a_loss_function_is_built_and_evaluates_the_network(level):
    network = make_network("dense")
    for around in (lambda cell: cell, AutoParallel):  # the model applies the settings of an AutoParallel
        optimizer, cell = nn.SGD(network.trainable_params(), 0.1), around(GradAccumulationCell(network, 2))
        model = ms.Model(cell, nn.CrossEntropyLoss(), optimizer, metrics={"accuracy"}, amp_level=level)
        if around is not AutoParallel:
            assert isinstance(model.train_network.window.measure.network, CompiledOnce) == (level != "O0")
        assert model.eval_network._network is model.predict_network is network


def test_casts_outside_of_a_lazy_cell_are_refused():
    network = nn.SequentialCell(Lazy(), nn.Dense(5, 5).to_float(ms.float16))
    with pytest.raises(ValueError, match=r"got casts in Dense outside of the Cell with mindspore.lazy_inline, 'Lazy'"):
        network_of(network)


def test_how_inputs_lie_on_the_devices():
    ms.set_auto_parallel_context(device_num=8)
    assert auto_parallel.shards_of_inputs() == (8,)
    layout = ms.Layout((4, 2), ("samples", "features"))
    by_names = layout("samples", "features"), layout("samples", "None")
    ways = (((4, 2), (8,)), (4, 8)), ("full_batch", (1,)), ("data_parallel", (8,)), (by_names, (1,))
    for strategy, shards in ways:
        ms.set_auto_parallel_context(dataset_strategy=strategy)
        assert auto_parallel.shards_of_inputs() == shards
