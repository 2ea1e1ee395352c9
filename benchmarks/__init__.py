"""Compares gradient accumulation with its alternatives: time, first call and peak memory.

    python -m benchmarks                   time, first call and memory of four networks, by all ways of training
    python -m benchmarks.tokens            micro-batches by length beside the even split
    python -m benchmarks.memory_limit      searches that must keep a memory limit

A network is one entry in networks.py, a way to train it one function in ways.py, and a target one line in targets.py.
The controlling process imports no framework. Each measured program is a separate process (worker.py), because peak
memory and first calls can only be measured in a process that did nothing else.
"""
