"""audit finds networks that accumulation cannot reproduce, names what helps, accepts the others, and leaves no trace.
Most networks are those of proof/losses.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountNotIgnored, EvenSplit, GradAccumulationCell, audit
from tests.proof import losses
from tests.proof.losses import RIGHT, WRONG
from tests.support.modes import eagerly
from tests.support.reference import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    Regression,
    as_numpy,
    batches,
    make_network,
    make_step,
    relative_error,
)

SEQUENCES = np.random.default_rng(1).normal(size=(6, 8, losses.FEATURES)).astype(np.float32)  # with time in front


def batch(samples=10):
    return [Tensor(value) for value in batches(samples, 1)[0]]


def in_loss(network):
    return nn.WithLossCell(network, nn.CrossEntropyLoss())


def run(network, inputs, optimizer="sgd", **options):
    cell = GradAccumulationCell(network, **{"micro_size": 4, **options})
    return audit(cell, OPTIMIZERS[optimizer](cell.trainable_params()), *inputs)


def run_case(case, **options):
    return run(case.network(), map(Tensor, case.inputs), **case.options, **options)


# -- correct networks pass ---------------------------------------------------------------------------------------------


def test_a_clean_network_passes(pynative):
    report = run(in_loss(make_network("conv")), batch(), "grouped")
    assert report.ok
    assert report.problems == ()
    assert report.loss_behaves_as == "mean"
    assert not report.couples_samples
    assert report.batch_norm_layers == report.dropout_layers == ()
    assert set(report.gradients) == set(report.parameters) == {"conv.weight", "out.weight", "out.bias"}
    assert max(report.gradients.values()) < 1e-5


def shifted_without_effect(m, x, y):
    """The shift has a gradient of zero except for rounding, because what follows is centred."""
    hidden = m.net(x) + m.shift
    return ops.square(ops.tanh(hidden - hidden.mean(axis=1, keep_dims=True)) - y).mean()


def sum_and_number(m, x, y):
    return losses.sum_of_squares(m, x, y), len(x)


def shift():
    return {"shift": ms.Parameter(Tensor(0.3, ms.float32), name="shift")}


@pytest.mark.parametrize(
    ("case", "dropout"),
    [
        (RIGHT["half_precision"], ()),
        (RIGHT["two_losses"], ()),
        (RIGHT["ratio"], ()),
        (WRONG["sum_of_squares"]._replace(loss=sum_and_number, options={"reduction": "ratio"}), ()),
        (losses.right(losses.classes, shifted_without_effect, losses.X, losses.TARGET, more=shift), ()),
        (RIGHT["with_dropout"], ("drop",)),
    ],
    ids=["float16", "two", "ratio", "ratio to a number", "a gradient that is zero but for rounding", "dropout"],
)
def test_other_networks_and_options_pass(case, dropout, pynative):
    """Dropout is left out."""
    report = run_case(case)
    assert report.ok, str(report)
    assert report.dropout_layers == dropout


# -- problems are found and named --------------------------------------------------------------------------------------


def own(loss):
    return losses.right(losses.one, loss, losses.X)


def mean_over_nothing(m, x):
    """The first micro-batch has no item, so its loss is 0 / 0; the whole batch's loss is finite."""
    mask = ops.cast(x[:, 0] > float(losses.X[:4, 0].max()), ms.float32)
    return losses.weighed(m.net(x)[:, 0], mask)


@pytest.mark.parametrize(
    ("case", "behaves_as", "couples", "said"),
    [
        (WRONG["sum_of_squares"], "sum", False, "behaves as a sum over samples, but the cell has reduction='mean'"),
        (WRONG["mean_given_as_sum"], "mean", False, "as a mean over samples, but the cell has reduction='sum'"),
        (WRONG["mean_given_as_ratio"], None, False, "This was tried, and makes it equal: its numerator is a mean"),
        (WRONG["info_nce"], "neither", True, "compares samples of one batch"),
        (WRONG["entropy_of_mean"], "mean", True, "compares samples of one batch"),  # of a doubled batch it is the same
        (WRONG["sum_with_penalty"], "neither", True, "adds a term of its own to a sum"),
        (RIGHT["with_dropout_by_function"], None, False, "differs from one call to the next"),
        (own(lambda m, x: ops.log(-ops.abs(m.net(x))).mean()), None, False, "not finite"),
        (own(lambda m, x: m.net(x).mean() * 0.0 + x.mean()), None, False, "All gradients are zero"),
        (own(mean_over_nothing), None, False, "a micro-batch takes a mean over nothing"),
    ],
    ids=[
        "sum",
        "mean",
        "ratio",
        "coupled_samples",
        "coupled_samples 2",
        "penalty",
        "random",
        "not finite",
        "zero",
        "nothing",
    ],
)
def test_one_problem_is_named(case, behaves_as, couples, said, pynative):
    report = run_case(case)
    assert not report.ok
    assert len(report.problems) == 1
    assert said in report.problems[0]
    assert report.couples_samples == couples
    assert report.batch_norm_layers == ()
    if behaves_as is not None:
        assert report.loss_behaves_as == behaves_as
        assert max(report.gradients.values()) > 1e-2


def test_clipping_hides_nothing(pynative):
    """With clipping to a small norm, gradients of a wrong size give the right update."""
    report = run_case(WRONG["sum_of_squares"], max_grad_norm=1e-3)
    assert min(report.gradients.values()) > 0.1
    assert max(report.parameters.values()) < 1e-6
    assert run_case(RIGHT["mean_of_squares"], max_grad_norm=1e-3).ok


def test_batch_norm_is_named_and_the_report_is_a_table(pynative):
    """There is no warning: in these tests it would be an error."""
    report = run_case(RIGHT["with_batch_norm"])
    assert report.batch_norm_layers == ("net.1",)
    assert report.couples_samples
    assert report.loss_behaves_as == "mean"
    (problem,) = report.problems
    assert problem.startswith("1 BatchNorm layer(s) couple the samples of a micro-batch: net.1.")
    lines = str(report).splitlines()
    rows = {line.split("  ")[0].strip(): line for line in lines}
    for name in report.gradients:
        assert rows[name].split()[1:] == [f"{report.gradients[name]:.1e}", f"{report.parameters[name]:.1e}"]
    assert len({len(rows[name]) for name in (*report.gradients, "worst relative error")}) == 1
    assert f"{report.loss_whole:.6g} on the whole batch, {report.loss_accumulated:.6g} accumulated" in rows["loss"]
    assert rows["couples samples"].endswith("yes")
    assert rows["BatchNorm layers"].endswith("net.1")
    assert rows["verdict"].endswith("1 problem(s)")
    assert lines[-1] == f"* {problem}"


# -- remedies ----------------------------------------------------------------------------------------------------------


def remedy_of(report) -> str:
    """The remedy that is named, alone."""
    (problem,) = report.problems
    _, was_tried, remedy = problem.partition("This was tried, and makes it equal: ")
    assert was_tried, problem
    return remedy.removesuffix(".")


def focal_ratio(m, x, positives):
    p = ops.sigmoid(m.net(x))
    p = p * positives + (1 - p) * (1 - positives)
    return (-ops.square(1 - p) * ops.log(p)).sum(), positives.sum()


def focal(m, x, positives):
    """Focal loss over all anchors, divided by the number of positives: images without any have a loss too."""
    total, number = focal_ratio(m, x, positives)
    return total / ops.maximum(number, Tensor(1.0))


def number_of(x, positives):
    return positives.sum()


POSITIVES = np.zeros((16, losses.CLASSES), np.float32)
POSITIVES[[0, 0, 1, 14], [0, 2, 3, 1]] = 1  # the second micro-batch of four has none
FOCAL = losses.right(losses.classes, focal, losses.X, POSITIVES, count=number_of)


def nearest_prototype(m, x, prototypes):
    """The squared distance to the nearest prototype, of which there are as many as samples."""
    return ops.square(m.net(x).expand_dims(1) - prototypes).sum(axis=-1).min(axis=1).mean()


def time_major(m, x, y):
    """A mean over samples of a function of each sequence, with time in front."""
    return ops.square(ops.tanh(m.net(x)).mean(axis=0) - y.mean(axis=0)).mean()


@pytest.mark.parametrize(
    ("case", "remedy", "applied"),
    [
        (WRONG["ignored_labels"], "count=CountNotIgnored()", {"count": CountNotIgnored()}),
        (WRONG["count_of_what_is_not_ignored"], "count=None", {"count": None}),
        (
            FOCAL,
            "reduction=\"ratio\", min_count=1 in place of a count, where the network returns the sum and what 'count'",
            {"loss": focal_ratio, "reduction": "ratio", "min_count": 1, "count": None},
        ),
        (
            losses.right(losses.of(losses.FEATURES), nearest_prototype, losses.X, losses.X2),
            "if input 1 has no entries of samples, split=EvenSplit(shared=(1,))",
            {"split": EvenSplit(shared=(1,))},
        ),
        (
            losses.right(losses.of(2), time_major, SEQUENCES, SEQUENCES[:, :, :2]),
            "split=EvenSplit(axis=1)",
            {"split": EvenSplit(axis=1)},
        ),
        (WRONG["flat_labels_of_mindspore"], "is broadcast", {"inputs": (losses.X, losses.TARGET)}),
    ],
    ids=["ignored", "needless", "ratio", "shared", "axis", "broadcast"],
)
def test_names_the_remedy_with_which_it_passes(case, remedy, applied, pynative, monkeypatch):
    """Also where trainings make no proof."""
    monkeypatch.setenv("GACCUM_MS_CHECK", "none")
    assert remedy in remedy_of(run_case(case))
    changed = {name: applied.pop(name) for name in ("loss", "inputs") if name in applied}
    report = run_case(case._replace(options={**case.options, **applied}, **changed))
    assert report.ok, str(report)


def test_names_outputs_that_are_not_of_a_sample(pynative):
    """The second output depends on the other samples."""

    def with_outputs(m, x, y):
        out = m.net(x)
        return ops.cross_entropy(out, y), y, out - out.mean(axis=0)

    report = run_case(losses.right(losses.classes, with_outputs, losses.X, losses.LABELS, aux=True))
    (problem,) = report.problems
    assert "Output(s) 1 after the loss, counted from 0" in problem


def test_names_state(pynative):
    """The forward centres its outputs by a running mean, which it writes."""

    def centred(m, x, y):
        out = m.net(x)
        loss = ops.cross_entropy(out - m.center, y)
        mean = ops.depend(ops.stop_gradient(out), loss).mean(axis=0)
        return ops.depend(loss, ops.assign(m.center, 0.9 * m.center + 0.1 * mean))

    def center():
        return {"center": ms.Parameter(ops.zeros(losses.CLASSES), name="center", requires_grad=False)}

    case = losses.right(losses.classes, centred, losses.X, losses.LABELS, more=center)
    (problem,) = run_case(case).problems
    assert "writes state in 'construct' (" in problem
    assert "center" in problem
    assert "'after_update' of a gaccum_ms.Transform" in problem


# -- everything is restored --------------------------------------------------------------------------------------------


class Stateful(nn.Cell):
    """Moving statistics, a counter, a dropout layer, and a layer that the user has set to evaluation mode."""

    def __init__(self):
        super().__init__()
        self.calls = ms.Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)
        self.first = nn.SequentialCell(nn.Dense(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES), nn.Dropout(p=0.5))
        self.second = nn.BatchNorm1d(CLASSES)

    def construct(self, x):
        return ops.depend(self.second(self.first(x)), ops.assign_add(self.calls, Tensor(1, ms.int32)))


def everything(*roots) -> list:
    """All values, and the flags of all Cells."""
    values = [(one.name, one.asnumpy().tobytes()) for root in roots for one in root.get_parameters()]
    cells = [named for root in roots for named in root.cells_and_names()]
    return values + [(name, one.training, one.requires_grad) for name, one in cells]


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has 2 BatchNorm")
@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network writes state")
def test_leaves_everything_bit_identical(pynative):
    network = Stateful()
    step = make_step(in_loss(network), OPTIMIZERS["adam"], micro_size=2)
    step(*batch())
    network.second.set_train(False)
    ms.manual_seed(11)
    before, generator = everything(step, step.optimizer), ms.get_rng_state().asnumpy().tobytes()
    report = audit(GradAccumulationCell(step.network, 2), step.optimizer, *batch())
    assert report.batch_norm_layers and report.dropout_layers
    assert everything(step, step.optimizer) == before
    assert ms.get_rng_state().asnumpy().tobytes() == generator


def test_a_compiled_step_goes_on_from_the_right_values():
    """In graph mode, of a cell with the step's network and optimizer."""
    optimizer = OPTIMIZERS["momentum"]
    step, other = (make_step(Regression(), optimizer, micro_size=3) for _ in range(2))
    losses = [float(step(*batch()))]
    assert audit(GradAccumulationCell(step.network, 3), step.optimizer, *batch(7)).ok
    losses += [float(step(*batch())), float(step(*batch()))]
    assert len(step.compile_cache) == 1
    with eagerly():
        assert losses == pytest.approx([float(other(*batch())) for _ in range(3)], rel=1e-5)
    assert relative_error(as_numpy(step.weights[0]), as_numpy(other.weights[0])) < 1e-5


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_refuses_what_it_cannot_audit_and_has_the_callers_tolerance(pynative):
    network = in_loss(make_network("dense"))
    cell = GradAccumulationCell(network, 2)
    optimizer = OPTIMIZERS["sgd"](cell.trainable_params())
    before = everything(cell)
    vector = GradAccumulationCell(WRONG["sum_of_cross_entropies"]._replace(loss=losses.entropies).network(), 2)
    vector_optimizer = OPTIMIZERS["sgd"](vector.trainable_params())
    elsewhere = OPTIMIZERS["sgd"](make_network("conv").trainable_params())
    one, too_many = GradAccumulationCell(network, micro_batch_size=16), GradAccumulationCell(network, 20)
    for error, message, arguments in (
        (TypeError, "'cell' must be .*, but got 'WithLossCell'", (network, optimizer, *batch())),
        (TypeError, r"'optimizer' must be an nn\.Optimizer, but got 'float'", (cell, 0.1, *batch())),
        (TypeError, "input 1 got 3 of type 'int'", (cell, optimizer, batch()[0], 3)),
        (ValueError, "at least two micro-batches, but got a batch of 10 sample", (one, optimizer, *batch())),
        (ValueError, "'micro_size' is the number of micro-batches", (too_many, optimizer, *batch())),
        (ValueError, "none of them the network's", (cell, elsewhere, *batch())),
        (ValueError, "scalar loss of shape", (vector, vector_optimizer, *map(Tensor, (losses.X, losses.LABELS)))),
    ):
        with pytest.raises(error, match=message):
            audit(*arguments)
    with pytest.raises(ValueError, match=r"'tolerance' must be positive, but got 0\.0"):
        audit(cell, optimizer, *batch(), tolerance=0.0)
    assert not audit(cell, optimizer, *batch(), tolerance=1e-12).ok
    assert everything(cell) == before
