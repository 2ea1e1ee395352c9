"""Time, first call and peak memory of gradient accumulation, side by side with what a user could run instead.

    python -m benchmarks

A network to compare on is one entry in networks.py; a way to train it is one function in ways.py; what must hold is
one line in targets.py. This side of the program imports no framework: each measured program is a process of its own
(worker.py), because peak memory and first calls can only be measured in a process that did nothing else.
"""
