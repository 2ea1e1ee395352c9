"""The values with which a rank resumes, from the checkpoints of all ranks that saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gaccum_ms.accumulation import accumulators
from gaccum_ms.accumulation.open_window import BATCHES, LOSS
from gaccum_ms.backend.parameters import own

Values = dict[str, np.ndarray]


def origin(values: Values) -> tuple[int, int]:
    """The rank that saved, and its number of ranks; (0, 1) for a run without accumulation."""
    rank, ranks = values.get(own("window_origin"), np.array([0, 1]))
    return int(rank), int(ranks)


def of_rank(files: list[tuple[Path, Values]], rank: int, ranks: int) -> Values:
    """The values with which this rank resumes."""
    by_rank = {origin(values)[0]: values for _, values in files}
    _, first = files[0]
    saved_ranks = origin(first)[1]
    is_open = any(int(values.get(own("window_position"), 0)) for _, values in files)
    paths = ", ".join(f"'{path}' of rank {origin(values)[0]} of {origin(values)[1]}" for path, values in files)
    if any(origin(values)[1] != saved_ranks for _, values in files) or len(by_rank) != len(files):
        raise ValueError(f"For 'resume', the files must be those of different ranks of one run, but got {paths}.")
    if len({int(values.get(own("update_count"), 0)) for _, values in files}) > 1:
        counts = [int(values.get(own("update_count"), 0)) for _, values in files]
        raise ValueError(f"For 'resume', all files must be of the same update, but got updates {counts}: {paths}.")
    if saved_ranks == ranks and rank in by_rank:
        return by_rank[rank]
    if not is_open:
        return {name: value for name, value in first.items() if name != own("random_state")}  # it is another rank's
    if len(by_rank) != saved_ranks:
        raise ValueError(
            f"For 'resume', a checkpoint that was saved in a window has the sums of one rank, and all {saved_ranks} "
            f"rank(s)' are needed to finish it on rank {rank} of {ranks}, but got {paths}."
        )
    joined = _joined([by_rank[number] for number in range(saved_ranks)], rank == 0)
    joined[own("window_origin")] = np.array([rank, ranks])
    return joined


def _joined(files: list[Values], first_rank: bool) -> Values:
    """The sums of all ranks for the first rank, and zeros for the others: the update's mean is over all ranks."""
    seeds = [float(values[own("window_unit")]) for values in files]
    seed = next((other for other in seeds if other > 0), 0.0) if first_rank else 0.0
    factors = [seed / other if other > 0 else 0.0 for other in seeds]
    position = max(int(values[own("window_position")]) for values in files)
    joined = {name: value for name, value in files[0].items() if name != own("random_state")}
    for name in [name for name in joined if name.startswith(accumulators.PREFIX)]:
        # Whole sums, in float64; without compensations, which loading computes for the dtype that is summed in here.
        lost = accumulators.COMPENSATION_PREFIX + name.removeprefix(accumulators.PREFIX)
        wholes = [values[name].astype(np.float64) + values.get(lost, 0.0) for values in files]
        joined[name] = sum(factor * whole for factor, whole in zip(factors, wholes, strict=True)).astype(np.float32)
        joined.pop(lost, None)
    for name in (own("window_sums"), own("window_squares")):
        if all(name in values for values in files):
            rows = np.stack([values[name] for values in files])
            joined[name] = rows.sum(axis=0) if first_rank else np.zeros_like(rows[0])
    joined[own("window_sums")][LOSS] = np.dot(factors, [values[own("window_sums")][LOSS] for values in files])
    joined[own("window_sums")][BATCHES] = position
    joined[own("window_position")] = np.array(position)
    joined[own("window_unit")] = np.array(seed)
    return joined
