"""The whole batch's update of cases.py's `Masked` , in float64 in NumPy."""

from __future__ import annotations

import numpy as np

from tests.semi_auto.cases import SAMPLES
from tests.semi_auto.machine import rows
from tests.semi_auto.ran import RANKS, SPLIT, WEIGHTS, lies, part

RATE = 0.1


def batch(seed: int = 7, parts: int = RANKS, width: int = 1):
    """Inputs and labels of so many devices. The number of labels above zero differs from device to device."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(parts * SAMPLES, 12)).astype(np.float32)
    above = np.repeat(np.linspace(0.05, 0.95, parts), SAMPLES)[:, None]
    sign = np.where(rng.random((len(x), width)) < above, 1, -1)
    return x, (np.abs(rng.normal(size=(len(x), width))) * sign).astype(np.float32)


class UpdateBySGD:
    """From the weights `before` and the whole `gradients` : the gradient's `norm` , and `after` , the weights.

    Args:
        before (dict): The weights before.
        gradients (dict): Their gradients.
        clip (float or None): The largest norm.
    """

    def __init__(self, before, gradients, clip=None):
        self.before, self.gradients = before, gradients
        self.norm = np.sqrt(sum((one**2).sum() for one in gradients.values()))
        factor = min(1.0, clip / self.norm) if clip else 1.0
        self.move(lambda gradient: factor * gradient)

    def move(self, change):
        """The weights after an update by changed gradients."""
        self.after = {name: self.before[name] - RATE * change(one) for name, one in self.gradients.items()}
        return self


class Update(UpdateBySGD):
    """An update by SGD: `loss` , `terms` and `totals` of each loss, the gradient's `norm` , and `after` , the weights.

    Args:
        values (dict): The weights before.
        batch (tuple): Inputs and labels.
        loss_weights (tuple): Of each loss.
        clip (float or None): The largest norm.
        min_count (float): The least total.
    """

    def __init__(self, values, batch, loss_weights=(1.0,), clip=None, min_count=0.0):
        x, y = (one.astype(np.float64) for one in batch)
        first, bias, second = (values[name].astype(np.float64) for name in WEIGHTS)
        reached = x @ first + bias
        hidden = np.maximum(reached, 0)
        out = hidden @ second
        masks, errors = ((y > 0).astype(float), (y * y > 0.5).astype(float)), (out - y, out)
        self.totals, self.terms, backward = [], [], np.zeros_like(out)
        for weight, mask, error in zip(loss_weights, masks, errors, strict=False):
            divisor = max(mask.sum(), min_count, 1e-30)
            self.totals.append(mask.sum())
            self.terms.append((mask * error**2).sum() / divisor)
            backward += weight * 2 * mask * error / divisor
        self.loss = np.dot(self.terms, loss_weights)
        at_hidden = backward @ second.T * (reached > 0)
        gradients = {"first": x.T @ at_hidden, "bias": at_hidden.sum(0), "second": hidden.T @ backward}
        super().__init__(values, gradients, clip)


# Of compile_worker.py's `LAYOUTS` : in how many parts the samples lie, and the parts of weights if they are no rows.
PLACES = {"split": (4, SPLIT), "lazy split": (4, SPLIT), "ws": (RANKS, lies(**dict.fromkeys(WEIGHTS, part(4))))}


def place(layout):
    return PLACES.get(layout, (RANKS, None))


def distance(ran, update, layout):
    """The largest difference of a weight on any rank from the update's, as a part of that weight's movement."""
    parts, largest = place(layout)[1], 0.0
    for name, whole in update.after.items():
        movement = np.abs(whole - update.before[name]).max()
        for rank, weight in enumerate(ran.parameter(name)):
            expected = parts[name](whole, rank) if parts else rows(weight.shape)(whole, rank)
            largest = max(largest, np.abs(weight - expected).max() / movement)
    return largest
