"""The finished graphs. Each is compiled once, when a test first needs it."""

from __future__ import annotations

import pytest

from tests.semi_auto.compiled import Compiler
from tests.support import no_device


def compiler_of(module):
    """A fixture: a function that compiles a case of this module, by its name, for eight ranks."""

    @pytest.fixture(scope="session")
    def compiler(tmp_path_factory):
        if reason := no_device.why_not():
            pytest.skip(reason)
        with Compiler(tmp_path_factory.mktemp(module), cases=module) as compiler:
            yield compiler

    return compiler


cases = compiler_of("cases")
