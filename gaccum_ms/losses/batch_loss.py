"""WithBatchLossCell: a network whose loss needs the samples of a whole batch. grad_cache.py trains it in
micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.checks.arguments import check_bool, first_of
from gaccum_ms.checks.batches import lacks_rows
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.layers.dropout import dropouts

_NAME = "WithBatchLossCell"
MOST_REPRESENTATIONS = 16
FLOATS = (ms.float32, ms.float16, ms.bfloat16, ms.float64)


class WithBatchLossCell(nn.Cell):
    r"""
    Combine a network with a loss that needs all samples of a batch at once. It is exact for any such loss: a
    contrastive one, whose negatives are the batch's other samples; `nn.DiceLoss` , `nn.MultiClassDiceLoss` and
    `nn.RMSELoss` ; the balancing of a mixture's experts; the mining of hard examples; whitened advantages.

    In a :class:`GradAccumulationCell` the loss is exact under micro-batches, by GradCache (`Gao et al., 2021
    <https://arxiv.org/abs/2101.06983>`_): each micro-batch runs forward; the loss is computed from all representations;
    then each micro-batch runs forward and backward, with its part of the loss's gradient. This costs one more forward.
    Memory holds the activations of one micro-batch, and the representations of all. The backbone must return the same
    both times. With Dropout it does not; there is a warning then.

    With `gather_ranks` , create it after `mindspore.set_auto_parallel_context` .

    Args:
        backbone (Cell): Maps the inputs to representations, a Tensor or a tuple of at most 16, each with the samples
            on axis 0: embeddings, and other inputs of the loss, such as labels, passed through. What does not depend
            on the samples, such as a temperature, has shape :math:`()`. Representations that are not of a float dtype
            get no gradient.
        loss_fn (Cell): Maps the representations of a whole batch to its loss, a scalar of shape :math:`()`. It may
            have Parameters, such as a temperature.

    Keyword Args:
        gather_ranks (bool, optional): In data parallel mode, give the loss the samples of all ranks, in the order of
            ranks; all must have batches of the same size. Loss and update then equal those of one process with the
            whole global batch, with either value of ``gradients_mean`` . Default: ``False`` , each rank's loss is over
            its own batch, and ranks are averaged or summed as without accumulation.

    Inputs:
        - **\*inputs** (Tensor) - The backbone's inputs, each of shape :math:`(N, ...)`.

    Outputs:
        Tensor of shape :math:`()`, the loss of the whole batch, not split.

    Raises:
        TypeError: If `backbone` or `loss_fn` is not a Cell, or `gather_ranks` not a bool.
        ValueError: If a representation has neither the samples on axis 0 nor shape :math:`()`, or with `gather_ranks`
            shape :math:`()`; if one of shape :math:`()` differs between micro-batches; if none is of a float dtype, or
            there are more than 16; if, with `gather_ranks` , the ranks' batches differ in size.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> import numpy as np
        >>> from mindspore import Tensor, nn, ops
        >>> from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell
        >>> ms.set_context(mode=ms.PYNATIVE_MODE)  # graph mode compiles Cells that are in files
        >>> class InfoNCE(nn.Cell):
        ...     def construct(self, rows):
        ...         return ops.cross_entropy(rows @ rows.T, ops.arange(rows.shape[0]))
        >>> net = WithBatchLossCell(nn.Dense(3, 2, weight_init="ones", bias_init="zeros"), InfoNCE())
        >>> optimizer = nn.SGD(net.trainable_params(), 0.01)
        >>> step = TrainOneStepWithGradAccumulationCell(GradAccumulationCell(net, 4), optimizer)
        >>> x = Tensor(np.eye(8, 3, dtype=np.float32))
        >>> whole, accumulated = net(x), step(x)
        >>> print(abs(float(whole - accumulated)) < 1e-6)
        True
    """

    def __init__(self, backbone: nn.Cell, loss_fn: nn.Cell, *, gather_ranks: bool = False) -> None:
        super().__init__(auto_prefix=False)
        for name, value in (("backbone", backbone), ("loss_fn", loss_fn)):
            if not isinstance(value, nn.Cell):
                raise TypeError(
                    f"For '{_NAME}', the argument '{name}' must be a Cell, but got {value!r} of type "
                    f"'{type(value).__name__}'. Write the function as the 'construct' of a Cell."
                )
        check_bool(_NAME, "gather_ranks", gather_ranks)
        self.backbone = backbone
        self.loss_fn = loss_fn
        self.gather_ranks = gather_ranks
        rank, self.ranks = rank_and_ranks() if gather_ranks else (0, 1)
        self.of_all_ranks = _Gather(rank, self.ranks) if self.ranks > 1 else nn.Identity()

    def construct(self, *inputs):
        return self.loss(*self.represent(*inputs))

    def represent(self, *inputs):
        """The representations, as a tuple."""
        representations = self.backbone(*inputs)
        if isinstance(representations, ms.Tensor):
            representations = (representations,)
        _check_representations([representation.dtype for representation in representations])
        return representations

    def loss(self, *representations):
        """The loss of all samples; with `gather_ranks` , also those of the other ranks."""
        gathered: tuple = ()
        for representation in representations:
            gathered = (*gathered, self.of_all_ranks(representation))
        return self.loss_fn(*gathered)

    def map_parts(self, function: Any) -> WithBatchLossCell:
        """Replace backbone and loss by what `function` returns for each. It must be applied to the parts, because
        training does not run this Cell's `construct` ."""
        self.backbone = function(self.backbone)
        self.loss_fn = function(self.loss_fn)
        return self


class _Gather(nn.Cell):
    """All ranks' rows of a Tensor, one rank after the other.

    The backward of an AllGather is a ReduceScatter, a sum over ranks of the gradients of this rank's rows. Here all
    ranks have the same loss of the same rows, so the sum is a product and needs no communication.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(auto_prefix=False)
        self.rank = rank
        self.ranks = ranks
        self.all_gather = ops.AllGather()

    def construct(self, rows):
        wire = rows
        if rows.dtype == ms.bool_:
            wire = ops.cast(rows, ms.int32)  # the CPU back end sends neither this ...
        elif rows.dtype == ms.bfloat16:
            wire = ops.cast(rows, ms.float32)  # ... nor this
        return ops.cast(self.all_gather(wire), rows.dtype)

    def bprop(self, rows, out, dout):
        own = rows.shape[0]
        return (dout[self.rank * own : (self.rank + 1) * own] * self.ranks,)


@ops.constexpr
def _check_representations(dtypes):
    if not any(dtype in FLOATS for dtype in dtypes):
        raise ValueError(
            f"For '{_NAME}', 'backbone' must return at least one representation of a float dtype, from which it can "
            f"learn, but got {[str(dtype) for dtype in dtypes]}."
        )
    if len(dtypes) > MOST_REPRESENTATIONS:
        raise ValueError(
            f"For '{_NAME}', 'backbone' must return at most {MOST_REPRESENTATIONS} representations, but got "
            f"{len(dtypes)}. Join some along their last axis."
        )


def check_rows(shapes: Sequence[tuple[int | None, ...] | None], rows: int | None, ranks: int) -> None:
    """Check the shapes of representations of `rows` samples. A shape is None for what is no Tensor."""
    for position, shape in enumerate(shapes):
        if shape is None or (not shape and ranks == 1):
            continue
        if not shape or lacks_rows(shape, rows):
            number = ", or shape ()" if ranks == 1 else ", along which 'gather_ranks' joins ranks"
            raise ValueError(
                f"For '{_NAME}', each representation that 'backbone' returns must have the samples on axis 0{number}, "
                f"but output {position} got shape {shape} for {rows} sample(s). ops.swapaxes brings samples there; "
                f"what is one for the whole batch belongs to 'loss_fn'."
            )


check_rows_in_graph = ops.constexpr(check_rows, check=False)  # the check warns about open shapes


def check_ranks(network: WithBatchLossCell) -> None:
    """Check the ranks before a step is built. Their number must not have changed since the network was made."""
    ranks = rank_and_ranks()[1]
    if network.gather_ranks and network.ranks != ranks:
        raise RuntimeError(
            f"For '{_NAME}', with 'gather_ranks' the parallel mode must be set before the network is made, but got "
            f"{network.ranks} rank(s) then and {ranks} now. Call init() and set_auto_parallel_context(parallel_mode="
            f"'data_parallel') first."
        )


def advice_about_two_passes(network: nn.Cell) -> str | None:
    """What to say about layers whose two forward passes differ; None if there are none."""
    layers = dropouts(network.backbone) if isinstance(network, WithBatchLossCell) else {}
    names = [name for name, layer in layers.items() if layer.training]
    if not names:
        return None
    return (
        f"For '{_NAME}', the backbone has {len(names)} Dropout layer(s) ({first_of(names)}) that draw other masks when "
        f"a micro-batch goes forward for the second time: the gradient is then not that of the loss. Set p=0 or remove "
        f"them."
    )
