"""The training step, loops of your own, and going on from a checkpoint."""
