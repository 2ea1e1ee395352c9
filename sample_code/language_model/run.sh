#!/usr/bin/env bash
# Trains train.py on 2 processes; takes the options of the project's run.sh, then its own.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/../../run.sh" --processes 2 --script "$here/train.py" "$@"
