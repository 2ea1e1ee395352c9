"""Losses as users write them: those that are not what the options say, with the remedy that is exact, and those that
are right. Each has a network, options and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
NEXT = np.where(MASK > 0, TOKENS, -100).astype(np.int32)
FRACTIONS = RANDOM.uniform(0, 1, (N,)).astype(np.float32)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]
BINARY = (LABELS % 2).astype(np.float32)[:, None]
IMAGES = RANDOM.normal(size=(N, 3, 6, 6)).astype(np.float32)
MAPS = RANDOM.integers(0, CLASSES, (N, 6, 6)).astype(np.int32)
CLASS_WEIGHTS = np.array([1.0, 5.0, 20.0, 2.0], np.float32)


@dataclass(frozen=True)
class Case:
    """`remedy` : words that the warning must have; None: the loss is right."""

    network: Callable[[], Any]
    inputs: tuple[np.ndarray, ...]
    options: dict[str, Any]
    remedy: str | None = None


WRONG: dict[str, Case] = {}
RIGHT: dict[str, Case] = {}
SUM, BATCH = 'reduction="sum"', "WithBatchLossCell"


def wrong(remedy: str, *inputs: np.ndarray, **options: Any) -> Callable:
    def add(make: Any) -> Any:
        WRONG[make.__name__] = Case(make, inputs, options, remedy)
        return make

    return add


def right(*inputs: np.ndarray, **options: Any) -> Callable:
    def add(make: Any) -> Any:
        RIGHT[make.__name__] = Case(make, inputs, options)
        return make

    return add


def weights(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) * 0.5)


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init=weights(outputs, inputs), bias_init="zeros")


class Net(nn.Cell):
    """The base: a dense layer of so many outputs."""

    outputs = 1

    def __init__(self):
        super().__init__()
        self.net = dense(FEATURES, self.outputs)
        self.set_train()


class Classes(Net):
    outputs = CLASSES


class Words(nn.Cell):
    """The base of language models."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5, embedding_table=weights(WORDS, 5))
        self.head = dense(5, WORDS)
        self.set_train()

    def losses(self, tokens, labels):
        logits = self.head(self.embedding(tokens)).reshape((-1, WORDS))
        return ops.cross_entropy(logits, labels.reshape((-1,)), reduction="none").reshape(labels.shape)


# -- wrong: sums -------------------------------------------------------------------------------------------------------


@wrong(SUM, X, TARGET)
class SumOfSquares(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).sum()


@wrong(SUM, X, TARGET)
class SumOverBatchSize(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).sum() / 16


@wrong(SUM, X, LABELS)
class SumOfCrossEntropies(Classes):
    def construct(self, x, y):
        return ops.cross_entropy(self.net(x), y, reduction="sum")


@wrong(SUM, X, TARGET)
class HalfSumInHelper(Net):
    def error(self, x, y):
        return 0.5 * ops.reduce_sum((self.net(x) - y) ** 2)

    def construct(self, x, y):
        return self.error(x, y)


@wrong(SUM, TOKENS, PADDED)
class SumOverTokens(Words):
    def construct(self, tokens, labels):
        return (self.losses(tokens, labels) * (labels != 0)).sum()


@wrong(SUM, X, X2)
class SumOfAutoencoder(nn.Cell):
    def __init__(self):
        super().__init__()
        self.down, self.up = dense(FEATURES, 2), dense(2, FEATURES)

    def construct(self, x, y):
        return ((self.up(ops.tanh(self.down(x))) - y) ** 2).sum()


@wrong('reduction="mean"', X, TARGET, reduction="sum")
class MeanGivenAsSum(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean()


@wrong("return the sum", X, TARGET, reduction="ratio")
class MeanGivenAsRatio(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean(), x.shape[0]


# -- wrong: means over other items -------------------------------------------------------------------------------------


@wrong("CountNotIgnored()", X, IGNORED)
class IgnoredLabels(Classes):
    def construct(self, x, y):
        return ops.cross_entropy(self.net(x), y)


@wrong("CountNotIgnored()", TOKENS, NEXT)
class TokensByHand(Words):
    def construct(self, tokens, labels):
        valid = labels != -100
        losses = self.losses(tokens, ops.where(valid, labels, ops.zeros_like(labels)))
        return (losses * valid).sum() / valid.sum()


@wrong("CountNotIgnored(ignore_index=0)", TOKENS, PADDED)
class PaddingByHand(Words):
    def construct(self, tokens, labels):
        valid = ops.cast(labels != 0, ms.float32)
        return (self.losses(tokens, labels) * valid).sum() / ops.maximum(valid.sum(), Tensor(1.0))


@wrong("CountNotIgnored(shift=1)", TOKENS, NEXT)
class ShiftedLabels(Words):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def construct(self, tokens, labels):
        logits = self.head(self.embedding(tokens))[:, :-1]
        return self.loss(logits.reshape((-1, WORDS)), labels[:, 1:].reshape((-1,)))


@wrong("CountNotIgnored(ignore_index=3", TOKENS, np.where(MASK > 0, TOKENS, 3).astype(np.int32))
class OwnPaddingIndex(Words):
    def __init__(self):
        super().__init__()
        self.pad_id = 3

    def construct(self, tokens, labels):
        kept = ops.cast(labels != self.pad_id, ms.float32)
        return (self.losses(tokens, labels) * kept).sum() / kept.sum()


@wrong("CountMask()", TOKENS, TOKENS, MASK)
class MaskedMean(Words):
    def construct(self, tokens, labels, mask):
        return (self.losses(tokens, labels) * mask).sum() / mask.sum()


@wrong("CountMask()", X, TARGET, FRACTIONS)
class FractionalMask(Net):
    def construct(self, x, y, mask):
        return (ops.square(self.net(x) - y)[:, 0] * mask).sum() / mask.sum()


@wrong("CountMask(position=1)", X, FRACTIONS, TARGET)
class ImportanceInTheMiddle(Net):
    def construct(self, x, importance, y):
        return (ops.abs(self.net(x) - y)[:, 0] * importance).sum() / importance.sum()


@wrong("CountClassWeights(", X, LABELS)
class WeightedClasses(Classes):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=Tensor(CLASS_WEIGHTS))

    def construct(self, x, y):
        return self.loss(self.net(x), y)


@wrong("CountClassWeights(importance)", X, LABELS)
class WeightedClassesByHand(Classes):
    def __init__(self):
        super().__init__()
        self.importance = Tensor(CLASS_WEIGHTS)

    def construct(self, x, y):
        of_labels = self.importance[y]
        return (ops.cross_entropy(self.net(x), y, reduction="none") * of_labels).sum() / of_labels.sum()


@wrong("count=None", X, IGNORED, count=CountNotIgnored())
class CountOfWhatIsNotIgnored(Classes):
    def construct(self, x, y):
        kept = ops.cast(y != -100, ms.float32)
        labels = ops.where(y == -100, ops.zeros_like(y), y)
        return (ops.cross_entropy(self.net(x), labels, reduction="none") * kept).mean()


@wrong("(None, CountNotIgnored())", X, IGNORED, loss_weights=(1.0, 0.5))
class SecondLossIgnores(Classes):
    def construct(self, x, y):
        logits = self.net(x)
        return ops.square(logits).mean(), ops.cross_entropy(logits, y)


@wrong("", X, LABELS)
class MeanOverPositives(Classes):
    """As of a detector, by the number of objects."""

    def construct(self, x, y):
        positive = ops.cast(y > 0, ms.float32)
        losses = ops.cross_entropy(self.net(x), y, reduction="none")
        return losses.sum() / ops.maximum(positive.sum(), Tensor(1.0))


@wrong("CountNotIgnored()", TOKENS, NEXT, split=MaxTokens(24, length=lambda t, y: (y >= 0).sum(1)), count=CountMask(0))
class TokensOfMaxTokens(Words):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def construct(self, tokens, labels):
        return self.loss(self.head(self.embedding(tokens)).reshape((-1, WORDS)), labels.reshape((-1,)))


# -- wrong: shapes -----------------------------------------------------------------------------------------------------


@wrong("input 1 of shape", X, TARGET[:, 0])
class FlatLabels(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean()


@wrong("input 1 of shape", X, TARGET)
class FlatOutputs(Net):
    def construct(self, x, y):
        return ops.square(self.net(x)[:, 0] - y).mean()


@wrong("input 1 of shape", X, TARGET[:, 0])
class FlatLabelsOfMindSpore(Net):
    def __init__(self):
        super().__init__()
        self.loss = nn.L1Loss()

    def construct(self, x, y):
        return self.loss(self.net(x), y)


# -- wrong: functions of a mean, and of several samples ----------------------------------------------------------------


@wrong(BATCH, X, TARGET)
class RootOfMean(Net):
    def construct(self, x, y):
        return ops.sqrt(ops.square(self.net(x) - y).mean())


@wrong(BATCH, X, LABELS)
class Perplexity(Classes):
    def construct(self, x, y):
        return ops.exp(ops.cross_entropy(self.net(x), y))


@wrong(BATCH, X, TARGET)
class LogOfMean(Net):
    def construct(self, x, y):
        return ops.log(ops.square(self.net(x) - y).mean() + 1e-6)


@wrong(BATCH, X, LABELS)
class FocalOfMean(Classes):
    def construct(self, x, y):
        loss = ops.cross_entropy(self.net(x), y)
        return (1 - ops.exp(-loss)) ** 2 * loss


@wrong(BATCH, X, ONE_HOT)
class Dice(Classes):
    def construct(self, x, y):
        chances = ops.sigmoid(self.net(x))
        return 1 - 2 * (chances * y).sum() / ((chances**2).sum() + (y**2).sum())


@wrong(BATCH, X, X2)
class InfoNCE(nn.Cell):
    def __init__(self):
        super().__init__()
        self.query, self.key = dense(FEATURES, 5), dense(FEATURES, 5)

    def construct(self, a, b):
        return ops.cross_entropy(self.query(a) @ self.key(b).T, ops.arange(a.shape[0]))


@wrong(BATCH, X)
class VarianceOfBatch(Classes):
    def construct(self, x):
        out = self.net(x)
        return ops.relu(1 - out.std(axis=0)).mean() + ops.square(out).mean()


@wrong(BATCH, X, X2)
class BarlowTwins(Classes):
    def construct(self, a, b):
        a, b = self.net(a), self.net(b)
        a, b = (a - a.mean(0)) / (a.std(0) + 1e-3), (b - b.mean(0)) / (b.std(0) + 1e-3)
        c = a.T @ b / a.shape[0]
        return ops.square(c - ops.eye(CLASSES, CLASSES, ms.float32)).sum()


@wrong(BATCH, X, LABELS)
class BalancedExperts(Classes):
    def __init__(self):
        super().__init__()
        self.router = dense(FEATURES, 3)

    def construct(self, x, y):
        chances = ops.softmax(self.router(x))
        load = ops.one_hot(chances.argmax(1), 3, Tensor(1.0), Tensor(0.0)).mean(0)
        return ops.cross_entropy(self.net(x), y) + 0.5 * 3 * (chances.mean(0) * load).sum()


@wrong(BATCH, X, LABELS)
class EntropyOfMean(Classes):
    def construct(self, x, y):
        mean = ops.softmax(self.net(x)).mean(0)
        return ops.cross_entropy(self.net(x), y) + (mean * ops.log(mean)).sum()


@wrong(BATCH, X, TARGET)
class HardestHalf(Net):
    def construct(self, x, y):
        losses = ops.square(self.net(x) - y)[:, 0]
        return ops.topk(losses, (losses.shape[0] + 1) // 2)[0].mean()


@wrong(BATCH, X, TARGET)
class WhitenedAdvantages(Net):
    def construct(self, x, reward):
        advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
        return -(ops.tanh(self.net(x)) * advantage).mean()


@wrong(BATCH, X, TARGET)
class Correlation(Net):
    def construct(self, x, y):
        out = self.net(x)
        a, b = out - out.mean(), y - y.mean()
        return 1 - (a * b).sum() / ops.sqrt((a**2).sum() * (b**2).sum())


@wrong(BATCH, X, X2, FRACTIONS)
class KTO(Net):
    """The reward is compared with a mean over the batch, which has no gradient."""

    def construct(self, x, other, desirable):
        reward, reference = self.net(x)[:, 0], ops.stop_gradient(self.net(other).mean())
        return (1 - ops.sigmoid((2 * (desirable > 0.5) - 1) * (reward - reference))).mean()


@wrong(BATCH, X, LABELS)
class BatchMaximum(Classes):
    def construct(self, x, y):
        out = self.net(x)
        return ops.cross_entropy(out / ops.stop_gradient(ops.abs(out).max()), y)


@wrong("", X)
class SumOfVariationalDivergence(nn.Cell):
    """A mean, and a divergence that is summed, with noise."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.up = dense(FEATURES, 3), dense(FEATURES, 3), dense(3, FEATURES)

    def construct(self, x):
        mean, spread = self.mean(x), self.spread(x)
        drawn = mean + ops.exp(0.5 * spread) * ops.standard_normal(mean.shape)
        divergence = -0.5 * (1 + spread - mean**2 - ops.exp(spread)).sum()
        return ops.square(self.up(drawn) - x).mean() + divergence


@wrong("", X, TARGET, reduction="sum")
class SumWithPenalty(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).sum() + 0.5 * ops.square(self.net.weight).sum()


# -- right -------------------------------------------------------------------------------------------------------------


@right(X, TARGET)
class MeanOfSquares(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean()


@right(X, TARGET)
class WithLoss(nn.WithLossCell):
    def __init__(self):
        super().__init__(dense(FEATURES, 1), nn.MSELoss())


@right(X, LABELS)
class CrossEntropy(nn.WithLossCell):
    def __init__(self):
        super().__init__(dense(FEATURES, CLASSES), nn.CrossEntropyLoss(label_smoothing=0.1))


@right(X, TARGET)
class MeanPlusDecay(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean() + 0.5 * ops.square(self.net.weight).sum()


@right(X, TARGET)
class SumOverSamplesByShape(Net):
    def construct(self, x, y):
        return ops.abs(self.net(x) - y).sum() / x.shape[0]


@right(X, TARGET, reduction="sum")
class SumGivenAsSum(Net):
    def construct(self, x, y):
        return ops.square(self.net(x) - y).sum()


@right(X, TARGET)
class SumThatSaysSo(nn.WithLossCell):
    def __init__(self):
        super().__init__(dense(FEATURES, 1), nn.MSELoss(reduction="sum"))


@right(X, IGNORED, count=CountNotIgnored())
class CountedLabels(Classes):
    def construct(self, x, y):
        return ops.cross_entropy(self.net(x), y)


@right(X, LABELS, count=CountClassWeights(Tensor(CLASS_WEIGHTS)))
class CountedClasses(Classes):
    def construct(self, x, y):
        return ops.cross_entropy(self.net(x), y, weight=Tensor(CLASS_WEIGHTS))


@right(TOKENS, TOKENS, MASK, count=CountMask())
class CountedMask(Words):
    def construct(self, tokens, labels, mask):
        return (self.losses(tokens, labels) * mask).sum() / mask.sum()


@right(TOKENS, NEXT, count=CountNotIgnored(shift=1))
class CountedShift(Words):
    def construct(self, tokens, labels):
        logits = self.head(self.embedding(tokens))[:, :-1]
        return ops.cross_entropy(logits.reshape((-1, WORDS)), labels[:, 1:].reshape((-1,)))


@right(TOKENS, PADDED, reduction="ratio")
class Ratio(Words):
    def construct(self, tokens, labels):
        valid = ops.cast(labels != 0, ms.float32)
        return (self.losses(tokens, labels) * valid).sum(), valid.sum()


@right(X, LABELS, reduction="ratio", min_count=1)
class RatioOfPositives(Classes):
    def construct(self, x, y):
        positive = ops.cast(y > 1, ms.float32)
        return (ops.cross_entropy(self.net(x), y, reduction="none") * positive).sum(), positive.sum()


@right(X, LABELS, reduction="sum", count=lambda x, y: ops.cast(y > 1, ms.float32).sum(), min_count=1)
class CountedSum(Classes):
    def construct(self, x, y):
        return ops.cross_entropy(self.net(x), y, reduction="sum")


@right(TOKENS, TOKENS, MASK)
class MeanOfEachSample(Words):
    def construct(self, tokens, labels, mask):
        return ((self.losses(tokens, labels) * mask).sum(1) / mask.sum(1)).mean()


@right(X, ONE_HOT)
class DiceOfEachSample(Classes):
    def construct(self, x, y):
        chances = ops.sigmoid(self.net(x))
        return (1 - 2 * (chances * y).sum(1) / (chances + y).sum(1)).mean()


@right(X, TARGET)
class RootOfEachSample(Net):
    def construct(self, x, y):
        return ops.sqrt(ops.square(self.net(x) - y) + 1e-6).mean()


@right(X, LABELS)
class Focal(Classes):
    def construct(self, x, y):
        losses = ops.cross_entropy(self.net(x), y, reduction="none")
        return ((1 - ops.exp(-losses)) ** 2 * losses).mean()


@right(X, BINARY)
class BinaryWithLogits(nn.WithLossCell):
    def __init__(self):
        super().__init__(dense(FEATURES, 1), nn.BCEWithLogitsLoss())


@right(X, LABELS)
class WithDropout(Classes):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(p=0.5)
        self.set_train()

    def construct(self, x, y):
        return ops.cross_entropy(self.net(self.drop(x)), y)


@right(X, LABELS)
class WithDropoutByFunction(Classes):
    def construct(self, x, y):
        return ops.cross_entropy(self.net(ops.dropout(x, 0.5, self.training)), y)


@right(IMAGES, LABELS)
class WithBatchNorm(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, weight_init=weights(5, 3, 3, 3)), nn.BatchNorm2d(5)
        self.head = dense(5, CLASSES)
        self.set_train()

    def construct(self, x, y):
        return ops.cross_entropy(self.head(ops.relu(self.norm(self.conv(x))).mean((2, 3))), y)


@right(IMAGES, MAPS)
class Segmentation(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 3, weight_init=weights(CLASSES, 3, 3, 3))

    def construct(self, x, y):
        return ops.cross_entropy(self.conv(x), y)


@right(X)
class Variational(nn.Cell):
    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.up = dense(FEATURES, 3), dense(FEATURES, 3), dense(3, FEATURES)

    def construct(self, x):
        mean, spread = self.mean(x), self.spread(x)
        drawn = mean + ops.exp(0.5 * spread) * ops.randn_like(mean)
        divergence = -0.5 * (1 + spread - mean**2 - ops.exp(spread)).sum(1).mean()
        return ops.square(self.up(drawn) - x).mean() + divergence


@right(X)
class Denoising(Classes):
    """Noise of each sample, and a time that is drawn."""

    outputs = FEATURES

    def construct(self, x):
        time = ops.rand(x.shape[0], 1)
        noise = ops.normal(x.shape, Tensor(0.0), Tensor(1.0))
        return ops.square(self.net(time * x + (1 - time) * noise) - noise).mean()


@right(X, X2)
class Pairs(Classes):
    """Samples 2i and 2i + 1 belong together, in each micro-batch too."""

    def construct(self, a, b):
        a = self.net(a).reshape((-1, 2, CLASSES))
        return ops.relu(1 - ops.abs(a[:, 0] - a[:, 1]).sum(1)).mean() + ops.square(self.net(b)).mean()


@right(X)
class GroupsOfFour(Classes):
    def construct(self, x):
        rewards = self.net(x).sum(1).reshape((-1, 4))
        return -((rewards - rewards.mean(1, keep_dims=True)) ** 2).mean()


@right(X, X2)
class Preference(Net):
    """DPO: each pair by itself."""

    def construct(self, chosen, rejected):
        return -ops.log(ops.sigmoid(0.1 * (self.net(chosen) - self.net(rejected)))).mean()


@right(X, TARGET)
class PolicyGradient(Net):
    """It cancels."""

    def construct(self, x, reward):
        ratio = ops.exp(self.net(x) - ops.stop_gradient(self.net(x)))
        advantage = reward - 0.5
        return -ops.minimum(ratio * advantage, ops.clamp(ratio, 0.8, 1.2) * advantage).mean()


@right(X, TARGET, FRACTIONS[:5], split=EvenSplit(shared=(2,)))
class SharedTable(Net):
    def construct(self, x, y, table):
        return (ops.square(self.net(x) - y) * table.mean()).mean()


@right(X.T.copy(), TARGET.T.copy(), split=EvenSplit(axis=1))
class SamplesOnAxisOne(Net):
    def construct(self, x, y):
        return ops.square(self.net(x.T) - y.T).mean()


@right(X, LABELS, loss_weights=(1.0, 0.5))
class TwoLosses(Classes):
    def construct(self, x, y):
        logits = self.net(x)
        return ops.square(logits).mean(), ops.cross_entropy(logits, y)


@right(X, IGNORED, loss_weights=(1.0, 0.5), count=(None, CountNotIgnored()))
class TwoCountedLosses(Classes):
    def construct(self, x, y):
        logits = self.net(x)
        return ops.square(logits).mean(), ops.cross_entropy(logits, y)


@right(X, LABELS, aux=True)
class WithOutputs(Classes):
    def construct(self, x, y):
        logits = self.net(x)
        return ops.cross_entropy(logits, y), logits, logits.argmax(1)


@right(X, X2)
class Triplet(Classes):
    def construct(self, anchor, other):
        a, b = self.net(anchor), self.net(other)
        return ops.relu(ops.square(a - b).sum(1) - 0.5).mean()


@right(TOKENS, NEXT, split=MaxTokens(24, length=lambda t, y: (y >= 0).sum(1)), count=CountNotIgnored())
class TokensThatAreCounted(Words):
    def construct(self, tokens, labels):
        return ops.cross_entropy(self.head(self.embedding(tokens)).reshape((-1, WORDS)), labels.reshape((-1,)))


@right(X.astype(np.float16), TARGET.astype(np.float16))
class HalfPrecision(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = dense(FEATURES, 1).to_float(ms.float16)

    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean()


@right(X, LABELS)
class OneClass(Classes):
    """Nothing can be seen: all samples have the same loss."""

    def construct(self, x, y):
        return ops.cross_entropy(self.net(x) * 0, y)


@right(X, TARGET)
class GradientPenalty(Net):
    def construct(self, x, y):
        slope = ops.grad(self.critic)(x)
        return (self.net(x) - y).mean() + ops.square(ops.norm(slope, dim=1) - 1).mean()

    def critic(self, x):
        return ops.tanh(self.net(x)).sum()


@right(X, TARGET)
class Huber(nn.WithLossCell):
    def __init__(self):
        super().__init__(nn.SequentialCell(dense(FEATURES, 8), nn.LayerNorm((8,)), dense(8, 1)), nn.HuberLoss())


@right(TOKENS, LABELS)
class Recurrent(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5, embedding_table=weights(WORDS, 5))
        self.lstm, self.head = nn.GRU(5, 6, batch_first=True), dense(6, CLASSES)

    def construct(self, tokens, labels):
        return ops.cross_entropy(self.head(self.lstm(self.embedding(tokens))[0][:, -1]), labels)


@right(X, TARGET)
class CountsItsCalls(Net):
    """State that changes no loss."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def construct(self, x, y):
        self.calls.append(x.shape)
        return ops.square(self.net(x) - y).mean()
