"""Fixtures of the tests of whole programs."""

from __future__ import annotations

import pytest

from tests.support.programs import Programs


@pytest.fixture(scope="session")
def programs():
    """Users' programs, for all tests of this process."""
    with Programs() as programs:
        yield programs
