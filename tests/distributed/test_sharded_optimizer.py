"""ShardedOptimizer: real ranks against the same training with the optimizer unsharded, and against one process."""

from __future__ import annotations

import functools
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from sharding_worker import TrustRatio, make_step, run
from support.ranks import Ranks
from support.reference import make_network as make_dense
from support.reference import relative_error
from support.two_ranks import Results, case

from gaccum_ms import GradAccumulationCell, ShardedOptimizer, resume
from gaccum_ms.distributed.layout import Layout, balanced_owners
from gaccum_ms.distributed.optimizer_groups import _ELEMENTWISE
from gaccum_ms.distributed.whole_state import not_saved_alone

TOLERANCE = 1e-6
RANKS_TOLERANCE = 1e-5  # between numbers of ranks, which add up in another order


def assert_same(one: Results, other: Results, tolerance: float = TOLERANCE) -> None:
    assert one.keys() == other.keys()
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in other.items()}
    errors = {name: relative_error(one[name], other[name]) for name in one if name != "losses" or one[name].size}
    assert max(errors.values()) < tolerance, errors


# -- without ranks -----------------------------------------------------------------------------------------------------


def test_only_a_save_is_taken_for_one(tmp_path):
    """Since MindSpore 2.8 a wrapper is around it that others have too, `load_checkpoint` for one."""
    file, net = str(tmp_path / "net.ckpt"), nn.Dense(2, 1)
    ms.save_checkpoint(net, file)
    assert ms.load_checkpoint(file, choice_func=lambda name: not_saved_alone(lambda: name == "weight")).keys() == {
        "weight"
    }
    net.weight.init_data = functools.partial(not_saved_alone, net.weight.init_data)
    with pytest.raises(RuntimeError, match="saved by this rank alone"):
        ms.save_checkpoint(net, file)


_ARGUMENTS = {nn.Momentum: {"learning_rate": 0.1, "momentum": 0.9}}
_VARIANTS = {
    nn.Adam: [{"use_amsgrad": True}, {"use_nesterov": True}, {"weight_decay": 0.1}],
    nn.RMSProp: [{"centered": True, "momentum": 0.5}],
    nn.SGD: [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}


def updated(kind, arguments: dict, values: list[np.ndarray], gradients: list[list[np.ndarray]]) -> list[np.ndarray]:
    params = [ms.Parameter(ms.Tensor(value), name=f"weight{index}") for index, value in enumerate(values)]
    optimizer = kind(params, **arguments)
    for those in gradients:
        optimizer(tuple(map(ms.Tensor, those)))
    return [param.asnumpy() for param in params]


def by_slices_and_whole(kind, arguments: dict) -> tuple[np.ndarray, np.ndarray]:
    """A weight after three updates, and the same weight given to the optimizer in two rows."""
    random = np.random.default_rng(1)
    value, *gradients = (random.normal(size=(4, 3)).astype(np.float32) for _ in range(4))
    (whole,) = updated(kind, arguments, [value], [[gradient] for gradient in gradients])
    rows = [[one.reshape((1, -1))[:, :7], one.reshape((1, -1))[:, 7:]] for one in (value, *gradients)]
    return whole.ravel(), np.concatenate([row.ravel() for row in updated(kind, arguments, rows[0], rows[1:])])


@pytest.mark.parametrize("kind", sorted(_ELEMENTWISE, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_optimizers_that_get_slices_treat_each_element_by_itself(kind, pynative):
    for variant in ({}, *_VARIANTS.get(kind, ())):
        whole, slices = by_slices_and_whole(kind, {**_ARGUMENTS.get(kind, {}), **variant})
        assert relative_error(slices, whole) < TOLERANCE


@pytest.mark.parametrize("kind", [nn.AdaFactor, TrustRatio])
def test_optimizers_that_look_at_whole_parameters_do_not_work_on_slices(kind, pynative):
    """The control: the comparison above would find them."""
    whole, slices = by_slices_and_whole(kind, {"learning_rate": None} if kind is nn.AdaFactor else {})
    assert relative_error(slices, whole) > 100 * TOLERANCE


class SpecialAdam(nn.Adam):
    """May do anything."""


@pytest.fixture
def two_ranks(monkeypatch):
    """As rank 1 of 2 sees it, where nothing is sent."""
    monkeypatch.setattr("gaccum_ms.distributed.sharded_optimizer.rank_and_ranks", lambda: (1, 2))


CENTRALIZED = [{"params": make_dense("conv").trainable_params(), "grad_centralization": True}]


@pytest.mark.parametrize(
    ("kind", "params", "sliced"),
    [
        (nn.Adam, None, True),
        (functools.partial(nn.Adam, beta1=0.8), None, True),
        (SpecialAdam, None, False),
        (lambda params: nn.Adam(params), None, False),
        (nn.Lamb, None, False),
        (nn.AdaFactor, None, False),
        (nn.Adam, CENTRALIZED, False),
    ],
)
def test_what_is_not_known_to_allow_slices_gets_whole_parameters(two_ranks, kind, params, sliced):
    params = params or make_dense("dense").trainable_params()
    arguments = {"learning_rate": None if kind is nn.AdaFactor else 0.1} if isinstance(kind, type) else {}
    assert ShardedOptimizer(kind, params, **arguments).sliced is sliced


def test_partition_is_the_users_choice(two_ranks):
    params = make_dense("dense").trainable_params()
    assert ShardedOptimizer(SpecialAdam, params, partition="slices").sliced
    assert not ShardedOptimizer(nn.Adam, params, partition="parameters").sliced
    for kind, arguments in ((nn.Lamb, {"learning_rate": 0.1}), (nn.Adam, {})):
        given = params if kind is nn.Lamb else CENTRALIZED
        with pytest.raises(ValueError, match="looks at whole parameters"):
            ShardedOptimizer(kind, given, partition="slices", **arguments)


def test_bad_arguments_are_one_clear_error():
    params = make_dense("dense").trainable_params()
    with pytest.raises(TypeError, match=r"Give nn.Adam, not nn.Adam\(...\)"):
        ShardedOptimizer(nn.Adam(params), params)
    with pytest.raises(TypeError, match=r"must make an nn\.Optimizer, but got 'int'"):
        ShardedOptimizer(lambda params: 1, params)
    with pytest.raises(TypeError, match="must be a list of Parameters, or of dicts"):
        ShardedOptimizer(nn.Adam, [1])
    with pytest.raises(ValueError, match="'partition' must be one of"):
        ShardedOptimizer(nn.Adam, params, partition="rows")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        with pytest.raises(RuntimeError, match="set enable_parallel_optimizer=True"):
            ShardedOptimizer(nn.Adam, params)
    finally:
        ms.reset_auto_parallel_context()


def test_options_of_sharded_accumulators():
    network = make_dense("dense")
    for options in ({"loss_weights": (1.0, 0.5)}, {"overflow": "drop_micro_batch"}):
        with pytest.raises(ValueError, match="'shard_accumulators' reduces each micro-batch"):
            GradAccumulationCell(network, 2, shard_accumulators=True, **options)
    with pytest.raises(TypeError, match="'shard_accumulators' must be a bool"):
        GradAccumulationCell(network, 2, shard_accumulators=1)


def test_stand_alone_it_is_the_plain_optimizer(mode):
    plain, sharded = make_step(False), make_step(True)
    assert_same(run(sharded, 0, 2), run(plain, 0, 2))
    names = [parameter.name for parameter in plain.get_parameters()]
    assert [parameter.name for parameter in sharded.get_parameters()] == names


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 64, 100])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_slices_are_put_together_again(size, ranks):
    """As `whole` does it, whose gathering is the only thing that is left out."""
    like = ms.Tensor(np.arange(size, dtype=np.float32))
    layouts = [Layout([like], [None], rank, ranks) for rank in range(ranks)]
    rows = [layout.own([like])[0] for layout in layouts]
    assert all(row.shape == (1, -(-size // ranks)) for row in rows)
    gathered = ms.ops.concat(rows)
    np.testing.assert_array_equal(layouts[0].joined(gathered, 0).asnumpy(), like.asnumpy())


def test_owners_are_balanced():
    sizes = [100, 60, 50, 40, 30, 20, 5]
    owners = balanced_owners(sizes, 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(loads) == [95, 100, 110]  # of 305


# -- two ranks against the same two ranks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(rank_pair, tmp_path_factory) -> list[Results]:
    """What each of two ranks gets, by case."""
    return rank_pair.worker("sharding_worker", tmp_path_factory.mktemp("equality"))


OPTIMIZERS = ["sgd", "momentum", "adam", "adam_weight_decay", "asgd", "adafactor", "trust_ratio"]


@pytest.mark.core("adam", "trust_ratio", "counted")
@pytest.mark.distributed
@pytest.mark.parametrize("name", [*OPTIMIZERS, "counted", "flush", "by hand"])
def test_equals_the_optimizer_that_is_not_sharded(trained, name):
    """Weights, the whole state and losses, on both ranks."""
    for results in trained:
        assert_same(case(results, f"{name}/sharded"), case(results, f"{name}/whole"))


@pytest.mark.core("broadcast-adam")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("small buffers", "adam_weight_decay"),
        ("small buffers by parameters", "adam_weight_decay"),
        ("pynative", "adam"),
        ("pynative by parameters", "trust_ratio"),
        ("jit", "adam"),
        ("broadcast", "adam"),
        ("broadcast by parameters", "trust_ratio"),
        ("pynative broadcast", "adam"),
    ],
)
def test_equals_it_in_all_modes_and_partitions(trained, name, reference):
    """With ``parameter_broadcast`` , where the ranks have begun with different weights."""
    for results in trained:
        assert_same(case(results, f"{name}/sharded"), case(results, f"{reference}/whole"))


@pytest.mark.distributed
def test_an_overflow_on_one_rank_skips_the_update_on_both(trained):
    for results in trained:
        sharded, whole = case(results, "overflow/sharded"), case(results, "overflow/whole")
        assert sharded["updates"] == whole["updates"] == 4 + 3
        del sharded["losses"], whole["losses"]  # not finite on one rank
        assert_same(sharded, whole)


@pytest.mark.core("shards counted-counted")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("shards", "adam"),
        ("shards counted", "counted"),
        ("shards by parameters", "shards by parameters"),
        ("shards flush", "flush"),
        ("pynative shards", "counted"),
    ],
)
def test_sharded_accumulators_equal_whole_ones(trained, name, reference):
    """Counts differ between ranks and micro-batches; the window's are exact all the same."""
    for results in trained:
        assert_same(case(results, f"{name}/sharded"), case(results, f"{reference}/whole"))


@pytest.mark.core(broken="forgets")
@pytest.mark.distributed
@pytest.mark.parametrize(("broken", "reference"), [("forgets", "adam"), ("neighbour", "adam"), ("unit", "counted")])
def test_the_comparison_finds_what_is_broken(trained, broken, reference):
    """A rank that forgets to gather; one that updates its neighbour's slice; accumulators in units of their own."""
    for results in trained:
        with pytest.raises(AssertionError):
            assert_same(case(results, f"broken: {broken}"), case(results, f"{reference}/whole"))


@pytest.mark.distributed
def test_learning_rates_are_those_of_all_groups_on_all_ranks(trained):
    for results in trained:
        np.testing.assert_allclose(results["rates/1"], results["rates/0"], rtol=1e-6)
    assert len(set(trained[0]["rates/0"][:6].tolist())) == 2


# -- checkpoints, and other numbers of ranks ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> tuple[Path, Results]:
    """A folder with checkpoints that one process saved after two updates, of plain optimizers; and how it went on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    results = {}
    ms.set_context(mode=ms.GRAPH_MODE)
    for kind, name in (("adam", "one-rank.ckpt"), ("adafactor", "one-rank-adafactor.ckpt")):
        step = make_step(False, kind)
        run(step, 0, 2)
        ms.save_checkpoint(step, str(folder / name))
        results[kind] = run(step, 2, 4)
    return folder, results


@pytest.fixture(scope="module")
def saved(rank_pair, one_rank) -> list[Results]:
    return rank_pair.worker("sharding_worker", one_rank[0])


def went_on(results: Results, name: str) -> Results:
    found = case(results, name)
    found.pop("losses")
    return found


@pytest.mark.core("resumed")
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["resumed", "mindspore's load", "to plain"])
def test_goes_on_from_what_modelcheckpoint_and_updatecheckpoint_saved(saved, name):
    """`resume` , MindSpore's own `load_checkpoint` , and into an optimizer that is not sharded."""
    assert case(saved[0], "resumed")  # they have saved
    for results in saved:
        assert_same(went_on(results, name), went_on(results, "adam went on"))


@pytest.mark.core("adam")
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["adam", "adafactor"])
def test_two_ranks_go_on_from_one(saved, one_rank, kind):
    """A plain optimizer's checkpoint, of one process."""
    for results in saved:
        assert_same(went_on(results, f"{kind} from one"), one_rank[1][kind], RANKS_TOLERANCE)


@pytest.mark.core("False-adam")
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["adam", "adafactor"])
@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_goes_on_from_two(saved, one_rank, kind, sharded):
    assert case(saved[0], f"{kind} went on")  # it has saved
    step = make_step(sharded, kind)
    resume(step, one_rank[0] / f"{kind}-by-hand.ckpt")
    assert_same(run(step, 2, 4), one_rank[1][kind], RANKS_TOLERANCE)


@pytest.mark.core(kind="adam")
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "one"), [("adam", "one-rank.ckpt"), ("adafactor", "one-rank-adafactor.ckpt")])
def test_a_checkpoint_is_that_of_the_optimizer_that_is_not_sharded(saved, one_rank, kind, one):
    """Names and shapes are those that one process saves with a plain optimizer, whoever has saved."""
    assert case(saved[0], f"{kind} went on")  # it has saved
    wanted = {name: value.shape for name, value in ms.load_checkpoint(str(one_rank[0] / one)).items()}
    by_hand = one_rank[0] / f"{kind}-by-hand.ckpt"
    found = {name: value.shape for name, value in ms.load_checkpoint(str(by_hand)).items()}
    assert found == wanted


@pytest.mark.core("window with sharded accumulators")
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["window", "window with sharded accumulators"])
def test_goes_on_in_mid_window(saved, name):
    for results in saved:
        assert_same(went_on(results, f"{name}/resumed"), went_on(results, f"{name}/whole"))


ERRORS = {
    "alone": "RuntimeError: For 'ShardedOptimizer', a checkpoint must hold the whole state",
    "alone again": "RuntimeError: For 'ShardedOptimizer', a checkpoint must hold the whole state",
    "plain step": "RuntimeError: For 'ShardedOptimizer', a checkpoint must hold the whole state",
    "one rank": "ValueError: For 'ShardedOptimizer', all ranks must have the same checkpoints",
    "by time": "ValueError: For 'ShardedOptimizer', all ranks must have the same checkpoints, by steps or updates",
    "uneven": "ValueError: For 'ShardedOptimizer', all ranks must have the same number of batches",
    "uneven shards": "ValueError: For 'GradAccumulationCell', all ranks must have the same number of batches",
    "micro-batches": "ValueError: For 'GradAccumulationCell', with 'shard_accumulators' all ranks must have the same",
    "other accumulators": "ValueError: For 'TrainOneStepWithGradAccumulationCell', a window must be finished by the",
    "update within": "RuntimeError: For 'ShardedOptimizer', there must be no update within 'whole_state()'",
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ERRORS)
def test_what_would_wait_for_ever_or_save_a_part_is_refused_on_both_ranks(saved, name):
    for results in saved:
        assert str(results[f"{name}/error"]).startswith(ERRORS[name]), results[f"{name}/error"]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eight(one_rank, tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("eight"), 8) as ranks:
        yield ranks.worker("sharding_worker", one_rank[0])


@pytest.fixture
def on(number, saved, request) -> list[Results]:
    """What each of so many ranks gets."""
    return saved if number == 2 else request.getfixturevalue("eight")


@pytest.mark.core(number=2)
@pytest.mark.distributed
@pytest.mark.parametrize("partition", ["slices", "parameters"])
@pytest.mark.parametrize("number", [2, 8])
def test_each_rank_has_its_share_of_the_state(on, number, partition):
    """In slices. By parameters as evenly as these go: the largest of five has most of the weights."""
    for results in on:
        whole, share = int(results["bytes/whole/state"]), int(results[f"bytes/{partition}/state"])
        assert int(results["bytes/whole/copies"]) == 0 and whole >= 2 * int(results["bytes/whole/weights"])
        if partition == "slices":
            assert share <= whole * (1 / number) * 1.05
            assert int(results["bytes/slices/copies"]) <= int(results["bytes/whole/weights"]) * (1 / number) * 1.05
    if partition == "parameters":
        assert sum(int(results["bytes/parameters/state"]) for results in on) <= whole * 1.05


@pytest.mark.core(number=2)
@pytest.mark.distributed
@pytest.mark.parametrize("number", [2, 8])
def test_each_rank_has_its_share_of_the_accumulators(on, number):
    for results in on:
        assert int(results["bytes/accumulators/1"]) <= int(results["bytes/accumulators/0"]) * (1 / number) * 1.05


@pytest.mark.thorough
@pytest.mark.distributed
def test_eight_ranks_go_on_from_two(saved, eight, one_rank):
    """With weights that have fewer elements than there are ranks; both with sharded accumulators."""
    assert case(saved[0], "resumed")  # they have saved
    for results in eight:
        assert_same(went_on(results, "from two"), one_rank[1]["adam"], RANKS_TOLERANCE)
