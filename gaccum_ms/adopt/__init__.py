"""Our step in the trainers of other packages: one module for each package, imported at its first use."""

import importlib
from types import ModuleType

_PACKAGES = ("mindcv", "mindformers", "mindocr", "mindone", "mindyolo")


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}': it has {', '.join(_PACKAGES)}.")


def __dir__() -> list[str]:
    return sorted(_PACKAGES)
