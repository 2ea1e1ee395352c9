"""A first call compiles few functions. Graph mode infers each of them, which takes most of a small network's first
call."""

from __future__ import annotations

import mindspore as ms
import pytest

from tests.support.programs import Programs

PROGRAM = """
from benchmarks.ways import WAYS, Setting
WAYS["ours"].build(Setting("mlp", "ours", 16, 256)).step()
"""


@pytest.mark.skipif(not ms.__version__.startswith("2.10."), reason="the number is that of MindSpore 2.10")
def test_the_mlp_has_few_functions(tmp_path):
    """Before a window was composed of parts, there were 374. A comprehension over the inputs adds 13, and an `if` for
    each weight 6."""
    script, graphs = tmp_path / "first_call.py", tmp_path / "graphs"
    script.write_text(PROGRAM)
    dump = {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(graphs)}
    with Programs() as programs:
        done = programs.run(script, folder=tmp_path, **dump, MS_DEV_DUMP_IR_PASSES="type_inference")
    assert done.returncode == 0, done.stderr[-3000:]
    inferred = max(graphs.rglob("*type_inference*.ir"), key=lambda file: file.stat().st_size).read_text()
    assert 200 < inferred.count("\nsubgraph @") <= 324  # 323
