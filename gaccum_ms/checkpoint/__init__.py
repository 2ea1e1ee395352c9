"""Continuing a training from a checkpoint, also in the middle of a window and on another number of ranks."""
