"""Gradient accumulation for MindSpore that is correct everywhere and costs nothing but its arithmetic.

Importing the package imports nothing else: a name is looked up when it is first asked for. So the command and its
launcher need no MindSpore, and MindSpore's functions stay as they are until the cell, or what uses it, is imported.
"""

import importlib
import typing

__version__ = "0.2.0"

if typing.TYPE_CHECKING:
    from gaccum_ms import adopt as adopt
    from gaccum_ms.auditing.audit import audit as audit
    from gaccum_ms.auditing.report import AuditReport as AuditReport
    from gaccum_ms.callbacks.adaptive import AdaptiveAccumulation as AdaptiveAccumulation
    from gaccum_ms.callbacks.flush import FlushAccumulation as FlushAccumulation
    from gaccum_ms.callbacks.monitor import WindowMonitor as WindowMonitor
    from gaccum_ms.callbacks.noise_scale import GradNoiseScale as GradNoiseScale
    from gaccum_ms.callbacks.progress import ProgressBar as ProgressBar
    from gaccum_ms.callbacks.schedule import AccumulationScheduler as AccumulationScheduler
    from gaccum_ms.callbacks.training_metrics import TrainingMetrics as TrainingMetrics
    from gaccum_ms.callbacks.update_scheduler import UpdateScheduler as UpdateScheduler
    from gaccum_ms.cell import GradAccumulation as GradAccumulation
    from gaccum_ms.cell import GradAccumulationCell as GradAccumulationCell
    from gaccum_ms.checkpoint.resume import resume as resume
    from gaccum_ms.checkpoint.update_checkpoint import UpdateCheckpoint as UpdateCheckpoint
    from gaccum_ms.cpu.threads import tune_cpu as tune_cpu
    from gaccum_ms.distributed.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from gaccum_ms.layers.group_norm import convert_batchnorm_to_groupnorm as convert_batchnorm_to_groupnorm
    from gaccum_ms.layers.window_batchnorm import WindowBatchNorm as WindowBatchNorm
    from gaccum_ms.learning_rate import scale_learning_rate as scale_learning_rate
    from gaccum_ms.losses.batch_loss import WithBatchLossCell as WithBatchLossCell
    from gaccum_ms.losses.counts import CountMask as CountMask
    from gaccum_ms.losses.counts_of_labels import CountClassWeights as CountClassWeights
    from gaccum_ms.losses.counts_of_labels import CountNotIgnored as CountNotIgnored
    from gaccum_ms.losses.per_sample_loss import PerSampleLoss as PerSampleLoss
    from gaccum_ms.memory.report import MemoryReport as MemoryReport
    from gaccum_ms.options.accumulators import Accumulators as Accumulators
    from gaccum_ms.record.window_callback import WindowCallback as WindowCallback
    from gaccum_ms.record.window_record import WindowRecord as WindowRecord
    from gaccum_ms.splitting.auto_size import AutoSize as AutoSize
    from gaccum_ms.splitting.balanced_sampler import BalancedSampler as BalancedSampler
    from gaccum_ms.splitting.even_split import EvenSplit as EvenSplit
    from gaccum_ms.splitting.max_tokens import MaxTokens as MaxTokens
    from gaccum_ms.splitting.token_plan import TokenPlan as TokenPlan
    from gaccum_ms.training.find_micro_batch_size import find_micro_batch_size as find_micro_batch_size
    from gaccum_ms.training.grad_accumulator import GradAccumulator as GradAccumulator
    from gaccum_ms.training.memory_report import memory_report as memory_report
    from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell as TrainOneStepWithGradAccumulationCell
    from gaccum_ms.transforms.adaptive_clip import AdaptiveGradientClip as AdaptiveGradientClip
    from gaccum_ms.transforms.clip_by_global_norm import ClipByGlobalNorm as ClipByGlobalNorm
    from gaccum_ms.transforms.clip_by_value import ClipByValue as ClipByValue
    from gaccum_ms.transforms.skip_spikes import SkipSpikes as SkipSpikes
    from gaccum_ms.transforms.transform import Transform as Transform
    from gaccum_ms.transforms.weight_average import WeightAverage as WeightAverage

# The modules of the names.
_MODULES = {
    "AccumulationScheduler": "callbacks.schedule",
    "Accumulators": "options.accumulators",
    "AdaptiveAccumulation": "callbacks.adaptive",
    "AdaptiveGradientClip": "transforms.adaptive_clip",
    "AuditReport": "auditing.report",
    "AutoSize": "splitting.auto_size",
    "BalancedSampler": "splitting.balanced_sampler",
    "ClipByGlobalNorm": "transforms.clip_by_global_norm",
    "ClipByValue": "transforms.clip_by_value",
    "CountClassWeights": "losses.counts_of_labels",
    "CountMask": "losses.counts",
    "CountNotIgnored": "losses.counts_of_labels",
    "EvenSplit": "splitting.even_split",
    "FlushAccumulation": "callbacks.flush",
    "GradAccumulation": "cell",
    "GradAccumulationCell": "cell",
    "GradAccumulator": "training.grad_accumulator",
    "GradNoiseScale": "callbacks.noise_scale",
    "MaxTokens": "splitting.max_tokens",
    "MemoryReport": "memory.report",
    "PerSampleLoss": "losses.per_sample_loss",
    "ProgressBar": "callbacks.progress",
    "ShardedOptimizer": "distributed.sharded_optimizer",
    "SkipSpikes": "transforms.skip_spikes",
    "TokenPlan": "splitting.token_plan",
    "TrainOneStepWithGradAccumulationCell": "training.step",
    "TrainingMetrics": "callbacks.training_metrics",
    "Transform": "transforms.transform",
    "UpdateCheckpoint": "checkpoint.update_checkpoint",
    "UpdateScheduler": "callbacks.update_scheduler",
    "WeightAverage": "transforms.weight_average",
    "WindowBatchNorm": "layers.window_batchnorm",
    "WindowCallback": "record.window_callback",
    "WindowMonitor": "callbacks.monitor",
    "WindowRecord": "record.window_record",
    "WithBatchLossCell": "losses.batch_loss",
    "audit": "auditing.audit",
    "convert_batchnorm_to_groupnorm": "layers.group_norm",
    "find_micro_batch_size": "training.find_micro_batch_size",
    "memory_report": "training.memory_report",
    "resume": "checkpoint.resume",
    "scale_learning_rate": "learning_rate",
    "tune_cpu": "cpu.threads",
}

__all__ = list(_MODULES)


if not typing.TYPE_CHECKING:  # for a type checker, the package would have any name

    def __getattr__(name: str) -> typing.Any:
        if name == "adopt":
            return importlib.import_module("gaccum_ms.adopt")
        if name not in _MODULES:
            raise AttributeError(f"module 'gaccum_ms' has no attribute '{name}'")
        value = getattr(importlib.import_module(f"gaccum_ms.{_MODULES[name]}"), name)
        globals()[name] = value  # the next time, Python finds it
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "adopt"})
