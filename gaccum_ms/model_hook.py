"""The hook into MindSpore: makes `ms.Model` and `mindspore.amp.build_train_network` build our step.

Both call the function `build_train_network` of `mindspore.train.amp`. It recognises cells by the class name
``GradAccumulationCell`` and would give them a private step that trains only in semi-auto parallel mode. The function
here is called in its place: a network with our cell gets our step or a clear error, and any other network goes to the
`original` . `ms.Model` evaluates and predicts with the network inside the cell, as if no cell were around it. For each
training with our step it also gets three callbacks: one calls `on_window_end` of the others, one checks ranks and open
windows, and one evaluates averages. `auto_mixed_precision` and `custom_mixed_precision` of `mindspore.amp` , given our
cell, convert the network in it, which the step calls. backend/hooked_functions.py calls these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mindspore as ms
import mindspore.train
from mindspore import nn
from mindspore.train import FlopsUtilizationCollector
from mindspore.train.metrics import get_metrics

from gaccum_ms import backend
from gaccum_ms.callbacks.averages import AveragesInEvaluation
from gaccum_ms.callbacks.flush import FlushAccumulation
from gaccum_ms.callbacks.window_watch import WindowWatch
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.checkpoint.sharded_saves import let_checkpoints_save
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.in_float32 import InFloat32
from gaccum_ms.record.recorder import WindowRecorder
from gaccum_ms.record.window_callback import WindowCallback, refuse_other_networks
from gaccum_ms.semi_auto.compiled_once import note_casts
from gaccum_ms.semi_auto.modes import held_cell
from gaccum_ms.training.evaluation import batch_evaluation, parts_of, with_its_parts
from gaccum_ms.training.flops import counted_in_loops
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.training.step_in_model import step_in

_FLOAT32_LOSS = ("O2", "O3", "auto")  # the levels at which MindSpore computes a plain network's loss in float32
_OURS = (GradAccumulationCell, TrainOneStepWithGradAccumulationCell)


def build_train_network(
    original: Callable[..., nn.Cell],
    network: nn.Cell,
    optimizer: nn.Optimizer,
    loss_fn: nn.Cell | None = None,
    level: str = "O0",
    boost_level: str = "O0",
    **kwargs: Any,
) -> nn.Cell:
    if not _holds_our_cell(network):
        return original(network, optimizer, loss_fn, level, boost_level, **kwargs)
    cell = held_cell(network)  # the network may be an AutoParallel around the cell
    if step_in(network) is not None:
        raise ValueError(
            f"For 'TrainOneStepWithGradAccumulationCell', a model must be built without an optimizer and a loss, "
            f"because the step has its own, but got a '{type(network).__name__}' with the optimizer "
            f"'{type(optimizer).__name__}'. Use ms.Model({'step' if network is step_in(network) else 'network'})."
        )
    if not isinstance(cell, GradAccumulationCell):
        raise ValueError(
            f"For 'GradAccumulationCell', the cell must be the outermost one when a model is built with an optimizer, "
            f"but got '{type(network).__name__}' around it. Put what it adds inside: "
            f"GradAccumulationCell({type(network).__name__}(...), ...)."
        )
    if boost_level != "O0":
        raise ValueError(
            f"For 'GradAccumulationCell', 'boost_level' must be 'O0', but got '{boost_level}': boost builds training "
            f"steps of its own, which do not accumulate. Leave 'boost_level' out."
        )
    backend.check_level(level, boost_level)
    backend.check_kwargs(kwargs)
    cell.check_loss(loss_fn)
    # The same steps as the original, for each level, on the network inside our cell.
    config = {**backend.config_level[level], **kwargs}
    if cell.has_step and level in ("O1", "O2", "O3"):
        raise ValueError(
            f"For 'GradAccumulationCell', each model with amp_level='{level}' must have a cell of its own, because the "
            f"level changes the cell's network, but got a cell that already has a training step. Make a network and a "
            f"cell for this model, or give ms.Model the step of the first: model.train_network."
        )
    process = functools.partial(backend.auto_mixed_precision_process, config=config, level=level)
    of_batch, with_parts = isinstance(cell.network, WithBatchLossCell), with_its_parts(cell.network)
    processed = cell.network.map_parts(process) if of_batch else process(cell.network)
    if level in ("O1", "auto"):
        note_casts(processed)
    cell.train_instead(processed, with_parts)
    low = (
        config["cast_model_type"] in (ms.float16, ms.bfloat16)
        or getattr(processed, "_amp_level", None) in _FLOAT32_LOSS
    )
    if low and isinstance(loss_fn, nn.Cell):
        loss_fn = InFloat32(loss_fn)
    manager = config["loss_scale_manager"]
    if manager is None:
        return TrainOneStepWithGradAccumulationCell(network, optimizer, loss_fn=loss_fn).set_train()
    update_cell = manager.get_update_cell()
    step = TrainOneStepWithGradAccumulationCell(network, optimizer, update_cell, loss_fn=loss_fn)
    if update_cell is None:
        # drop_overflow_update=False: the optimizer's loss_scale removes it.
        step.update.leave_scale_to_optimizer(float(manager.get_loss_scale()))
    return step.set_train()


@contextmanager
def _without_cell(model: mindspore.train.Model) -> Iterator[nn.Cell | None]:
    """Within it the model has the network and the loss inside our cell. It yields the cell, if there is one."""
    before, cell = (model._network, model._loss_fn), held_cell(model._network)
    if not isinstance(cell, GradAccumulationCell):
        yield None
        return
    model._network, model._loss_fn = parts_of(cell, model._loss_fn)
    try:
        yield cell
    finally:
        model._network, model._loss_fn = before


def build_eval_network(
    original: Callable[..., None], model: mindspore.train.Model, metrics: Any, eval_network: Any, eval_indexes: Any
) -> None:
    with _without_cell(model) as cell:
        if cell is not None and metrics and eval_network is None:
            eval_network = batch_evaluation(cell, model._loss_fn, get_metrics(metrics).values())
            eval_indexes = [0, 1, 2]
        original(model, metrics, eval_network, eval_indexes)


def build_predict_network(original: Callable[..., None], model: mindspore.train.Model) -> None:
    with _without_cell(model):
        original(model)


def cast(original: Callable[..., nn.Cell], network: Any, *arguments: Any, **named: Any) -> nn.Cell:
    """A function of MindSpore that changes a network's dtypes; of our cell, it changes the network inside."""
    if not isinstance(network, GradAccumulationCell):
        return original(network, *arguments, **named)
    network.network = original(network.network, *arguments, **named)
    return network


def train(
    original: Callable[..., None],
    model: mindspore.train.Model,
    epoch: int,
    train_dataset: Any,
    callbacks: Any = None,
    **kwargs: Any,
) -> None:
    callbacks, step = model._transform_callbacks(callbacks), step_in(model.train_network)
    if step is None:
        refuse_other_networks(callbacks, model.train_network)
        return original(model, epoch, train_dataset, callbacks=callbacks, **kwargs)
    step.check_names_and_refresh_name()  # with data sinking it is called within another Cell
    # A flush comes before callbacks that must see its update, such as checkpoints, wherever they are in the list.
    callbacks = sorted(callbacks, key=lambda callback: not isinstance(callback, FlushAccumulation))
    callbacks = [WindowWatch(step), AveragesInEvaluation(step), *callbacks]
    with ExitStack() as watching:
        if any(isinstance(callback, WindowCallback) for callback in callbacks):
            recorder = WindowRecorder(step)
            callbacks = [recorder, *callbacks]
            watching.enter_context(recorder.sees_flushes())
        if any(isinstance(callback, FlopsUtilizationCollector) for callback in callbacks):
            watching.enter_context(counted_in_loops(step, train_dataset))
        original(model, epoch, train_dataset, callbacks=let_checkpoints_save(callbacks, step.optimizer), **kwargs)


def _holds_our_cell(network: Any) -> bool:
    return isinstance(network, nn.Cell) and any(isinstance(cell, _OURS) for _, cell in network.cells_and_names())
