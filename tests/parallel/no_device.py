"""What lets MindSpore compile for GPUs on a machine that has none: its CUDA libraries, and a driver without devices.

The libraries are NVIDIA's packages for CUDA 11, the extra 'gpu'. The driver is a library whose every function says
``CUDA_ERROR_NO_DEVICE``, made here by the C compiler.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import gaccum_ms

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
FUNCTIONS = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetProcAddress", "cuGetProcAddress_v2",
    "cuDeviceGetAttribute", "cuGetErrorName", "cuLaunchKernel", "cuModuleGetFunction", "cuModuleLoadDataEx",
    "cuModuleUnload", "cuStreamSynchronize",
)  # fmt: skip
LIBRARIES = ("cublas", "cuda_nvrtc", "cuda_runtime", "cudnn", "cufft", "curand", "cusolver", "cusparse")


def why_not() -> str | None:
    """What is missing, if anything is."""
    try:
        missing = [name for name in LIBRARIES if importlib.util.find_spec(f"nvidia.{name}") is None]
    except ModuleNotFoundError:
        missing = list(LIBRARIES)
    if missing:
        return f"the CUDA libraries {', '.join(missing)} are not installed: pip install 'gaccum-ms[gpu]'"
    return None if shutil.which("cc") else "there is no C compiler, 'cc', to make a driver without devices with"


def environment(folder: Path) -> dict[str, str]:
    """The variables by which MindSpore finds all that; `folder` gets the driver."""
    source, cuda = folder / "driver.c", folder / "cuda"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in FUNCTIONS))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    compiler = cuda / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.6, V11.6.124'\n")
    compiler.chmod(0o755)
    mindspore = Path(importlib.util.find_spec("mindspore").origin).parent
    nvidia = [Path(one) for one in importlib.util.find_spec("nvidia").submodule_search_locations]
    libraries = [folder, *(mindspore / "lib" / "plugin" / name for name in ("gpu11.6", "gpu"))]
    libraries += [library for root in nvidia for library in root.glob("*/lib")]
    return {
        **os.environ,
        "CUDA_HOME": str(cuda),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PATH": os.pathsep.join([str(compiler.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(Path(gaccum_ms.__file__).parents[1]),
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "graphs"),
        "GLOG_v": "3",
    }
