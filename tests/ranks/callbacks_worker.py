"""The cases of callbacks on ranks (support/ranks.py): windows that adapt to the noise over two ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mindspore.communication import get_rank

from gaccum_ms import AdaptiveAccumulation, FlushAccumulation
from tests.callbacks.test_adaptive import fit, steps_of
from tests.ranks.cases import error_of, named
from tests.support.reference import as_numpy
from tests.support.two_ranks import Results


class Astray(AdaptiveAccumulation):
    """Finds ten times the noise on rank 1."""

    def on_window_end(self, run_context, record):
        if get_rank() == 1:
            noise = record.noise._replace(squares=10 * record.noise.squares)
            record = dataclasses.replace(record, noise=noise)
        super().on_window_end(run_context, record)


def follow(out: Path) -> Results:
    results = {}
    for name, kind in (("follow", AdaptiveAccumulation), ("astray", Astray)):
        callback = kind(max_steps=3, smoothing=0.999)
        step = fit(callback, samples=1600, rate=1e-3, seed=get_rank())
        found = {"steps": steps_of(callback), "rates": [record.learning_rate for record in callback.records]}
        results |= named(name, found | {"weight": as_numpy(step.weights[0]), "scale": callback._estimate.noise_scale})
    options = {"accumulation_steps": 2, "callbacks": [FlushAccumulation()]}
    message = error_of(lambda: fit(AdaptiveAccumulation(), samples=8 * (3 - get_rank()), **options))
    return results | named("uneven", {"message": message})


CASES = dict.fromkeys(("follow", "astray", "uneven"), follow)
