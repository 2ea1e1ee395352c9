"""The training step with its runners, and the accumulator for hand-written loops."""
