"""Replaces the functions with which MindSpore builds, evaluates, casts and trains a model: `gaccum_ms.model_hook` is
then asked first, and may call the original.

Nothing narrower works. `Model.__init__` looks `build_train_network` up in its module, and then builds the networks for
evaluation and prediction, before anybody has the object; and a model whose network is our step asks for nothing before
it trains. `gaccum_ms.cell` installs this, and `gaccum_ms.record.window_callback` , whose callbacks refuse other
networks; importing the package alone replaces nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import mindspore
import mindspore.amp
import mindspore.train
from mindspore.train import amp

_HOOK = "gaccum_ms.model_hook"  # by name: it imports the cell, and so this file
_MODULES = (amp, mindspore.amp, mindspore.train)  # which have the functions of `amp` as their own
_METHODS = ("_train", "_build_eval_network", "_build_predict_network")  # `Model.train` and `Model.fit` call `_train`
_CASTS = ("auto_mixed_precision", "custom_mixed_precision")


@functools.cache  # once for each process
def install_model_hook() -> None:
    """Put our functions where MindSpore's own modules look theirs up."""
    for name, hook in (("build_train_network", "build_train_network"), *((cast, "cast") for cast in _CASTS)):
        function = _hooked(getattr(amp, name), hook)
        for module in _MODULES:
            if hasattr(module, name):
                setattr(module, name, function)
    model = mindspore.train.Model
    for name in _METHODS:
        setattr(model, name, _hooked(getattr(model, name), name.removeprefix("_")))


def _hooked(original: Callable[..., Any], hook: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(_HOOK), hook)(original, *arguments, **named)

    return call
