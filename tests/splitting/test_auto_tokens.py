"""``MaxTokens("auto")``: it finds what fits on all widths, and trains as with the same number given. If memory runs out
in training: ranks/test_tokens_ranks.py."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import AutoSize, CountNotIgnored, GradAccumulationCell, find_micro_batch_size, memory_report
from gaccum_ms.memory.trial import Trials
from tests.splitting.test_max_tokens import DATA, IGNORED, LENGTH, Causal, batch, max_tokens, run, step_of, whole_step
from tests.support.modes import eagerly

PLENTY = 1 << 40


class Limited(nn.Cell):
    """Raises MindSpore's out-of-memory error for micro-batches of more than `tokens` tokens or `rows` rows."""

    def __init__(self, tokens=10**6, rows=10**6):
        super().__init__()
        self.network = Causal()
        self.tokens, self.rows = tokens, rows

    def construct(self, tokens, labels):
        if tokens.shape[0] * tokens.shape[1] > self.tokens or tokens.shape[0] > self.rows:
            raise RuntimeError("std::bad_alloc")
        return self.network(tokens, labels)


def test_finds_the_number_that_fits_on_all_widths_once(monkeypatch):
    """Of 20 samples, four rows of width 24 would fit, which are 96 tokens; but at width 12, these are eight rows."""
    tried, one_trial = [], Trials.run
    monkeypatch.setattr(Trials, "run", lambda self, size: tried.append(size) or one_trial(self, size))
    data = [batch(seed) for seed in range(2)]
    split = max_tokens(max_tokens=AutoSize(PLENTY), widths=(12, LENGTH))
    step = step_of(split, Limited(rows=5))
    assert step.split.max_tokens is None
    losses = run(step, data)
    assert split.max_tokens is None
    assert step.split.max_tokens == 2 * LENGTH
    assert tried == [1, 2, 4, 3]
    assert len(step._runner.runner._graph.compile_cache) == 2
    with eagerly():
        np.testing.assert_allclose(losses, run(whole_step(), data), rtol=1e-5)


def test_the_worst_case_is_a_full_micro_batch_of_each_width():
    tokens, labels = DATA[0]
    lengths = (tokens != 0).sum(1)
    worst = max_tokens(widths=(4, 12, LENGTH)).worst_case(Tensor(tokens), Tensor(labels))
    number = [(lengths <= 4).sum(), ((lengths > 4) & (lengths <= 12)).sum(), (lengths > 12).sum()]
    assert worst.multiple_of == LENGTH
    assert worst.most == max(-(-count * width // LENGTH) for count, width in zip(number, (4, 12, LENGTH), strict=True))
    parts = worst.of(4 * LENGTH)()
    assert [part[0].shape for part in parts] == [(24, 4), (8, 12), (4, LENGTH)]
    for width, (of_tokens, of_labels) in zip((4, 12, LENGTH), parts, strict=True):
        found = (of_tokens.asnumpy() != 0).sum(1)
        assert found.max() == lengths[lengths <= width].max()
        assert (of_labels.asnumpy() != IGNORED).any()
    short = np.where(np.arange(LENGTH) < 4, tokens[:7], 0)
    assert max_tokens(widths=(4, LENGTH)).worst_case(Tensor(short), Tensor(labels[:7])).most == 2, "28 of 24 tokens"


def test_what_is_refused(pynative):
    network = Causal()
    with pytest.raises(TypeError, match="'max_tokens' must be an int, but got 'automatic'"):
        max_tokens(max_tokens="automatic")
    with pytest.raises(ValueError, match=r"'widths' must be ascending, from 1 on, but got \[8, 4\]"):
        max_tokens(max_tokens="auto", widths=[8, 4])
    with pytest.raises(RuntimeError, match="'max_tokens' must be known before a batch is split, but got 'auto'"):
        max_tokens(max_tokens="auto")(*map(Tensor, DATA[0]))
    cell = GradAccumulationCell(network, split=max_tokens(max_tokens="auto"), count=CountNotIgnored(IGNORED))
    optimizer, batch = nn.SGD(network.trainable_params(), 0.1), tuple(map(Tensor, DATA[0]))
    with pytest.raises(ValueError, match="each number is a row of the report, but got 'split' of class 'MaxTokens'"):
        memory_report(cell, optimizer, *batch)
    with pytest.raises(ValueError, match="must be so many samples of the batch"):
        function = GradAccumulationCell(network, split=lambda *batch: [batch])
        find_micro_batch_size(function, optimizer, batch)
    with pytest.raises(ValueError, match=r"got widths \[4, 9\], max_tokens=auto and a sample of 24 tokens"):
        run(step_of(max_tokens(max_tokens="auto", widths=[4, 9])), DATA[:1])
