"""Packaging of gaccum_ms."""

from pathlib import Path

from setuptools import find_packages, setup

REPORT = ["jinja2>=3", "matplotlib>=3.6"]
DOCS = [
    "furo==2025.12.19",
    "myst-parser>=4",
    "sphinx>=8.1",
    "sphinx-copybutton==0.5.2",
    "sphinx-reredirects",
    *REPORT,
]
readme = Path(__file__).with_name("README.md")

setup(
    name="gaccum_ms",
    version="0.2.0",
    description="Gradient accumulation for MindSpore: one import line, the full batch's update",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author="The gaccum_ms developers",
    keywords="MindSpore, gradient accumulation, micro-batch, large batch, distributed training, deep learning",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["gaccum_ms", "gaccum_ms.*"]),
    package_data={"gaccum_ms": ["py.typed", "report/page.html"]},
    entry_points={"console_scripts": ["gaccum-ms = gaccum_ms.__main__:main"]},
    python_requires=">=3.10,<3.13",
    install_requires=[
        "mindspore>=2.7.2,<2.11",  # the range that the tests ran on
        "numpy<2",  # MindSpore's datasets fail with NumPy 2
        "psutil",
        "tqdm>=4.66",
    ],
    extras_require={
        "report": REPORT,  # `gaccum-ms report` and all `draw`
        "sample": ["scikit-learn"],
        "gallery": ["matplotlib", "mindcv==0.3.*", "scikit-learn"],  # all of sample_code/
        "tensorboard": ["tensorboardX"],
        "test": [
            "coverage>=7.10",  # tests/matrix.py
            "grimp>=3",
            "ipykernel",
            "ipywidgets",
            "mindcv==0.3.*",
            "pytest>=8.4,<9",  # pytest-xdist 3.8 does not support the groups of pytest 9.2
            "pytest-rerunfailures",
            "pytest-xdist",
            "scikit-learn",
            "selenium",  # it drives the Chromium that looks at the site
            "setuptools",  # it and wheel build the wheel that is tested
            "tensorboardX",
            "wheel",
            *DOCS,
        ],
        "torch": ["torch==2.13.*"],  # the tests that compare with PyTorch's loop
        # The packages of gaccum_ms/adopt/, if pip can install them beside MindSpore 2.10, and their undeclared
        # dependencies.
        "trainers": ["datasets", "mindcv==0.3.*", "mindone==0.5.*", "mindyolo==0.5.*", "ml_dtypes", "pyarrow<24"],
        "benchmark": ["mindcv==0.3.*", "torch==2.13.*"],
        # The libraries of MindSpore's GPU back end, built for CUDA 11.6 and cuDNN 8; see gaccum_ms/launch/cuda.py.
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
        "ray": ["ray>=2.51,<3"],  # gaccum-ms run --on ray; labels came with 2.51; tested with 2.60
        "dev": ["import-linter>=2", "mypy", "pre-commit", "ruff", "zizmor==1.*"],
        "docs": DOCS,
        "release": ["build", "twine>=6"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
