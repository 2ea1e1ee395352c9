"""The finished graphs, each compiled once, when a test first needs it."""

from __future__ import annotations

import no_device
import pytest
from compiled import Compiler


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """The function from a case's name to what eight ranks' compiler made of it."""
    if reason := no_device.why_not():
        pytest.skip(reason)
    with Compiler(tmp_path_factory.mktemp("parallel")) as compiler:
        yield compiler
