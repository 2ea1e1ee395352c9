"""The finished graphs. Each is compiled once, when a test first needs it."""

from __future__ import annotations

import pytest

from tests.semi_auto.compiled import Compiler
from tests.support import no_device


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """A function that compiles a case, by its name, for eight ranks."""
    if reason := no_device.why_not():
        pytest.skip(reason)
    with Compiler(tmp_path_factory.mktemp("parallel")) as compiler:
        yield compiler
