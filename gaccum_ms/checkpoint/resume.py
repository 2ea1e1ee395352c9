"""resume: continue from a checkpoint, also in the middle of a window, on any number of ranks.

MindSpore's `load_checkpoint` loads a step too, but only on the ranks and with the options that saved it. `resume`
checks a checkpoint before anything changes, and loads it on other ranks and with other options.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.checkpoint_file import SUFFIXES, read_checkpoint
from gaccum_ms.backend.data_sets import counts_quickly, epoch_of
from gaccum_ms.backend.newer_optimizers import is_of_scheduler, is_rate
from gaccum_ms.backend.parameters import own
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.checkpoint.contents import check_contents, without_optimizer
from gaccum_ms.checkpoint.data_position import begin_at
from gaccum_ms.checkpoint.newest import newest_checkpoint
from gaccum_ms.checkpoint.other_ranks import counted_here
from gaccum_ms.checkpoint.rank_files import Values, of_rank, origin
from gaccum_ms.checks.arguments import check_bool, first_of
from gaccum_ms.distributed.ranks import group_size_or_1
from gaccum_ms.distributed.sharded_optimizer import whole_state
from gaccum_ms.learning_rate import MULTIPLIER_PREFIX
from gaccum_ms.training.grad_accumulator import GradAccumulator
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell


def resume(
    model: ms.Model | TrainOneStepWithGradAccumulationCell | GradAccumulator,
    checkpoint: str | Path | Sequence[str | Path],
    data_set: Any = None,
    optimizer: bool = True,
) -> int:
    r"""
    Resume training from a checkpoint, also from the middle of a window.

    Loads weights, optimizer state, loss scale, the open window with its counts, the counts of batches and updates, and
    the state of MindSpore's default generator. The step may be new, or have run. The window is finished with its true
    counts, also if `micro_size` and `accumulation_steps` have changed. If the number of ranks has changed, give the
    checkpoints of all old ranks. What was seen is counted in samples of all ranks: with `data_set` , the updates stay
    the same if each rank's batch has more samples, or its window more batches, so that an update has as many as before,
    and ranks get samples in turn, as with `num_shards` of `NumpySlicesDataset` and `GeneratorDataset` . One warning
    says in what they differ otherwise. With a checkpoint of a training without accumulation, the window and all counts
    begin anew, and a warning names optimizer state that it lacks, which stays as it is. For a GradAccumulator, a
    warning says if a scheduler's state is missing in the checkpoint, or if its learning rate is not the optimizer's.

    Two things are not in a checkpoint, because MindSpore gives no access to them: the next random numbers of operators
    on CPU, such as the masks of `nn.Dropout` ; and random numbers of Python and NumPy in datasets.

    Args:
        model (Union[Model, TrainOneStepWithGradAccumulationCell, GradAccumulator]): What trains.
        checkpoint (Union[str, Path, Sequence]): A file of `mindspore.save_checkpoint` of the step, or of
            `mindspore.train.ModelCheckpoint` ; its suffix decides between ckpt and safetensors. Or the files of all
            ranks that saved, in any order. Or a folder, one for each rank or one for all: all ranks then resume from
            the newest checkpoint, by the files' times, that all of them have; copy folders with their times. A file
            that is damaged, or that the step cannot go on from, is skipped with a warning, and what a killed process
            was writing is removed. If the folder is empty or missing, training begins at the beginning.
        data_set (Dataset, optional): It is set to the batch after the last one that was trained on. Once a batch is
            trained on, its iterators begin at the beginning again. Its seed must be the same, and `dataset_sink_mode`
            False. If the number of ranks has changed, it must divide the same samples among the new ranks.
            Default: ``None`` .
        optimizer (bool): Whether the optimizer's state is loaded. With ``False`` it stays as it is, its learning rate
            too, and the checkpoint may lack it. Default: ``True`` .

    Returns:
        int, the number of finished epochs, 0 without `data_set` : ``model.train(epochs, data_set,
        initial_epoch=resume(model, file, data_set))`` . In a loop of your own, the epochs are ``range(finished,
        epochs)`` , each with its own iterator. One iterator for all of them needs ``num_epochs=epochs`` , which counts
        the finished ones too; a shuffled data set then keeps its order.

    Raises:
        TypeError: If `model` or `optimizer` has another type.
        ValueError: If a file is damaged, or is no checkpoint; if it lacks a parameter of the network, of the open
            window, or of the optimizer (all of the optimizer's, if it is from a training without accumulation); if one
            has another shape; if the window cannot be finished here, because other ranks' files are missing,
            micro-batches are weighted by another rule, or accumulators were sharded; if the data set has other samples
            in an epoch, or those that were seen, or those of an open window, do not divide by a batch of all ranks; if
            the ranks' folders have no checkpoint in common, or files of which none can be read. Nothing has changed
            then.
        RuntimeError: If the checkpoint is in a window, and the step was compiled for windows of one batch.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, resume
        >>> def make_model():
        ...     net = nn.Dense(3, 1)
        ...     optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        ...     cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=4)
        ...     return ms.Model(cell, optimizer=optimizer)
        >>> x, y = np.ones((12, 3), np.float32), np.zeros((12, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> model = make_model()
        >>> step = model.train_network.set_train()
        >>> for batch in data_set.create_tuple_iterator():
        ...     loss = step(*batch)
        >>> file = Path(tempfile.mkdtemp(), "in_mid_window.ckpt")
        >>> ms.save_checkpoint(step, str(file))
        >>> model = make_model()
        >>> resume(model, file, data_set)
        1
        >>> print(model.train_network.window_position.asnumpy())
        2
        >>> model.train(2, data_set, initial_epoch=1)
        >>> print(model.train_network.update_count.asnumpy())
        3
    """
    check_bool("resume", "optimizer", optimizer)
    step = _step_of(model)
    paths = [Path(checkpoint)] if isinstance(checkpoint, (str, Path)) else [Path(path) for path in checkpoint]
    if not paths:
        raise ValueError("For 'resume', the argument 'checkpoint' must be at least one file, but got none.")
    folder = paths[0] if len(paths) == 1 and _is_folder(paths[0]) else None
    _check_suffixes([] if folder else paths)
    read = functools.lru_cache(maxsize=1)(functools.partial(_read, step, optimizer=optimizer))
    step.check_names_and_refresh_name()  # as before the first batch, which the checkpoint is from after
    with whole_state(step.optimizer):
        if folder:
            resumes_windows = step.run_record.resumes_windows
            # In semi-auto and auto parallel mode the record says one rank, but all devices choose together.
            ranks = step.run_record.ranks if resumes_windows else group_size_or_1()
            paths = newest_checkpoint(folder, ranks, read, in_windows=resumes_windows)
        if paths:
            return _go_on(step, [(path, read(path)) for path in paths], data_set, optimizer)
    if data_set is not None and counts_quickly(data_set):
        step.run_record.note_data_set(epoch_of(data_set, step.run_record.ranks))
    return 0


def _go_on(step: Any, files: list[tuple[Path, Values]], data_set: Any, optimizer: bool) -> int:
    _refuse_rate_factor(files)
    record = step.run_record
    values = of_rank(files, record.rank, record.ranks)
    batches = int(values.get(own("window_position"), 0))
    if batches:
        rank, ranks = origin(values)
        record.check(True, batches, rank, ranks, int(values[own("window_rule")]), int(values[own("configured_steps")]))
    values = counted_here(files, values, record, data_set)
    if isinstance(step, GradAccumulator) and optimizer:
        _warn_of_schedulers(step, values)
    if isinstance(step, TrainOneStepWithGradAccumulationCell) and batches:
        step.let_windows_span_batches()
    step.load(values)
    if data_set is None:
        return 0
    position = int(values.get(own("batch_count"), 0))
    begin_at(data_set, position, step)
    return position // data_set.get_dataset_size()


def _step_of(model: Any) -> TrainOneStepWithGradAccumulationCell | GradAccumulator:
    step = model.train_network if isinstance(model, ms.Model) else model
    if not isinstance(step, (TrainOneStepWithGradAccumulationCell, GradAccumulator)):
        raise TypeError(
            f"For 'resume', the argument 'model' must be a Model of a GradAccumulationCell, its training step, or a "
            f"GradAccumulator, but got '{type(step).__name__}'."
        )
    return step


def _is_folder(path: Path) -> bool:
    return path.is_dir() or (path.suffix not in SUFFIXES and not os.path.lexists(path))


def _check_suffixes(paths: Sequence[Path]) -> None:
    others = [str(path) for path in paths if path.suffix not in SUFFIXES]
    if others:
        raise ValueError(
            f"For 'resume', the argument 'checkpoint' must be a folder, or a file whose name ends with "
            f"{' or '.join(SUFFIXES)}, but got {first_of(others)}."
        )


def _read(step: nn.Cell, path: Path, optimizer: bool) -> Values:
    """The values of a file, if the step can go on from them."""
    values = _under_own_names(step, read_checkpoint(path))
    if not optimizer:
        values = without_optimizer(step, values)
    check_contents(step, path, values, optimizer)
    return values


def _under_own_names(step: nn.Cell, values: Values) -> Values:
    """The values, with this process's names of learning-rate schedules. Each process numbers its schedules in order of
    creation, so the step's first schedule is the checkpoint's first."""

    def schedules(names: Iterable[str]) -> list[str]:
        found = [name for name in names if MULTIPLIER_PREFIX in name]
        return sorted(found, key=lambda name: int(name.rpartition(".")[2]))

    own = schedules(parameter.name for parameter in step.get_parameters())
    names = dict(zip(schedules(values), own, strict=False))
    return {names.get(name, name): value for name, value in values.items()}


def _refuse_rate_factor(files: list[tuple[Path, Values]]) -> None:
    """Version 0.1's AdaScale kept a factor in the optimizer's rate, which nothing would remove."""
    for path, values in files:
        factor = float(values.get(own("rate_factor"), 1.0))
        if factor != 1.0:
            raise ValueError(
                f"For 'resume', the learning rate of a checkpoint must be without a factor of AdaScale, which this "
                f"version lacks, but got '{path}' with the rate times {factor:g}. Finish that training with the "
                f"version that began it, or load the network alone by mindspore.load_param_into_net."
            )


def _warn_of_schedulers(accumulator: GradAccumulator, values: Values) -> None:
    """Warn if a scheduler's state is missing, here or in the checkpoint: the next rates will be other ones."""
    saved = any(is_of_scheduler(name) for name in values)
    if accumulator.has_scheduler and not saved:
        problem = "has no scheduler's state, so the scheduler begins anew"
    elif accumulator.has_scheduler:
        return
    elif saved:
        problem = "has a scheduler's state, but the accumulator has no scheduler"
    else:
        changed = [
            parameter.name
            for parameter in accumulator.optimizer.get_parameters()
            if is_rate(parameter.name)
            and not np.array_equal(parameter.asnumpy(), values.get(parameter.name, parameter))
        ]
        if not changed:
            return
        problem = (
            f"has another '{changed[0]}' than the optimizer, and no scheduler's state: the rate is loaded, but a "
            f"scheduler that you step yourself begins anew"
        )
    warn_user(
        f"For 'resume', the checkpoint {problem}. Give GradAccumulator(..., scheduler=...) when it is saved and when "
        f"it is loaded."
    )
