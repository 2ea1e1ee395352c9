"""Reading a checkpoint file that is whole. Damaged files: checkpoint/test_newest.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from gaccum_ms.backend.checkpoint_file import read_checkpoint

DTYPES = (ms.float32, ms.float16, ms.bfloat16, ms.float64, ms.int32, ms.int64, ms.uint8, ms.bool_)


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_each_dtype_and_a_parameter_of_several_records_are_read_as_they_were(tmp_path, suffix, monkeypatch):
    """MindSpore cuts a Parameter of more than 512 MB into records."""
    monkeypatch.setattr("mindspore.train.serialization.SLICE_SIZE", 1)
    numbers = np.arange(1000).reshape(10, 100)
    values = {str(dtype): ms.Tensor(numbers % 128, dtype) for dtype in DTYPES}
    file = tmp_path / f"all.{suffix}"
    ms.save_checkpoint([{"name": name, "data": value} for name, value in values.items()], str(file), format=suffix)
    read = read_checkpoint(file)
    assert read.keys() == values.keys()
    for name, value in values.items():
        expected = (value.astype(ms.float32) if value.dtype == ms.bfloat16 else value).asnumpy()
        np.testing.assert_array_equal(read[name], expected, strict=True)
