"""Refuses ranks that save checkpoints under the same names: each would replace or delete the others' files."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from mindspore.train import Callback, ModelCheckpoint

from gaccum_ms.distributed.layout import gather_json


def refuse_shared_folders(callbacks: Sequence[Callback]) -> None:
    """Raise an error on all ranks if two on one host have the same folder and prefix. A collective.

    A folder or prefix that is a function, as newer versions of MindSpore allow, is not known before it saves, and is
    not compared."""
    own = [
        [platform.node(), os.path.realpath(each._directory), each._prefix]
        for each in callbacks
        if isinstance(each, ModelCheckpoint)
        and not (getattr(each, "_directory_func", None) or getattr(each, "_prefix_func", None))
    ]
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, places in enumerate(gather_json(own)):
        for place in {tuple(place) for place in places}:
            ranks_of.setdefault(place, []).append(rank)
    for (_, folder, prefix), ranks in ranks_of.items():
        if len(ranks) > 1:
            raise ValueError(
                f"For 'ModelCheckpoint', each rank must save to a folder of its own, because ranks replace and delete "
                f"each other's files, but got ranks {', '.join(map(str, ranks))} with the folder '{folder}' and the "
                f"prefix '{prefix}'. Nothing was trained. Use directory=f\"checkpoints/{{rank}}\", with "
                f"rank = get_rank()."
            )
