"""Losses as users write them: those that are not what the options say, with the remedy that is exact, and those that
are right. Each has a network, options and a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gaccum_ms import CountClassWeights, CountMask, CountNotIgnored, EvenSplit, MaxTokens

N, FEATURES, CLASSES, WORDS, LENGTH = 16, 6, 4, 11, 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, FEATURES)).astype(np.float32)
X2 = RANDOM.normal(size=(N, FEATURES)).astype(np.float32)
TARGET = RANDOM.normal(size=(N, 1)).astype(np.float32)
LABELS = np.array([0] * 8 + [1] * 4 + [2] * 2 + [3] * 2, np.int32)
RANDOM.shuffle(LABELS)
IGNORED = np.where(np.arange(N) % 5 < 2, -100, LABELS).astype(np.int32)
TOKENS = RANDOM.integers(1, WORDS, (N, LENGTH)).astype(np.int32)
LENGTHS = RANDOM.integers(2, LENGTH + 1, N)
MASK = (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.float32)
PADDED = np.where(MASK > 0, TOKENS, 0).astype(np.int32)
PADDED_BY_3 = np.where(MASK > 0, TOKENS, 3).astype(np.int32)
NEXT = np.where(MASK > 0, TOKENS, -100).astype(np.int32)
FRACTIONS = RANDOM.uniform(0, 1, (N,)).astype(np.float32)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]
BINARY = (LABELS % 2).astype(np.float32)[:, None]
IMAGES = RANDOM.normal(size=(N, 3, 6, 6)).astype(np.float32)
MAPS = RANDOM.integers(0, CLASSES, (N, 6, 6)).astype(np.int32)
CLASS_WEIGHTS = np.array([1.0, 5.0, 20.0, 2.0], np.float32)


class Model(nn.Cell):
    """A network, more that its loss needs, and the loss."""

    def __init__(self, net: nn.Cell, loss: Callable, **more: Any) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        for name, value in more.items():
            setattr(self, name, value)
        self.set_train()

    def construct(self, *batch):
        return self.loss(self, *batch)


class Case(NamedTuple):
    """`remedy` : words that the warning must have; None: the loss is right. `net` : makes the network before the loss,
    or, without a `loss` , the whole; `more` : what the Model holds besides."""

    remedy: str | None
    net: Callable[[], nn.Cell]
    loss: Callable | None
    inputs: tuple[np.ndarray, ...]
    options: dict[str, Any]
    more: Callable[[], dict[str, Any]] = dict

    def network(self) -> nn.Cell:
        return self.net() if self.loss is None else Model(self.net(), self.loss, **self.more())


def wrong(
    remedy: str | None, net: Callable, loss: Any, *inputs: np.ndarray, more: Callable = dict, **options: Any
) -> Case:
    return Case(remedy, net, loss, inputs, options, more)


right = functools.partial(wrong, None)


# -- networks ----------------------------------------------------------------------------------------------------------


def weights(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) * 0.5)


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init=weights(outputs, inputs), bias_init="zeros")


def of(outputs: int) -> Callable[[], nn.Cell]:
    return lambda: dense(FEATURES, outputs)


one, classes = of(1), of(CLASSES)


def embedding() -> nn.Cell:
    return nn.Embedding(WORDS, 5, embedding_table=weights(WORDS, 5))


def words() -> nn.Cell:
    return nn.SequentialCell(embedding(), dense(5, WORDS))


def normalised() -> nn.Cell:
    return nn.SequentialCell(nn.Conv2d(3, 5, 3, weight_init=weights(5, 3, 3, 3)), nn.BatchNorm2d(5), nn.ReLU())


def with_loss(net: Callable, loss: nn.Cell) -> Callable[[], nn.Cell]:
    """A network of MindSpore's classes alone."""
    return lambda: nn.WithLossCell(net(), loss)


def spread_and_up() -> dict[str, nn.Cell]:
    return {"spread": dense(FEATURES, 3), "up": dense(3, FEATURES)}


# -- losses: their first argument is the Model -------------------------------------------------------------------------


def squares(m, x, y):
    return ops.square(m.net(x) - y)


def mean_of_squares(m, x, y):
    return squares(m, x, y).mean()


def sum_of_squares(m, x, y):
    return squares(m, x, y).sum()


def entropies(m, x, y):
    return ops.cross_entropy(m.net(x), y, reduction="none")


def cross_entropy(m, x, y):
    return ops.cross_entropy(m.net(x), y)


def of_tokens(m, tokens, labels):
    logits = m.net(tokens).reshape((-1, WORDS))
    return ops.cross_entropy(logits, labels.reshape((-1,)), reduction="none").reshape(labels.shape)


def mean_of_tokens(m, tokens, labels):
    return ops.cross_entropy(m.net(tokens).reshape((-1, WORDS)), labels.reshape((-1,)))


def shifted(m, tokens, labels):
    return ops.cross_entropy(m.net(tokens)[:, :-1].reshape((-1, WORDS)), labels[:, 1:].reshape((-1,)))


def weighed(losses, mask):
    return (losses * mask).sum() / mask.sum()


def masked(m, tokens, labels, mask):
    return weighed(of_tokens(m, tokens, labels), mask)


def two_losses(m, x, y):
    logits = m.net(x)
    return ops.square(logits).mean(), ops.cross_entropy(logits, y)


def decay(m, x, y):
    return 0.5 * ops.square(m.net.weight).sum()


def focal_of(loss):
    return (1 - ops.exp(-loss)) ** 2 * loss


def ratio(m, tokens, labels):
    valid = ops.cast(labels != 0, ms.float32)
    return (of_tokens(m, tokens, labels) * valid).sum(), valid.sum()


def ratio_of_positives(m, x, y):
    positive = ops.cast(y > 1, ms.float32)
    return (entropies(m, x, y) * positive).sum(), positive.sum()


def tokens_by_hand(m, tokens, labels):
    valid = labels != -100
    return weighed(of_tokens(m, tokens, ops.where(valid, labels, ops.zeros_like(labels))), valid)


def padding_by_hand(m, tokens, labels):
    valid = ops.cast(labels != 0, ms.float32)
    return (of_tokens(m, tokens, labels) * valid).sum() / ops.maximum(valid.sum(), Tensor(1.0))


def count_of_what_is_not_ignored(m, x, y):
    kept = ops.cast(y != -100, ms.float32)
    return (entropies(m, x, ops.where(y == -100, ops.zeros_like(y), y)) * kept).mean()


def mean_over_positives(m, x, y):
    return entropies(m, x, y).sum() / ops.maximum(ops.cast(y > 0, ms.float32).sum(), Tensor(1.0))


def dice(m, x, y):
    chances = ops.sigmoid(m.net(x))
    return 1 - 2 * (chances * y).sum() / ((chances**2).sum() + (y**2).sum())


def variance_of_batch(m, x):
    out = m.net(x)
    return ops.relu(1 - out.std(axis=0)).mean() + ops.square(out).mean()


def barlow_twins(m, a, b):
    a, b = m.net(a), m.net(b)
    a, b = (a - a.mean(0)) / (a.std(0) + 1e-3), (b - b.mean(0)) / (b.std(0) + 1e-3)
    return ops.square(a.T @ b / a.shape[0] - ops.eye(CLASSES, CLASSES, ms.float32)).sum()


def balanced_experts(m, x, y):
    chances = ops.softmax(m.router(x))
    load = ops.one_hot(chances.argmax(1), 3, Tensor(1.0), Tensor(0.0)).mean(0)
    return ops.cross_entropy(m.net(x), y) + 0.5 * 3 * (chances.mean(0) * load).sum()


def entropy_of_mean(m, x, y):
    mean = ops.softmax(m.net(x)).mean(0)
    return ops.cross_entropy(m.net(x), y) + (mean * ops.log(mean)).sum()


def hardest_half(m, x, y):
    losses = squares(m, x, y)[:, 0]
    return ops.topk(losses, (losses.shape[0] + 1) // 2)[0].mean()


def whitened_advantages(m, x, reward):
    return -(ops.tanh(m.net(x)) * (reward - reward.mean()) / (reward.std() + 1e-3)).mean()


def correlation(m, x, y):
    out = m.net(x)
    a, b = out - out.mean(), y - y.mean()
    return 1 - (a * b).sum() / ops.sqrt((a**2).sum() * (b**2).sum())


def kto(m, x, other, desirable):
    reward, reference = m.net(x)[:, 0], ops.stop_gradient(m.net(other).mean())
    return (1 - ops.sigmoid((2 * (desirable > 0.5) - 1) * (reward - reference))).mean()


def batch_maximum(m, x, y):
    out = m.net(x)
    return ops.cross_entropy(out / ops.stop_gradient(ops.abs(out).max()), y)


def sum_of_variational_divergence(m, x):
    """A mean, and a divergence that is summed, with noise."""
    mean, spread = m.net(x), m.spread(x)
    drawn = mean + ops.exp(0.5 * spread) * ops.standard_normal(mean.shape)
    return ops.square(m.up(drawn) - x).mean() - 0.5 * (1 + spread - mean**2 - ops.exp(spread)).sum()


def dice_of_each_sample(m, x, y):
    chances = ops.sigmoid(m.net(x))
    return (1 - 2 * (chances * y).sum(1) / (chances + y).sum(1)).mean()


def variational(m, x):
    mean, spread = m.net(x), m.spread(x)
    drawn = mean + ops.exp(0.5 * spread) * ops.randn_like(mean)
    return ops.square(m.up(drawn) - x).mean() - 0.5 * (1 + spread - mean**2 - ops.exp(spread)).sum(1).mean()


def denoising(m, x):
    """Noise of each sample, and a time that is drawn."""
    time = ops.rand(x.shape[0], 1)
    noise = ops.normal(x.shape, Tensor(0.0), Tensor(1.0))
    return ops.square(m.net(time * x + (1 - time) * noise) - noise).mean()


def pairs(m, a, b):
    """Samples 2i and 2i + 1 belong together, in each micro-batch too."""
    a = m.net(a).reshape((-1, 2, CLASSES))
    return ops.relu(1 - ops.abs(a[:, 0] - a[:, 1]).sum(1)).mean() + ops.square(m.net(b)).mean()


def groups_of_four(m, x):
    rewards = m.net(x).sum(1).reshape((-1, 4))
    return -((rewards - rewards.mean(1, keep_dims=True)) ** 2).mean()


def policy_gradient(m, x, reward):
    ratio = ops.exp(m.net(x) - ops.stop_gradient(m.net(x)))
    advantage = reward - 0.5
    return -ops.minimum(ratio * advantage, ops.clamp(ratio, 0.8, 1.2) * advantage).mean()


def with_outputs(m, x, y):
    logits = m.net(x)
    return ops.cross_entropy(logits, y), logits, logits.argmax(1)


def gradient_penalty(m, x, y):
    slope = ops.grad(lambda x: ops.tanh(m.net(x)).sum())(x)
    return (m.net(x) - y).mean() + ops.square(ops.norm(slope, dim=1) - 1).mean()


def counts_its_calls(m, x, y):
    m.calls.append(x.shape)
    return squares(m, x, y).mean()


# -- the tables --------------------------------------------------------------------------------------------------------

SUM, BATCH, SHAPE = 'reduction="sum"', "WithBatchLossCell", "input 1 of shape"
TWO = {"loss_weights": (1.0, 0.5)}
CUT = {"split": MaxTokens(24, length=lambda tokens, labels: (labels >= 0).sum(1))}

WRONG: dict[str, Case] = {
    # sums
    "sum_of_squares": wrong(SUM, one, sum_of_squares, X, TARGET),
    "sum_over_batch_size": wrong(SUM, one, lambda *batch: sum_of_squares(*batch) / 16, X, TARGET),
    "half_sum": wrong(SUM, one, lambda m, x, y: 0.5 * ops.reduce_sum((m.net(x) - y) ** 2), X, TARGET),
    "sum_of_cross_entropies": wrong(SUM, classes, lambda *batch: entropies(*batch).sum(), X, LABELS),
    "sum_over_tokens": wrong(SUM, words, lambda m, x, y: (of_tokens(m, x, y) * (y != 0)).sum(), TOKENS, PADDED),
    "sum_of_autoencoder": wrong(
        SUM, lambda: nn.SequentialCell(of(2)(), nn.Tanh(), dense(2, FEATURES)), sum_of_squares, X, X2
    ),
    "mean_given_as_sum": wrong('reduction="mean"', one, mean_of_squares, X, TARGET, reduction="sum"),
    "mean_given_as_ratio": wrong(
        "return the sum", one, lambda m, x, y: (mean_of_squares(m, x, y), len(x)), X, TARGET, reduction="ratio"
    ),
    # means over other items
    "ignored_labels": wrong("CountNotIgnored()", classes, cross_entropy, X, IGNORED),
    "tokens_by_hand": wrong("CountNotIgnored()", words, tokens_by_hand, TOKENS, NEXT),
    "padding_by_hand": wrong("CountNotIgnored(ignore_index=0)", words, padding_by_hand, TOKENS, PADDED),
    "shifted_labels": wrong("CountNotIgnored(shift=1)", words, shifted, TOKENS, NEXT),
    "own_padding_index": wrong(
        "CountNotIgnored(ignore_index=3",
        words,
        lambda m, x, y: weighed(of_tokens(m, x, y), ops.cast(y != m.pad_id, ms.float32)),
        *(TOKENS, PADDED_BY_3),
        more=lambda: {"pad_id": 3},
    ),
    "masked_mean": wrong("CountMask()", words, masked, TOKENS, TOKENS, MASK),
    "fractional_mask": wrong(
        "CountMask()", one, lambda m, x, y, mask: weighed(squares(m, x, y)[:, 0], mask), X, TARGET, FRACTIONS
    ),
    "importance_in_the_middle": wrong(
        "CountMask(position=1)",
        one,
        lambda m, x, mask, y: weighed(ops.abs(m.net(x) - y)[:, 0], mask),
        X,
        FRACTIONS,
        TARGET,
    ),
    "weighted_classes": wrong(
        "CountClassWeights(", with_loss(classes, nn.CrossEntropyLoss(weight=Tensor(CLASS_WEIGHTS))), None, X, LABELS
    ),
    "weighted_classes_by_hand": wrong(
        "CountClassWeights(importance)",
        classes,
        lambda m, x, y: weighed(entropies(m, x, y), m.importance[y]),
        *(X, LABELS),
        more=lambda: {"importance": Tensor(CLASS_WEIGHTS)},
    ),
    "count_of_what_is_not_ignored": wrong(
        "count=None", classes, count_of_what_is_not_ignored, X, IGNORED, count=CountNotIgnored()
    ),
    "second_loss_ignores": wrong("(None, CountNotIgnored())", classes, two_losses, X, IGNORED, **TWO),
    "mean_over_positives": wrong("", classes, mean_over_positives, X, LABELS),
    "tokens_of_max_tokens": wrong("CountNotIgnored()", words, mean_of_tokens, TOKENS, NEXT, count=CountMask(0), **CUT),
    # shapes
    "flat_labels": wrong(SHAPE, one, mean_of_squares, X, TARGET[:, 0]),
    "flat_outputs": wrong(SHAPE, one, lambda m, x, y: ops.square(m.net(x)[:, 0] - y).mean(), X, TARGET),
    "flat_labels_of_mindspore": wrong(SHAPE, with_loss(one, nn.L1Loss()), None, X, TARGET[:, 0]),
    # functions of a mean, and of several samples
    "root_of_mean": wrong(BATCH, one, lambda *batch: ops.sqrt(mean_of_squares(*batch)), X, TARGET),
    "perplexity": wrong(BATCH, classes, lambda *batch: ops.exp(cross_entropy(*batch)), X, LABELS),
    "log_of_mean": wrong(BATCH, one, lambda *batch: ops.log(mean_of_squares(*batch) + 1e-6), X, TARGET),
    "focal_of_mean": wrong(BATCH, classes, lambda *batch: focal_of(cross_entropy(*batch)), X, LABELS),
    "dice": wrong(BATCH, classes, dice, X, ONE_HOT),
    "info_nce": wrong(
        BATCH,
        of(5),
        lambda m, a, b: ops.cross_entropy(m.net(a) @ m.key(b).T, ops.arange(a.shape[0])),
        *(X, X2),
        more=lambda: {"key": dense(FEATURES, 5)},
    ),
    "variance_of_batch": wrong(BATCH, classes, variance_of_batch, X),
    "barlow_twins": wrong(BATCH, classes, barlow_twins, X, X2),
    "balanced_experts": wrong(BATCH, classes, balanced_experts, X, LABELS, more=lambda: {"router": dense(FEATURES, 3)}),
    "entropy_of_mean": wrong(BATCH, classes, entropy_of_mean, X, LABELS),
    "hardest_half": wrong(BATCH, one, hardest_half, X, TARGET),
    "whitened_advantages": wrong(BATCH, one, whitened_advantages, X, TARGET),
    "correlation": wrong(BATCH, one, correlation, X, TARGET),
    "kto": wrong(BATCH, one, kto, X, X2, FRACTIONS),
    "batch_maximum": wrong(BATCH, classes, batch_maximum, X, LABELS),
    "sum_of_variational_divergence": wrong("", of(3), sum_of_variational_divergence, X, more=spread_and_up),
    "sum_with_penalty": wrong(
        "", one, lambda *batch: sum_of_squares(*batch) + decay(*batch), X, TARGET, reduction="sum"
    ),
}
RIGHT: dict[str, Case] = {
    "mean_of_squares": right(one, mean_of_squares, X, TARGET),
    "with_loss": right(with_loss(one, nn.MSELoss()), None, X, TARGET),
    "cross_entropy": right(with_loss(classes, nn.CrossEntropyLoss(label_smoothing=0.1)), None, X, LABELS),
    "mean_plus_decay": right(one, lambda *batch: mean_of_squares(*batch) + decay(*batch), X, TARGET),
    "sum_over_samples_by_shape": right(one, lambda m, x, y: ops.abs(m.net(x) - y).sum() / x.shape[0], X, TARGET),
    "sum_given_as_sum": right(one, sum_of_squares, X, TARGET, reduction="sum"),
    "sum_that_says_so": right(with_loss(one, nn.MSELoss(reduction="sum")), None, X, TARGET),
    "counted_labels": right(classes, cross_entropy, X, IGNORED, count=CountNotIgnored()),
    "counted_classes": right(
        classes,
        lambda m, x, y: ops.cross_entropy(m.net(x), y, weight=Tensor(CLASS_WEIGHTS)),
        *(X, LABELS),
        count=CountClassWeights(Tensor(CLASS_WEIGHTS)),
    ),
    "counted_mask": right(words, masked, TOKENS, TOKENS, MASK, count=CountMask()),
    "counted_shift": right(words, shifted, TOKENS, NEXT, count=CountNotIgnored(shift=1)),
    "ratio": right(words, ratio, TOKENS, PADDED, reduction="ratio"),
    "ratio_of_positives": right(classes, ratio_of_positives, X, LABELS, reduction="ratio", min_count=1),
    "counted_sum": right(
        classes,
        lambda *batch: entropies(*batch).sum(),
        *(X, LABELS),
        reduction="sum",
        count=lambda x, y: ops.cast(y > 1, ms.float32).sum(),
        min_count=1,
    ),
    "mean_of_each_sample": right(
        words, lambda m, x, y, mask: ((of_tokens(m, x, y) * mask).sum(1) / mask.sum(1)).mean(), TOKENS, TOKENS, MASK
    ),
    "dice_of_each_sample": right(classes, dice_of_each_sample, X, ONE_HOT),
    "root_of_each_sample": right(one, lambda *batch: ops.sqrt(squares(*batch) + 1e-6).mean(), X, TARGET),
    "focal": right(classes, lambda *batch: focal_of(entropies(*batch)).mean(), X, LABELS),
    "binary_with_logits": right(with_loss(one, nn.BCEWithLogitsLoss()), None, X, BINARY),
    "with_dropout": right(
        classes, lambda m, x, y: cross_entropy(m, m.drop(x), y), X, LABELS, more=lambda: {"drop": nn.Dropout(p=0.5)}
    ),
    "with_dropout_by_function": right(
        classes, lambda m, x, y: cross_entropy(m, ops.dropout(x, 0.5, m.training), y), X, LABELS
    ),
    "with_batch_norm": right(
        normalised,
        lambda m, x, y: ops.cross_entropy(m.head(m.net(x).mean((2, 3))), y),
        *(IMAGES, LABELS),
        more=lambda: {"head": dense(5, CLASSES)},
    ),
    "segmentation": right(
        lambda: nn.Conv2d(3, CLASSES, 3, weight_init=weights(CLASSES, 3, 3, 3)), cross_entropy, IMAGES, MAPS
    ),
    "variational": right(of(3), variational, X, more=spread_and_up),
    "denoising": right(of(FEATURES), denoising, X),
    "pairs": right(classes, pairs, X, X2),
    "groups_of_four": right(classes, groups_of_four, X),
    "preference": right(  # DPO: each pair by itself
        one, lambda m, a, b: -ops.log(ops.sigmoid(0.1 * (m.net(a) - m.net(b)))).mean(), X, X2
    ),
    "policy_gradient": right(one, policy_gradient, X, TARGET),
    "shared_table": right(
        one,
        lambda m, x, y, table: (squares(m, x, y) * table.mean()).mean(),
        *(X, TARGET, FRACTIONS[:5]),
        split=EvenSplit(shared=(2,)),
    ),
    "samples_on_axis_one": right(
        one, lambda m, x, y: mean_of_squares(m, x.T, y.T), X.T.copy(), TARGET.T.copy(), split=EvenSplit(axis=1)
    ),
    "two_losses": right(classes, two_losses, X, LABELS, **TWO),
    "two_counted_losses": right(classes, two_losses, X, IGNORED, count=(None, CountNotIgnored()), **TWO),
    "with_outputs": right(classes, with_outputs, X, LABELS, aux=True),
    "triplet": right(classes, lambda m, a, b: ops.relu(ops.square(m.net(a) - m.net(b)).sum(1) - 0.5).mean(), X, X2),
    "tokens_that_are_counted": right(words, mean_of_tokens, TOKENS, NEXT, count=CountNotIgnored(), **CUT),
    "half_precision": right(
        lambda: one().to_float(ms.float16), mean_of_squares, X.astype(np.float16), TARGET.astype(np.float16)
    ),
    "one_class": right(classes, lambda m, x, y: cross_entropy(m, x * 0, y), X, LABELS),  # the loss of all is the same
    "gradient_penalty": right(one, gradient_penalty, X, TARGET),
    "huber": right(
        lambda: nn.WithLossCell(nn.SequentialCell(of(8)(), nn.LayerNorm((8,)), dense(8, 1)), nn.HuberLoss()),
        *(None, X, TARGET),
    ),
    "recurrent": right(
        embedding,
        lambda m, tokens, labels: ops.cross_entropy(m.head(m.gru(m.net(tokens))[0][:, -1]), labels),
        *(TOKENS, LABELS),
        more=lambda: {"gru": nn.GRU(5, 6, batch_first=True), "head": dense(6, CLASSES)},
    ),
    "counts_its_calls": right(one, counts_its_calls, X, TARGET, more=lambda: {"calls": []}),
}
