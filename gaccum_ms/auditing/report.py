"""The judgement of an audit's measurements, and its report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaccum_ms.auditing.evidence import Evidence, relative_error
from gaccum_ms.layers.dropout import dropouts


@dataclass(frozen=True)
class AuditReport:
    r"""
    The result of :func:`audit` ; ``print(report)`` shows it as a table, and ``report.ok`` is True without problems.

    All errors are the largest absolute difference between the accumulated and the whole batch's values of one
    parameter, relative to the latter's largest entry, without unit. NaN means that a value was not finite.

    Args:
        gradients (dict[str, float]): For each parameter's name, the error of its finished gradient, before clipping.
        parameters (dict[str, float]): Likewise, of its value after one update with the optimizer.
        loss_whole (float): The loss of the whole batch.
        loss_accumulated (float): The loss that the training step returns.
        loss_behaves_as (str): ``"mean"`` , ``"sum"`` or ``"neither"`` ; ``"batch"`` for a WithBatchLossCell.
        reduction (str): The cell's option; what the loss says, if it is not given.
        batch_norm_layers (tuple[str, ...]): Their names.
        couples_samples (bool): Whether results depend on which samples share a micro-batch, apart from a wrong
            `reduction` , and from what a remedy makes equal.
        dropout_layers (tuple[str, ...]): The names of those that were switched off for the audit.
        problems (tuple[str, ...]): For each problem, a description and a remedy.

    Raises:
        TypeError: If a field is left out.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from gaccum_ms import AuditReport
        >>> report = AuditReport({}, {}, 2.0, 4.0, "sum", "mean", (), False, (), ("a sum: give reduction='sum'",))
        >>> print(report.ok)
        False
    """

    gradients: dict[str, float]
    parameters: dict[str, float]
    loss_whole: float
    loss_accumulated: float
    loss_behaves_as: str
    reduction: str
    batch_norm_layers: tuple[str, ...]
    couples_samples: bool
    dropout_layers: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether accumulation gives this network the whole batch's results."""
        return not self.problems

    def __str__(self) -> str:
        behaviour = f"{self.loss_behaves_as}, the cell has reduction='{self.reduction}'"
        if self.loss_behaves_as == "batch":
            behaviour = "one of the whole batch, as WithBatchLossCell says"
        error = relative_error(self.loss_accumulated, self.loss_whole)
        losses = f"{self.loss_whole:.6g} on the whole batch, {self.loss_accumulated:.6g} accumulated ({error:.1e})"
        facts = {
            "loss": losses,
            "loss behaves as": behaviour,
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


def judged(evidence: Evidence) -> AuditReport:
    """The report."""
    pairs = zip(evidence.accumulated.parameters, evidence.whole.parameters, strict=True)
    errors = (relative_error(value, reference) for value, reference in pairs)
    couples_samples, problems = _problems(evidence)
    return AuditReport(
        gradients=evidence.gradients,
        parameters=dict(zip(evidence.gradients, errors, strict=True)),
        loss_whole=evidence.whole.loss,
        loss_accumulated=evidence.accumulated.loss,
        loss_behaves_as=evidence.behaves_as,
        reduction=evidence.cell.reduction,
        batch_norm_layers=evidence.batch_norm_layers,
        couples_samples=couples_samples,
        dropout_layers=tuple(dropouts(evidence.cell.network)),
        problems=tuple(problems),
    )


def _problems(evidence: Evidence) -> tuple[bool, list[str]]:
    """Whether samples are coupled, and the problems."""
    layers, problems = evidence.batch_norm_layers, []
    if layers:
        problems.append(
            f"{len(layers)} BatchNorm layer(s) couple the samples of a micro-batch: "
            f"{', '.join(layers)}. For the whole batch's results use nn.GroupNorm or nn.LayerNorm, or "
            f"use_batch_statistics=False."
        )
    elif evidence.changed_state:
        problems.append(
            f"The network writes state in 'construct' ({', '.join(evidence.changed_state)}), which then moves once per "
            f"micro-batch; where the loss uses it, errors come from it. Write it once per update: in 'after_update' of "
            f"a gaccum_ms.Transform, or after the training step from what the network returns with aux=True."
        )
    if evidence.changed_outputs:
        problems.append(
            f"Output(s) {', '.join(map(str, evidence.changed_outputs))} after the loss, counted from 0, differ(s) from "
            f"the whole batch's: with aux=True each must have the micro-batch's samples along axis 0, or shape (). "
            f"Move the samples of others there, and leave out what is one for the whole batch."
        )
    couples_samples, problem = _first_problem(evidence, explained=bool(problems))
    return couples_samples or bool(layers), problems if problem is None else [*problems, problem]


def _first_problem(evidence: Evidence, explained: bool) -> tuple[bool, str | None]:
    """Whether samples are coupled without a known layer, and the first of some problems, which explains the others.
    `explained` : differences come from problems that are reported already."""
    whole, accumulated, reduction = evidence.whole, evidence.accumulated, evidence.cell.reduction
    worst, error = next(iter(evidence.errors.items()))
    by = f"by {error:.1e} in {worst}"
    if evidence.remedy is not None:
        return False, f"Micro-batching changes the result, {by}. This was tried, and makes it equal: {evidence.remedy}."
    if not evidence.is_finite:
        return False, (
            f"A loss or gradient is not finite; the loss is {whole.loss:.6g} on the whole batch, "
            f"{accumulated.loss:.6g} accumulated. Nothing can be compared: use other weights or inputs. Where only the "
            f"accumulated one is not finite, a micro-batch takes a mean over nothing, such as ignored labels alone: "
            f"give it as count=."
        )
    if evidence.largest == 0:
        return False, "All gradients are zero: nothing can be compared. Use a batch from which the network learns."
    if evidence.is_random:
        return False, (
            f"The loss differs from one call to the next, {_as_text(evidence.once)} and {_as_text(evidence.again)}: "
            f"something other than a dropout layer is random or keeps a state, and errors may come from it. Switch it "
            f"off for the audit."
        )
    if evidence.of_batch:
        if not evidence.differs or explained:
            return False, None
        return True, (
            f"Micro-batching changes the result, {by}, although the loss sees the whole batch: the backbone gives a "
            f"sample another representation among other samples, or another one the second time. Leave to 'loss_fn' "
            f"what compares samples."
        )
    behaves_as = evidence.behaves_as
    if behaves_as not in (evidence.expected, "neither"):
        return False, (
            f"The loss behaves as a {behaves_as} over samples, but the cell has reduction='{reduction}': loss and "
            f"gradient have a wrong size. Give reduction='{behaves_as}', or make the loss a {reduction}."
        )
    if behaves_as == "neither":
        return True, (
            f"The loss is neither a mean nor a sum over samples: {_as_text(evidence.once)} on the batch, "
            f"{_as_text(evidence.twice)} on the batch twice over. Either it compares samples of one batch, as in-batch "
            f"negatives do, and needs a WithBatchLossCell, or them in one micro-batch; or it adds a term of its own to "
            f"a sum: make it a mean."
        )
    if not evidence.differs or explained:
        return False, None
    if evidence.cell.trims:
        return False, (
            f"Leaving padding out changes the result, {by}: the network reads padding, as a mean or an attention over "
            f"all places does. Mask it there, or split without MaxTokens."
        )
    over = "what count= counts" if evidence.cell.counted else "samples"
    return True, (
        f"Micro-batching changes the result, {by}, although no known layer couples samples. Either the network "
        f"compares samples of one batch: give it as WithBatchLossCell; or its loss is a mean over something other than "
        f"{over}, such as valid tokens: {'give another count=' if evidence.cell.counted else 'give it as count='}."
    )


def _as_text(losses: np.ndarray) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
