"""The judgement of an audit's measurements, and its report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# The relative error of a gradient that is zero except for rounding, such as a bias before a normalisation, means
# nothing. So errors are relative to at least this share of the largest entry of all gradients.
_SMALLEST_SCALE = 1e-2


@dataclass(frozen=True)
class AuditReport:
    """The result of :func:`audit` ; ``print(report)`` shows it as a table.

    All errors are the largest absolute difference between the accumulated and the whole batch's values of one
    parameter, relative to the latter's largest entry, without unit. NaN means that a value was not finite.
    """

    gradients: dict[str, float]  # parameter name -> error of its finished gradient, before clipping
    parameters: dict[str, float]  # parameter name -> error of its value after one update with the optimizer
    loss_whole: float
    loss_accumulated: float
    loss_behaves_as: str  # "mean", "sum" or "neither"; "batch" if the network is a WithBatchLossCell
    reduction: str  # the cell's option
    batch_norm_layers: tuple[str, ...]
    couples_samples: bool  # whether results depend on which samples share a micro-batch, apart from a wrong reduction=
    dropout_layers: tuple[str, ...]  # switched off for the audit
    problems: tuple[str, ...]  # for each problem, a description and a remedy

    @property
    def ok(self) -> bool:
        """Whether accumulation gives this network the whole batch's results."""
        return not self.problems

    def _behaviour(self) -> str:
        if self.loss_behaves_as == "batch":
            return "one of the whole batch, as WithBatchLossCell says"
        return f"{self.loss_behaves_as}, the cell has reduction='{self.reduction}'"

    def __str__(self) -> str:
        error = _relative_error(self.loss_accumulated, self.loss_whole)
        losses = f"{self.loss_whole:.6g} on the whole batch, {self.loss_accumulated:.6g} accumulated ({error:.1e})"
        facts = {
            "loss": losses,
            "loss behaves as": self._behaviour(),
            "couples samples": "yes" if self.couples_samples else "no",
            "BatchNorm layers": ", ".join(self.batch_norm_layers) or "none",
            "dropout, switched off": ", ".join(self.dropout_layers) or "none",
        }
        width = max(len(name) for name in (*facts, *self.gradients))
        lines = [f"{name:{width}}  {fact}" for name, fact in facts.items()]
        lines.append(f"{'worst relative error':{width}}  gradient  after update")
        for name in self.gradients:
            lines.append(f"{name:{width}}  {self.gradients[name]:8.1e}  {self.parameters[name]:12.1e}")
        lines.append(f"{'verdict':{width}}  {'ok' if self.ok else f'{len(self.problems)} problem(s)'}")
        return "\n".join([*lines, *(f"* {problem}" for problem in self.problems)])


@dataclass(frozen=True)
class Update:
    """The results of one update."""

    loss: float
    gradients: list[np.ndarray]
    parameters: list[np.ndarray]


@dataclass(frozen=True)
class Evidence:
    """The measurements, and the properties of the cell."""

    names: tuple[str, ...]  # the weights' names
    whole: Update
    accumulated: Update
    once: np.ndarray  # losses on the batch
    again: np.ndarray  # the same, in a second call
    twice: np.ndarray  # losses on the doubled batch
    tolerance: float
    reduction: str
    of_batch: bool  # whether the loss needs the whole batch
    counted: bool
    trimmed: bool  # whether padding is left out
    batch_norm_layers: tuple[str, ...]
    dropout_layers: tuple[str, ...]


def judged(found: Evidence) -> AuditReport:
    """The report."""
    whole, accumulated, tolerance, reduction = found.whole, found.accumulated, found.tolerance, found.reduction
    expected = "mean" if reduction == "ratio" else reduction  # a ratio stays the same on the doubled batch
    once, again, twice = found.once, found.again, found.twice
    layers = found.batch_norm_layers
    largest = max(np.abs(gradient).max(initial=0) for gradient in whole.gradients)
    gradients = {
        name: _relative_error(value, reference, _SMALLEST_SCALE * largest)
        for name, value, reference in zip(found.names, accumulated.gradients, whole.gradients, strict=True)
    }
    parameters = {
        name: _relative_error(value, reference)
        for name, value, reference in zip(found.names, accumulated.parameters, whole.parameters, strict=True)
    }
    errors = {**gradients, "the loss": _relative_error(accumulated.loss, whole.loss)}
    worst = max(errors, key=lambda name: errors[name])
    behaves_as = "batch" if found.of_batch else _behaves_as(once, twice, tolerance, expected)

    problems = []
    couples_samples = bool(layers)
    if layers:
        problems.append(
            f"{len(layers)} BatchNorm layer(s) couple the samples of a micro-batch: "
            f"{', '.join(layers)}. For the whole batch's results use nn.GroupNorm or nn.LayerNorm, or "
            f"use_batch_statistics=False."
        )
    # Only the first of the following problems is reported, because it explains the others.
    if not np.isfinite([whole.loss, accumulated.loss, *errors.values()]).all():
        problems.append(
            f"A loss or gradient is not finite; the loss is {whole.loss:.6g} on the whole batch, "
            f"{accumulated.loss:.6g} accumulated. Nothing can be compared: use other weights or inputs. Where only the "
            f"accumulated one is not finite, a micro-batch takes a mean over nothing, such as ignored labels alone: "
            f"give it as count=."
        )
    elif largest == 0:
        problems.append("All gradients are zero: nothing can be compared. Use a batch from which the network learns.")
    elif not np.allclose(once, again, rtol=tolerance, atol=0):
        problems.append(
            f"The loss differs from one call to the next, {_shown(once)} and {_shown(again)}: something other than a "
            f"dropout layer is random or keeps a state, and errors may come from it. Switch it off for the audit."
        )
    elif found.of_batch:
        if errors[worst] > tolerance and not layers:
            couples_samples = True
            problems.append(
                f"Micro-batching changes the result, by {errors[worst]:.1e} in {worst}, although the loss sees the "
                f"whole batch: the backbone gives a sample another representation among other samples, or another one "
                f"the second time. Leave to 'loss_fn' what compares samples."
            )
    elif behaves_as not in (expected, "neither"):
        problems.append(
            f"The loss behaves as a {behaves_as} over samples, but the cell has reduction='{reduction}': loss and "
            f"gradient have a wrong size. Give reduction='{behaves_as}', or make the loss a {reduction}."
        )
    elif behaves_as == "neither":
        couples_samples = True
        problems.append(
            f"The loss is neither a mean nor a sum over samples: {_shown(once)} on the batch, {_shown(twice)} on the "
            f"batch twice over. Either it compares samples of one batch, as in-batch negatives do, and needs a "
            f"WithBatchLossCell, or them in one micro-batch; or it adds a term of its own to a sum: make it a mean."
        )
    elif errors[worst] > tolerance and found.trimmed:
        problems.append(
            f"Leaving padding out changes the result, by {errors[worst]:.1e} in {worst}: the network reads padding, as "
            f"a mean or an attention over all places does. Mask it there, or split without MaxTokens."
        )
    elif errors[worst] > tolerance and not layers:
        couples_samples = True
        problems.append(
            f"Micro-batching changes the result, by {errors[worst]:.1e} in {worst}, although no known layer couples "
            f"samples. Either the network compares samples of one batch: give it as WithBatchLossCell; or its "
            f"loss is a mean over something other than {'what count= counts' if found.counted else 'samples'}, such as "
            f"valid tokens: give it as count=."
        )
    return AuditReport(
        gradients=gradients,
        parameters=parameters,
        loss_whole=whole.loss,
        loss_accumulated=accumulated.loss,
        loss_behaves_as=behaves_as,
        reduction=reduction,
        batch_norm_layers=layers,
        couples_samples=couples_samples,
        dropout_layers=found.dropout_layers,
        problems=tuple(problems),
    )


def _behaves_as(once: np.ndarray, twice: np.ndarray, tolerance: float, expected: str) -> str:
    """The kind of loss, from its values on the batch and on the doubled batch; `expected` for a loss of zero."""
    values = {"mean": once, "sum": 2 * once}
    for kind in (expected, "mean", "sum"):
        if np.allclose(twice, values[kind], rtol=tolerance, atol=0):
            return kind
    return "neither"


def _relative_error(value: np.ndarray | float, reference: np.ndarray | float, smallest_scale: float = 0.0) -> float:
    """Largest difference, relative to the largest entry of the reference."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    scale = max(np.abs(reference).max(initial=0), smallest_scale, 1e-30)
    return float(np.abs(value - reference).max(initial=0) / scale)


def _shown(losses: np.ndarray) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
