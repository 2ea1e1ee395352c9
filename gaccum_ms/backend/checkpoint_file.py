"""Reads a checkpoint file whole, or refuses it: MindSpore's own reader loads damaged files, and may abort on them.

A ckpt file is a row of records, each with its length. MindSpore accepts one that was cut between two records, and gives
C++ sizes that do not fit. What the structure cannot show, a checksum does, MindSpore's own `crc_check` : in a ckpt
file behind the last record, in a safetensors file in the metadata.
"""

from __future__ import annotations

import binascii
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import mindspore as ms
import numpy as np
from mindspore.train import CheckpointConfig
from safetensors import safe_open

from gaccum_ms.backend import checkpoint_records
from gaccum_ms.backend.snapshot import as_numpy

SUFFIXES = (".ckpt", ".safetensors")
_RECORD = b"\x0a"  # the byte with which each record begins
_CHECKSUM = b"crc_num"
_CHECKSUM_SIZE = len(_CHECKSUM) + 10


def with_checksum(config: CheckpointConfig) -> CheckpointConfig:
    """The configuration with `crc_check` , which MindSpore's class refuses for safetensors, though its
    `save_checkpoint` writes it. An encrypted file has none."""
    config = copy.copy(config)
    config._crc_check = config.enc_key is None
    return config


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """All Parameters of a file, by name; bfloat16 becomes float32. ValueError if it is damaged."""
    try:
        if not path.is_file():  # a link may lead nowhere, and a pipe would be waited for
            raise ValueError("there is no such file")
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_ckpt(path)
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:  # the libraries that parse a file raise many types
        raise ValueError(
            f"For 'resume', a checkpoint must be a whole file, and not encrypted, but got '{path}': {error}."
        ) from error


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    with safe_open(path, framework="np") as file:  # compares all sizes, as MindSpore's reader does not
        has_checksum = _CHECKSUM.decode() in (file.metadata() or {})
        numbers = [name for name in file.keys() if not file.get_slice(name).get_shape()]  # noqa: SIM118
        if has_checksum and any(not _has_checksum_of_mindspore(file.get_tensor(name)) for name in numbers):
            raise ValueError("a number in it is too large")
    values = ms.load_checkpoint(str(path), format="safetensors", crc_check=has_checksum)
    return {name: as_numpy(value) for name, value in values.items()}


def _has_checksum_of_mindspore(number: np.ndarray) -> bool:
    """Whether it is no whole number, or a small one: for the checksum of one, MindSpore makes as many bytes."""
    return number.dtype.kind not in "iu" or 0 <= int(number) < 2**31


def _read_ckpt(path: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, tuple[Any, list[bytes]]] = {}
    with path.open("rb") as file:
        for record in _records(file, path.stat().st_size):
            kind = record.WhichOneof("value")
            if kind is None:
                raise ValueError(f"'{record.tag}' has no value")
            if kind == "tensor" and record.tensor.tensor_type != "str":  # a text is the user's own, by `append_info`
                _, contents = tensors.setdefault(record.tag, (record.tensor, []))
                contents.append(record.tensor.tensor_content)  # a large Parameter has several records
    return {name: _array(tensor, b"".join(contents)) for name, (tensor, contents) in tensors.items()}


def _array(tensor: Any, content: bytes) -> np.ndarray:
    shape = tuple(tensor.dims)
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape is {shape}")
    if tensor.tensor_type == "BFloat16":  # NumPy has no such type; it is the upper half of a float32
        values = (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(content, tensor.tensor_type.lower())
    return values.reshape(shape)


def _records(file: BinaryIO, size: int) -> Iterator[Any]:
    """The records of a ckpt file, which ends with a record or with the checksum of all."""
    checksum = 0
    while left := size - file.tell():
        begin = file.read(1)
        if begin == _RECORD:
            length, prefix = _length(file)
            content = file.read(length) if length < left else b""
            if len(content) < length:
                raise ValueError(f"it ends within a record of {length} bytes")
            for part in (begin, prefix, content):
                checksum = binascii.crc32(part, checksum)
            yield checkpoint_records.Value.FromString(content)
        elif left == _CHECKSUM_SIZE and (begin + (end := file.read())).startswith(_CHECKSUM):
            if int.from_bytes(end[-10:], "big") != checksum:
                raise ValueError("its checksum is another than that of its contents")
        else:
            raise ValueError(f"its byte {size - left} begins no record of a checkpoint")


def _length(file: BinaryIO) -> tuple[int, bytes]:
    """A number in the form of protocol buffers, seven bits in each byte, the lowest first; and its bytes."""
    read = b""
    while not read or read[-1] >= 128:
        byte = file.read(1)
        if not byte or len(read) == 10:
            raise ValueError("a record has no length")
        read += byte
    return sum((byte & 127) << (7 * place) for place, byte in enumerate(read)), read
