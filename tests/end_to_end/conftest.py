"""What several tests of users' programs need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def digits(programs, tmp_path_factory) -> Path:
    """scikit-learn's digits in MNIST's files."""
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra 'test'")
    folder = tmp_path_factory.mktemp("digits")
    prepare = ROOT / "sample_code" / "distributed_gradient_accumulation" / "prepare_data.py"
    assert programs.run(prepare, str(folder / "data"), folder=folder).returncode == 0
    return folder / "data"
