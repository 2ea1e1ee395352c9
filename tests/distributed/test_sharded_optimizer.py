"""ShardedOptimizer: real ranks compared with the same training with the unsharded optimizer, and with one process."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from gaccum_ms import ShardedOptimizer, resume
from gaccum_ms.distributed.layout import Layout, balanced_owners
from gaccum_ms.distributed.optimizer_groups import _ELEMENTWISE
from gaccum_ms.distributed.whole_state import not_saved_alone
from tests.ranks.sharding_worker import UPDATES, make_step, run
from tests.support.modes import eagerly
from tests.support.reference import make_network as make_dense
from tests.support.reference import relative_error
from tests.support.reuse import Reused
from tests.support.state import assert_close
from tests.support.two_ranks import Results, case, results_of

TOLERANCE = 1e-6
RANKS_TOLERANCE = 1e-5  # between different numbers of ranks, which add up in another order


def assert_same(one: Results, other: Results, tolerance: float = TOLERANCE) -> None:
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in other.items()}
    assert_close(one, other, tolerance)


def test_only_a_save_is_taken_for_one(tmp_path):
    """Since MindSpore 2.8 `save_checkpoint` has a wrapper that other functions have too, such as `load_checkpoint` ."""
    file, net = str(tmp_path / "net.ckpt"), nn.Dense(2, 1)
    ms.save_checkpoint(net, file)
    assert ms.load_checkpoint(file, choice_func=lambda name: not_saved_alone(lambda: name == "weight")).keys() == {
        "weight"
    }
    net.weight.init_data = functools.partial(not_saved_alone, net.weight.init_data)
    with pytest.raises(RuntimeError, match="saved by this rank alone"):
        ms.save_checkpoint(net, file)


_ARGUMENTS = {
    nn.Adam: {"use_amsgrad": True, "weight_decay": 0.1},
    nn.Momentum: {"learning_rate": 0.1, "momentum": 0.9},
    nn.RMSProp: {"centered": True, "momentum": 0.5},
    nn.SGD: {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("kind", sorted(_ELEMENTWISE, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_optimizers_that_get_slices_treat_each_element_by_itself(kind, pynative):
    """A weight of two rows is the same after three updates if the optimizer gets it in two slices."""
    value, *gradients = np.random.default_rng(1).normal(size=(4, 2, 6)).astype(np.float32)

    def updated(slices):
        """The weight, if the optimizer gets what `slices` returns of it and of its gradients."""
        params = [ms.Parameter(ms.Tensor(one), name=f"weight{index}") for index, one in enumerate(slices(value))]
        optimizer = kind(params, **_ARGUMENTS.get(kind, {}))
        for gradient in gradients:
            optimizer(tuple(map(ms.Tensor, slices(gradient))))
        return np.concatenate([param.asnumpy().ravel() for param in params])

    slices = updated(lambda one: np.split(one.reshape((1, -1)), [7], axis=1))
    assert relative_error(slices, updated(lambda one: [one])) < TOLERANCE


class SpecialAdam(nn.Adam):
    """A subclass of an allowed optimizer: it may do anything."""


def as_rank(monkeypatch, rank: int, ranks: int) -> None:
    """Set this process's rank and the number of ranks; nothing is sent."""
    monkeypatch.setattr("gaccum_ms.distributed.sharded_optimizer.rank_and_ranks", lambda: (rank, ranks))


@pytest.fixture
def two_ranks(monkeypatch):
    as_rank(monkeypatch, 1, 2)


CENTRALIZED = [{"params": make_dense("conv").trainable_params(), "grad_centralization": True}]


@pytest.mark.parametrize(
    ("kind", "params", "sliced"),
    [
        (nn.Adam, None, True),
        (functools.partial(nn.Adam, beta1=0.8), None, True),
        (SpecialAdam, None, False),
        (nn.Lamb, None, False),
        (nn.Adam, CENTRALIZED, False),
    ],
)
def test_what_is_not_known_to_allow_slices_gets_whole_parameters(two_ranks, kind, params, sliced):
    params = params or make_dense("dense").trainable_params()
    assert ShardedOptimizer(kind, params, learning_rate=0.1).sliced is sliced


def test_partition_is_the_users_choice(two_ranks):
    params = make_dense("dense").trainable_params()
    assert ShardedOptimizer(SpecialAdam, params, partition="slices").sliced
    assert not ShardedOptimizer(nn.Adam, params, partition="parameters").sliced
    for kind, arguments in ((nn.Lamb, {"learning_rate": 0.1}), (nn.Adam, {})):
        with pytest.raises(ValueError, match="looks at whole parameters"):
            ShardedOptimizer(kind, params if kind is nn.Lamb else CENTRALIZED, partition="slices", **arguments)


def test_bad_arguments_are_one_clear_error(parallel_context):
    params = make_dense("dense").trainable_params()
    with pytest.raises(TypeError, match=r"Give nn.Adam, not nn.Adam\(...\)"):
        ShardedOptimizer(nn.Adam(params), params)
    with pytest.raises(TypeError, match=r"must make an nn\.Optimizer, but got 'int'"):
        ShardedOptimizer(lambda params: 1, params)
    with pytest.raises(TypeError, match="must be a list of Parameters, or of dicts"):
        ShardedOptimizer(nn.Adam, [1])
    with pytest.raises(ValueError, match="'partition' must be one of"):
        ShardedOptimizer(nn.Adam, params, partition="rows")
    parallel_context(parallel_mode="semi_auto_parallel")
    with pytest.raises(RuntimeError, match="set enable_parallel_optimizer=True"):
        ShardedOptimizer(nn.Adam, params)


steps = Reused(make_step)


def test_stand_alone_it_is_the_plain_optimizer(pynative):
    plain, sharded = steps(False), steps(True)
    assert_same(run(sharded, 0, 2), run(plain, 0, 2))
    names = [parameter.name for parameter in plain.get_parameters()]
    assert [parameter.name for parameter in sharded.get_parameters()] == names


def test_slices_are_put_together_again():
    """This does what `whole` does, except for the gathering."""
    for ranks, size in itertools.product((2, 3, 8), (1, 2, 3, 7, 8, 9, 64, 100)):
        like = ms.Tensor(np.arange(size, dtype=np.float32))
        layouts = [Layout([like], [None], rank, ranks) for rank in range(ranks)]
        rows = [layout.own([like])[0] for layout in layouts]
        assert all(row.shape == (1, -(-size // ranks)) for row in rows)
        gathered = ms.ops.concat(rows)
        np.testing.assert_array_equal(layouts[0].joined(gathered, 0).asnumpy(), like.asnumpy(), (ranks, size))


def test_owners_are_balanced():
    sizes = [100, 60, 50, 40, 30, 20, 5]
    owners = balanced_owners(sizes, 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(loads) == [95, 100, 110]  # 305 in all


def test_each_rank_has_its_share(monkeypatch):
    """Of the state; with slices it has copies of its weights too. By parameters the shares are uneven, because one of
    the six Parameters has most of the weights; only their sum is bounded."""
    ranks = 8
    network = nn.SequentialCell(nn.Dense(383, 253), nn.Dense(253, 251), nn.Dense(251, 9))  # no size is a multiple of 8
    params = network.trainable_params()
    weights = sum(weight.nbytes for weight in params)

    def state(optimizer: nn.Optimizer) -> int:
        return sum(one.nbytes for one in optimizer.get_parameters() if not any(one is weight for weight in params))

    whole, by_parameters = state(nn.Adam(params)), 0
    assert whole >= 2 * weights
    for rank in range(ranks):
        as_rank(monkeypatch, rank, ranks)
        by_parameters += state(ShardedOptimizer(nn.Adam, params, partition="parameters"))
        if rank in (0, ranks - 1):
            assert state(ShardedOptimizer(nn.Adam, params)) <= (whole + weights) * 1.05 / ranks
    assert by_parameters <= whole * 1.05


trained = results_of("sharding_worker")


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["counted", "by parameters", "experimental", "grouped", "by hand"])
def test_equals_the_optimizer_that_is_not_sharded(trained, name):
    """On both ranks, weights, the whole state and losses equal the unsharded training's. Counts differ between ranks
    and micro-batches. In "by parameters" the ranks begin with different weights, and rank 0's are broadcast."""
    reference = "counted" if name == "by parameters" else name
    for results in trained:
        assert_same(case(results, f"{name}/sharded"), case(results, f"{reference}/whole"))


@pytest.mark.distributed
def test_an_overflow_on_one_rank_skips_the_update_on_both(trained):
    for results in trained:
        sharded, whole = case(results, "overflow/sharded"), case(results, "overflow/whole")
        assert sharded["updates"] == whole["updates"] == UPDATES + UPDATES - 1
        del sharded["losses"], whole["losses"]  # not finite on one rank
        assert_same(sharded, whole)


@pytest.mark.distributed
def test_learning_rates_are_those_of_all_groups_on_all_ranks(trained):
    for results in trained:
        np.testing.assert_allclose(results["rates/1"], results["rates/0"], rtol=1e-6)
    assert len(set(trained[0]["rates/0"][:6].tolist())) == 2


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> tuple[Path, Results]:
    """One process with a plain optimizer: the folder of its checkpoint after two updates, and its results after two
    more."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with eagerly():
        step = steps(False)
        run(step, 0, 2)
        ms.save_checkpoint(step, str(folder / "one-rank-adam.ckpt"))
        return folder, run(step, 2, 4)


@pytest.fixture(scope="module")
def saved(rank_pair, one_rank) -> list[Results]:
    """The results of each of two ranks, by case. The ranks find the checkpoint of one process."""
    return rank_pair.worker("tests.ranks.sharding_worker", one_rank[0])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["resumed", "mindspore's load"])
def test_goes_on_from_what_modelcheckpoint_and_updatecheckpoint_saved(saved, name):
    """Loaded by `resume` , and by MindSpore's own `load_checkpoint` ."""
    assert case(saved[0], "resumed")  # this case saves
    for results in saved:
        assert_same(case(results, name), case(results, "adam went on"))


@pytest.mark.distributed
def test_two_ranks_go_on_from_one(saved, one_rank):
    """The checkpoint is of one process with a plain optimizer."""
    for results in saved:
        assert_same(case(results, "adam from one"), one_rank[1], RANKS_TOLERANCE)


@pytest.mark.distributed
def test_one_rank_goes_on_from_two(saved, one_rank, pynative):
    """Its checkpoint has the names and shapes that one process saves with a plain optimizer."""
    assert case(saved[0], "adam went on")  # this case saves
    folder, end = one_rank
    files = folder / "one-rank-adam.ckpt", folder / "adam-by-hand.ckpt"
    wanted, shapes = ({name: one.shape for name, one in ms.load_checkpoint(str(file)).items()} for file in files)
    assert shapes == wanted
    for sharded in (False, True):
        step = steps(sharded)
        resume(step, files[1])
        assert_same(run(step, 2, 4), end, RANKS_TOLERANCE)


ERRORS = {
    "alone": "RuntimeError: For 'ShardedOptimizer', a checkpoint must hold the whole state",
    "plain step": "RuntimeError: For 'ShardedOptimizer', a checkpoint must hold the whole state",
    "one rank": "ValueError: For 'ShardedOptimizer', all ranks must have the same checkpoints",
    "by time": "ValueError: For 'ShardedOptimizer', all ranks must have the same checkpoints, by steps or updates",
    "uneven": "ValueError: For 'ShardedOptimizer', all ranks must have the same number of batches",
    "update within": "RuntimeError: For 'ShardedOptimizer', there must be no update within 'whole_state()'",
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ERRORS)
def test_what_would_wait_for_ever_or_save_a_part_is_refused_on_both_ranks(saved, name):
    for results in saved:
        assert str(results[f"{name}/error"]).startswith(ERRORS[name]), results[f"{name}/error"]
