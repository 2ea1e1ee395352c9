"""Runs a network forward eagerly, in graph mode too, without a gradient, and without any lasting effect.

``MS_JIT=0`` makes Cells and functions with `mindspore.jit` run eagerly; no context is switched, and nothing is
compiled. Put back are Parameters, attributes of Cells and of objects that the user's code reaches, the modes of Cells,
and all generators of random numbers. What is printed is lost.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend import kernel_seeds
from gaccum_ms.backend.graphs import eagerly
from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.python_state import StateOutside
from gaccum_ms.backend.snapshot import Snapshot

_MOST_COPIED = 2**28  # bytes of Parameters
# `requires_grad` : else MindSpore records a gradient. `_is_check_and_refresh` : else an eager call renames Parameters.
_ATTRIBUTES = ("training", "requires_grad", "_is_check_and_refresh")


class CannotPutBack(Exception):
    """The network would not be left as it was; the reason is the text."""


@contextmanager
def without_effect(
    function: Callable[..., Any],
    networks: Sequence[nn.Cell],
    left_out: Sequence[ms.Parameter],
    in_evaluation: Iterable[nn.Cell] = (),
) -> Iterator[Callable[[], None]]:
    """Within it, the function may be called, or the network that it is; it yields a function that puts back what
    `construct` wrote. `networks` : those that it calls; `left_out` : Parameters that it does not write, which are not
    copied; `in_evaluation` : Cells that have evaluation mode meanwhile."""
    cells = list({id(cell): cell for network in networks for _, cell in held_cells(network)}.values())
    before = Snapshot(*networks, leave_out=left_out)
    outside = StateOutside(function, {*before.parameters, *before.tensors, *map(id, left_out)})
    if outside.takes_next:
        raise CannotPutBack("it takes from an iterator, which cannot be put back")
    modes = [{name: vars(cell).get(name) for name in _ATTRIBUTES} for cell in cells]
    hooks = [(kept, dict(kept)) for cell in cells for kept in (cell._forward_hook, cell._forward_pre_hook) if kept]
    seeds = dict(kernel_seeds)
    frozen = {key for key, (parameter, _) in before.parameters.items() if not parameter.requires_grad}

    def put_back() -> None:
        before.restore_values(frozen)
        outside.restore()

    try:
        for cell in cells:
            vars(cell).update(requires_grad=False, _is_check_and_refresh=True)
        for cell in in_evaluation:
            vars(cell)["training"] = False
        for kept, _ in hooks:
            kept.clear()
        with eagerly(), redirect_stdout(io.StringIO()):
            yield put_back
    finally:
        close_tape()
        for kept, entries in hooks:
            kept.update(entries)
        for cell, mode in zip(cells, modes, strict=True):
            vars(cell).update(mode)
        before.restore_values()
        outside.restore(generators=True)
        kernel_seeds.clear()
        kernel_seeds.update(seeds)


def too_large_to_copy(networks: Sequence[nn.Cell], writes: Callable[[], bool]) -> Sequence[ms.Parameter]:
    """All Parameters, if they are too large to copy. `writes` : whether code of the networks writes Parameters."""
    parameters = {id(parameter): parameter for network in networks for parameter in network.get_parameters()}
    if sum(parameter.nbytes for parameter in parameters.values()) <= _MOST_COPIED:
        return ()
    if writes():
        raise CannotPutBack(f"it writes Parameters, of which more than {_MOST_COPIED >> 20} MB would have to be copied")
    return tuple(parameters.values())


def outputs_of(network: nn.Cell, inputs: Sequence[ms.Tensor], weights: Sequence[ms.Parameter]) -> tuple[Any, ...]:
    """What the network returns. `weights` : what forward does not write."""
    with without_effect(network, (network,), weights):
        outputs = network(*inputs)
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def shapes_if_taken(
    network: nn.Cell, inputs: Sequence[ms.Tensor], weights: Sequence[ms.Parameter]
) -> list[tuple[int, ...] | None] | None:
    """The shapes of what the network returns; None for what is no Tensor, and of a network that does not take these
    inputs, such as one with a reshape to one number of samples."""
    try:
        outputs = outputs_of(network, inputs, weights)
    except Exception:
        return None
    return [output.shape if isinstance(output, ms.Tensor) else None for output in outputs]
