"""The positions of the numbers that are added up beside gradients, called `sums` everywhere.

By counts, a loop adds up losses (times their seeds), counts and dropped micro-batches. An open window keeps these, and
the number of its batches. A batch that Python cuts has its items after them.
"""

LOSS, COUNT, DROPPED = 0, 1, 2
SUMS = 3  # how many these are
BATCHES = SUMS  # the position after them
