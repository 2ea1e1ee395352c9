"""mindocr: `TrainOneStepWrapper` , with our step. It has the arguments of mindone's."""

from gaccum_ms.adopt.mindone import train_step

__all__ = ["train_step"]
