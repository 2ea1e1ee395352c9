"""The length of a batch in a graph, which `set_inputs` may leave open."""

from __future__ import annotations

import mindspore as ms
from mindspore import ops

_shape_of = ops.TensorShape()

# -- compiled ----------------------------------------------------------------------------------------------------------


def samples_of(inputs, axis):
    """Samples in a batch: an int, or an int32 Tensor of shape () where `set_inputs` leaves it open. `axis` : that of
    the samples of the first input."""
    samples = inputs[0].shape[axis]
    if not ops.isconstant(samples):
        samples = ops.cast(_shape_of(inputs[0])[axis], ms.int32)
    return samples
