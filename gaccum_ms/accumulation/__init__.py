"""Micro-batches go forward and backward, their gradients add up, and a window ends in an update."""
