"""The proof of many losses as users write them, forward only and without a compilation: each wrong one is told, with
the remedy that is exact where one is known, and no right one is."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.communication import comm_func
from mindspore.nn.utils import no_init_parameters

from gaccum_ms import GradAccumulationCell
from gaccum_ms.backend.noise_of_rows import ReachesOtherRanks, noise_of_rows
from gaccum_ms.cell import cell_with_loss
from gaccum_ms.proof import first_batch
from gaccum_ms.proof.first_batch import FirstBatch
from gaccum_ms.proof.samples import _MOST_READ, few
from gaccum_ms.splitting.even_split import cut, cut_axes, plan_split
from gaccum_ms.training.python_split import micro_batches_of
from tests.proof import losses
from tests.proof.losses import RIGHT, WRONG, Case


def proved(case: Case) -> tuple[FirstBatch, str | None]:
    """The proof of a loss in four micro-batches, and what it says."""
    network, cut_by_function = case.network(), callable(case.options.get("split"))
    cell = GradAccumulationCell(network, None if cut_by_function else 4, **case.options)
    cell_with_loss("owner", cell, None)  # its reduction is then known
    inputs = [Tensor(value) for value in case.inputs]
    options = cell.options
    if options.splits_in_python:
        parts = micro_batches_of(options.split.working_copy(), inputs, False)
    else:
        plan = plan_split([value.shape for value in inputs], 4, None, options.shared, options.axis)
        parts = cut(inputs, plan, cut_axes(len(inputs), options.shared, options.axis))
    proof = FirstBatch("GradAccumulationCell", network, [network], options)
    is_known = options.trims or not options.splits_in_python  # as in a step: what a function cuts has no axes
    batch = inputs, cut_axes(len(inputs), options.shared, options.axis) if is_known else None, lambda: parts
    proof.again = lambda: proof.look(*batch)
    return proof, proof.again()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_told_with_its_remedy(name):
    proof, text = proved(WRONG[name])
    assert text is not None and WRONG[name].remedy in text, (proof, text)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_not_told(name):
    proof, text = proved(RIGHT[name])
    assert text is None
    takes_a_gradient = name == "gradient_penalty"  # which MindSpore cannot take eagerly in graph mode
    assert (proof.verdict.kind == "skipped") == takes_a_gradient, proof


def test_losses_are_judged_in_pynative_mode_too(pynative):
    assert "(None, CountNotIgnored())" in proved(WRONG["second_loss_ignores"])[1]
    for name in ("gradient_penalty", "variational"):
        proof, text = proved(RIGHT[name])
        assert text is None and proof.verdict.kind != "skipped", proof


# -- what was left open by first trials --------------------------------------------------------------------------------


def test_a_remedy_of_the_few_samples_alone_is_no_remedy(pynative):
    """A mask that the loss does not know fits the few samples, and no micro-batch."""
    x, y = losses.X, losses.TARGET
    mask = np.random.default_rng(1).uniform(0.2, 3, (len(x), 1)).astype(np.float32)
    inputs = [Tensor(value) for value in (x, y, mask.repeat(_MOST_READ + 1, 1))]  # so large that it chooses no sample
    network = WRONG["root_of_mean"].network()
    parts = next(few(inputs, (0, 0, 0), 5))
    rows = *parts, np.concatenate(parts)
    first, second, whole = (float(network(Tensor(x[row]), Tensor(y[row])).asnumpy()) for row in rows)
    share = (whole - second) / (first - second)
    mask[parts[0]], mask[parts[1]] = share / len(parts[0]), (1 - share) / len(parts[1])

    def masked(m, x, y, mask):
        return ops.sqrt(losses.mean_of_squares(m, x, y))

    _, text = proved(losses.right(losses.one, masked, x, y, mask.repeat(_MOST_READ + 1, 1)))
    assert losses.BATCH in text and "This was tried" not in text, text


def cut_by(split):
    """The proof of a right and of a wrong loss, cut by this function, with what it says."""
    cases = RIGHT["mean_of_squares"], WRONG["sum_of_squares"]
    return [proved(case._replace(options={"split": split})) for case in cases]


def test_what_a_function_cuts_is_compared_with_the_raw_batch(pynative):
    (right, nothing), (_, text) = cut_by(lambda x, y: [(x[:3], y[:3]), (x[3:], y[3:])])
    assert nothing is None and right.verdict.kind == "equal", right
    assert "This was tried" in text and losses.SUM in text
    assert f"parts of 3, {losses.N - 3} sample(s)" in text


@pytest.mark.parametrize(
    ("split", "why"),
    [
        (lambda *batch: [[value[row : row + 1] for value in batch] for row in range(9)], "is too large"),
        (lambda x, y: [(x[:8], y[:8]), (2 * x[8:], y[8:])], "makes other samples"),
    ],
)
def test_what_a_function_cuts_may_not_be_compared(split, why, pynative):
    for proof, text in cut_by(split):
        assert text is None and str(proof).startswith("skipped: ") and why in str(proof), proof


def test_a_dear_forward_takes_fewer_samples_or_is_left_out(pynative, monkeypatch):
    case = RIGHT["counted_shift"]
    entries = sum(parameter.size for parameter in case.network().get_parameters())
    work = entries * losses.LENGTH
    for most, kind in ((work * 10, "parts of 2, 3"), (work * 9, "parts of 1, 1"), (work * 3, "skipped: a forward")):
        monkeypatch.setitem(first_batch._MOST_WORK, "CPU", most)
        assert kind in str(proved(case)[0])


def test_lazy_parameters_are_initialised_and_keep_their_names(pynative):
    with no_init_parameters():
        network = nn.WithLossCell(nn.Dense(losses.FEATURES, 1), nn.MSELoss())
    assert any(parameter.has_init for parameter in network.get_parameters())
    names = [parameter.name for parameter in network.get_parameters()]
    proof, _ = proved(RIGHT["mean_of_squares"]._replace(net=lambda: network, loss=None))
    assert proof.verdict.kind == "equal"
    assert [parameter.name for parameter in network.get_parameters()] == names


def test_what_cannot_be_seen_is_looked_at_again(pynative):
    """At the second, fourth and eighth call."""
    proof, _ = proved(RIGHT["one_class"])
    calls = []
    for _ in range(9):
        before = proof.verdict
        proof.again()
        calls.append(proof.verdict is not before)
    assert [number + 2 for number, looked in enumerate(calls) if looked] == [2, 4, 8]


@pytest.mark.parametrize("call", [comm_func.all_reduce, mint.distributed.all_reduce, lambda x: ops.AllReduce()(x)])
def test_a_collective_is_refused_before_it_runs(call, pynative):
    """Whoever calls it: each function is one that MindSpore's module looks up, or an operator's call."""
    with noise_of_rows(refuses_collectives=True), pytest.raises(ReachesOtherRanks):
        call(Tensor(1.0))
