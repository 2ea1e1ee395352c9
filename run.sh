#!/usr/bin/env bash
# Runs the distributed sample, the tests or the linters, installing first what they need. See `bash run.sh --help`.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sample=$here/sample_code/distributed_gradient_accumulation

usage() {
    cat <<'END'
bash run.sh [options] [arguments of the script]    train the sample on 8 processes
bash run.sh test [arguments of pytest]             run all tests
bash run.sh lint                                   ruff and mypy

options (or the variable in brackets):
  --processes N       number of processes (PROCESSES, default 8)
  --launcher NAME     msrun or mpirun (LAUNCHER, default msrun)
  --script FILE       the program to run (SCRIPT, default the sample's train.py)
  --log-dir FOLDER    gets 1/rank.N/stdout and stderr (LOG_DIR, default ./log_output)
  --timeout SECONDS   end all processes after so long (TIMEOUT, default never)

DATA_PATH names a folder with MNIST's four files; without it scikit-learn's digits are used.
A Python with MindSpore that is on PATH is used as it is; otherwise everything goes into .venv, here.
END
}

# Python 3.10 to 3.12 that can make an environment. Each is tried by running it: a pyenv shim may exist and not run.
find_python() {
    local candidate
    { type -ap python3.11 python3.12 python3.10 python3 python || true
      ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[012].*/bin/python3 2>/dev/null || true
    } | while IFS= read -r candidate; do
        if "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null </dev/null; then
            printf '%s\n' "$candidate"
            break
        fi
    done
}

has() { # has PYTHON MODULE...: are they all installed?
    "$1" -c 'import sys, importlib.util as u
sys.exit(not all(u.find_spec(name) for name in sys.argv[1:]))' "${@:2}" 2>/dev/null
}

# use EXTRA MODULE...: set $python to one that has MindSpore and these modules, installing what is missing.
use() {
    local extra=$1 stamp='' wanted='' base
    python=$(type -p python || type -p python3 || true)
    if [ -z "$python" ] || ! has "$python" mindspore; then
        python=$here/.venv/bin/python
        if ! has "$python" pip; then
            base=$(find_python)
            if [ -z "$base" ]; then
                echo "error: no Python 3.10, 3.11 or 3.12 with 'venv' was found (on Debian: python3-venv)." >&2
                exit 2
            fi
            rm -rf "$here/.venv"
            "$base" -m venv "$here/.venv"
        fi
        stamp=$here/.venv/.installed-$extra
        wanted=$(cksum "$here/setup.py")
    fi
    if ! has "$python" mindspore psutil "${@:2}" ||
        { [ -n "$stamp" ] && [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; }; then
        echo "installing gaccum_ms[$extra] with $python"
        "$python" -m pip install --quiet --disable-pip-version-check --editable "$here[$extra]"
        [ -z "$stamp" ] || printf '%s\n' "$wanted" >"$stamp"
    fi
    PATH=$(dirname "$python"):$PATH
    export PATH PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # this folder's sources, whatever else is installed
}

case ${1-} in
-h | --help)
    usage
    exit
    ;;
test)
    use test pytest xdist sklearn tensorboardX
    cd "$here"
    # All of them: two files at a time, because compiling a graph keeps one core busy.
    [ $# -gt 1 ] || set -- test --numprocesses 2 --dist loadfile
    exec "$python" -m pytest "${@:2}"
    ;;
lint)
    use dev ruff mypy
    cd "$here"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    exec "$python" -m mypy
    ;;
esac

processes=${PROCESSES:-8} launcher=${LAUNCHER:-msrun} script=${SCRIPT:-$sample/train.py}
log_dir=${LOG_DIR:-log_output} timeout=${TIMEOUT:-0}
while [ $# -gt 0 ]; do
    case $1 in
    --processes | --launcher | --script | --log-dir | --timeout)
        if [ $# -lt 2 ]; then
            echo "error: $1 needs a value; see bash run.sh --help" >&2
            exit 2
        fi
        name=${1#--}
        printf -v "${name//-/_}" '%s' "$2"
        shift 2
        ;;
    *) break ;;
    esac
done

use sample sklearn
if [ "$script" = "$sample/train.py" ] && [ -z "${DATA_PATH-}" ]; then
    "$python" "$sample/prepare_data.py"
fi
# As a file, not as -m gaccum_ms.launch: that would import MindSpore into the launcher, which has no need of it.
exec "$python" "$here/gaccum_ms/launch.py" --processes "$processes" --launcher "$launcher" --log-dir "$log_dir" \
    --timeout "$timeout" "$script" "$@"
