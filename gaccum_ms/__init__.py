"""Gradient accumulation for MindSpore that is correct everywhere and costs nothing but its arithmetic."""

from gaccum_ms import model as _model
from gaccum_ms.adaptive import AdaptiveAccumulation
from gaccum_ms.adascale import AdaScale
from gaccum_ms.audit import audit
from gaccum_ms.batch_loss import WithBatchLossCell
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.checkpoint import UpdateCheckpoint
from gaccum_ms.find_size import find_micro_batch_size
from gaccum_ms.flush import FlushAccumulation
from gaccum_ms.grad_accumulator import GradAccumulator
from gaccum_ms.gradient_noise import GradNoiseScale
from gaccum_ms.group_norm import convert_batchnorm_to_groupnorm
from gaccum_ms.lr import scale_learning_rate
from gaccum_ms.memory import memory_report
from gaccum_ms.monitor import WindowMonitor
from gaccum_ms.normalize import CountMask, CountNotIgnored
from gaccum_ms.per_sample_loss import PerSampleLoss
from gaccum_ms.progress import ProgressBar
from gaccum_ms.resume import resume
from gaccum_ms.schedule import AccumulationScheduler
from gaccum_ms.sharded_optimizer import ShardedOptimizer
from gaccum_ms.threads import tune_cpu, tune_cpu_threads
from gaccum_ms.train_step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.window_batchnorm import WindowBatchNorm

__version__ = "0.1.0"

__all__ = [
    "AccumulationScheduler",
    "AdaScale",
    "AdaptiveAccumulation",
    "CountMask",
    "CountNotIgnored",
    "FlushAccumulation",
    "GradAccumulationCell",
    "GradAccumulator",
    "GradNoiseScale",
    "PerSampleLoss",
    "ProgressBar",
    "ShardedOptimizer",
    "TrainOneStepWithGradAccumulationCell",
    "UpdateCheckpoint",
    "WindowBatchNorm",
    "WindowMonitor",
    "WithBatchLossCell",
    "audit",
    "convert_batchnorm_to_groupnorm",
    "find_micro_batch_size",
    "memory_report",
    "resume",
    "scale_learning_rate",
    "tune_cpu",
    "tune_cpu_threads",
]

_model.install_model_hook()
