"""The training step, the accumulator for hand-written loops, and resuming from a checkpoint."""
