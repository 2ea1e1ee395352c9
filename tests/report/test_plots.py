"""Pictures: without matplotlib, each `draw` says what to install. What is drawn is tested beside what is drawn."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from gaccum_ms import GradNoiseScale, MemoryReport, TokenPlan

REPORT = MemoryReport(0, "resident memory", 400, 400, 400, 64, 9000, 20000, (), ())
PLAN = TokenPlan(np.array([4]), 4, (4,), 4, ((4, np.array([0])),))


@pytest.mark.parametrize("pictured", [GradNoiseScale(), REPORT, PLAN], ids=lambda value: type(value).__name__)
def test_without_matplotlib_there_is_one_clear_error(pictured, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "gaccum_ms.report.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("For 'draw', matplotlib must be installed, but ")) as raised:
        pictured.draw(tmp_path / "picture.png")
    assert str(raised.value).endswith(". Run: pip install 'gaccum_ms[report]'")
