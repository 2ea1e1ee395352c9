"""Checkpoints by update: what their files hold. When they are saved: tests/accumulation/test_windows.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, train
from safetensors import safe_open

from gaccum_ms import GradAccumulationCell, UpdateCheckpoint, resume
from tests.support.state import assert_identical, everything


def model() -> ms.Model:
    net = nn.Dense(3, 1)
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=2)
    return ms.Model(cell, optimizer=nn.Momentum(net.trainable_params(), 0.1, 0.9))


def data():
    x = np.ones((4, 3), np.float32)
    return ms.dataset.NumpySlicesDataset((x, x[:, :1]), shuffle=False).batch(1)


@pytest.mark.filterwarnings("ignore:getName:DeprecationWarning")  # MindSpore's, where it saves in a thread
@pytest.mark.parametrize(("suffix", "in_a_thread"), [("ckpt", True), ("safetensors", False)])
def test_its_files_have_a_checksum_that_mindspore_takes_without_a_word(tmp_path, suffix, in_a_thread, capfd, pynative):
    config = train.CheckpointConfig(format=suffix, async_save=in_a_thread)
    saved = model()
    saved.train(1, data(), callbacks=[UpdateCheckpoint(prefix="net", directory=str(tmp_path), config=config)])
    assert not config.crc_check, "the configuration is the user's"
    file = tmp_path / f"net-1_4.{suffix}"
    if suffix == "ckpt":
        assert file.read_bytes()[-17:-10] == b"crc_num"
    else:
        with safe_open(file, framework="np") as opened:
            assert int(opened.metadata()["crc_num"])
    capfd.readouterr()
    for crc_check in (False, True):
        loaded = ms.load_checkpoint(str(file), format=suffix, crc_check=crc_check)
        assert loaded.keys() == everything(saved.train_network).keys()
    assert "WARNING" not in "".join(capfd.readouterr())
    other = model()
    assert resume(other, tmp_path, data()) == 1
    assert_identical(everything(other.train_network), everything(saved.train_network))


def test_an_encrypted_file_has_none_and_cannot_be_resumed(tmp_path, pynative):
    config = train.CheckpointConfig(enc_key=b"0123456789ABCDEF")
    trained = model()
    trained.train(1, data(), callbacks=[UpdateCheckpoint(prefix="net", directory=str(tmp_path), config=config)])
    file = tmp_path / "net-1_4.ckpt"
    assert ms.load_checkpoint(str(file), dec_key=b"0123456789ABCDEF", dec_mode="AES-GCM")
    with pytest.raises(ValueError, match=r"must be a whole file, and not encrypted, but got .*begins no record"):
        resume(trained, file)
