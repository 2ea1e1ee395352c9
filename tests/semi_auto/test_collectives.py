"""The contents of our step's graphs, compiled by MindSpore for eight devices: collectives, accumulators, and the order
of micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.finished_graph import COLLECTIVES
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.core("ours, 4")
@pytest.mark.parametrize(
    "name",
    ["ours, 1", "ours, 4", "ours, 16", "optimizer parallel, 1", "optimizer parallel, 4", "lazy, 4", "per sample, 4"],
)
def test_gradients_are_reduced_once_per_weight_and_update(cases, name):
    assert len(Ran(cases(name)).gradient_collectives()) == len(WEIGHTS)


@pytest.mark.thorough
def test_no_fusion_joins_the_losses_reductions(cases):
    """MindSpore's own fusion joins AllReduces that have the same ``fusion`` number, as gradients have. A loss's
    AllReduce has 0, "alone", even if fusion is on."""
    ran = Ran(cases("communication fused"))
    losses = [one.node for one in ran.machine.executed if one.node.op == "AllReduce" and not one.node.shape]
    assert len(losses) == 4 + 1  # of four micro-batches, and the loss's backward
    assert all(node.attribute("fusion") == 0 for node in losses)
    assert all(one.node.attribute("fusion") for one in ran.gradient_collectives())


@pytest.mark.core(name=["plain", "ours, 4", "per sample, 4"])
@pytest.mark.parametrize(
    ("name", "reduced", "gathered"),
    [
        *(("plain", 4, 0), ("per sample, 1", 4, 0), ("per sample, 4", 4, 0), ("per sample, 16", 4, 0)),
        *(("ours, 4", 8, 0), ("ours, 16", 20, 0), ("lazy, 4", 11, 0)),
        ("context by init", 8, 0),  # nobody says how many devices there are
        *(("framework, 4", 8, 2), ("framework, 16", 20, 2)),
    ],
)
def test_an_update_has_as_many_collectives_as_docs_parallel_shows(cases, name, reduced, gathered):
    """If the network takes the mean itself, the sum over devices is part of the mean's operator, in MindSpore's own
    cell too. No pass of the compiler moves it behind the Add that follows."""
    ran = Ran(cases(name))
    counts = {kind: ran.counts[kind] for kind in COLLECTIVES if ran.counts[kind]}
    assert counts == {"AllReduce": reduced} | ({"AllGather": gathered} if gathered else {})


@pytest.mark.thorough
def test_optimizer_parallel_scatters_gradients_and_keeps_a_part_of_the_weights(cases):
    for name in ("optimizer parallel, 4", "sharded gradients"):
        ran, case = Ran(cases(name)), cases(name)
        assert ran.counts["ReduceScatter"] > 0
        for state in ("second", "accum.second"):
            assert ran.parameter(state)[0].size == case.parameters[state].size // RANKS


@pytest.mark.thorough
def test_sharded_gradients_need_a_part_of_the_accumulators(cases):
    whole = cases("sharded gradients").parameters["accu_grads.second"].size
    assert Ran(cases("sharded gradients")).parameter("accu_grads.second")[0].size == whole // RANKS
    assert Ran(cases("optimizer parallel, 4")).parameter("accu_grads.second")[0].size == whole


# -- accumulators and order --------------------------------------------------------------------------------------------


@pytest.mark.core(name=["ours, 4", "per sample, 4"])
@pytest.mark.parametrize(("name", "k"), [("ours, 4", 4), ("ours, 16", 16), ("lazy, 4", 4), ("per sample, 4", 4)])
def test_accumulators_are_added_to_micro_size_times_and_cleared_once(cases, name, k):
    ran = Ran(cases(name))
    if "lazy" not in name:  # there a Parameter has another name in the network's graph
        assert ran.adds() == {f"accu_grads.{weight}": k for weight in WEIGHTS}
    assert sum(executed.node.op == "AssignAdd" for executed in ran.machine.executed) == k * len(WEIGHTS) + 3
    cleared = [
        one for one in ran.machine.executed if one.node.op == "Assign" and "value=[...]" in one.node.arguments[1]
    ]
    assert len(cleared) == len(WEIGHTS)


def needs(program):
    """For each node of the entry, all nodes that must have run before."""
    before = {}
    for node in program.entry.nodes:
        direct = {one for one in node.arguments if one in before}
        before[node.name] = direct.union(*(before[one] for one in direct))
    return before


@pytest.mark.core("ours, 4")
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
    """The nodes in the order of a back end that runs them as they become ready, and each node's users."""
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


@pytest.mark.core("ours, 4")
@pytest.mark.parametrize("name", ["ours, 4", "ours, 16", "per sample, 4"])
def test_activations_of_one_micro_batch_live_at_a_time(cases, name):
    """In the order of `ready_first` , when a micro-batch begins, only gradients on their way into accumulators, and
    losses on their way into the batch's loss, remain of the one before."""
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


@pytest.mark.thorough
def test_lazy_inline_bounds_what_is_compiled(cases):
    programs = [cases(f"lazy deep, mean, {k}").program for k in (2, 8)]
    forward = [max(len(graph.nodes) for graph in one.graphs.values() if graph is not one.entry) for one in programs]
    assert abs(forward[0] - forward[1]) < 5  # the network is there once for all its calls
    added, added_lazily = (
        cases(f"{name}, 8").nodes - cases(f"{name}, 2").nodes for name in ("deep, mean", "lazy deep, mean")
    )
    assert added_lazily < added / 2  # only slices and sums are added
