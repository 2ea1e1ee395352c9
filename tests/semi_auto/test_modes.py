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
    AccumulationScheduler,
    Accumulators,
    AdaptiveGradientClip,
    ClipByGlobalNorm,
    ClipByValue,
    EvenSplit,
    GradAccumulationCell,
    SkipSpikes,
    TrainOneStepWithGradAccumulationCell,
    WindowBatchNorm,
    resume,
)
from gaccum_ms.backend import MirrorMicroStepOperator, bprop_getters
from gaccum_ms.backend.micro_mirrors import unreduced
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.semi_auto.compiled_once import CompiledOnce
from tests.support.modes import eagerly
from tests.support.reference import batches, make_network


@pytest.fixture(autouse=True)
def _parallel_mode():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    yield
    ms.reset_auto_parallel_context()


def make_step(**options):
    cell = GradAccumulationCell(nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss()), **options)
    return TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1))


@pytest.mark.parametrize(
    ("steps", "consequence"), [(1, "Nothing was changed"), (2, "The window that the batch is in does not update")]
)
def test_a_bad_count_is_one_clear_error(steps, consequence):
    """After the graph, which needs devices and is not run, has noted that the count was bad."""

    def count(x, y):
        return -1.0

    step = make_step(micro_size=2, count=count, accumulation_steps=steps)
    bad = step.window_count if steps == 1 else step.window.open.batch_items
    bad.set_data(Tensor(np.nan, ms.float32))
    with pytest.raises(ValueError, match=rf"'count' must return .* got \[\[-1.0, -1.0\]\].*{consequence}"):
        step._counts.check(step._runner.prepare(tuple(Tensor(value) for value in batches(4, 1)[0])))


def test_refuses_window_batch_norm():
    network = nn.SequentialCell(WindowBatchNorm(4), nn.Dense(4, 2))
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 2)
    with pytest.raises(ValueError, match=r"must have no WindowBatchNorm, .*Use nn\.GroupNorm"):
        TrainOneStepWithGradAccumulationCell(cell, nn.SGD(network.trainable_params(), 0.1))


def test_shared_inputs_need_not_divide():
    step = make_step(micro_size=2, split=EvenSplit(shared=(1,)))
    batch = step._runner.prepare((Tensor(np.zeros((4, 12), np.float32)), Tensor(np.zeros(3, np.float32))))
    assert [[value.shape for value in part] for part in batch.micro_batches()] == [[(2, 12), (3,)]] * 2


def test_refuses_ragged_batches_before_compiling():
    step = make_step(micro_size=4)
    with pytest.raises(ValueError, match=r"must divide by 'micro_size', .*but got 10 samples and micro_size=4"):
        step(Tensor(np.zeros((10, 12), np.float32)), Tensor(np.zeros(10, np.int32)))
    assert not step.compile_cache


@pytest.mark.parametrize(
    "chain",
    [
        lambda: (ClipByValue(1.0), ClipByGlobalNorm(1.0)),
        lambda: (SkipSpikes(norm=2.0), ClipByGlobalNorm(1.0), ClipByGlobalNorm(0.5)),
    ],
)
def test_a_second_norm_is_refused(chain):
    with pytest.raises(ValueError, match=r"one norm is taken of the gradient, .*behind other norms or changes"):
        make_step(micro_size=2, transforms=chain())


def test_transforms_that_would_see_parts_are_refused():
    with pytest.raises(ValueError, match=r"one device's part there, but got AdaptiveGradientClip, abs\. Give"):
        make_step(micro_size=2, transforms=(AdaptiveGradientClip(), abs))


def test_windows_of_batches_cut_each_into_two_at_least():
    """The compiler fills accumulators for two or more micro-batches."""
    step = make_step(micro_size=1)
    step.set_accumulation_steps(2)
    batch = step._runner.prepare(tuple(map(Tensor, batches(8, 1)[0])))
    assert [part.shape[0] for part, _ in batch.micro_batches()] == [4, 4]


def test_another_backward_of_mindspores_operators_is_refused():
    """Windows of several batches replace it while a graph is compiled; afterwards MindSpore's own is back."""
    name = MirrorMicroStepOperator.__name__
    own = bprop_getters[name]
    with unreduced():
        assert bprop_getters[name] is not own
    assert bprop_getters[name] is own
    bprop_getters.register(MirrorMicroStepOperator)(lambda self: None)
    try:
        with pytest.raises(RuntimeError, match=f"'{name}' must be the one that it knows, .* Leave"), unreduced():
            pass
    finally:
        bprop_getters.register(MirrorMicroStepOperator)(own)


def test_a_schedule_makes_windows_of_batches():
    step = make_step(micro_size=2)
    step.set_accumulation_steps(2)
    assert int(step.accumulation_steps.asnumpy()) == 2
    assert step.flush() is False  # there are no batches
    data_set = ms.dataset.NumpySlicesDataset(batches(8, 1)[0], shuffle=False).batch(4)
    with pytest.raises(RuntimeError, match="need GPUs or Ascend"):
        ms.Model(step).train(1, data_set, callbacks=AccumulationScheduler({0: 2}), dataset_sink_mode=False)
    assert not int(step.window_position.asnumpy())


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
    assert "skipped: the compiler distributes" in str(step.run_record)
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
    batch = runner.prepare(tuple(Tensor(value) for value in batches(4, 1)[0]))
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
    with pytest.raises(ValueError, match=r"must be from between two windows, .* saved 1 batch.*FlushAccumulation"):
        resume(make_step(micro_size=2, accumulation_steps=3), tmp_path / "at_end.ckpt")
    assert isinstance(step.parameter_layout_dict, dict)  # other readers than those that save
    step.flush()
    assert calls == ["add", "add", "update 1.0", "add", "update 0.0"]
    compiled(step, tmp_path / "between_windows.ckpt")
    os.utime(tmp_path / "at_end.ckpt")
    later = make_step(micro_size=2, accumulation_steps=3)
    resume(later, tmp_path)  # not from the newest file, which has an open window
    assert not later.run_record.training_ended
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


def test_accumulators_of_a_lower_precision_than_weights_are_refused():
    with pytest.raises(ValueError, match="the precision of the weights at least, but got Accumulators"):
        make_step(micro_size=2, accumulators=Accumulators(ms.float16))
    make_step(micro_size=1, accumulators=Accumulators(ms.float16))  # has none


def in_another_mode(**options):
    """A step after its first batch."""
    ms.reset_auto_parallel_context()
    with eagerly():
        step = make_step(micro_size=2, **options)
        step(*map(Tensor, batches(4, 1)[0]))
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    return step


def test_a_checkpoint_of_an_open_window_is_refused(tmp_path):
    """It is of a device's own sums, or of a window of another mode, whose sums are of one rank."""
    ms.save_checkpoint(in_another_mode(accumulation_steps=2), str(tmp_path / "open.ckpt"))
    step = make_step(micro_size=2, accumulation_steps=2)
    with pytest.raises(ValueError, match=r"must be from between two windows, .* saved 1 batch"):
        resume(step, tmp_path / "open.ckpt")
    ms.load_checkpoint(str(tmp_path / "open.ckpt"), step)
    with pytest.raises(ValueError, match=r"must be from between two windows, .* saved 1 batch"):
        step(*map(Tensor, batches(4, 1)[0]))


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


def test_a_step_runs_in_the_mode_it_was_built_for():
    built_here = make_step(micro_size=2)
    ms.reset_auto_parallel_context()
    with pytest.raises(RuntimeError, match="must be the same when the step is built and when it runs"):
        built_here(Tensor(np.zeros((8, 12), np.float32)), Tensor(np.zeros(8, np.int32)))


def test_batch_norm_is_warned_about():
    network = nn.SequentialCell(nn.Dense(12, 8), nn.BatchNorm1d(8), nn.Dense(8, 5))
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1))
    with pytest.warns(UserWarning, match="BatchNorm"), pytest.raises(RuntimeError, match="need GPUs or Ascend"):
        step(Tensor(np.zeros((8, 12), np.float32)), Tensor(np.zeros(8, np.int32)))


def test_cpu_is_refused_with_the_remedy():
    step = make_step(micro_size=2)
    with pytest.raises(RuntimeError, match=r"need GPUs or Ascend, but got the device target 'CPU'.*data_parallel"):
        step(Tensor(np.zeros((8, 12), np.float32)), Tensor(np.zeros(8, np.int32)))


class Lazy(nn.Cell):
    @ms.lazy_inline
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(12, 5).to_float(ms.float16)

    def construct(self, x):
        return self.layer(x)


def network_of(network, **options):
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 2)
    step = ms.amp.build_train_network(cell, nn.SGD(cell.trainable_params(), 0.1), **options)
    return step.window.parts.network


def test_networks_that_cast_weights_are_compiled_once():
    assert not isinstance(network_of(Lazy()), CompiledOnce)
    for dtype in (ms.float16, ms.bfloat16):
        assert isinstance(network_of(nn.Dense(12, 5).to_float(dtype)), CompiledOnce)
    assert isinstance(network_of(make_network("dense"), level="O2"), CompiledOnce)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_model_with_a_loss_function_is_built_and_evaluates_the_network(level):
    network = make_network("dense")
    for cell in (GradAccumulationCell(network, 2), AutoParallel(GradAccumulationCell(network, 2))):
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        loss = nn.CrossEntropyLoss()
        model = ms.Model(cell, loss, optimizer, metrics={"accuracy"}, amp_level=level)
        assert isinstance(model.train_network.window.parts.network, CompiledOnce) == (level != "O0")
        assert model.eval_network._network is model.predict_network is network


def test_casts_outside_of_a_lazy_cell_are_refused():
    network = nn.SequentialCell(Lazy(), nn.Dense(5, 5).to_float(ms.float16))
    with pytest.raises(ValueError, match=r"got casts in Dense outside of the Cell with mindspore.lazy_inline, 'Lazy'"):
        network_of(network)


def test_how_inputs_lie_on_the_devices():
    ms.set_auto_parallel_context(device_num=8)
    assert auto_parallel.parts_of_inputs() == (8,)
    ms.set_auto_parallel_context(dataset_strategy=((4, 2), (8,)))
    assert auto_parallel.parts_of_inputs() == (4, 8)
    ms.set_auto_parallel_context(dataset_strategy="full_batch")
    assert auto_parallel.parts_of_inputs() == (1,)
    ms.set_auto_parallel_context(dataset_strategy="data_parallel")
    assert auto_parallel.parts_of_inputs() == (8,)
    layout = ms.Layout((4, 2), ("samples", "features"))
    ms.set_auto_parallel_context(dataset_strategy=(layout("samples", "features"), layout("samples", "None")))
    assert auto_parallel.parts_of_inputs() == (1,)
