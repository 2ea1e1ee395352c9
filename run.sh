#!/usr/bin/env bash
# Runs the distributed sample, the tests, the linters or the docs, installing first what they need. See `bash run.sh --help`.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sample=$here/sample_code/distributed_gradient_accumulation

usage() {
    cat <<'END'
bash run.sh [options] [arguments of the script]    train the sample on 8 processes
bash run.sh check                                  say whether this machine can train, and if not, why
bash run.sh test                                   run the tests: every option, error and promise, on all cores
bash run.sh test all                               those, and the thorough ones; `rest`: the thorough ones alone
bash run.sh test [arguments of pytest]             some of all tests
bash run.sh test parallel [arguments of pytest]    those of the graphs for 8 devices, which no device need run
bash run.sh lint                                   ruff and mypy
bash run.sh docs [folder]                          build the site, by default in build/site

options (or the variable in brackets):
  --processes N            number of processes on this host (PROCESSES, default 8)
  --launcher NAME          msrun or mpirun (LAUNCHER, default msrun)
  --script FILE            the program to run (SCRIPT, default the sample's train.py)
  --log-dir FOLDER         gets 1/rank.N/stdout and stderr (LOG_DIR, default ./log_output)
  --timeout SECONDS        end all processes after so long (TIMEOUT, default never)
  --start-timeout SECONDS  wait so long for processes and hosts that do not come (default 600)
  --tune-cpu               call gaccum_ms.tune_cpu() on each process before the program

with several hosts, the same on each but for R:
  --nodes N --node-rank R --master-addr ADDRESS [--master-port P]
                           R is this host's number from 0, ADDRESS is one of host 0's; P and P + 1
                           (default 8118) must be free and open there

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

# choose: set $python to the one that is active, if it has MindSpore, otherwise to .venv's, which may not be there yet.
choose() {
    python=$(type -p python || type -p python3 || true)
    ours=
    if [ -z "$python" ] || ! has "$python" mindspore; then
        python=$here/.venv/bin/python
        ours=yes
    fi
}

# use EXTRA MODULE...: set $python to one that has MindSpore and these modules, installing what is missing.
use() {
    local extra=$1 stamp='' wanted='' base
    choose
    if [ -n "$ours" ]; then
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
    if ! has "$python" mindspore psutil tqdm "${@:2}" ||
        { [ -n "$stamp" ] && [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; }; then
        echo "installing gaccum_ms[$extra] with $python"
        "$python" -m pip install --quiet --disable-pip-version-check --editable "$here[$extra]"
        [ -z "$stamp" ] || printf '%s\n' "$wanted" >"$stamp"
    fi
    PATH=$(dirname "$python"):$PATH
    export PATH PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # this folder's sources, whatever else is installed
}

# use_gpu: add the extra gpu's libraries, which some tests need, though no GPU. They say themselves why they skip where
# these cannot be had.
use_gpu() {
    local said
    if ! "$python" -c 'import sys; sys.path.insert(0, sys.argv[1]); import gpu; sys.exit(bool(gpu.missing_packages()))' \
        "$here/gaccum_ms"; then
        echo "installing gaccum_ms[gpu] with $python"
        said=$("$python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 30 \
            --editable "$here[gpu]" 2>&1) ||
            echo "the extra 'gpu' was not installed: $(grep -m 1 -o 'ERROR.*' <<<"$said")"
    fi
}

# processes: how many share the tests: one for each core, if there are 3 GB of memory for each.
processes() {
    local cores memory
    cores=$(nproc)
    memory=$(awk '/MemAvailable/ {print int($2 / 3000000)}' /proc/meminfo)
    echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}

case ${1-} in
-h | --help)
    usage
    exit
    ;;
check)
    choose
    [ -x "$python" ] || python=$(find_python)
    if [ -z "$python" ]; then
        echo "error: no Python 3.10, 3.11 or 3.12 with 'venv' was found (on Debian: python3-venv)." >&2
        exit 2
    fi
    exec "$python" "$here/gaccum_ms/check.py"
    ;;
test)
    use test pytest xdist sklearn tensorboardX matplotlib mindcv sphinx myst_parser
    cd "$here"
    case ${2-} in
    '') tier=(-m "not thorough") ;;
    all) tier=() ;;
    rest) tier=(-m thorough) ;;
    parallel)
        use_gpu
        exec "$python" -m pytest tests/parallel "${@:3}"
        ;;
    *) exec "$python" -m pytest "${@:2}" ;;
    esac
    use_gpu
    exec "$python" -m pytest --numprocesses "$(processes)" --dist loadgroup --no-loadscope-reorder --durations 25 \
        ${tier[@]+"${tier[@]}"} "${@:3}"
    ;;
lint)
    use dev ruff mypy
    cd "$here"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    exec "$python" -m mypy
    ;;
docs)
    use docs sphinx myst_parser matplotlib
    exec "$python" -m sphinx -W --keep-going -q -b html "$here/docs" "${2:-$here/build/site}"
    ;;
esac

script=${SCRIPT:-$sample/train.py}
options=(--processes "${PROCESSES:-8}" --launcher "${LAUNCHER:-msrun}")
options+=(--log-dir "${LOG_DIR:-log_output}" --timeout "${TIMEOUT:-0}")
while [ $# -gt 0 ]; do
    case $1 in
    --script | --processes | --launcher | --log-dir | --timeout | --start-timeout | \
        --nodes | --node-rank | --master-addr | --master-port)
        if [ $# -lt 2 ]; then
            echo "error: $1 needs a value; see bash run.sh --help" >&2
            exit 2
        fi
        if [ "$1" = --script ]; then script=$2; else options+=("$1" "$2"); fi
        shift 2
        ;;
    --tune-cpu | --tune-cpu-threads)
        options+=("$1")
        shift
        ;;
    *) break ;;
    esac
done

use sample sklearn
if [ "$script" = "$sample/train.py" ] && [ -z "${DATA_PATH-}" ]; then
    "$python" "$sample/prepare_data.py"
fi
# As a file, not as -m gaccum_ms.launch: that would import MindSpore into the launcher, which has no need of it.
exec "$python" "$here/gaccum_ms/launch.py" "${options[@]}" "$script" "$@"
