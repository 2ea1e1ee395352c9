"""The programs of the self-check: ``probe.py DEVICE`` computes, and ``probe.py`` on ranks communicates.

They import nothing of ours, so their failures are MindSpore's.
"""

from __future__ import annotations

import sys


def compute_on(device: str) -> None:
    """Compute on a device."""
    import mindspore as ms

    ms.set_device(device)
    if float((ms.Tensor([1.0]) + 1.0).asnumpy()[0]) != 2.0:
        sys.exit("1 + 1 is not 2")


def all_reduce() -> None:
    """Add up 1 from each rank."""
    import mindspore as ms
    from mindspore import ops
    from mindspore.communication import get_group_size, init

    ms.set_device("CPU")
    init()
    if float(ops.AllReduce()(ms.Tensor([1.0])).asnumpy()[0]) != get_group_size():
        sys.exit("the sum of a 1 from each rank is not the number of ranks")


if __name__ == "__main__":
    compute_on(sys.argv[1]) if sys.argv[1:] else all_reduce()
