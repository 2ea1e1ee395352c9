"""A folder of checkpoints: training resumes from the newest that all ranks have, and those that only some ranks have
are set aside. Killed ranks: tests/launch/test_restarts.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import Tensor, nn

from gaccum_ms import Accumulators, resume
from gaccum_ms.backend.checkpoint_file import read_checkpoint
from gaccum_ms.checkpoint import newest
from gaccum_ms.checkpoint.newest import AHEAD, common_key, newest_checkpoint
from gaccum_ms.checkpoint.resume import _read
from tests.support.reference import OPTIMIZERS, accumulated, batches, make_network
from tests.support.state import assert_identical, everything

pytestmark = pytest.mark.usefixtures("pynative")


def make_step(**options):
    network = make_network("dense")
    loss_cell = nn.WithLossCell(network, nn.CrossEntropyLoss())
    return accumulated(**(options or {"micro_size": 2}))(loss_cell, OPTIMIZERS["momentum"](network.trainable_params()))


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> tuple[Path, dict]:
    """Three checkpoints, of which the last is in another format, and the step's states."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    folder, step, states = tmp_path_factory.mktemp("three"), make_step(), {}
    for number, batch in enumerate(batches(8, 3), start=1):
        step(*map(Tensor, batch))
        file = folder / f"net-1_{number}.{'safetensors' if number == 3 else 'ckpt'}"
        ms.save_checkpoint(step, str(file), format=file.suffix[1:])
        os.utime(file, (number, number))
        states[file.name] = everything(step)
    return folder, states


def test_an_empty_folder_is_the_beginning_and_one_with_nothing_that_can_be_read_is_refused(tmp_path):
    """Training from the beginning would soon delete what is there."""
    step = make_step()
    before = everything(step)
    assert resume(step, tmp_path) == resume(step, tmp_path / "missing") == 0
    assert_identical(everything(step), before)
    (tmp_path / "net-1_4.ckpt").write_bytes(b"damaged")
    message = r"the folder .* but got 1 file\(s\) that cannot, .* Remove them"
    with pytest.warns(UserWarning, match="is passed over"), pytest.raises(ValueError, match=message):
        resume(step, tmp_path)


def test_the_newest_of_a_folder_is_taken_and_of_equal_times_the_numbers_in_the_names_decide(three, tmp_path):
    folder, states = three
    step = make_step()
    assert resume(step, folder) == 0
    assert_identical(everything(step), states["net-1_3.safetensors"])
    assert len(list(folder.iterdir())) == 3, "nothing is set aside"
    for name, number in (("net-1_1.ckpt", 9), ("net-1_2.ckpt", 10)):
        (tmp_path / f"net-1_{number}.ckpt").write_bytes((folder / name).read_bytes())
        os.utime(tmp_path / f"net-1_{number}.ckpt", (5, 5))
    resume(step, tmp_path)
    assert_identical(everything(step), states["net-1_2.ckpt"])


def test_what_another_rank_lacks_is_set_aside(three, tmp_path, monkeypatch):
    """Rank 1, which is simulated, has the first alone."""
    for name in ("net-1_1.ckpt", "net-1_2.ckpt"):
        (tmp_path / name).write_bytes((three[0] / name).read_bytes())
    monkeypatch.setattr(newest, "gather_json", lambda keys: [keys, [key for key in keys if key[0] == 1]])
    assert newest_checkpoint(tmp_path, 2, read_checkpoint) == [tmp_path / "net-1_1.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net-1_1.ckpt", "net-1_2.ckpt.not_on_all_ranks"]


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


def open_window(file: Path, checksum: bool) -> tuple:
    """A step with much state, three batches into a window, and its state. It is saved as the file."""
    step = make_step(accumulation_steps=4, accumulators=Accumulators(ms.float16, compensated=True))
    for batch in batches(8, 3):
        step(*map(Tensor, batch))
    ms.save_checkpoint(step, str(file), format=file.suffix[1:], crc_check=checksum)
    return step, everything(step)


def borders(content: bytes) -> set[int]:
    """Where the records of a ckpt file end."""
    ends, place = set(), 0
    while content[place : place + 1] == b"\x0a":
        length, place, shift = 0, place + 1, 0
        while True:
            byte = content[place]
            length |= (byte & 127) << shift
            place, shift = place + 1, shift + 7
            if byte < 128:
                break
        place += length
        ends.add(place)
    return ends - {len(content)}


def damaged(content: bytes, every: int):
    """Each cut between two records, and of each `every` -th byte: the file cut there, all its bits flipped, or one."""
    for place in sorted(borders(content) | set(range(0, len(content), every))):
        yield f"cut at {place}", content[:place]
    for place in range(0, len(content), every):
        for flips in (255, 1 << place // every % 8):
            yield f"byte {place} ^ {flips}", content[:place] + bytes([content[place] ^ flips]) + content[place + 1 :]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_a_file_with_a_checksum_is_read_as_it_was_or_not_whatever_byte_is_lost_or_changed(tmp_path, suffix, checksum):
    """Without a checksum, cuts are found, but not a changed number. Nothing but a ValueError is raised."""
    file, damage_file = tmp_path / f"whole.{suffix}", tmp_path / f"damaged.{suffix}"
    step, state = open_window(file, checksum)
    content = file.read_bytes()
    read = []
    for what, damage in [*damaged(content, every=61), ("whole", content)]:
        damage_file.write_bytes(damage)
        try:
            values = _read(step, damage_file, optimizer=True)
        except ValueError as error:
            assert str(damage_file) in str(error)
            continue
        read.append(what)
        if checksum:
            assert_identical(values, {name: value for name, value in state.items() if name in values})
        assert int(values["gaccum_ms.window_position"]) == 0 or "gaccum_ms.window_sums" in values, what
    assert read[-1] == "whole"
    cuts = [what for what in read if what.startswith("cut")]
    if checksum and suffix == "ckpt":
        assert read[:-1] == cuts == [f"cut at {len(content) - 17}"], "all but the checksum is there"
    else:
        assert not cuts


def test_what_is_not_whole_is_passed_over_and_what_a_killed_process_was_writing_is_removed(tmp_path):
    """Cut between two records or elsewhere, empty, one byte of a type's name changed, a dangling link, a folder, and
    weights alone."""
    step, state = open_window(tmp_path / "net-1_3.ckpt", True)
    content = (tmp_path / "net-1_3.ckpt").read_bytes()
    cuts = [content[: sorted(borders(content))[-3]], content[: len(content) // 2], b""]
    for number, damage in enumerate([*cuts, content.replace(b"Float32", b"Fkoat32", 1)], start=4):
        (tmp_path / f"net-1_{number}.ckpt").write_bytes(damage)
        os.utime(tmp_path / f"net-1_{number}.ckpt", (2**31, 2**31))
    (tmp_path / "net-1_8.ckpt").symlink_to(tmp_path / "missing.ckpt")
    (tmp_path / "net-1_9.ckpt").mkdir()
    ms.save_checkpoint(make_network("dense"), str(tmp_path / "net-1_10.ckpt"))
    (tmp_path / "net_1-1_5.tmp").write_bytes(content)
    (tmp_path / "mine.tmp").write_bytes(content)
    step(*map(Tensor, batches(8, 1)[0]))  # its state is then another
    with pytest.warns(UserWarning, match="is passed over") as warned:
        resume(step, tmp_path)
    assert [one.filename for one in warned] == [__file__] * 7
    assert_identical(everything(step), state)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"mine.tmp", *(f"net-1_{number}.ckpt" for number in range(3, 11))}
