"""The contents of our step's graphs, compiled by MindSpore for eight devices: collectives, accumulators, and the order
of micro-batches."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.semi_auto.finished_graph import COLLECTIVES
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


@pytest.mark.parametrize(
    ("name", "reduced", "gathered"),
    [("plain", 4, 0), ("ours, 4", 8, 0), ("per sample, 4", 4, 0), ("framework, 4", 8, 2)],
)
def test_an_update_has_as_many_collectives_as_docs_parallel_shows(cases, name, reduced, gathered):
    """If the network takes the mean itself, the sum over devices is part of the mean's operator, in MindSpore's own
    cell too. No pass of the compiler moves it behind the Add that follows."""
    ran = Ran(cases(name))
    counts = {kind: ran.counts[kind] for kind in COLLECTIVES if ran.counts[kind]}
    assert counts == {"AllReduce": reduced} | ({"AllGather": gathered} if gathered else {})
    assert len(ran.gradient_collectives()) == len(WEIGHTS)


@pytest.mark.parametrize(("name", "accumulators"), [("ratio, clip, op", 1), ("sum, count, sg", RANKS)])
def test_optimizer_parallel_scatters_gradients_and_keeps_a_part_of_the_weights(cases, name, accumulators):
    """And with `gradient_accumulation_shard` a part of the accumulators."""
    ran = Ran(cases(name))
    assert ran.counts["ReduceScatter"] > 0
    for state, parts in ("", RANKS), ("accum.", RANKS), ("accu_grads.", accumulators):
        name = f"{state}{WEIGHTS[-1]}"
        assert ran.parameter(name)[0].size == ran.values[name].size // parts


def test_accumulators_are_added_to_micro_size_times_and_cleared_once(cases):
    executed = Ran(cases("ours, 4")).executed
    added = Counter(node.arguments[0].split("_", 1)[1] for node in executed if node.op == "AssignAdd")
    assert {name: number for name, number in added.items() if "accu_grads" in name} == {
        f"accu_grads.{weight}": 4 for weight in WEIGHTS
    }
    cleared = [node for node in executed if node.op == "Assign" and "value=[...]" in node.arguments[1]]
    assert len(cleared) == len(WEIGHTS)


def test_lazy_inline_compiles_the_network_once(cases):
    case = cases("sum, count, sg")
    compiled = sum(node.op == "MatMul" for graph in case.program.graphs.values() for node in graph.nodes)
    assert Ran(case).counts["MatMul"] == 4 * compiled


def test_a_micro_batchs_forward_waits_for_the_backward_before_it(cases):
    """So that the activations of one micro-batch live at a time."""
    nodes, before = cases("ours, 4").program.entry.nodes, {}
    for node in nodes:  # all nodes that must have run before
        direct = {one for one in node.arguments if one in before}
        before[node.name] = direct.union(*(before[one] for one in direct))
    begins = {(node.attribute("micro"), node.name) for node in nodes if node.op == "StridedSlice"}
    ends = {(node.attribute("grad_accu_backward_end"), node.name) for node in nodes if "grad" in node.scope.lower()}
    assert {micro for micro, _ in begins} == set(range(4))
    for micro, begin in begins:
        of_last = {end for earlier, end in ends if earlier == micro - 1}
        assert micro == 0 or before[begin] & of_last, f"micro-batch {micro} does not wait"
