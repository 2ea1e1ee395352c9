"""MindSpore's own tutorial program trains if its import line names gaccum_ms. With MindSpore's import no weight moves:
test_troubleshooting.py."""

from __future__ import annotations

import re

import gaccum_ms
from tests.support import paths

SCRIPT = paths.worker("tutorial_script.py")
MINDSPORES = "from mindspore.nn.wrap.cell_wrapper import GradAccumulationCell\n"
OURS = "from gaccum_ms import GradAccumulationCell\n"
LOSS = re.compile(r"^epoch: \d+ step: \d+, loss is (\S+)$", re.MULTILINE)
LOOK = re.compile(r"^(?:before|after): weights (\w+) accuracy (\S+)$", re.MULTILINE)


def test_with_our_import_it_trains(programs, digits, tmp_path):
    assert gaccum_ms.GradAccumulation is gaccum_ms.GradAccumulationCell, "a second name for the import line"
    text = SCRIPT.read_text()
    assert text.count(MINDSPORES) == 1
    script = tmp_path / "train.py"
    script.write_text(text.replace(MINDSPORES, OURS))
    done = programs.run(script, folder=tmp_path, DATA_PATH=str(digits), MS_DEV_HOST_BLOCKING_RUN="1")
    assert done.returncode == 0, done.stderr[-3000:]
    (before, accuracy_before), (after, accuracy_after) = LOOK.findall(done.stdout)
    losses = [float(loss) for loss in LOSS.findall(done.stdout)]
    assert len(losses) == 20
    assert losses[0] < 2.5, "the mean over micro-batches, about ln 10 at first, not their sum"
    assert losses[-1] < losses[0] - 0.05
    assert after != before
    assert float(accuracy_after) > float(accuracy_before) + 0.2
