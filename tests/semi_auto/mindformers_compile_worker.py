"""compile_worker.py, for the steps of mindformers_cases.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["LOG_MF_PATH"] = str(Path(sys.argv[1]).parent / "log_of_mindformers")

from tests.semi_auto.compile_worker import main
from tests.semi_auto.mindformers_cases import CASES

main(CASES)
