"""What a rank takes of the files of all ranks. Windows that are joined: test_resume.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gaccum_ms.backend.parameters import own
from gaccum_ms.checkpoint.rank_files import of_rank


def test_a_rank_does_not_draw_what_another_draws():
    saved = {own("window_origin"): np.array([0, 2]), own("random_state"): np.zeros(3), "weight": np.ones(2)}
    files = [(Path("rank0.ckpt"), saved)]
    assert of_rank(files, rank=0, ranks=2) == saved
    assert of_rank(files, rank=1, ranks=2).keys() == saved.keys() - {own("random_state")}
