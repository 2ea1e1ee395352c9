"""A machine with NVIDIA's CUDA libraries and a driver, but no GPU: enough for MindSpore to compile for GPUs.

The libraries are NVIDIA's packages for CUDA 11, the extra 'gpu'. The driver is a library whose functions all return "no
device"; the C compiler builds it here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from unittest import mock

from gaccum_ms.launch import cuda

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
FUNCTIONS = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetProcAddress", "cuGetProcAddress_v2",
    "cuDeviceGetAttribute", "cuGetErrorName", "cuLaunchKernel", "cuModuleGetFunction", "cuModuleLoadDataEx",
    "cuModuleUnload", "cuStreamSynchronize",
)  # fmt: skip


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def why_not() -> str | None:
    """What is missing to compile for GPUs; empty if nothing is."""
    if missing := cuda.missing_packages():
        return f"{', '.join(missing)} not installed: {cuda.REMEDY}"
    return None if compiler() else "there is no C compiler to make a driver without devices with"


def make_driver(folder: Path) -> None:
    """Build the driver in a folder."""
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in FUNCTIONS))
    subprocess.run([str(compiler()), "-shared", "-fPIC", "-o", folder / cuda.DRIVER, source], check=True, timeout=600)


def environment(folder: Path) -> dict[str, str]:
    """The environment in which MindSpore compiles for GPUs; its CUDA files are made in `folder` ."""
    make_driver(folder)
    with mock.patch.object(cuda, "DRIVER", str(folder / cuda.DRIVER)):  # the loader does not look there
        return {**os.environ, **cuda.environment(folder / "cuda", {"LD_LIBRARY_PATH": str(folder)})}
