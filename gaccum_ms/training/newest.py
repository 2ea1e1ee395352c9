"""From which checkpoint of a folder a training goes on: the newest that all ranks have.

Ranks that are ended at any moment do not leave the same files: one has saved an update, another has not yet. They are
never far apart, because each update needs all of them. A rank sets aside what it has and others lack: its weights may
differ in the last bits from those that will be trained again, and the next time a mixture of both would be the newest.

MindSpore writes a checkpoint under another name, and renames it when it is whole. What cannot be read all the same, a
power cut may have left it, is passed over.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from pathlib import Path

import mindspore as ms

from gaccum_ms.backend.parameters import own
from gaccum_ms.distributed.layout import gather_json

SUFFIXES = (".ckpt", ".safetensors")
AHEAD = 2  # checkpoints that a rank may have and another lacks, one of them if it saves asynchronously
SET_ASIDE = ".not_on_all_ranks"
_RECORDS = [own(name) for name in ("update_count", "window_position", "batch_count", "window_origin")]
Key = list[int]  # updates made, batches in the open window, batches seen, and on how many ranks


def newest_checkpoint(folder: Path, ranks: int) -> list[Path]:
    """Return the newest checkpoint in a folder that all ranks have; none where there is none to go on from.

    A collective, if there are several ranks.

    Raises:
        ValueError: If there are checkpoints, and none that all ranks have.
    """
    files = [path for path in folder.iterdir() if path.suffix in SUFFIXES] if folder.is_dir() else []
    whole = ((path, key) for path in sorted(files, key=_time, reverse=True) if (key := _key(path)))
    mine: list[tuple[Path, Key]] = []
    for number in (1, AHEAD + 1):  # most often all have the same newest one
        mine += itertools.islice(whole, number - len(mine))
        keys = [key for _, key in mine]
        agreed, over = common_key(gather_json(keys) if ranks > 1 else [keys], last=number > 1)
        if over:
            break
    if agreed is None:
        newer, chosen = [path for path, _ in mine], []
    else:
        place = keys.index(agreed)
        newer, chosen = [path for path, _ in mine[:place]], [mine[place][0]]
    for path in newer:
        with contextlib.suppress(FileNotFoundError):  # another rank has, in a folder of both
            path.rename(path.with_name(path.name + SET_ASIDE))
    return chosen


def common_key(keys_of_ranks: list[list[Key]], last: bool) -> tuple[Key | None, bool]:
    """What all ranks have in common, the newest first, and whether it is final: `last` says that no rank has more."""
    first, *others = keys_of_ranks
    for key in first:
        if all(key in keys for keys in others):
            return key, True
    if not any(keys_of_ranks):
        return None, True
    if last and (all(keys_of_ranks) or max(map(len, keys_of_ranks)) > AHEAD):
        shown = ", ".join(f"rank {rank} {[key[0] for key in keys]}" for rank, keys in enumerate(keys_of_ranks))
        raise ValueError(
            f"For 'resume', the folders of all ranks must have a checkpoint in common, but got those of updates "
            f"{shown}. Let UpdateCheckpoint keep two at least; or give the files themselves."
        )
    return None, last


def _time(path: Path) -> int:
    return path.stat().st_mtime_ns


def _key(path: Path) -> Key | None:
    """What says which checkpoint this is; none if it cannot be read."""
    kind = path.suffix.removeprefix(".")
    try:
        records = ms.load_checkpoint(str(path), format=kind, choice_func=lambda name: name in _RECORDS)
        values = [records[name].asnumpy().reshape(-1) for name in _RECORDS]
    except Exception as error:  # MindSpore has several kinds for a file that is not whole
        warnings.warn(f"For 'resume', '{path}' is passed over: {error}", UserWarning, stacklevel=5)
        return None
    return [int(value[-1]) for value in values]
