"""What is recorded of a run, in checkpoints, and of a window, for callbacks."""
