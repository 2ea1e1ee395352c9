"""A folder of checkpoints: training resumes from the newest that all ranks have, and those that only some ranks have
are set aside. Killed ranks: tests/launch/test_restarts.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import Tensor, nn

from gaccum_ms import resume
from gaccum_ms.checkpoint import newest
from gaccum_ms.checkpoint.newest import AHEAD, SET_ASIDE, common_key, newest_checkpoint
from tests.support.reference import OPTIMIZERS, accumulated, batches, make_network
from tests.support.state import assert_identical, everything

pytestmark = pytest.mark.usefixtures("pynative")


def make_step():
    network = make_network("dense")
    loss_cell = nn.WithLossCell(network, nn.CrossEntropyLoss())
    return accumulated(micro_size=2)(loss_cell, OPTIMIZERS["momentum"](network.trainable_params()))


def saved(folder: Path, updates: int, suffix: str = "ckpt") -> dict:
    """The step's state after each update, with a checkpoint of it."""
    step, states = make_step(), {}
    for number, batch in enumerate(batches(8, updates), start=1):
        step(*map(Tensor, batch))
        file = folder / f"net-1_{number}.{suffix}"
        ms.save_checkpoint(step, str(file), format=suffix)
        os.utime(file, (number, number))
        states[file.name] = everything(step)
    return states


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> tuple[Path, dict]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    folder = tmp_path_factory.mktemp("three")
    return folder, saved(folder, 3)


def test_resume_takes_the_newest_of_a_folder(three):
    folder, states = three
    step = make_step()
    assert resume(step, folder) == 0
    assert_identical(everything(step), states["net-1_3.ckpt"])
    assert len(list(folder.iterdir())) == 3, "nothing is set aside"


def test_a_folder_that_is_empty_or_not_there_is_the_beginning(tmp_path):
    step = make_step()
    before = everything(step)
    assert resume(step, tmp_path) == resume(step, tmp_path / "missing") == 0
    assert_identical(everything(step), before)


def test_a_folder_with_nothing_that_can_be_read_is_refused(three, tmp_path):
    """Training from the beginning would soon delete what is there."""
    (tmp_path / "net-1_4.ckpt").write_bytes(b"damaged")
    step = make_step()
    with (
        pytest.warns(UserWarning, match="is passed over"),
        pytest.raises(ValueError, match=r"the folder .* but got 1 file\(s\) that cannot be read .* Remove them"),
    ):
        resume(step, tmp_path)


def test_of_equal_times_the_numbers_in_the_names_decide(three, tmp_path):
    folder, states = three
    for name, number in (("net-1_1.ckpt", 9), ("net-1_2.ckpt", 10)):
        (tmp_path / f"net-1_{number}.ckpt").write_bytes((folder / name).read_bytes())
        os.utime(tmp_path / f"net-1_{number}.ckpt", (5, 5))
    step = make_step()
    resume(step, tmp_path)
    assert_identical(everything(step), states["net-1_2.ckpt"])


def test_what_is_not_whole_is_passed_over_and_stays_a_file(three, tmp_path):
    folder, states = three
    for name in states:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        os.utime(tmp_path / name, (5, 5 + list(states).index(name)))
    whole = (tmp_path / "net-1_3.ckpt").read_bytes()
    (tmp_path / "net-1_3.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "net-1_4.ckpt").write_bytes(b"")
    (tmp_path / "net-1_5.tmp").write_bytes(whole)
    step = make_step()
    with pytest.warns(UserWarning, match=r"net-1_[34].ckpt' is passed over") as warned:
        resume(step, tmp_path)
    assert [one.filename for one in warned] == [__file__] * 2
    assert_identical(everything(step), states["net-1_2.ckpt"])
    assert len(list(tmp_path.iterdir())) == 5


def ranks_say(monkeypatch, *others: list) -> None:
    """Simulate the keys of other ranks."""
    monkeypatch.setattr(newest, "gather_json", lambda keys: [keys, *others])


def keys_of(folder: Path, monkeypatch) -> list:
    heard: list = []
    monkeypatch.setattr(newest, "gather_json", lambda keys: heard.append(list(keys)) or [keys, []])
    with pytest.raises(ValueError, match="must have a checkpoint in common"):
        newest_checkpoint(folder, 2)
    return heard[-1]


def test_what_another_rank_lacks_is_set_aside(three, tmp_path, monkeypatch):
    folder, states = three
    for number, name in enumerate(states):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        os.utime(tmp_path / name, (number, number))
    keys = keys_of(folder, monkeypatch)
    assert [key[0] for key in keys] == [3, 2, 1]
    ranks_say(monkeypatch, keys[1:])
    assert newest_checkpoint(tmp_path, 2) == [tmp_path / "net-1_2.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("net-1_1.ckpt", "net-1_2.ckpt"),
        f"net-1_3.ckpt{SET_ASIDE}",
    ]


def test_what_ranks_agree_on():
    a, b, c, d = ([number, 0, number, 2] for number in (4, 3, 2, 1))
    assert common_key([[a], [a]], last=False) == (a, True)
    assert common_key([[a], [b]], last=False) == (None, False), "they look further"
    assert common_key([[a, b, c], [b, c, d]], last=True) == (b, True)
    assert common_key([[], []], last=False) == (None, True)
    assert common_key([[d], []], last=True) == (None, True), "one was killed before its first was saved"
    for keys in ([[a, b, c], []], [[a, b], [c]]):
        with pytest.raises(ValueError, match=re.escape(f"updates rank 0 {[key[0] for key in keys[0]]}, rank 1")):
            common_key(keys, last=True)
    assert AHEAD == 2


def test_safetensors_are_found_too(tmp_path):
    states = saved(tmp_path, 1, "safetensors")
    step = make_step()
    resume(step, tmp_path)
    assert_identical(everything(step), states["net-1_1.safetensors"])
