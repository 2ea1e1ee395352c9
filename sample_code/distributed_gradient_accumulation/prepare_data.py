"""Write scikit-learn's handwritten digits as MNIST's own files, so that the sample runs with no download.

scikit-learn carries 1,797 real images of handwritten digits, 8×8 pixels each. Enlarged to 28×28 and written in the
IDX format under MNIST's file names, they are read by ``mindspore.dataset.MnistDataset`` like MNIST itself.
"""

import argparse
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

DEFAULT_FOLDER = Path(__file__).resolve().parent / "data"
TRAIN_IMAGES = 1536  # 8 ranks × 12 batches × 16 images; the other 261 are held out


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write an array of bytes in the IDX format: type, number of dimensions, dimensions, values."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def prepare(folder: Path = DEFAULT_FOLDER) -> Path:
    """Write the digits into `folder`, unless they are there already, and return it.

    The folder appears whole or not at all, so several processes may call this at once.
    """
    if folder.exists():
        return folder
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    enlarged = np.kron(digits.images[order], np.ones((3, 3))) * 255 / 16  # 8×8, 0…16 -> 24×24, 0…255
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))
    labels = digits.target[order]

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".digits-", dir=folder.parent))
    try:
        for name, part in (("train", slice(None, TRAIN_IMAGES)), ("t10k", slice(TRAIN_IMAGES, None))):
            write_idx(scratch / f"{name}-images-idx3-ubyte", images[part])
            write_idx(scratch / f"{name}-labels-idx1-ubyte", labels[part])
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    except OSError:
        if not folder.exists():  # where it exists, another process was faster and its files are the same
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    print(f"data: {prepare(parser.parse_args().folder)}")
