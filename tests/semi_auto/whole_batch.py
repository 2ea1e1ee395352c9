"""The whole batch's update of the networks of cases.py, in float64 in NumPy."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

RATE = 0.1


class UpdateBySGD:
    """From the weights `before` and the whole `gradients` : the gradient's `norm` , of which `clip` is the largest, and
    `after` , the weights."""

    def __init__(self, before, gradients, clip=None):
        self.before, self.gradients = before, gradients
        self.norm = np.sqrt(sum((one**2).sum() for one in gradients.values()))
        factor = min(1.0, clip / self.norm) if clip else 1.0
        self.move(lambda gradient: factor * gradient)

    def move(self, change, rate=lambda name: RATE):
        """The weights after an update by changed gradients."""
        self.after = {name: self.before[name] - rate(name) * change(one) for name, one in self.gradients.items()}
        return self


class Update(UpdateBySGD):
    """From the weights before, inputs and labels: the outputs `out` ; `loss` ; `terms` and `totals` of each loss, which
    are at least `min_count` . A loss that is `masked` is over its mask alone."""

    def __init__(self, values, batch, loss_weights=(1.0,), clip=None, min_count=0.0, masked=True):
        values = {name: value.astype(np.float64) for name, value in values.items()}
        x, y = (one.astype(np.float64) for one in batch)
        layers = layers_of(values)
        reached, inputs = [], [x]
        for name, bias, has_relu, is_transposed in layers:
            weight = values[name].T if is_transposed else values[name]
            reached.append(inputs[-1] @ weight + values.get(bias, 0.0))
            inputs.append(np.maximum(reached[-1], 0) if has_relu else reached[-1])
        self.out = out = inputs[-1]
        masks = (y > 0, y * y > 0.5) if masked else (np.ones_like(y),)
        self.totals, self.terms, backward = [], [], np.zeros_like(out)
        for loss_weight, mask, error in zip(loss_weights, masks, (out - y, out), strict=False):
            divisor = max(mask.sum(), min_count, 1e-30)
            self.totals.append(mask.sum())
            self.terms.append((mask * error**2).sum() / divisor)
            backward += loss_weight * 2 * mask * error / divisor
        self.loss = np.dot(self.terms, loss_weights)
        gradients = defaultdict(float)
        for index, (name, bias, has_relu, is_transposed) in reversed([*enumerate(layers)]):
            backward = backward * (reached[index] > 0) if has_relu else backward
            gradient = inputs[index].T @ backward
            gradients[name] += gradient.T if is_transposed else gradient
            if bias in values:
                gradients[bias] += backward.sum(0)
            backward = backward @ (values[name] if is_transposed else values[name].T)
        super().__init__(values, dict(gradients), clip)


def layers_of(values):
    """Of each layer: the weight, the bias, whether a ReLU follows, and whether the weight is transposed."""
    weights = [name for name in values if re.fullmatch(r"layers\.\d\.weight", name)]
    layers = [(name, name.replace("weight", "bias"), values[name].shape[1] > 1, False) for name in weights]
    table = "enter.table"
    return [(table, None, False, False), *layers, (table, None, False, True)] if table in values else layers
