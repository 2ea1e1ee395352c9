"""The cases of test_noise_record.py on ranks (support/ranks.py): records of the gradient noise over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import get_rank

from gaccum_ms import CountMask
from tests.accumulation.test_noise_record import make_step, noise_of, targets
from tests.support.two_ranks import Results


def records(gradients_mean: bool) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        rank = get_rank()
        ms.set_auto_parallel_context(gradients_mean=gradients_mean)
        y, mask = targets(16), np.array([1, 0.5, 0, 0, 1, 1, 0, 2] * 2, np.float32)
        results = {}
        half, part = np.split(y, 2)[rank], slice(0, 6) if rank == 0 else slice(6, 16)
        for name, options, batches in (
            ("samples", {"micro_size": 4}, [half]),
            ("uneven", {"micro_batch_size": 2 + rank}, [y[part]]),
            ("one each", {"micro_size": 1}, [half]),
            ("spanning", {"micro_size": 4, "accumulation_steps": 2}, [half, half + 1]),
        ):
            step = make_step(**options)
            for batch in batches:
                step(Tensor(batch))
            results[name] = noise_of(step)
        step = make_step(micro_batch_size=2, count=CountMask())
        step(Tensor(y[part]), Tensor(mask[part]))
        results["counted"] = noise_of(step)
        return {f"mean{gradients_mean:d}/{name}": noise for name, noise in results.items()}

    return case


CASES = {f"mean{mean:d}": records(mean) for mean in (True, False)}
