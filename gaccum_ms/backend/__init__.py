"""Looks up every private MindSpore name that the package uses, for MindSpore 2.7.2 to 2.10.

One ImportError names all that are missing, when a name of the package is first asked for; otherwise there would be an
AttributeError during training. docs/hardware.md lists the kernels and passes that a version lacks.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint

SUPPORTED = ">=2.7.2,<2.11"  # as in setup.py
missing: list[str] = []


def _private(*places: str) -> Any:
    """The object at the first of these places that exists; a place is ``module:name``."""
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    missing.append(places[0].replace(":", "."))
    return None


def _attributes(owner: str, value: Any, *names: str) -> None:
    """Note the attributes that `value` lacks. Other files use them directly."""
    for name in names if value is not None else ():
        try:
            operator.attrgetter(name)(value)
        except AttributeError:
            missing.append(f"{owner}.{name}")


# -- names that are imported from here ---------------------------------------------------------------------------------

# In `mindspore.graph` since 2.9, in `mindspore.common` before.
cell_graph_executor = _private("mindspore.graph.api:_cell_graph_executor", "mindspore.common.api:_cell_graph_executor")
pynative_executor = _private("mindspore.graph.api:_pynative_executor", "mindspore.common.api:_pynative_executor")

# At the same place in all versions.
no_grad = _private("mindspore.common:_no_grad")
fork_utils = _private("mindspore._c_expression:fork_utils")
kernel_seeds = _private("mindspore.common.seed:_KERNEL_SEED")  # from which operators that draw get their seeds
check_level = _private("mindspore.train.amp:_check_level")
check_kwargs = _private("mindspore.train.amp:_check_kwargs")
config_level = _private("mindspore.train.amp:_config_level")
auto_mixed_precision_process = _private("mindspore.train.amp:_auto_mixed_precision_process")
OutputTo16 = _private("mindspore.train.amp:_OutputTo16")
OutputTo32 = _private("mindspore.train.amp:_OutputTo32")
ascend_target = _private("mindspore.amp:_ascend_target")
ascend_910a_target = _private("mindspore.amp:_ascend_910a_target")
ascend_910b_target = _private("mindspore.amp:_ascend_910b_target")
NPUClearFloatStatusV2 = _private("mindspore.ops.operations.math_ops:NPUClearFloatStatusV2")
NPUGetFloatStatusV2 = _private("mindspore.ops.operations.math_ops:NPUGetFloatStatusV2")
auto_parallel_context = _private("mindspore.parallel._auto_parallel_context:auto_parallel_context")
init_auto_parallel_context = _private("mindspore.parallel._utils:_init_auto_parallel_context")
clear_auto_parallel_context = _private("mindspore.parallel._utils:_clear_auto_parallel_context")
get_device_num = _private("mindspore.parallel._utils:_get_device_num")
get_global_rank = _private("mindspore.parallel._utils:_get_global_rank")
MicroStepAllGather = _private("mindspore.ops.operations.comm_ops:_MicroStepAllGather")
MirrorMicroStepOperator = _private("mindspore.ops.operations.comm_ops:_MirrorMicroStepOperator")
bprop_getters = _private("mindspore.ops._grad_experimental.grad_base:bprop_getters")
flops_collector = _private("mindspore.train.callback:_flops_collector")
checkpoint_records = _private("mindspore.train.checkpoint_pb2:Checkpoint")
get_grad_accumulation_shard = _private("mindspore.parallel._utils:_get_grad_accumulation_shard")

# -- attributes of MindSpore's objects, the same in all versions -------------------------------------------------------

_cell = nn.Cell()
_attributes("Cell", _cell, "_cells", "_params", "_buffers", "_user_parameters", "_get_attr_from_cell")
_attributes("Cell", _cell, "_forward_hook", "_forward_pre_hook")
_attributes("Cell", _cell, "check_names_and_refresh_name", "compile_and_run", "compile_cache")
_attributes("Parameter", ms.Parameter(ms.Tensor(0.0)), "assign_value", "data_ptr", "has_init", "init_data", "copy_")
_attributes("GroupNorm", nn.GroupNorm, "_cal_output")
_attributes("CheckpointConfig", CheckpointConfig(), "_crc_check")
_attributes("Model", Model, "_train", "_transform_callbacks", "_build_eval_network", "_build_predict_network")
_attributes("_flops_collector", flops_collector, "flops_collection")
_attributes("_cell_graph_executor", cell_graph_executor, "_graph_executor.get_params")
_attributes("_pynative_executor", pynative_executor, "clear_res", "enable_grad", "grad_flag", "set_enable_grad")
_context = auto_parallel_context and auto_parallel_context()
_attributes("auto_parallel_context()", _context, "get_auto_parallel_new_interface")
_attributes("fork_utils", fork_utils, "prepare_before_fork", "parent_at_fork", "child_at_fork", "prctl_set_pdeathsig")
_attributes("WithLossCell", nn.WithLossCell(_cell, _cell), "_backbone", "_loss_fn")
for _name in ("_config", "_directory", "_prefix"):
    if _name not in ModelCheckpoint.__init__.__code__.co_names:  # an instance would search for files
        missing.append(f"ModelCheckpoint.{_name}")

if missing:
    raise ImportError(
        f"For 'gaccum_ms', MindSpore must be {SUPPORTED}, but got MindSpore {ms.__version__}, which lacks "
        f"{', '.join(missing)}. pip install 'mindspore{SUPPORTED}', or a newer gaccum_ms."
    )
