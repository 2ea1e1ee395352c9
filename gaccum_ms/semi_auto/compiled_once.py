"""Networks that the compiler compiles once for all micro-batches, because its passes need it.

All micro-batches share the cast of a weight, but the compiler's pass assigns each operator to one micro-batch, unless
the network is compiled once, with `mindspore.lazy_inline`. So where `to_float()` or `amp_level` cast weights, this file
puts a Cell with it around the network, and for `gradient_accumulation_shard` , whose pass needs it for any network.
That is for Ascend: MindSpore's back end for GPUs does not run such graphs. A batch that is not cut does without.
"""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
from mindspore import nn

from gaccum_ms.options.rules import Setup
from gaccum_ms.semi_auto.modes import shards_gradients
from gaccum_ms.transforms.chain import is_elementwise


class CompiledOnce(nn.Cell):
    """A network that is compiled once for all its calls."""

    @ms.lazy_inline
    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return self.network(*inputs)


def runs_on_device() -> bool:
    """Whether the device's back end runs what is compiled once."""
    return ms.get_context("device_target") != "GPU"


def note_casts(network: nn.Cell) -> None:
    """Note that a mixed-precision level has added casts that leave no flag on the Cells."""
    object.__setattr__(network, "casts_by_level", True)


def compiled_once(network: nn.Cell, setup: Setup) -> nn.Cell:
    """The network, in a `CompiledOnce` if the compiler needs that: if it casts weights that are compiled for each
    micro-batch, or if gradients are sharded. `network` runs on a micro-batch; `setup` has the cell's whole network, for
    which, or for a part, `note_casts` may have been called. Where the compiler cannot do it, this refuses."""
    options, whole, _ = setup
    is_cut = (options.micro_size or 1) > 1
    by_level = any(getattr(cell, "casts_by_level", False) for _, cell in whole.cells_and_names())
    casting = [type(cell).__name__ for cell in _inlined(network) if is_cut and (by_level or _casts(cell))]
    inside = [type(cell).__name__ for _, cell in network.cells_and_names() if _is_lazy(cell)]
    shards = is_cut and shards_gradients()
    takes_norm = options.max_grad_norm is not None or not all(map(is_elementwise, options.transforms))
    if inside and takes_norm and not is_cut:
        raise ValueError(
            f"For 'GradAccumulationCell', in semi-auto and auto parallel mode the compiler sums the norm of a batch of "
            f"one micro-batch once for each device where the network has mindspore.lazy_inline, but got it on the "
            f"__init__ of '{inside[0]}' with micro_size=1. Give micro_size=2, or leave lazy_inline out."
        )
    if (casting or inside or shards) and not runs_on_device():
        needs = f"a cast of the weights of '{casting[0]}'" if casting else "gradient_accumulation_shard=True"
        needs = f"it on the __init__ of '{inside[0]}'" if inside else needs
        raise ValueError(
            f"For 'GradAccumulationCell', in semi-auto and auto parallel mode a network on GPU must not need "
            f"mindspore.lazy_inline, which MindSpore runs on Ascend only, but got {needs}. Leave out lazy_inline, "
            f"to_float(), amp_level and gradient_accumulation_shard. For float16, cast in the layer, tied to its "
            f"input: ops.cast(ops.depend(self.weight, x), mindspore.float16)."
        )
    if not casting and (inside or not shards):
        return network
    if inside:
        raise ValueError(
            f"For 'GradAccumulationCell', in semi-auto and auto parallel mode a network that casts weights, by "
            f"to_float() or amp_level, must be compiled once for all micro-batches, but got casts in "
            f"{', '.join(casting[:3])}{', ...' * (len(casting) > 3)} outside of the Cell with mindspore.lazy_inline, "
            f"'{inside[0]}'. Decorate the __init__ of the network's outermost Cell, and no other; or none."
        )
    return CompiledOnce(network)


def _is_lazy(cell: nn.Cell) -> bool:
    return str(getattr(cell, "cell_init_args", "")).startswith("lazy_inline_")  # MindSpore's layers have other values


def _inlined(cell: nn.Cell) -> Iterator[nn.Cell]:
    """The Cells with weights that are compiled for each micro-batch, which are those outside of lazy_inline Cells."""
    if _is_lazy(cell):
        return
    if any(True for _ in cell.parameters_and_names(expand=False)):
        yield cell
    for child in cell.cells():
        yield from _inlined(child)


def _casts(cell: nn.Cell) -> bool:
    flags = cell.get_flags()
    return bool(flags.get("fp16") or flags.get("bf16"))
