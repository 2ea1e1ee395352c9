"""Gradient accumulation for MindSpore that is correct everywhere and costs nothing but its arithmetic."""

import os
import re
import sys

__version__ = "0.2.0"

__all__ = [
    "AccumulationScheduler",
    "Accumulators",
    "AdaptiveAccumulation",
    "AdaptiveGradientClip",
    "AuditReport",
    "AutoSize",
    "BalancedSampler",
    "ClipByGlobalNorm",
    "ClipByValue",
    "CountClassWeights",
    "CountMask",
    "CountNotIgnored",
    "EvenSplit",
    "FlushAccumulation",
    "GradAccumulation",
    "GradAccumulationCell",
    "GradAccumulator",
    "GradNoiseScale",
    "MaxTokens",
    "MemoryReport",
    "PerSampleLoss",
    "ProgressBar",
    "ShardedOptimizer",
    "SkipSpikes",
    "TokenPlan",
    "TrainOneStepWithGradAccumulationCell",
    "TrainingMetrics",
    "Transform",
    "UpdateCheckpoint",
    "UpdateScheduler",
    "WeightAverage",
    "WindowBatchNorm",
    "WindowCallback",
    "WindowMonitor",
    "WindowRecord",
    "WithBatchLossCell",
    "audit",
    "convert_batchnorm_to_groupnorm",
    "find_micro_batch_size",
    "memory_report",
    "resume",
    "scale_learning_rate",
    "tune_cpu",
]

# The command, `gaccum-ms` or `python -m gaccum_ms`, and its launcher, `python -m gaccum_ms.launch`, do not need
# MindSpore, which may not be installed yet. While Python searches for the module of -m, sys.argv[0] is "-m", and the
# module is the word before the other arguments.
if sys.argv[:1] == ["-m"]:
    _word = sys.orig_argv[-len(sys.argv)]
    _is_command = re.fullmatch(r"(-\w*m)?gaccum_ms(\.__main__|\.launch.*)?", _word) is not None
else:
    _is_command = os.path.basename("".join(sys.argv[:1])) == "gaccum-ms"

if not _is_command:
    from gaccum_ms import adopt as adopt
    from gaccum_ms import model_hook as _model
    from gaccum_ms.auditing.audit import audit
    from gaccum_ms.auditing.report import AuditReport
    from gaccum_ms.callbacks.adaptive import AdaptiveAccumulation
    from gaccum_ms.callbacks.flush import FlushAccumulation
    from gaccum_ms.callbacks.monitor import WindowMonitor
    from gaccum_ms.callbacks.noise_scale import GradNoiseScale
    from gaccum_ms.callbacks.progress import ProgressBar
    from gaccum_ms.callbacks.schedule import AccumulationScheduler
    from gaccum_ms.callbacks.training_metrics import TrainingMetrics
    from gaccum_ms.callbacks.update_scheduler import UpdateScheduler
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.checkpoint.resume import resume
    from gaccum_ms.checkpoint.update_checkpoint import UpdateCheckpoint
    from gaccum_ms.cpu.threads import tune_cpu
    from gaccum_ms.distributed.sharded_optimizer import ShardedOptimizer
    from gaccum_ms.layers.group_norm import convert_batchnorm_to_groupnorm
    from gaccum_ms.layers.window_batchnorm import WindowBatchNorm
    from gaccum_ms.learning_rate import scale_learning_rate
    from gaccum_ms.losses.batch_loss import WithBatchLossCell
    from gaccum_ms.losses.counts import CountMask
    from gaccum_ms.losses.counts_of_labels import CountClassWeights, CountNotIgnored
    from gaccum_ms.losses.per_sample_loss import PerSampleLoss
    from gaccum_ms.memory.report import MemoryReport
    from gaccum_ms.options.accumulators import Accumulators
    from gaccum_ms.record.window_callback import WindowCallback
    from gaccum_ms.record.window_record import WindowRecord
    from gaccum_ms.splitting.auto_size import AutoSize
    from gaccum_ms.splitting.balanced_sampler import BalancedSampler
    from gaccum_ms.splitting.even_split import EvenSplit
    from gaccum_ms.splitting.max_tokens import MaxTokens
    from gaccum_ms.splitting.token_plan import TokenPlan
    from gaccum_ms.training.find_micro_batch_size import find_micro_batch_size
    from gaccum_ms.training.grad_accumulator import GradAccumulator
    from gaccum_ms.training.memory_report import memory_report
    from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
    from gaccum_ms.transforms.adaptive_clip import AdaptiveGradientClip
    from gaccum_ms.transforms.clip_by_global_norm import ClipByGlobalNorm
    from gaccum_ms.transforms.clip_by_value import ClipByValue
    from gaccum_ms.transforms.skip_spikes import SkipSpikes
    from gaccum_ms.transforms.transform import Transform
    from gaccum_ms.transforms.weight_average import WeightAverage

    GradAccumulation = GradAccumulationCell  # the name in mindspore.parallel.nn, which MindSpore keeps

    _model.install_model_hook()
