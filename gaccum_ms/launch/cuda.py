"""Makes a CUDA folder for MindSpore's GPU back end, from the CUDA 11 libraries of the extra ``gpu``.

MindSpore chooses the back end by the version that ``$CUDA_HOME/bin/nvcc`` prints, and loads it if all its libraries are
found. The libraries from PyPI come each in a folder of its own, without a compiler. So this file makes a folder that
resembles CUDA's: links to the libraries, and an ``nvcc`` that prints the version.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

# MindSpore 2.10 supports CUDA 10.1, 11.1 and 11.6; libraries of later versions 11 also run programs built for 11.6.
CUDA_VERSION = "11.6.124"
DRIVER = "libcuda.so.1"
LIBRARIES = {
    "libcublas.so.11": "nvidia-cublas-cu11",
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11",
    "libcudnn.so.8": "nvidia-cudnn-cu11",
    "libcufft.so.10": "nvidia-cufft-cu11",
    "libcurand.so.10": "nvidia-curand-cu11",
    "libcusolver.so.11": "nvidia-cusolver-cu11",
    "libcusparse.so.11": "nvidia-cusparse-cu11",
    "libnvrtc.so.11.2": "nvidia-cuda-nvrtc-cu11",
}
REMEDY = "in the project's folder: pip install '.[gpu]' (1.6 GB)"


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def missing_packages() -> list[str]:
    """Return the packages of the extra ``gpu`` whose libraries are not installed."""
    found = {path.name for path in _libraries()}
    return [package for library, package in LIBRARIES.items() if library not in found]


def environment(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Make the folder, and return the variables with which MindSpore finds it."""
    if "CUDA_HOME" in env or not has_driver() or missing_packages():
        return {}
    nvcc, libraries = folder / "bin" / "nvcc", folder / "lib64"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    major, minor, _ = CUDA_VERSION.split(".")
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {major}.{minor}, V{CUDA_VERSION}'\n")
    nvcc.chmod(0o755)
    libraries.mkdir(exist_ok=True)
    for library in _libraries():
        # MindSpore reads the version from a file's name.
        with_version = [f"libcudart.so.{CUDA_VERSION}"] * (library.name == "libcudart.so.11.0")
        for name in (library.name, *with_version):
            (libraries / name).unlink(missing_ok=True)
            (libraries / name).symlink_to(library)
    plugins = _folders("mindspore")[0] / "lib" / "plugin"
    search = [libraries, plugins / f"gpu{major}.{minor}", plugins / "gpu", *filter(None, [env.get("LD_LIBRARY_PATH")])]
    return {"CUDA_HOME": str(folder), "LD_LIBRARY_PATH": os.pathsep.join(map(str, search))}


def _libraries() -> list[Path]:
    """The shared libraries in NVIDIA's packages."""
    return sorted(library for folder in _folders("nvidia") for library in folder.glob("*/lib/*.so*"))


def _folders(name: str) -> list[Path]:
    """All folders of a package: NVIDIA's may be in several environments, one based on the other."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
