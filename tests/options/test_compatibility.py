"""The table of options that do not go together: each rule can refuse something, and the docs have the same table."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import pytest
from mindspore import nn

from gaccum_ms import CountMask, EvenSplit, MaxTokens, WindowBatchNorm, WithBatchLossCell
from gaccum_ms.options.compatibility import RULES, Setup
from gaccum_ms.options.compatibility import refused as first_refused
from gaccum_ms.options.options import Options
from gaccum_ms.options.rules import AUDIT, CELL, IN_ONE_GRAPH, REPORT, SEMI_AUTO, SPAN_LATER, TRIAL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
TWO = {"loss_weights": (1.0, 0.5)}
THREE = {"loss_weights": (1.0,) * 3, "count": (None, None, CountMask())}
AUTO = {"micro_batch_size": "auto"}
BY_FUNCTION = {"split": lambda *batch: [batch]}


# For each rule, in order: options that break it and no rule before it, the words of the error, and "batch" for a loss
# of the batch, "distributed" for semi-auto and auto parallel mode, or "pools" for a network with WindowBatchNorm.
BROKEN = [
    ({"reduction": "sum", **TWO}, "reduction='sum' with 'loss_weights' needs .* got count=None"),
    ({"reduction": "ratio", "count": CountMask()}, r"reduction='ratio' .* got count=CountMask.*, 1 loss.es. and"),
    ({"min_count": 1.0}, "least count of items .* got min_count=1.0, count=None, reduction='mean' and a network"),
    ({"overflow": "drop_micro_batch", **TWO}, "drop_micro_batch' divides .* got 2 loss.es., reduction='mean'"),
    ({"accumulation_steps": 2, **TWO}, "must be 1 .* got accumulation_steps=2 and 2 losses"),
    ({"shard_accumulators": True, **TWO}, "reduces each micro-batch .* got 2 loss.es. and overflow='drop_window'"),
    ({"record_noise": True, "reduction": "sum"}, "'record_noise' .* got 1 loss.es., reduction='sum', count=None"),
    (THREE, "pools a micro-batch's statistics in each forward, .* but got 3 losses. Add", "pools"),
    ({"aux": True, **TWO}, "aux=True the network must return one loss .* got 2 loss.es. and .* 'WithLossCell'"),
    ({"accumulation_steps": 3}, "'accumulation_steps' must be 1, but got 3: the loss needs", "batch"),
    ({"count": (CountMask(),)}, r"'count' must be None, but got CountMask\(\): the loss is", "batch"),
    (TWO, r"'loss_weights' must be \(1.0,\), but got \(1.0, 0.5\): add", "batch"),
    ({"record_noise": True}, "'record_noise' must be False, but got True: a micro-batch's", "batch"),
    ({"overflow": "drop_micro_batch"}, "'overflow' must be 'drop_window', but got 'drop_micro_batch': a", "batch"),
    ({"memory_limit": 5}, "'memory_limit' is for .* got memory_limit=5 and micro_batch_size=None"),
    ({"is_out_of_memory": "x"}, "got is_out_of_memory='x' and micro_batch_size=None. Leave it out"),
    ({**AUTO, "jit": False}, "compiles in PyNative mode too, .* got jit=False. Leave 'jit' out"),
    ({**AUTO, "shard_accumulators": True}, "got 1 loss.es., shard_accumulators=True .* class 'WithLossCell'"),
    ({"split": MaxTokens(8, 0)}, "fills micro-batches up with rows of padding, .* but got count=None"),
    ({"split": MaxTokens("auto", 0), "count": CountMask(), "jit": False}, "compiles in PyNative mode .* got jit=False"),
    ({**BY_FUNCTION, "shard_accumulators": True}, "got 1 loss.es., shard_accumulators=True .* class 'WithLossCell'"),
    (AUTO, "needs Python between the batches, .* but the training step is part of another graph"),
    ({}, "need graph mode, because .* but got PyNative mode. Use"),
    ({}, "which take each micro-batch once, but got a network of class", "batch"),
    ({"micro_batch_size": 2}, "'micro_batch_size' must be None, but got 2: the compiler"),
    ({"accumulation_steps": 2}, "'accumulation_steps' must be 1, but got 2: the compiler"),
    ({"compensated": True}, "'compensated' must be False, but got True: .* Data parallel mode has no such limit"),
    ({"shard_accumulators": True}, "'shard_accumulators' must be False, but got True: the compiler"),
    ({"overflow": "drop_micro_batch"}, "must be 'drop_window', but got 'drop_micro_batch': the compiler"),
    ({"transforms": (abs,)}, r"'transforms' must be \(\), but got \(<built-in function abs>,\): a gradient is one"),
    ({"record_noise": True}, "'record_noise' must be False, but got True: the compiler"),
    ({"aux": True}, "'aux' must be False, but got True: the compiler"),
    (TWO, r"'loss_weights' must be \(1.0,\), but got \(1.0, 0.5\): the compiler"),
    ({"reduction": "ratio"}, "'reduction' must be 'mean' or 'sum', but got 'ratio': the compiler"),
    ({}, "that outlive a batch, but in semi-auto and auto parallel mode the compiler reduces", "distributed"),
    (TWO, "need a network of one loss, .* but got one of several losses.$"),
    ({}, "need a loss that is a mean or sum .* 'WithBatchLossCell', whose", "batch"),
    (AUTO, "but got micro_batch_size='auto'. Give 'micro_size'"),
    ({}, "that one micro-batch can be tried with, but got a 'WithBatchLossCell'", "batch"),
    ({}, "must be 'stand_alone' or 'data_parallel', but got 'stand_alone': there", "distributed"),
    (BY_FUNCTION, "needs Python at each batch, .* but the training step is part of another graph"),
    (
        {"split": EvenSplit(shared=(1,))},
        r"or EvenSplit\(\), but got EvenSplit\(shared=\(1,\), axis=0\): the",
    ),
    (BY_FUNCTION, "must be the network's inputs, .* but got a function as 'split': only"),
    (BY_FUNCTION, "must be so many samples of the batch, .* but got a function as 'split': only"),
    ({"split": MaxTokens("auto", 0)}, r"must be given, because .* but got MaxTokens\('auto', ...\). Give a number"),
    ({"split": MaxTokens(8, 0)}, "each number is a row of the report, but got 'split' of class 'MaxTokens', whose"),
]


@pytest.mark.parametrize("number", range(len(RULES)))
def test_each_rule_has_its_own_error(number):
    rule, (options, words, *kind) = RULES[number], BROKEN[number]
    net = nn.Dense(1, 1)
    network = WithBatchLossCell(net, net) if kind == ["batch"] else nn.WithLossCell(net, nn.MSELoss())
    if kind == ["pools"]:
        network = nn.WithLossCell(nn.SequentialCell(WindowBatchNorm(1), net), nn.MSELoss())
    setup = Setup(Options(**options), network, kind == ["distributed"])
    ms.set_context(mode=ms.PYNATIVE_MODE if "PyNative" in rule.what else ms.GRAPH_MODE)
    error = first_refused(rule.place, "Owner", setup)
    assert type(error) is rule.error
    with pytest.raises(rule.error, match=f"For 'Owner', .*{words}"):
        raise error
    assert str(error) == rule.message("Owner", setup)


def test_each_rule_has_an_example():
    assert len(BROKEN) == len(RULES)


@pytest.mark.parametrize("place", [CELL, SEMI_AUTO, SPAN_LATER, IN_ONE_GRAPH, AUDIT, TRIAL, REPORT])
def test_the_plain_options_go_together_everywhere(place):
    ms.set_context(mode=ms.GRAPH_MODE)
    assert first_refused(place, "Owner", Setup(Options(micro_size=2), nn.Dense(1, 1))) is None


def reason(text):
    """The part of a rule's text in the docs: the reason and the remedy."""
    must_be, _, rest = text.partition(", but ")
    given, _, remedy = rest.partition(". ")
    why = given.partition(": ")[2] or must_be
    return f"{why.removesuffix('.')}. {remedy}".strip()


def table():
    rows = [(rule.what, rule.beside, reason(rule.text)) for rule in RULES]
    lines = [("what", "does not go with", "because, and what to do instead"), ("---",) * 3, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_page_has_the_table():
    """`python tests/options/test_compatibility.py` prints the table."""
    assert table() in PAGE.read_text()


if __name__ == "__main__":
    print(table())
