"""The launcher: starts, watches and ends the processes of a training. Nothing here imports MindSpore."""
