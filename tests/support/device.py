"""The device of the tests: the CPU, or another one with ``bash run.sh test device`` ."""

from __future__ import annotations

import os

DEVICE = os.environ.get("GACCUM_MS_DEVICE", "CPU")
COUNT = int(os.environ.get("GACCUM_MS_DEVICES", "2"))
RANKS = 1 << (min(COUNT, 8).bit_length() - 1)  # a power of two, so that it divides every batch of the programs
