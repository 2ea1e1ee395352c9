"""The adapters in general: they are imported at their first use, without their packages, and have complete
docstrings."""

from __future__ import annotations

import inspect
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import adopt

FUNCTIONS = [
    adopt.mindcv.train_step,
    adopt.mindcv.create_trainer,
    adopt.mindcv.state_monitor,
    adopt.mindformers.train_step,
    adopt.mindocr.train_step,
    adopt.mindone.train_step,
    adopt.mindone.transformers_train_step,
    adopt.mindone.diffusers_train_step,
    adopt.mindyolo.train_step,
]


def test_each_module_is_imported_when_it_is_first_used_and_without_its_package(programs, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "names = ('mindcv', 'mindformers', 'mindocr', 'mindone', 'mindyolo')\n"
        "sys.modules.update(dict.fromkeys(names))\n"
        "import gaccum_ms\n"
        "print([name in sys.modules for name in map('gaccum_ms.adopt.{}'.format, names)])\n"
        "print([callable(getattr(gaccum_ms.adopt, name).train_step) for name in names])\n"
    )
    result = programs.run(script, folder=tmp_path)
    assert result.stdout.split("\n")[:2] == [str([False] * 5), str([True] * 5)], result.stderr[-2000:]


def test_another_name():
    with pytest.raises(AttributeError, match="it has mindcv, mindformers, mindocr, mindone, mindyolo"):
        adopt.mindspore  # noqa: B018
    assert dir(adopt) == ["mindcv", "mindformers", "mindocr", "mindone", "mindyolo"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: f"{one.__module__.rsplit('.', 1)[1]}-{one.__name__}")
def test_docstrings_name_all_arguments(function):
    text = inspect.getdoc(function)
    documented = set(re.findall(r"^    \**(\w+) \(", text, re.MULTILINE))
    assert documented == set(inspect.signature(function).parameters)
    for section in ("Args:", "Returns:", "Raises:"):
        assert section in text


class Line(nn.Cell):
    """A loss whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor([1.0]), name="weight")

    def construct(self, x):
        return (self.weight * x).mean()


@pytest.mark.parametrize(
    ("threshold", "weight"), [(2.0, 1.0), (float(np.nextafter(np.float32(2), np.float32(3))), -1.0)]
)
def test_mindformers_skips_an_update_whose_norm_is_the_threshold(threshold, weight, pynative):
    """As its own step, which updates if the norm is less."""
    network = Line()
    step = adopt.mindformers.train_step(
        network,
        nn.SGD(network.trainable_params(), 1.0),
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=threshold,
    ).set_train()
    step(Tensor([2.0]))
    assert network.weight.asnumpy() == [weight]
