"""The finished graphs of all cases, compiled once."""

from __future__ import annotations

import no_device
import pytest
from compiled import Case, compile_cases


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """Compiles everything that the tests need, on eight ranks; returns the function from name to case."""
    if reason := no_device.why_not():
        pytest.skip(reason)
    out = compile_cases(tmp_path_factory.mktemp("parallel"))
    return lambda name: Case(out / name)
