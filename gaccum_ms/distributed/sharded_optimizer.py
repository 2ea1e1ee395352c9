"""ShardedOptimizer: each rank keeps its part of the optimizer's state, updates that part of the weights, and gathers
the others'.

The inner optimizer is an ordinary one. Its parameters are this rank's parts, and so is its state. Slices are copies,
into which it writes; a whole weight, which belongs to one rank, it updates in place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.newer_optimizers import list_rates
from gaccum_ms.backend.parameters import write
from gaccum_ms.checks.arguments import check_one_of
from gaccum_ms.distributed.layout import Layout, balanced_owners, rank_and_ranks
from gaccum_ms.distributed.optimizer_groups import PLACEHOLDER, in_order, own_groups, rate_places, takes_slices
from gaccum_ms.distributed.whole_state import WholeState, not_saved_alone

_NAME = "ShardedOptimizer"

PART = "part_of."  # followed by the weight's name: a rank's copy of its slice


class ShardedOptimizer(nn.Optimizer):
    r"""
    Shard the state of any optimizer over the ranks of data parallel mode.

    Each rank keeps and updates its part, and all ranks then gather the weights: ZeRO stage 1 of Rajbhandari et al.,
    `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models <https://arxiv.org/abs/1910.02054>`_ (2020),
    on every device. Adam's two moments have twice the weights' size; each of N ranks keeps :math:`1/N` of them.
    Weights, state and losses equal the unsharded optimizer's, to float32 rounding. Stand-alone, nothing is sharded.

    Adam, AdamWeightDecay, SGD, Momentum and MindSpore's other optimizers that update each element independently get a
    slice of each parameter; besides the state, a rank then has a copy of its slices of the weights. All others, and
    groups with ``grad_centralization`` , get whole parameters, each on one rank, balanced by size.

    A checkpoint holds the whole state, with the names and shapes of the unsharded optimizer, so that
    :func:`resume` loads it on any number of ranks, and into the plain optimizer. `mindspore.train.ModelCheckpoint` and
    :class:`UpdateCheckpoint` save it if all ranks have them, each with its own directory. Otherwise save and load
    within ``with optimizer.whole_state():`` , which all ranks must enter, even if only some of them save. Each rank
    then has the whole state temporarily.

    Args:
        optimizer (Union[type, Callable]): A class of optimizers, such as `nn.Adam` , or a function that creates an
            optimizer of parameters: ``lambda params: nn.LARS(nn.Momentum(params, 0.1, 0.9))`` .
        params (Union[list[Parameter], list[dict]]): The parameters or groups of them, as the optimizer takes them.
        *args (Any): Further arguments of the optimizer.

    Keyword Args:
        partition (str, optional): ``"slices"`` gives the optimizer slices, and is correct if it updates each element
            independently; ``"parameters"`` gives it whole parameters. Default: ``None`` , slices for MindSpore's own
            optimizers of that kind, whole parameters for all others.
        **kwargs (Any): Further arguments of the optimizer, by name.

    Inputs:
        - **gradients** (tuple[Tensor]) - Whole, and reduced over ranks, in the order and shapes of `parameters` .

    Outputs:
        Stand-alone, the result of the optimizer; else a tuple of Tensors that depend on the writing of the weights.

    Raises:
        TypeError: If `optimizer` makes no optimizer, or `params` has no Parameters.
        ValueError: If `partition` has another value, or is ``"slices"`` for an optimizer that needs whole parameters.
        RuntimeError: In semi-auto, auto and hybrid parallel mode, which have `enable_parallel_optimizer` . If a Cell
            with it is saved by one rank alone; if there is an update within `whole_state` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, ShardedOptimizer
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = ShardedOptimizer(nn.Adam, net.trainable_params(), learning_rate=0.1)
        >>> model = ms.Model(GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4), optimizer=optimizer)
        >>> x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
        >>> model.train(1, ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8))
        >>> print(net.weight.asnumpy().round(4))
        [[0.9 0.9 0.9]]
    """

    def __init__(
        self,
        optimizer: Callable[..., nn.Optimizer],
        params: Sequence[Any],
        *args: Any,
        partition: str | None = None,
        **kwargs: Any,
    ) -> None:
        nn.Cell.__init__(self, auto_prefix=False)  # not nn.Optimizer's: the inner optimizer has rates and counts
        if not callable(optimizer) or isinstance(optimizer, nn.Cell):
            raise TypeError(
                f"For '{_NAME}', the argument 'optimizer' must be a class of optimizers, or a function that makes one "
                f"of parameters, but got one of type '{type(optimizer).__name__}'. Give nn.Adam, not nn.Adam(...)."
            )
        check_one_of(_NAME, "partition", partition, (None, "slices", "parameters"))
        params = list(params)
        weights = in_order(params)
        _check_mode()
        self.rank, self.ranks = rank_and_ranks()
        self.sliced = takes_slices(optimizer, params, partition) and self.ranks > 1
        owners: Sequence[int | None] = (None,) * len(weights)
        if not self.sliced:
            owners = balanced_owners([weight.size for weight in weights], self.ranks)
        self.parameters = self._parameters = ms.ParameterTuple(weights)
        self._user_parameters += [weight.name for weight in weights]
        self.layout = Layout(weights, owners, self.rank, self.ranks)
        own = self._own_parameters()
        groups = own_groups(params, weights, own, self.rank) if self.ranks > 1 else params
        inner = optimizer(groups, *args, **kwargs)
        if not isinstance(inner, nn.Cell) or getattr(inner, "parameters", None) is None:
            raise TypeError(
                f"For '{_NAME}', the argument 'optimizer' must make an nn.Optimizer, but got "
                f"'{type(inner).__name__}' from it."
            )
        list_rates(self, inner)
        places = {id(part): place for place, part in enumerate(own.values())}
        self.slots = tuple(places.get(id(parameter), -1) for parameter in inner.parameters)  # -1: a placeholder
        self.inner_places = tuple(self.slots.index(place) for place in range(len(own)))
        self._rate_places = rate_places(params, weights, groups, inner)
        if self.ranks > 1:
            for index, part in own.items():
                if self.sliced:
                    part.name = PART + weights[index].name  # its state has the weight's name already
            for parameter in self._state_of(inner):
                parameter.layerwise_parallel = True  # ranks' parts differ: MindSpore must not broadcast them
            for parameter in (*self._state_of(inner), *(own.values() if self.sliced else ())):
                parameter.init_data = functools.partial(not_saved_alone, parameter.init_data)
        self.inner: nn.Cell = inner
        self._hidden = (inner,)  # `self.inner` may be replaced by the whole state
        self.weight_of = self._weights_of_rows(inner)
        self._depth = 0
        self._whole: Any = None
        self._saves_together = False
        self._is_whole_for_save = False

    def _own_parameters(self) -> dict[int, ms.Parameter]:
        """The Parameters that the inner optimizer updates, by the weights' indices: this rank's weights, or copies of
        its slices."""
        if not self.sliced:
            return {index: self.parameters[index] for index in self.layout.own_indices}
        with no_grad():
            rows = self.layout.own(self.parameters)
        return {
            index: ms.Parameter(row, name=weight.name, requires_grad=weight.requires_grad, layerwise_parallel=True)
            for index, (row, weight) in enumerate(zip(rows, self.parameters, strict=True))
        }

    def _state_of(self, inner: nn.Cell) -> list[ms.Parameter]:
        """The inner optimizer's state: its Parameters except those that it updates, and placeholders."""
        updated = {id(parameter) for parameter in inner.parameters}
        return [
            parameter
            for parameter in inner.get_parameters()
            if id(parameter) not in updated and PLACEHOLDER not in parameter.name
        ]

    def _weights_of_rows(self, inner: nn.Cell) -> dict[int, int]:
        """For each Parameter of the state that is a row, by its id, the index of its weight. Its name ends with the
        weight's name, unless the weight was renamed after the optimizer was made."""
        weights = {}
        for parameter in self._state_of(inner) if self.sliced else ():
            of = [
                index
                for index, weight in enumerate(self.parameters)
                if parameter.name.endswith(weight.name) and parameter.shape == (1, self.layout.columns[index])
            ]
            if of:
                weights[id(parameter)] = max(of, key=lambda index: len(self.parameters[index].name))
        return weights

    # -- the interface of an optimizer ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the inner optimizer's: `global_step` , `loss_scale` , `is_group_lr` ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            hidden = self.__dict__.get("_hidden")
            if name.startswith("_") or hidden is None:
                raise
            return getattr(hidden[0], name)

    @property
    def learning_rate(self) -> Any:
        """As in any `nn.Optimizer` ; if groups have separate rates, one for each of `parameters` ."""
        rate = self._hidden[0].learning_rate
        return tuple(rate[place] for place in self._rate_places) if self._hidden[0].is_group_lr else rate

    def get_lr_parameter(self, param: ms.Parameter | list[ms.Parameter]) -> Any:
        """As in `nn.Optimizer` , for the given parameters, also if they are on another rank."""
        ids = [id(weight) for weight in self.parameters]
        wanted = param if isinstance(param, list) else [param]
        if any(id(parameter) not in ids for parameter in wanted):
            raise ValueError(f"For 'get_lr_parameter', 'param' must be of the optimizer's parameters, but got {param}.")
        inner = self._hidden[0]
        rates = inner.get_lr_parameter(
            [inner.parameters[self._rate_places[ids.index(id(parameter))]] for parameter in wanted]
        )
        return rates if isinstance(param, list) else rates[0]

    # -- compiled ------------------------------------------------------------------------------------------------------

    @ms.jit  # as in MindSpore's optimizers: otherwise PyNative's tape may forbid writing into a weight
    def construct(self, gradients):
        if self.ranks == 1:
            return self.inner(gradients)
        # Without `depend` , a gradient that only another rank uses would not be reduced here, and that rank would hang.
        parts = ops.depend(self.layout.own(gradients), gradients)
        if self.sliced:
            rows = self.layout.own(self.parameters)
            for place in range(len(rows)):
                copied = write(self.inner.parameters[self.inner_places[place]], rows[place])
                parts = ops.depend(parts, copied)
        inner_gradients: tuple = ()
        for place in self.slots:
            inner_gradients = (*inner_gradients, parts[place] if place >= 0 else ops.zeros((1,), ms.float32))
        updated = self.inner(inner_gradients)
        own: tuple = ()
        for place in self.inner_places:
            own = (*own, self.inner.parameters[place])
        wholes = self.layout.whole(ops.depend(own, updated))
        written: tuple = ()
        for index in range(len(wholes)):
            # Own weights too, though they have the value: a gather whose result is unused here would be left out.
            written = (*written, write(self.parameters[index], wholes[index]))
        return written

    # -- the whole state -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Context manager in which this optimizer, and any Cell that holds it, has the whole state in its Parameters,
        with the names and shapes of the unsharded optimizer: to save, load or inspect it. At its end each rank takes
        back its part. A collective: all ranks must enter it.

        Raises:
            RuntimeError: If there was an update within it.
        """
        self._enter()
        try:
            yield
        except BaseException:
            self._leave(keep=False)
            raise
        self._leave(keep=True)

    def begin_saves(self) -> None:
        """Until `end_saves` , checkpoints get the whole state, because all ranks save the same ones."""
        self._saves_together = True

    def prepare_save(self) -> None:
        """Before MindSpore saves a Cell that holds this optimizer."""
        if self._saves_together and not self._depth:
            self._is_whole_for_save = True
            self._enter()

    def end_saves(self) -> None:
        self._saves_together = False
        if self._is_whole_for_save:
            self._is_whole_for_save = False
            self._leave(keep=False)

    def _enter(self) -> None:
        self._depth += 1
        if self.ranks > 1 and self._depth == 1:
            self._whole = WholeState(self._state_of(self._hidden[0]), self)
            self.inner = self._whole

    def _leave(self, keep: bool) -> None:
        self._depth -= 1
        if self.ranks > 1 and self._depth == 0:
            whole, self._whole = self._whole, None
            self.inner = self._hidden[0]
            if keep:
                whole.take_back()


def whole_state(optimizer: nn.Cell) -> contextlib.AbstractContextManager:
    """`ShardedOptimizer.whole_state` for any optimizer; it does nothing for others."""
    return optimizer.whole_state() if isinstance(optimizer, ShardedOptimizer) else contextlib.nullcontext()


def _check_mode() -> None:
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode not in (ms.ParallelMode.STAND_ALONE, ms.ParallelMode.DATA_PARALLEL):
        raise RuntimeError(
            f"For '{_NAME}', the parallel mode must be 'data_parallel' or 'stand_alone', but got '{mode}'. There "
            f"MindSpore shards the optimizer itself: set enable_parallel_optimizer=True, and give the plain optimizer."
        )
