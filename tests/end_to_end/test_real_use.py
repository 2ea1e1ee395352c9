"""mindcv's ResNet-18 and MobileNetV2 and a text classifier through Model.train, with two callbacks each, on one process
or on two; real_use_worker.py trains them."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest

from tests.support.ranks import Ranks
from tests.support.reference import as_numpy, relative_error, vector
from tests.support.two_ranks import Results, case

mindcv = pytest.importorskip("mindcv", reason="mindcv is in the extra 'test'", exc_type=ImportError)

pytestmark = [pytest.mark.distributed]

UPDATES = 8  # on images: 4 epochs of 2 batches
TEXT_UPDATES = 18  # 6 epochs of 12 batches, in windows of 5, 5 and, flushed, 2
ON = [1, 2]


class Trained(NamedTuple):
    """A launch: where it leaves files, and each rank's results."""

    out: Path
    ranks: list[Results]

    def of(self, name: str) -> list[Results]:
        return [case(results, name) for results in self.ranks]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The launches by their number of processes."""
    with contextlib.ExitStack() as stack:
        found = {}
        for processes in ON:
            out = tmp_path_factory.mktemp(f"on{processes}")
            ranks = stack.enter_context(Ranks(out, processes, {"ONEDNN_MAX_CPU_ISA": None}))  # users need not set it
            found[processes] = Trained(out, ranks.worker("tests.ranks.real_use_worker", out))
        yield found


def assert_ranks_agree(ranks: list[Results]) -> None:
    for results in ranks[1:]:
        np.testing.assert_array_equal(results["weights"], ranks[0]["weights"])


def assert_learns(losses: np.ndarray) -> None:
    """Compare the losses of the last two updates with the first two."""
    assert np.isfinite(losses).all()
    assert losses[-2:].mean() < 0.7 * losses[:2].mean(), losses


def printed_losses(results: Results) -> np.ndarray:
    return np.array([float(loss) for loss in re.findall(r"loss is (\S+)", str(results["printed"]))])


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2])
def test_resnet18_with_lossmonitor_and_checkpoints(trained, processes):
    ranks = trained[processes].of("resnet18")
    assert_ranks_agree(ranks)
    assert [int(results["updates"]) for results in ranks] == [UPDATES] * processes
    assert all(len(printed_losses(results)) == UPDATES for results in ranks)
    assert_learns(np.mean([printed_losses(results) for results in ranks], axis=0))  # each prints its own loss


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by mindcv's imports
def test_resnet18s_checkpoints_load_into_the_bare_network(trained, processes):
    network = mindcv.create_model("resnet18", num_classes=3)
    for rank, results in enumerate(trained[processes].of("resnet18")):
        files = sorted((trained[processes].out / f"checkpoints{rank}").glob("*.ckpt"))
        assert [file.name for file in files] == ["resnet18-2_2.ckpt", "resnet18-4_2.ckpt"]  # after 4 and 8 updates
        loaded = []
        for file in files:
            missing, _ = ms.load_param_into_net(network, ms.load_checkpoint(str(file)))
            assert missing == []
            loaded.append(vector(network.trainable_params()))
            moving_mean = as_numpy(network.bn1.moving_mean)
        np.testing.assert_array_equal(loaded[1], results["weights"])
        np.testing.assert_array_equal(moving_mean, results["moving_mean"])
        assert relative_error(loaded[0], loaded[1]) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2])
def test_mobilenet_with_timemonitor_and_windowmonitor(trained, processes):
    ranks = trained[processes].of("mobilenet")
    assert_ranks_agree(ranks)
    for results in ranks:
        assert int(results["updates"]) == UPDATES
        assert str(results["printed"]).count("Train epoch time") == 4
        assert (results["norms"] > 0).all()
        np.testing.assert_array_equal(results["norms"], ranks[0]["norms"])  # norms of the reduced gradient
    assert_learns(np.mean([results["losses"] for results in ranks], axis=0))
    lines = (trained[processes].out / "windows.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["update"] for record in records] == list(range(1, UPDATES + 1))  # only one rank writes
    assert {record["count"] for record in records} == {24 / processes}
    np.testing.assert_allclose([record["loss"] for record in records], ranks[0]["losses"])


@pytest.mark.thorough
@pytest.mark.parametrize("processes", ON)
def test_text_classifier_with_flush_and_progress_bar(trained, processes):
    ranks = trained[processes].of("text")
    assert_ranks_agree(ranks)
    assert [int(results["updates"]) for results in ranks] == [TEXT_UPDATES] * processes
    assert all(float(results["accuracy"]) > 0.9 for results in ranks)
    last = [str(results["drawn"]).split("\r")[-1] for results in ranks]
    assert "Epoch 6/6 |###" in last[0]
    assert ", loss 0." in last[0] and f"update {TEXT_UPDATES}" in last[0]
    assert set(last[1:]) <= {""}


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1])
def test_mobilenet_with_group_norm_equals_whole_batches(trained, processes):
    whole = case(trained[1].ranks[0], "whole mobilenet")
    ranks = trained[processes].of("exact mobilenet")
    assert relative_error(np.mean([results["losses"] for results in ranks], axis=0), whole["losses"]) < 1e-5
    for results in ranks:
        assert (
            relative_error(results["change"], whole["change"]) < 2e-3
        )  # the change of the weights, which hardly move in two updates


@pytest.mark.thorough
@pytest.mark.parametrize("processes", ON)
def test_the_text_classifier_equals_one_batch_for_each_window(trained, processes):
    whole = case(trained[2].ranks[0], "whole text")
    for results in trained[processes].of("text"):
        # Adam divides by the gradient's own size, which magnifies rounding more than SGD does.
        assert relative_error(results["weights"], whole["weights"]) < 1e-3


@pytest.mark.thorough
def test_ranks_that_do_not_know_of_each_other_are_caught(trained):
    """The control: each learns the task, alone, from its half."""
    ranks = trained[2].of("text, each by itself")
    assert [int(results["updates"]) for results in ranks] == [TEXT_UPDATES] * 2
    with pytest.raises(AssertionError):
        assert_ranks_agree(ranks)
    whole = case(trained[2].ranks[0], "whole text")
    assert relative_error(ranks[0]["weights"], whole["weights"]) > 1e-2
