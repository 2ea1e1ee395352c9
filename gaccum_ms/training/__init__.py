"""The training step, loops of one's own, and going on from a checkpoint."""
