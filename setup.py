"""Packaging of gaccum_ms."""

from pathlib import Path

from setuptools import find_packages, setup

readme = Path(__file__).with_name("README.md")

setup(
    name="gaccum_ms",
    version="0.2.0",
    description="Gradient accumulation for MindSpore: one import line, the full batch's update",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["gaccum_ms", "gaccum_ms.*"]),
    package_data={"gaccum_ms": ["py.typed"]},
    python_requires=">=3.10,<3.13",
    install_requires=[
        "mindspore>=2.7.2,<2.11",  # the range that the tests ran on
        "numpy<2",  # MindSpore's datasets fail with NumPy 2
        "psutil>=6",
        "tqdm>=4.66",
    ],
    extras_require={
        "plot": ["matplotlib"],  # GradNoiseScale.draw
        "sample": ["scikit-learn"],
        "gallery": ["matplotlib", "mindcv==0.3.*", "scikit-learn"],  # all of sample_code/
        "tensorboard": ["tensorboardX"],
        "test": [
            "matplotlib",
            "mindcv==0.3.*",
            "myst-parser>=4",
            "pytest>=8.4,<9",  # pytest-xdist 3.8 knows no groups of 9.2
            "pytest-xdist",
            "scikit-learn",
            "setuptools",  # it and wheel build the wheel that is tested
            "sphinx>=8.1",
            "tensorboardX",
            "wheel",
        ],
        "torch": ["torch==2.13.*"],  # the tests that compare with PyTorch's loop
        "benchmark": ["matplotlib", "mindcv==0.3.*", "torch==2.13.*"],
        # What MindSpore's GPU back end, made for CUDA 11.6 and cuDNN 8, is linked with; see gaccum_ms/launch/cuda.py.
        "gpu": [
            "nvidia-cublas-cu11",
            "nvidia-cuda-nvrtc-cu11",
            "nvidia-cuda-runtime-cu11",
            "nvidia-cudnn-cu11==8.9.6.50",
            "nvidia-cufft-cu11",
            "nvidia-curand-cu11",
            "nvidia-cusolver-cu11",
            "nvidia-cusparse-cu11",
        ],
        "dev": ["import-linter>=2", "ruff", "mypy"],
        "docs": ["matplotlib", "myst-parser>=4", "sphinx>=8.1"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
