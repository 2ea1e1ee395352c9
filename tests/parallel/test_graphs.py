"""What MindSpore's compiler makes of our step for eight devices, read and run without one.

Two kinds of evidence: what is in the finished graph, and what eight devices would compute by it (machine.py).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from compile_worker import SAMPLES
from machine import Machine, rows

pytestmark = [pytest.mark.distributed]
RANKS = 8
WEIGHTS = ("first", "bias", "second")
SPLIT = {  # where (4, 2) devices have the columns of one layer and the rows of the next
    "first": lambda whole, rank: np.split(whole, 2, axis=1)[rank % 2],
    "bias": lambda whole, rank: np.split(whole, 2)[rank % 2],
    "second": lambda whole, rank: np.split(whole, 2)[rank % 2],
}
SPLIT |= {f"{state}.{name}": part for state in ("accum", "stat") for name, part in list(SPLIT.items())}
rng = np.random.default_rng(0)
X, Y = (rng.normal(size=(RANKS * SAMPLES, width)).astype(np.float32) for width in (12, 1))


def shards(parts: int, *arrays):
    """Each input as what each rank has of it, where samples lie in `parts` parts on the ranks."""
    return [[np.split(array, parts)[rank * parts // RANKS] for rank in range(RANKS)] for array in arrays]


class Ran:
    """A case's graph, run once, or several times, on the machine."""

    def __init__(self, case, parts=RANKS, batch=(X, Y), layout=None, changed=None, steps=1):
        self.machine = Machine(case.program, RANKS, {**case.parameters, **(changed or {})}, layout)
        for _ in range(steps):
            self.results = self.machine.step(*shards(parts, *batch))
        self.counts = Counter(executed.node.op for executed in self.machine.executed)

    def parameter(self, name):
        return self.machine.state[name]

    @property
    def losses(self):
        return [result[0] if isinstance(result, tuple) else result for result in self.results]

    def adds(self):
        """How often something is added to each accumulator."""
        return Counter(
            executed.node.arguments[0].split("_", 1)[1]
            for executed in self.machine.executed
            if executed.node.op == "AssignAdd" and "accu_grads." in executed.node.arguments[0]
        )

    def gradient_collectives(self):
        """Reductions of gradients: those that the compiler puts where weights are used, "mirrors" of them."""
        return [
            executed
            for executed in self.machine.executed
            if executed.node.op in ("AllReduce", "ReduceScatter")
            and ("mirror" in executed.node.attributes.lower() or "parallel_optimizer" in executed.node.attributes)
        ]


def same_update(ours: Ran, theirs: Ran, tolerance=1e-5) -> bool:
    """Whether both leave every weight, on every rank, where the other does, and report the same loss."""
    left, right = ([*(one for name in WEIGHTS for one in ran.parameter(name)), *ran.losses] for ran in (ours, theirs))
    return all(np.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def plain(cases):
    return Ran(cases("plain"))


def by_hand(values):
    """Loss and gradient of the mean over all samples of all ranks, in NumPy."""
    hidden = np.maximum(X @ values["first"] + values["bias"], 0)
    error = hidden @ values["second"] - Y
    backward = 2 * error / error.size
    at_hidden = backward @ values["second"].T * (hidden > 0)
    gradients = {"first": X.T @ at_hidden, "bias": at_hidden.sum(0), "second": hidden.T @ backward}
    return np.mean(error**2), gradients


def part_of(layout, name, whole, rank):
    return layout[name](whole, rank) if layout else whole


# -- the machine itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "factor"), [("plain", 1 / RANKS), ("plain, sum of ranks", 1.0)])
def test_the_machine_computes_what_numpy_does(cases, name, factor):
    """MindSpore's own step for the whole batch: one SGD update at rate 0.1 of the mean over all ranks. A loss that is a
    mean is one over all ranks already; with ``gradients_mean`` the gradient is divided by their number once more."""
    values, ran = cases(name).parameters, Ran(cases(name))
    loss, gradients = by_hand(values)
    np.testing.assert_allclose(ran.losses, [loss] * RANKS, rtol=1e-5)
    for weight, gradient in gradients.items():
        for after in ran.parameter(weight):
            np.testing.assert_allclose((values[weight] - after) / 0.1, factor * gradient, rtol=1e-3, atol=1e-5)


# -- the same update as the whole batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((f"ours, {k}", "plain") for k in (1, 4, 16)),
        *((f"per sample, {k}", "plain") for k in (1, 4, 16)),
        *((f"lazy, {k}", "plain") for k in (4, 16)),
        ("sum of ranks", "plain, sum of ranks"),
        ("sum", "plain, sum"),
        ("auto", "plain"),
        ("context by init", "plain"),
        ("AutoParallel", "plain"),
        ("AutoParallel, model", "plain"),
    ],
)
def test_equals_the_whole_batch(cases, name, whole):
    ours, theirs = Ran(cases(name)), Ran(cases(whole))
    assert same_update(ours, theirs)
    assert not same_update(ours, Ran(cases(whole), batch=(X, -Y)))  # another update is seen


@pytest.mark.parametrize(
    ("name", "whole", "parts", "layout"),
    [
        ("full batch", "plain, full batch", 1, None),
        *((f"optimizer parallel, {k}", "plain, optimizer parallel", RANKS, None) for k in (1, 4, 16)),
        ("sharded gradients", "plain, optimizer parallel, sum of ranks", RANKS, None),
    ],
)
def test_equals_the_whole_batch_where_weights_or_batches_lie_otherwise(cases, name, whole, parts, layout):
    assert same_update(Ran(cases(name), parts, layout=layout), Ran(cases(whole), parts, layout=layout))


def test_equals_numpy_where_weights_are_split(cases):
    """Columns of one layer and rows of the next on (4, 2) devices, the batch in 4 parts."""
    values, ran = cases("split").parameters, Ran(cases("split"), 4, layout=SPLIT)
    loss, gradients = by_hand(values)
    np.testing.assert_allclose(ran.losses, [loss] * RANKS, rtol=1e-5)
    for weight, gradient in gradients.items():
        for rank, after in enumerate(ran.parameter(weight)):
            expected = part_of(SPLIT, weight, values[weight] - np.float32(0.1) * gradient, rank)
            np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)


def test_a_step_that_does_not_clear_is_seen(cases, plain):
    """Negative control: twice the accumulators' content, and the second update is not the whole batch's."""
    left_over = {"accu_grads." + name: np.full_like(cases("ours, 4").parameters[name], 0.01) for name in WEIGHTS}
    assert not same_update(Ran(cases("ours, 4"), changed=left_over), plain)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, "plain") for name in ("ours, 4", "lazy, 4", "per sample, 4")),
        ("optimizer parallel, 4", "plain, optimizer parallel"),
        ("sharded gradients", "plain, optimizer parallel, sum of ranks"),
    ],
)
def test_two_updates_clear_between_them(cases, name, whole):
    ran = Ran(cases(name), steps=2)
    assert same_update(ran, Ran(cases(whole), steps=2))
    for weight in WEIGHTS:
        assert not np.any(ran.parameter("accu_grads." + weight))


@pytest.mark.parametrize("name", ["count", "optimizer parallel, count"])
def test_counts_are_of_all_devices(cases, name):
    """The sum over all labels above zero on all ranks, whose numbers differ from rank to rank."""
    y = Y - np.linspace(-1, 1, RANKS * SAMPLES, dtype=np.float32)[:, None]
    per_rank = [int((part > 0).sum()) for part in np.split(y, RANKS)]
    assert len(set(per_rank)) > 1
    counted, summed = Ran(cases(name), batch=(X, y)), Ran(cases("plain, sum"), batch=(X, y))
    total = sum(per_rank)
    assert [float(one) for one in counted.parameter("gaccum_ms.window_count")] == [total] * RANKS
    np.testing.assert_allclose(counted.losses, np.array(summed.losses) / total, rtol=1e-5)
    factor = 1.0 if name == "count" else RANKS  # "plain, sum" and "count" have gradients_mean
    for weight in WEIGHTS:
        before = cases(name).parameters[weight]
        by_sum = factor * (summed.parameter(weight)[0] - before) / total
        for rank, after in enumerate(counted.parameter(weight)):
            expected = rows(after.shape)(before + by_sum, rank)
            np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-6)


def test_a_mean_weighs_by_its_micro_batchs_count(cases):
    """Micro-batch i is the i-th quarter of each rank's samples; its mean weighs as much as it has labels above zero."""
    y = Y - np.tile(np.repeat([-1.0, 0.0, 0.5, 1.0], SAMPLES // 4), RANKS).astype(np.float32)[:, None]
    quarters = [np.arange(RANKS * SAMPLES) % SAMPLES // (SAMPLES // 4) == quarter for quarter in range(4)]
    counts = [(y[quarter] > 0).sum() for quarter in quarters]
    assert len(set(counts)) > 1
    values = cases("count of means").parameters
    error = np.maximum(X @ values["first"] + values["bias"], 0) @ values["second"] - y
    means = [np.mean(error[quarter] ** 2) for quarter in quarters]
    ran = Ran(cases("count of means"), batch=(X, y))
    np.testing.assert_allclose(ran.losses, [np.average(means, weights=counts)] * RANKS, rtol=1e-5)


def test_a_batch_that_counts_nothing_does_not_update(cases):
    ran = Ran(cases("count"), batch=(X, -np.abs(Y)))
    for name in WEIGHTS:
        assert all(np.array_equal(one, cases("count").parameters[name]) for one in ran.parameter(name))
    assert not any(np.any(ran.parameter("accu_grads." + name)) for name in WEIGHTS)


@pytest.mark.parametrize(
    ("name", "parts", "layout", "factor"),
    [
        ("split, clip", 4, SPLIT, 1.0),
        ("split, scale", 4, SPLIT, 1.0),
        ("scale", RANKS, None, 1 / RANKS),
        ("lazy, split, scale", 4, SPLIT, 1.0),
        ("optimizer parallel, clip", RANKS, None, 1 / RANKS),
        ("optimizer parallel, scale", RANKS, None, 1 / RANKS),
        ("sharded gradients, clip", RANKS, None, 1.0),
    ],
)
def test_clips_by_the_norm_of_the_whole_gradient(cases, name, parts, layout, factor):
    """Each rank has a part of the gradient; all must scale it by the norm of all parts together."""
    values, ran = cases(name).parameters, Ran(cases(name), parts, layout=layout)
    gradients = {weight: factor * gradient for weight, gradient in by_hand(values)[1].items()}
    norm = np.sqrt(sum(np.sum(np.square(one, dtype=np.float64)) for one in gradients.values()))
    assert norm > 0.1
    np.testing.assert_allclose(ran.parameter("gaccum_ms.grad_norm"), [norm] * RANKS, rtol=1e-4)
    for weight, gradient in gradients.items():
        clipped = values[weight] - np.float32(0.1) * gradient * (0.1 / norm)
        for rank, after in enumerate(ran.parameter(weight)):
            part = rows(after.shape)(clipped, rank) if layout is None else part_of(layout, weight, clipped, rank)
            np.testing.assert_allclose(after, part, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "parts", "layout"),
    [
        ("scale", RANKS, None),
        ("split, scale", 4, SPLIT),
        ("lazy, split, scale", 4, SPLIT),
        ("optimizer parallel, scale", RANKS, None),
    ],
)
def test_an_overflow_on_one_rank_is_one_on_all(cases, name, parts, layout):
    """The machine stops where ranks take different ways; here they take the same, and none updates."""
    x = X.copy()
    x[3] = np.inf  # a sample of one rank, or of two that share it
    ran = Ran(cases(name), parts, batch=(x, Y), layout=layout)
    assert all(result[1] for result in ran.results)
    case = cases(name)
    for weight in WEIGHTS:
        for rank, after in enumerate(ran.parameter(weight)):
            whole = case.parameters[weight]
            part = part_of(layout, weight, whole, rank) if layout else rows(after.shape)(whole, rank)
            assert np.array_equal(after, part)
    assert [float(one.reshape(())) for one in ran.parameter("gaccum_ms.scale_sense")] == [512.0] * RANKS
    fine = Ran(cases(name), parts, layout=layout)
    assert not any(result[1] for result in fine.results)
    assert not np.array_equal(fine.parameter("second")[0], ran.parameter("second")[0])


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *(f"ours, {k}" for k in (1, 4, 16)),
        *(f"optimizer parallel, {k}" for k in (1, 4, 16)),
        *("lazy, 4", "lazy, 16", "per sample, 16"),
    ],
)
def test_gradients_are_reduced_once_per_weight_and_update(cases, name):
    assert len(Ran(cases(name)).gradient_collectives()) == len(WEIGHTS)


@pytest.mark.parametrize("k", [4, 16])
def test_no_input_is_gathered(cases, k):
    assert Ran(cases(f"ours, {k}")).counts["AllGather"] == 0
    assert Ran(cases(f"framework, {k}")).counts["AllGather"] == 2  # MindSpore's own cell: each input


def test_no_input_is_gathered_where_nobody_says_how_many_devices_there_are(cases):
    assert Ran(cases("context by init")).counts["AllGather"] == 0


def test_no_fusion_joins_the_losses_reductions(cases, plain):
    """The experiment with MindSpore's own means: its fusion of AllReduces takes those that have one ``fusion`` number,
    as gradients have; a loss's has 0, "alone", also where fusion is on."""
    ran = Ran(cases("communication fused"))
    losses = [one.node for one in ran.machine.executed if one.node.op == "AllReduce" and not one.node.shape]
    assert len(losses) == 4 + 1  # of four micro-batches, and the loss's backward
    assert all(node.attribute("fusion") == 0 for node in losses)
    assert all(one.node.attribute("fusion") for one in ran.gradient_collectives())


@pytest.mark.parametrize("k", [1, 4, 16])
def test_losses_per_sample_are_reduced_once(cases, plain, k):
    """As many collectives as the whole batch has: one for each weight, one for the loss, and the loss's backward."""
    assert Ran(cases(f"per sample, {k}")).counts["AllReduce"] == plain.counts["AllReduce"]


@pytest.mark.parametrize("k", [4, 16])
def test_a_scalar_loss_is_reduced_by_each_micro_batch(cases, plain, k):
    """What the compiler's passes do to a mean that the network takes itself, in MindSpore's own cell as well: the
    sum over devices is part of the mean's own operator, and no pass moves it behind the Add that follows."""
    for name in (f"ours, {k}", f"framework, {k}", f"lazy, {k}"):
        assert Ran(cases(name)).counts["AllReduce"] >= plain.counts["AllReduce"] + k - 1


def test_optimizer_parallel_scatters_gradients_and_keeps_a_part_of_the_weights(cases):
    for name in ("optimizer parallel, 4", "sharded gradients"):
        ran, case = Ran(cases(name)), cases(name)
        assert ran.counts["ReduceScatter"] > 0
        for state in ("second", "accum.second"):
            assert ran.parameter(state)[0].size == case.parameters[state].size // RANKS


def test_sharded_gradients_need_a_part_of_the_accumulators(cases):
    whole = cases("sharded gradients").parameters["accu_grads.second"].size
    assert Ran(cases("sharded gradients")).parameter("accu_grads.second")[0].size == whole // RANKS
    assert Ran(cases("optimizer parallel, 4")).parameter("accu_grads.second")[0].size == whole


# -- accumulators and order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "k"), [("ours, 4", 4), ("ours, 16", 16), ("lazy, 16", 16), ("per sample, 4", 4)])
def test_accumulators_are_added_to_micro_size_times_and_cleared_once(cases, name, k):
    ran = Ran(cases(name))
    if "lazy" not in name:  # where a Parameter has another name in the network's graph
        assert ran.adds() == {f"accu_grads.{weight}": k for weight in WEIGHTS}
    assert sum(executed.node.op == "AssignAdd" for executed in ran.machine.executed) == k * len(WEIGHTS) + 3
    cleared = [
        one for one in ran.machine.executed if one.node.op == "Assign" and "value=[...]" in one.node.arguments[1]
    ]
    assert len(cleared) == len(WEIGHTS)


def test_one_micro_batch_has_no_accumulators(cases):
    assert not any(name.startswith("accu_grads.") for name in cases("ours, 1").parameters)


def needs(program):
    """For each node of the entry, all nodes that must have run before."""
    before = {}
    for node in program.entry.nodes:
        direct = {one for one in node.arguments if one in before}
        before[node.name] = direct.union(*(before[one] for one in direct))
    return before


@pytest.mark.parametrize("name", ["ours, 4", "ours, 16", "per sample, 4"])
def test_a_micro_batchs_forward_waits_for_the_backward_before_it(cases, name):
    program = cases(name).program
    before = needs(program)
    nodes = {node.name: node for node in program.entry.nodes}
    begins = {}
    for node in program.entry.nodes:
        if node.op == "StridedSlice" and (micro := node.attribute("micro")) is not None:
            begins.setdefault(micro, []).append(node.name)
    assert sorted(begins) == list(range(len(begins)))
    for micro in range(1, len(begins)):
        for begin in begins[micro]:
            waited_for = [nodes[one] for one in before[begin] if nodes[one].attribute("micro") == micro - 1]
            assert any(
                node.attribute("grad_accu_backward_end") == micro - 1 and "grad" in node.scope.lower()
                for node in waited_for
            ), f"micro-batch {micro} does not wait"


def ready_first(program):
    """The nodes in the order in which a back end runs them that takes whatever is ready, first come, first served."""
    waiting = {
        node.name: {one for one in node.arguments if one.startswith("%") and not one.startswith("%para")}
        for node in program.entry.nodes
    }
    users = {}
    for name, needed in waiting.items():
        for one in needed:
            users.setdefault(one, []).append(name)
    queue = [name for name, needed in waiting.items() if not needed]
    order = []
    while queue:
        name = queue.pop(0)
        order.append(name)
        for user in users.get(name, ()):
            waiting[user].discard(name)
            if not waiting[user]:
                queue.append(user)
    return order, users


@pytest.mark.parametrize("name", ["ours, 4", "ours, 16", "per sample, 4"])
def test_activations_of_one_micro_batch_live_at_a_time(cases, name):
    """Run ready first: when the next micro-batch begins, all that is left of one is a gradient on its way into its
    accumulator, and its losses on their way into the batch's."""
    program = cases(name).program
    order, users = ready_first(program)
    nodes = {node.name: node for node in program.entry.nodes}
    before = needs(program)
    slices = {one.name for one in program.entry.nodes if one.op == "StridedSlice"}
    done, begun = set(), set()
    for one in order:
        micro = nodes[one].attribute("micro")
        if nodes[one].op == "StridedSlice" and micro not in begun:
            begun.add(micro)
            for earlier in done:
                left = [nodes[user].op for user in users.get(earlier, ()) if user not in done]
                of_samples = before[earlier] & slices and nodes[earlier].attribute("micro") == micro - 1
                if of_samples and np.prod(nodes[earlier].shape) > 1:
                    done_with = {"AssignAdd", "Add", "MakeTuple", "Depend", "UpdateState"}
                    assert set(left) <= done_with, f"{nodes[earlier]} is still to go to {left}"
        done.add(one)
    assert begun == set(range(int(name.split(", ")[1])))


def test_lazy_inline_bounds_what_is_compiled(cases):
    """The time that it takes is in the benchmark, `python -m benchmarks.semi_auto` ."""

    def nodes(name):
        return sum(len(graph.nodes) for graph in cases(name).program.graphs.values())

    programs = [cases(f"lazy deep, {k}").program for k in (2, 16)]
    forward = [max(len(graph.nodes) for graph in one.graphs.values() if graph is not one.entry) for one in programs]
    assert abs(forward[0] - forward[1]) < 5  # the network is there once, however often it is called
    added, added_lazily = nodes("deep, 16") - nodes("deep, 2"), nodes("lazy deep, 16") - nodes("lazy deep, 2")
    assert added_lazily < added / 2  # what is left are slices and sums


def test_the_mean_of_sharded_gradients_is_refused(cases):
    """MindSpore's own cell takes the mean over ranks of weights that lie whole on each, and the sum of the others."""
    assert "gradients_mean" in cases("sharded gradients, mean").message
    theirs, whole = Ran(cases("sharded gradients, mean, framework")), Ran(cases("plain, optimizer parallel"))
    before = cases("plain").parameters
    moved = {
        name: [
            np.abs(before[name][:4].ravel()[:4] - ran.parameter(name)[0][:4].ravel()[:4]).sum()
            for ran in (theirs, whole)
        ]
        for name in WEIGHTS
    }
    assert moved["first"][0] == pytest.approx(moved["first"][1], rel=1e-3)
    assert moved["second"][0] == pytest.approx(RANKS * moved["second"][1], rel=1e-3)


# -- what is refused, before the compiler refuses it -------------------------------------------------------------------


def test_casts_of_weights_need_lazy_inline(cases):
    assert "the casts of weights" in cases("half").message
    assert "Cannot find micro info" in cases("half, framework").message  # what MindSpore says of its own cell
    assert cases("half, lazy").program.entry.nodes
    assert cases("half, lazy inside").program.entry.nodes


def test_auto_parallel_goes_around_the_cell(cases):
    assert "put it around the cell and not around the step" in cases("AutoParallel around the step").message


def test_an_autoparallels_own_settings_are_looked_at(cases):
    assert "'pipeline_stages' must be 1, but got 2" in cases("AutoParallel, pipeline").message
