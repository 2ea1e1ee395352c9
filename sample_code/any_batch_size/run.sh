#!/usr/bin/env bash
# Trains train.py, in one process; takes its options.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../run.sh" sample any_batch_size "$@"
