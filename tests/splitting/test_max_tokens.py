"""MaxTokens: training gives the weights of the whole padded batch, with at most one graph for each width; errors."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountNotIgnored, EvenSplit, GradAccumulationCell, MaxTokens, audit, resume
from tests.support.modes import eagerly
from tests.support.reference import as_numpy, make_step, relative_error
from tests.support.state import assert_identical, everything

VOCABULARY, LENGTH, WIDTH, IGNORED = 23, 24, 8, -100


class Causal(nn.Cell):
    """Each place sees the mean of all places up to it. The loss is a mean over the labels that are not padding."""

    def __init__(self, reads_padding=False):
        super().__init__()
        random = np.random.default_rng(5)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = ms.Parameter(Tensor(random.normal(size=(LENGTH, WIDTH)), ms.float32), name="position")
        self.out = nn.Dense(WIDTH, VOCABULARY)
        self.loss = nn.CrossEntropyLoss()
        self.reads_padding = reads_padding
        for one in self.trainable_params():
            one.set_data(Tensor(random.normal(size=one.shape) * 0.3, ms.float32))

    def construct(self, tokens, labels):
        width = tokens.shape[1]
        x = self.embedding(tokens) + self.position[:width]
        if self.reads_padding:
            x = x + x.mean(1, keep_dims=True)
        x = x + ops.cumsum(x, 1) / ops.arange(1, width + 1).reshape((1, -1, 1))
        return self.loss(self.out(ops.tanh(x)).reshape((-1, VOCABULARY)), labels.reshape((-1,)))


def batch(seed, samples=20, width=LENGTH):
    """Sequences of lengths from 1 to `width` , one of them full, one without a label."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.uniform(np.log(2), np.log(width), samples)).astype(int)
    lengths[random.permutation(samples)[:2]] = width, 1
    tokens = random.integers(1, VOCABULARY, (samples, width)).astype(np.int32)
    labels = random.integers(0, VOCABULARY, (samples, width)).astype(np.int32)
    tokens[np.arange(width) >= lengths[:, None]] = 0
    labels[np.arange(width) >= lengths[:, None] - 1] = IGNORED
    return tokens, labels


def length_of(tokens, labels):
    return (tokens != 0).sum(1)


def max_tokens(**options):
    return MaxTokens(**{"max_tokens": 48, "length": length_of, "widths": 3, **options})


def momentum(weights):
    return nn.Momentum(weights, 0.3, 0.9)


def step_of(split=None, network=None, scale=None, **options):
    options = {"count": CountNotIgnored(IGNORED), "split": split or max_tokens(), **options}
    return make_step(network or Causal(), momentum, scale, **options)


def whole_step():
    """MindSpore's step on the whole padded batch."""
    network = Causal()
    return nn.TrainOneStepCell(network, momentum(network.trainable_params())).set_train()


def run(step, data):
    losses = []
    for one in data:
        loss = step(*map(Tensor, one))
        losses.append(float((loss[0] if isinstance(loss, tuple) else loss).asnumpy()))
    return losses


def assert_alike(step, other):
    for ours, theirs in ((step.weights, other.weights), (step.optimizer.moments, other.optimizer.moments)):
        for one, whole in zip(ours, theirs, strict=True):
            assert relative_error(as_numpy(one), as_numpy(whole)) < 1e-5, one.name


def assert_refuses(step, batch, why):
    """It refuses a batch, which changes nothing."""
    before = everything(step)
    with pytest.raises(ValueError, match=why):
        run(step, [batch])
    assert_identical(everything(step), before)


DATA = [batch(seed) for seed in range(4)]


def test_equals_the_whole_padded_batch_in_at_most_as_many_graphs_as_widths(mode):
    split = max_tokens(widths=2)
    step = step_of(split)
    losses = run(step, DATA)
    with eagerly():
        whole = whole_step()
        np.testing.assert_allclose(losses, run(whole, DATA), rtol=1e-5)
    assert_alike(step, whole)
    assert step.split.widths[-1] == LENGTH
    assert len(step.split.widths) == 2
    if mode == "graph":
        run(step, [batch(seed, samples) for seed, samples in enumerate((2, 3, 11, 40, 64), start=50)])
        assert len(step._runner._graph.compile_cache) == 2, "whatever comes"
        assert len(step.end_window.compile_cache) == 1


class Tokens(nn.Cell):
    """Outputs for each token, alone and with features; features that are as many as the tokens of a width by chance; a
    number for each sample, and one for all."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(8), ms.float32), name="weight")

    def construct(self, tokens, labels):
        found = tokens.astype(ms.float32)
        valid = (labels != IGNORED).astype(ms.float32)
        loss = (found * valid * self.weight.sum()).sum() / valid.sum()
        features = found.sum(1, keepdims=True) * self.weight
        of_samples = (tokens != 0).sum(1).astype(ms.int32)
        return loss, found, found.expand_dims(2) * self.weight, features, of_samples, loss * 2


def test_outputs_come_back_in_the_batchs_order_at_its_own_width(pynative):
    """Each batch is padded to its own longest sequence, which may be less than the widths."""
    options = {"split": max_tokens(widths=[3, 8, LENGTH]), "count": CountNotIgnored(IGNORED), "aux": True}
    step = make_step(Tokens(), lambda weights: nn.SGD(weights, 0.0), **options)
    for number, width in enumerate((8, LENGTH)):
        tokens, labels = batch(number, 7, width)
        loss, *outputs = [output.asnumpy() for output in step(Tensor(tokens), Tensor(labels))]
        numbers = tokens.astype(np.float32)
        np.testing.assert_array_equal(outputs[0], numbers)
        np.testing.assert_array_equal(outputs[1], np.repeat(numbers[:, :, None], 8, axis=2))
        np.testing.assert_array_equal(outputs[2], np.repeat(numbers.sum(1, keepdims=True), 8, axis=1))
        np.testing.assert_array_equal(outputs[3], (tokens != 0).sum(1))
        np.testing.assert_allclose(outputs[4], 2 * loss, rtol=1e-6)
    assert int(step.update_count.asnumpy()) == 2


def test_in_windows_tails_and_after_a_resume_in_mid_window(tmp_path, pynative):
    even = step_of(EvenSplit(), micro_size=2, accumulation_steps=3)
    step = step_of(accumulation_steps=3)
    run(even, DATA), even.flush()
    run(step, DATA[:2])
    ms.save_checkpoint(step, str(tmp_path / "window.ckpt"))
    other = step_of(max_tokens(max_tokens=100, widths=2), accumulation_steps=3)
    resume(other, tmp_path / "window.ckpt")
    run(other, DATA[2:])
    assert other.flush()
    assert_alike(other, even)


def test_masks_weights_and_what_has_no_tokens_are_cut_as_the_tokens_are():
    random = np.random.default_rng(0)
    tokens, labels = batch(3, 6)
    mask = random.integers(0, 2, (6, LENGTH, LENGTH)).astype(bool)
    weight, features = random.normal(size=6).astype(np.float32), random.normal(size=(6, LENGTH, 4)).astype(np.float16)
    inputs = (tokens, labels, mask, weight, features)
    split = MaxTokens(60, lambda tokens, *_: (tokens != 0).sum(1), [6, LENGTH], axes={2: (1, 2)})
    parts = split(*map(Tensor, inputs))
    for (width, rows), part in zip(split.plan.micro_batches, parts, strict=True):
        arrays = [one.asnumpy() for one in part]
        shapes = [(rows.size, width), (rows.size, width), (rows.size, width, width), (rows.size,)]
        assert [one.shape for one in arrays] == [*shapes, (rows.size, width, 4)]
        assert [one.dtype for one in arrays] == [one.dtype for one in inputs]
        for place, sample in enumerate(rows):
            cut = (tokens[:, :width], labels[:, :width], mask[:, :width, :width], weight, features[:, :width])
            fillers = (0, IGNORED, None, 0, None)
            for one, whole, filler in zip(arrays, cut, fillers, strict=True):
                if sample >= 0:
                    np.testing.assert_array_equal(one[place], whole[sample])
                elif filler is not None:
                    assert (one[place] == filler).all()
    assert (np.concatenate([rows for _, rows in split.plan.micro_batches]) < 0).any(), "some rows are filled up"


def test_audit_finds_a_network_that_reads_its_padding(pynative):
    """Trimming is exact for networks that do not read it."""
    for reads in (False, True):
        network = Causal(reads_padding=reads)
        cell = GradAccumulationCell(network, split=max_tokens(), count=CountNotIgnored(IGNORED))
        report = audit(cell, nn.SGD(network.trainable_params(), 0.1), *map(Tensor, DATA[0]))
        assert report.ok != reads, report
        if reads:
            assert "Leaving padding out changes the result" in report.problems[0]
            assert max(report.gradients.values()) > 0.01


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_empty_samples_have_a_row():
    split = max_tokens(length=lambda tokens, labels: np.maximum((tokens != 0).sum(1) - 1, 0))
    split(*map(Tensor, DATA[0]))
    rows = np.concatenate([rows for _, rows in split.plan.micro_batches])
    assert sorted(rows[rows >= 0]) == list(range(20))
    split = max_tokens(length=lambda tokens, labels: [0] * 19 + [24], widths=2)
    split(*map(Tensor, DATA[0]))
    assert split.widths == (1, 24)


class Ratio(nn.Cell):
    """A sum over labels, and how many count; `of_labels` : these are the labels that are not ignored."""

    def __init__(self, of_labels=True, masks=True):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY, embedding_table=Tensor(np.eye(VOCABULARY, dtype=np.float32)))
        self.loss = nn.CrossEntropyLoss(reduction="none")
        self.of_labels, self.masks = of_labels, masks

    def construct(self, tokens, labels):
        losses = self.loss(self.table(tokens).reshape((-1, VOCABULARY)), labels.reshape((-1,)))
        valid = (labels.reshape((-1,)) != IGNORED).astype(ms.float32)
        losses = losses * valid if self.masks else losses + 1
        return losses.sum(), valid.sum() if self.of_labels else tokens.shape[0]


def ratio_step(split, **options):
    return make_step(Ratio(**options), momentum, split=split, count=None, reduction="ratio")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"of_labels": False}, "the denominator of a ratio must be 0 .* but got 1 for"),
        ({"masks": False}, "the numerator of a ratio must be 0"),
    ],
)
def test_rows_that_are_filled_up_must_be_0_in_a_ratio(options, what, pynative):
    assert_refuses(ratio_step(max_tokens(padding=(0, IGNORED)), **options), DATA[0], what)


FULL = batch(7, 7, 8)[0] * 0 + 3, np.tile(np.arange(8, dtype=np.int32), (7, 1))


def test_a_first_batch_without_padding_is_no_evidence_of_what_padding_is(pynative):
    """Seven full texts, of which three fit into a micro-batch: nothing fills up the last one. A later batch shows the
    padding, which fills up from then on."""
    split, told = (max_tokens(max_tokens=24, widths=[8, 24], padding=padding) for padding in (None, (0, IGNORED)))
    padded = batch(8, 7)
    data = [FULL, padded, FULL]
    step, known = ratio_step(split), ratio_step(told)
    losses, plans = [], []
    for one in data:
        losses += run(step, [one])
        plans.append(step.split.plan)
    np.testing.assert_allclose(losses, run(known, data), rtol=1e-5)
    assert_alike(step, known)
    assert [(rows >= 0).all() for _, rows in plans[0].micro_batches] == [True] * 3
    assert (plans[2].micro_batches[-1][1] < 0).any()
    assert plans[0].micro_batches[-1][1].size == 1


def test_a_batch_without_padding_that_must_be_widened_asks_for_padding(pynative):
    step = step_of(max_tokens(widths=[12, LENGTH]))
    assert_refuses(step, FULL, r"'padding' must be given, .* width of 12, but got none, and 7 sample\(s\) of 8")
    run(step, DATA[:1])  # shows the padding
    run(step, [FULL])


def test_the_users_object_stays_as_it_is_and_serves_two_steps(pynative):
    """The second step's batches are narrower, and have another padding."""

    def length(tokens, labels):
        return (tokens != (0 if tokens.shape[1] == LENGTH else VOCABULARY - 1)).sum(1)

    split = max_tokens(length=length, widths=2)
    before = dict(vars(split))
    tokens, labels = batch(1, 12, 10)
    steps = step_of(split), step_of(split)
    run(steps[0], DATA[:1])
    run(steps[1], [(np.where(tokens == 0, VOCABULARY - 1, tokens), labels)])
    assert vars(split) == before
    assert [step.split.widths[-1] for step in steps] == [LENGTH, 10]
    assert [step.split.plan.before for step in steps] == [LENGTH, 10]
    assert split.plan is None
    split(*(Tensor(value) for value in DATA[0]))  # by hand, which is no batch of a training
    assert (step_of(split).split.plan, step_of(split).split.widths) == (None, None)
    assert step_of(EvenSplit(), count=None, micro_size=2).split is None


def test_bad_arguments():
    for arguments, error, why in (
        ({"max_tokens": 0}, ValueError, "'max_tokens' must be at least 1, but got 0"),
        ({"length": 1}, TypeError, "'length' must be a function of the batch's inputs, but got 1"),
        ({"widths": 0}, ValueError, "'widths' must be at least 1"),
        ({"widths": "4"}, TypeError, "'widths' must be an int, the largest number of widths, or the widths"),
        ({"widths": [8, 4]}, ValueError, r"'widths' must be ascending, from 1 to max_tokens=48, but got \[8, 4\]"),
        ({"lengths": [1.5]}, ValueError, "'lengths' must give whole numbers"),
        ({"lengths": [3, 49]}, ValueError, "'max_tokens' must be .* but got .*max_tokens=48 and a sample of 49 tokens"),
    ):
        with pytest.raises(error, match=why):
            max_tokens(**arguments)


def test_what_is_refused_changes_nothing(pynative):
    for split, labels, why in (
        (max_tokens(max_tokens=20, widths=[4, 20]), DATA[0][1], r"max_tokens=20 and a sample of 24 tokens\. Cut such"),
        (max_tokens(), DATA[0][1][:19], r"number of samples, but got shapes \[\(20, 24\), \(19, 24\)\]"),
        (max_tokens(padding=(0, 7), widths=(8, LENGTH)), DATA[0][1], "'count' must be 0 for rows that hold padding"),
    ):
        assert_refuses(step_of(split), (DATA[0][0], labels), why)


def test_bad_batches():
    for lengths, why in (
        (np.ones(19), r"of shape \(20,\), but got shape \(19,\)"),
        (np.full(20, 1.5), "'length' must give whole numbers, but got"),
        (np.full(20, LENGTH + 1), "at least 0 and at most 24, the batch's width, but got 25 to 25"),
    ):
        with pytest.raises(ValueError, match=why):
            max_tokens(length=lambda *_: lengths)(*map(Tensor, DATA[0]))  # noqa: B023
    with pytest.raises(ValueError, match=r"'padding' must have one value for each input, but got 1 and 2 input"):
        max_tokens(padding=(0,))(*map(Tensor, DATA[0]))
    with pytest.raises(ValueError, match=r"first input must be of shape \(N, W, ...\)"):
        max_tokens()(Tensor(np.ones(3, np.int32)), Tensor(np.ones(3, np.int32)))
    with pytest.raises(ValueError, match=r"got widths \[4, 9\], max_tokens=48 and a sample of 24 tokens"):
        max_tokens(widths=[4, 9])(*map(Tensor, DATA[0]))
    with pytest.raises(TypeError, match="input 0 got"):
        max_tokens()("text", Tensor(np.ones(3, np.int32)))
