#!/usr/bin/env bash
# Trains train.py on 8 processes; takes the options of the project's run.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../run.sh" "$@"
