"""mindcv's ResNet-18 and a text classifier through Model.train on two ranks, with two callbacks each;
real_use_worker.py trains them."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest

from tests.support.reference import as_numpy, relative_error, vector
from tests.support.two_ranks import Results, case

mindcv = pytest.importorskip("mindcv", reason="mindcv is in the extra 'test'", exc_type=ImportError)

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

UPDATES = 6  # on images: 3 epochs of 2 batches
TEXT_UPDATES = 18  # 6 epochs of 12 batches, in windows of 5, 5 and, flushed, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("real use")


@pytest.fixture(scope="module")
def ranks(rank_pair, folder):
    return rank_pair.worker("tests.ranks.real_use_worker", folder)


def assert_ranks_agree(ranks: list[Results]) -> None:
    np.testing.assert_array_equal(ranks[0]["weights"], ranks[1]["weights"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by mindcv's imports
def test_resnet18_with_lossmonitor_and_checkpoints(ranks, folder):
    """Each rank prints the loss of its own samples. Checkpoints load into the bare network."""
    both = [case(results, "resnet18") for results in ranks]
    assert_ranks_agree(both)
    losses = []
    network = mindcv.create_model("resnet18", num_classes=3)
    for rank, results in enumerate(both):
        assert int(results["updates"]) == UPDATES
        losses.append([float(loss) for loss in re.findall(r"loss is (\S+)", str(results["printed"]))])
        files = sorted((folder / f"checkpoints{rank}").glob("*.ckpt"))
        assert [file.name for file in files] == ["resnet18-2_1.ckpt", "resnet18-3_2.ckpt"]  # after 3 and 6 updates
        loaded = []
        for file in files:
            missing, _ = ms.load_param_into_net(network, ms.load_checkpoint(str(file)))
            assert missing == []
            loaded.append(vector(network.trainable_params()))
        np.testing.assert_array_equal(loaded[1], results["weights"])
        np.testing.assert_array_equal(as_numpy(network.bn1.moving_mean), results["moving_mean"])
        assert relative_error(loaded[0], loaded[1]) > 1e-3
    mean = np.mean(losses, axis=0)
    assert mean.shape == (UPDATES,)
    assert mean[-2:].mean() < 0.7 * mean[:2].mean(), mean


def test_text_classifier_with_flush_and_progress_bar_equals_one_batch_for_each_window(ranks):
    both = [case(results, "text") for results in ranks]
    assert_ranks_agree(both)
    whole = case(ranks[0], "whole text")
    for results in both:
        assert int(results["updates"]) == TEXT_UPDATES
        assert float(results["accuracy"]) > 0.9
        # Adam divides by the gradient's own size, which magnifies rounding more than SGD does.
        assert relative_error(results["weights"], whole["weights"]) < 1e-3
    last = [str(results["drawn"]).split("\r")[-1] for results in both]
    assert "Epoch 6/6 |###" in last[0]
    assert ", loss 0." in last[0] and f"update {TEXT_UPDATES}" in last[0]
    assert last[1] == "", "only one rank draws"


def test_ranks_that_do_not_know_of_each_other_are_caught(ranks):
    """The control: each learns the task, alone, from its half."""
    both = [case(results, "text, each by itself") for results in ranks]
    assert [int(results["updates"]) for results in both] == [TEXT_UPDATES] * 2
    with pytest.raises(AssertionError):
        assert_ranks_agree(both)
    whole = case(ranks[0], "whole text")
    assert relative_error(both[0]["weights"], whole["weights"]) > 1e-2
