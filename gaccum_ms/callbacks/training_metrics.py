"""TrainingMetrics: metrics over each epoch's training batches, from the outputs of the training forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore as ms
from mindspore.train import Callback, Metric, RunContext

from gaccum_ms.backend.snapshot import as_numpy
from gaccum_ms.checks.arguments import check_bool
from gaccum_ms.distributed.ranks import rank_or_0
from gaccum_ms.training.step_in_model import samples_of_batch, training_step

_NAME = "TrainingMetrics"


class TrainingMetrics(Callback):
    r"""
    Compute metrics over each epoch's training batches without another forward, from the outputs beside the loss of a
    :class:`GradAccumulationCell` with ``aux=True`` .

    Each metric gets all outputs of one batch after the loss, in their order. They come from the training forward:
    before the batch's own update, in training mode. Each rank computes its own metrics.

    ``history`` has the results: a list of dicts from name to number, one for each epoch of the last training. Later
    callbacks find the last one in ``run_context.original_args().training_metrics`` .

    Args:
        metrics (dict): From name to a `mindspore.train.Metric <https://www.mindspore.cn/docs/en/master/api_python/
            mindspore.train.html>`_ or a function. A Metric is cleared at each epoch's beginning, updated with each
            batch's outputs, Tensors, out of which its `set_indexes` chooses, and evaluated at the epoch's end. A
            function maps the outputs, NumPy arrays, to a number; the result is the mean over the epoch's samples.
        show (bool): Whether rank 0 prints a line after each epoch. Default: ``True`` .

    Raises:
        TypeError: If `metrics` is not such a dict, or `show` not a bool.
        ValueError: If `metrics` is empty; if training begins with data sinking, which hides batches from callbacks, or
            without our step on a cell with ``aux=True`` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn, train
        >>> from gaccum_ms import GradAccumulationCell, TrainingMetrics
        >>> class WithLogits(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Dense(2, 2, weight_init="zeros", bias_init="zeros")
        ...         self.loss = nn.CrossEntropyLoss()
        ...     def construct(self, x, y):
        ...         logits = self.net(x)
        ...         return self.loss(logits, y), logits, y
        >>> cell = GradAccumulationCell(WithLogits(), 2, aux=True)
        >>> x, y = np.eye(2, dtype=np.float32)[[0, 1, 0, 1]], np.array([0, 1, 0, 1], np.int32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(4)
        >>> metrics = {"accuracy": train.Accuracy(), "error rate": lambda logits, y: (logits.argmax(1) != y).mean()}
        >>> model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.5))
        >>> model.train(2, data_set, callbacks=[TrainingMetrics(metrics)])
        epoch 1: accuracy 0.5, error rate 0.5
        epoch 2: accuracy 1, error rate 0
    """

    def __init__(self, metrics: Mapping[str, Metric | Callable[..., Any]], show: bool = True) -> None:
        super().__init__()
        if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
            raise TypeError(
                f"For '{_NAME}', the argument 'metrics' must be a dict from names to mindspore.train.Metric or "
                f"functions, but got {metrics!r}."
            )
        if not metrics:
            raise ValueError(f"For '{_NAME}', the argument 'metrics' must not be empty, but got {metrics!r}.")
        check_bool(_NAME, "show", show)
        self.history: list[dict[str, float]] = []
        self._metrics = {
            name: metric if isinstance(metric, Metric) else _Mean(metric) for name, metric in metrics.items()
        }
        self._show = show

    def on_train_begin(self, run_context: RunContext) -> None:
        parameters, step = run_context.original_args(), training_step(run_context)
        if step is None or not step.window.has_outputs or parameters.dataset_sink_mode:
            raise ValueError(
                f"For '{_NAME}', the trained network must be a GradAccumulationCell with aux=True and "
                f"'dataset_sink_mode' False, but got '{type(parameters.train_network).__name__}', "
                f"aux={step is not None and step.window.has_outputs} and "
                f"dataset_sink_mode={parameters.dataset_sink_mode}. Let the network return (loss, *aux)."
            )
        self.history = []

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        for metric in self._metrics.values():
            metric.clear()

    def on_train_step_end(self, run_context: RunContext) -> None:
        parameters, step = run_context.original_args(), training_step(run_context)
        assert step is not None  # on_train_begin has checked it
        outputs = parameters.net_outputs[3 if step.update.scaled else 1 :]
        samples = samples_of_batch(run_context)
        for metric in self._metrics.values():
            if isinstance(metric, _Mean):
                metric.add(samples, outputs)
            else:
                metric.update(*outputs)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        results = {name: metric.eval() for name, metric in self._metrics.items()}
        self.history.append(results)
        parameters.training_metrics = results
        if self._show and rank_or_0() == 0:
            results_as_text = (f"{name} {_as_text(value)}" for name, value in results.items())
            print(f"epoch {parameters.cur_epoch_num}: {', '.join(results_as_text)}", flush=True)


class _Mean:
    """The mean of a function over the samples of all batches; NaN without batches."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.clear()

    def clear(self) -> None:
        self.sum, self.samples = 0.0, 0

    def add(self, samples: int, outputs: tuple[ms.Tensor, ...]) -> None:
        self.sum += float(self.function(*map(as_numpy, outputs))) * samples
        self.samples += samples

    def eval(self) -> float:
        return self.sum / self.samples if self.samples else float("nan")


def _as_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
