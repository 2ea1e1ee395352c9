"""Gradient accumulation for MindSpore that is correct everywhere and costs nothing but its arithmetic."""

from gaccum_ms import model as _model
from gaccum_ms.audit import audit
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.grad_accumulator import GradAccumulator
from gaccum_ms.normalize import CountMask, CountNotIgnored
from gaccum_ms.train_step import TrainOneStepWithGradAccumulationCell

__version__ = "0.1.0"

__all__ = [
    "CountMask",
    "CountNotIgnored",
    "GradAccumulationCell",
    "GradAccumulator",
    "TrainOneStepWithGradAccumulationCell",
    "audit",
]

_model.install_model_hook()
