"""A first call compiles few functions, for any number of micro-batches. Graph mode infers each of them, which takes
most of a small network's first call."""

from __future__ import annotations

import mindspore as ms
import pytest

PROGRAM = """
from benchmarks.ways import WAYS, Setting
for micro_size in (2, 16):
    WAYS["ours"].build(Setting("mlp", "ours", micro_size, 256)).step()
"""


@pytest.mark.skipif(not ms.__version__.startswith("2.10."), reason="the number is that of MindSpore 2.10")
def test_the_mlp_has_few_functions_however_many_micro_batches(tmp_path, programs):
    """Before a window was composed of parts, there were 374. A comprehension over the inputs adds 13, and an `if` for
    each weight 6."""
    script, graphs = tmp_path / "first_call.py", tmp_path / "graphs"
    script.write_text(PROGRAM)
    dump = {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(graphs)}
    done = programs.run(script, folder=tmp_path, **dump, MS_DEV_DUMP_IR_PASSES="type_inference")
    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted(graphs.rglob("*type_inference*.ir"), key=lambda file: file.stat().st_size)
    few, many = (file.read_text().count("\nsubgraph @") for file in files[-2:])
    assert 200 < few == many <= 317  # 316
