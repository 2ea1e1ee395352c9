"""The proof of many losses as users write them, forward only and without a compilation: each wrong one is told, with
the remedy that is exact where one is known, and no right one is."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import GradAccumulationCell
from gaccum_ms.backend.snapshot import Snapshot
from gaccum_ms.proof.first_batch import FirstBatch
from gaccum_ms.splitting.even_split import cut, cut_axes, plan_split
from gaccum_ms.training.python_split import micro_batches_of
from tests.proof.losses import RIGHT, WRONG, Case


def proved(case: Case, **more) -> tuple[FirstBatch, str | None]:
    """The proof of a loss in four micro-batches, and what it says."""
    options = {"micro_size": 4, **case.options}
    if callable(options.get("split")):
        options["micro_size"] = None
    network = case.network()
    cell = GradAccumulationCell(network, **options, **more)
    cell.check_options(is_whole=True)
    inputs = [Tensor(value) for value in case.inputs]
    options = cell.options
    if options.splits_in_python:
        parts = micro_batches_of(options.split.working_copy(), inputs, False)
    else:
        plan = plan_split([value.shape for value in inputs], 4, None, options.shared, options.axis)
        parts = cut(inputs, plan, cut_axes(len(inputs), options.shared, options.axis))
    proof = FirstBatch("GradAccumulationCell", network, [network], options)
    return proof, proof.look(inputs, cut_axes(len(inputs), options.shared, options.axis), lambda: parts)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_told_with_its_remedy(name, mode):
    proof, text = proved(WRONG[name])
    assert text is not None, proof
    assert WRONG[name].remedy in text, text


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_not_told(name, mode):
    proof, text = proved(RIGHT[name])
    assert text is None
    assert proof.verdict.kind != "skipped", proof
