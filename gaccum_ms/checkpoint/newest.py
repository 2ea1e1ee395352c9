"""The checkpoint of a folder from which training resumes: the newest one, by the files' times, that all ranks have.

Ranks that are killed do not leave the same files: one may have saved an update that another has not. The difference is
small, because each update needs all ranks. A rank sets aside checkpoints that others lack. Training will save these
updates again, with weights that may differ in the last bits, and a later resume must not mix both.

MindSpore writes a checkpoint under another name, and renames it when it is complete. What a killed process was writing
is removed. A file that cannot be resumed from all the same, for instance after a power cut, is skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path

from gaccum_ms.backend.checkpoint_file import SUFFIXES
from gaccum_ms.backend.parameters import own
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.checkpoint.rank_files import Values
from gaccum_ms.distributed.layout import gather_json

AHEAD = 2  # checkpoints that one rank may have and another lacks; one of the two is due to asynchronous saving
SET_ASIDE = ".not_on_all_ranks"
_UNFINISHED = re.compile(r"-\d+_\d+\.tmp$")  # the names under which `ModelCheckpoint` writes
_RECORDS = [own(name) for name in ("update_count", "window_position", "batch_count", "window_origin")]
Key = list[int]  # updates made, batches in the open window, batches seen, number of ranks


def newest_checkpoint(folder: Path, ranks: int, read: Callable[[Path], Values], in_windows: bool = True) -> list[Path]:
    """Return the newest checkpoint in a folder that all ranks have, or an empty list if no rank has any. `read` reads a
    file whole, and raises a ValueError if it cannot be resumed from. `in_windows` : whether one may be saved in a
    window.

    A collective, if there are several ranks."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    files = [path for path in entries if path.suffix in SUFFIXES]
    for path in entries:  # no rank writes now: all begin to train after the exchange below
        if _UNFINISHED.search(path.name):
            path.unlink(missing_ok=True)
    newest_first = ((path, _key(path, read)) for path in sorted(files, key=_time, reverse=True))
    whole = ((path, key) for path, key in newest_first if key and (in_windows or not key[1]))
    mine: list[tuple[Path, Key]] = []
    for number in (1, AHEAD + 1):  # usually all have the same newest one
        mine += itertools.islice(whole, number - len(mine))
        keys = [key for _, key in mine]
        agreed, over = common_key(gather_json(keys) if ranks > 1 else [keys], last=number > 1)
        if over:
            break
    if files and not mine:
        raise ValueError(
            f"For 'resume', the folder '{folder}' must have a checkpoint that can be resumed from, or none, but got "
            f"{len(files)} file(s) that cannot, for the reasons that the warnings above give. Remove them to begin "
            f"anew; or give the file of a training without accumulation itself."
        )
    if agreed is None:
        newer, chosen = [path for path, _ in mine], []
    else:
        place = keys.index(agreed)
        newer, chosen = [path for path, _ in mine[:place]], [mine[place][0]]
    for path in newer:
        with contextlib.suppress(FileNotFoundError):  # another rank renamed it, if both share the folder
            path.rename(path.with_name(path.name + SET_ASIDE))
    return chosen


def common_key(keys_of_ranks: list[list[Key]], last: bool) -> tuple[Key | None, bool]:
    """The newest key that all ranks have, and whether the result is final. `last` : no rank will report more keys."""
    first, *others = keys_of_ranks
    for key in first:
        if all(key in keys for keys in others):
            return key, True
    if not any(keys_of_ranks):
        return None, True
    if last and (all(keys_of_ranks) or max(map(len, keys_of_ranks)) > AHEAD):
        keys_as_text = ", ".join(f"rank {rank} {[key[0] for key in keys]}" for rank, keys in enumerate(keys_of_ranks))
        raise ValueError(
            f"For 'resume', the folders of all ranks must have a checkpoint in common, but got those of updates "
            f"{keys_as_text}. Let UpdateCheckpoint keep two at least; or give the files themselves."
        )
    return None, last


def _time(path: Path) -> tuple[int, list[int]]:
    """The file's time; for equal times, the numbers in its name."""
    try:
        time = path.stat().st_mtime_ns
    except OSError:  # a link may lead nowhere
        time = path.lstat().st_mtime_ns
    return time, [int(number) for number in re.findall(r"\d+", path.name)]


def _key(path: Path, read: Callable[[Path], Values]) -> Key | None:
    """The key of a checkpoint; None if it cannot be resumed from."""
    try:
        values = read(path)
        if missing := [name for name in _RECORDS if name not in values]:
            raise ValueError(f"it is of no step of gaccum_ms, and has no {missing[0]}")
    except ValueError as error:
        warn_user(f"For 'resume', '{path}' is passed over: {error}")
        return None
    return [int(values[name].reshape(-1)[-1]) for name in _RECORDS]
