"""Micro-batches run forward and backward, their gradients are added up, and a window ends in an update."""
