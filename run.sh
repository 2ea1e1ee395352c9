#!/usr/bin/env bash
# Runs the distributed sample, the tests, the linters or the docs. Installs what they need. See `bash run.sh --help`.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sample=$here/sample_code/distributed_gradient_accumulation
ours=$here${PYTHONPATH:+:$PYTHONPATH} # this folder's sources come before installed packages
venv=$here/.venv                       # missing packages are installed there
mindspore=                             # the version given by --mindspore

usage() {
    cat <<'END'
bash run.sh [options] [script] [its arguments]     train the sample, or run a script, on 8 processes
bash run.sh sample NAME [its options]              train one of sample_code/, in this process: image_classification, ...
bash run.sh check                                  say whether this machine can train, and if not, why
bash run.sh report windows.jsonl                   draw a WindowMonitor's record as one HTML page
bash run.sh test                                   run the tests: every option, error and promise, on all cores
bash run.sh test all                               those, and the thorough ones; `rest`: the thorough ones alone
bash run.sh test [arguments of pytest]             some of all tests
bash run.sh test parallel [arguments of pytest]    those of the graphs for 8 devices, which no device need run
bash run.sh test device [arguments of pytest]      on the devices of this machine; the report is in build/device
bash run.sh test --mindspore 2.8.0 [any of these]  the same with that MindSpore, in an environment of its own
bash run.sh lint                                   ruff, mypy, import-linter, and zizmor for the workflows
bash run.sh docs [folder]                          build the site, by default in build/site

The first word that is no option begins the script's own words; -- ends the options before that.
DATA_PATH names a folder with MNIST's four files; without it scikit-learn's digits are used.
A Python on PATH that has all that is needed is used as it is. What is missing goes into .venv, here, never there.
The launcher's options follow. PROCESSES, LAUNCHER, SCRIPT, LOG_DIR and TIMEOUT in the environment are their defaults.

END
}

# find_python: print a Python 3.10 to 3.12 that can make .venv, which is not .venv's own. Each is run, because a pyenv
# shim may not run.
find_python() {
    local candidate
    { type -ap python3.11 python3.12 python3.10 python3 python || true
      ls -d "${PYENV_ROOT:-${HOME-}/.pyenv}"/versions/3.1[012].*/bin/python3 2>/dev/null || true
    } | while IFS= read -r candidate; do
        [ "$(dirname "$candidate")" -ef "$venv/bin" ] && continue
        if "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null </dev/null; then
            printf '%s\n' "$candidate"
            break
        fi
    done
}

lacks() { # lacks PYTHON MODULE...: print the modules that are not installed
    "$1" -c 'import sys, importlib.util as u
print(*(name for name in sys.argv[1:] if not u.find_spec(name)))' "${@:2}" 2>/dev/null || echo "${*:2}"
}

has() { # has PYTHON MODULE...: succeed if all modules are installed
    [ -z "$(lacks "$@")" ]
}

# choose: set $python to the active one if it has MindSpore, otherwise to .venv's, which may not exist yet.
choose() {
    python=$(type -p python || type -p python3 || true)
    if [ -z "$python" ] || ! has "$python" mindspore; then
        python=$venv/bin/python
    fi
}

# some_python: set $python to the chosen one, or to any other that runs.
some_python() {
    choose
    [ -x "$python" ] || python=$(find_python)
    [ -n "$python" ] || no_python
}

no_python() {
    echo "error: no Python 3.10, 3.11 or 3.12 with 'venv' was found (on Debian: python3-venv)." >&2
    exit 2
}

# use EXTRA MODULE...: set $python to one that has MindSpore and these modules. The active one is used if it has all of
# them, and is never changed: missing packages are installed into .venv.
use() {
    local missing active
    used=("$@")
    active=$(type -p python || type -p python3 || true)
    missing=$(lacks "$active" mindspore psutil tqdm "${@:2}")
    [ -z "$mindspore" ] || missing=mindspore
    python=$active
    if [ -n "$missing" ]; then
        use_venv "$active" "$missing"
    fi
    PATH=$(dirname "$python"):$PATH
    export PATH PYTHONPATH=$ours
}

# use_venv ACTIVE MISSING: set $python to .venv's, with all requested modules. If the active Python has MindSpore, .venv
# uses its packages.
use_venv() {
    local active=$1
    python=$venv/bin/python
    if [[ " $2 " == *" mindspore "* ]] || [ "$(dirname "$active")" -ef "$venv/bin" ]; then
        active=
    else
        echo "$active lacks ${2// /, } and is left as it is: $venv gets what is missing"
    fi
    if ! filled; then
        (
            flock --nonblock 9 || { echo "waiting for another run.sh, which fills .venv" && flock 9; }
            filled || fill "$active"
        ) 9>>"$venv.lock"
    fi
}

# filled: succeed if .venv has all requested modules, installed by the present setup.py.
filled() {
    has "$python" pip mindspore psutil tqdm "${used[@]:1}" &&
        { [ -e "$venv/on-top" ] || [ "$(cat "$(stamp)" 2>/dev/null)" = "$(cksum "$here/setup.py")" ]; }
}

stamp() {
    echo "$venv/.installed-${used[0]:-nothing-more}"
}

# fill ACTIVE: make .venv, based on the packages of this Python if given, and install what is missing. A .venv whose
# Python runs may be the user's own, so it is kept; without pip, as `uv venv` makes it, it gets pip.
fill() {
    local base
    if ! "$python" -c '' 2>/dev/null; then
        base=${1:-$(find_python)}
        [ -n "$base" ] || no_python
        rm -rf "$venv"
        if [ -n "$1" ]; then # before the rest, so that a run which is interrupted here is taken up as it began
            mkdir "$venv"
            "$1" -c 'import site
for folder in site.getsitepackages() + site.ENABLE_USER_SITE * [site.getusersitepackages()]:
    print(f"import site; site.addsitedir({folder!r})")' >"$venv/on-top"
        fi
        "$base" -m venv "$venv"
    elif ! has "$python" pip && ! "$python" -m ensurepip >/dev/null; then
        echo "error: $venv has no pip. Install pip there, or remove that folder: run.sh then makes it anew." >&2
        exit 2
    fi
    if [ -e "$venv/on-top" ]; then
        "$python" -c 'import site, sys
open(site.getsitepackages()[0] + "/on-top.pth", "w").write(sys.stdin.read())' <"$venv/on-top"
    fi
    if ! filled; then
        echo "installing gaccum_ms${used[0]:+[${used[0]}]} into $venv"
        "$python" -m pip install --quiet --disable-pip-version-check --editable "$here${used[0]:+[${used[0]}]}" \
            ${mindspore:+"mindspore==$mindspore"}
        cksum "$here/setup.py" >"$(stamp)"
    fi
}

use_gallery() { # the requirements of all programs in sample_code/
    use gallery sklearn matplotlib mindcv
}

# use_gpu: add the libraries of the extra gpu, which some tests need, even without a GPU. If the libraries cannot be
# installed, these tests are skipped with a reason.
use_gpu() {
    local said
    if ! "$python" -c 'import sys; from gaccum_ms.launch import cuda; sys.exit(bool(cuda.missing_packages()))'; then
        [ "$python" = "$venv/bin/python" ] || use_venv "$python" 'gaccum_ms[gpu]'
        echo "installing gaccum_ms[gpu] into $venv"
        said=$({ flock 9 && "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 30 \
            --editable "$here[gpu]"; } 2>&1 9>>"$venv.lock") ||
            echo "the extra 'gpu' was not installed: $(grep -m 1 -o 'ERROR.*' <<<"$said")"
    fi
}

# become MODULE [WORDS...]: continue as this module of the launcher, which needs no MindSpore. Python would search for
# modules in the working folder first, where a user's files may have any names; -P prevents it (not in Python 3.10).
become() {
    local safe
    safe=$("$python" -c 'import sys; print("-P" if hasattr(sys.flags, "safe_path") else "")')
    export PYTHONPATH=$ours
    exec "$python" ${safe:+"$safe"} -m "$@"
}

# processes: print the number of test processes: two more than the cores, because the launcher's tests mostly wait, but
# at most one for each 3 GB of free memory.
processes() {
    local cores memory
    cores=$(($(nproc) + 2))
    memory=$(awk '/MemAvailable/ {print int($2 / 3000000)}' /proc/meminfo)
    echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}

case ${1-} in
-h | --help)
    usage
    some_python
    become gaccum_ms.launch --help
    ;;
check | report)
    some_python
    become gaccum_ms "$@"
    ;;
sample)
    program=$here/sample_code/${2-}/train.py
    if [ ! -f "$program" ]; then
        samples=("$here"/sample_code/*/)
        samples=("${samples[@]%/}")
        echo "error: there is no sample '${2-}', but ${samples[*]##*/}" >&2
        exit 2
    fi
    use_gallery
    exec "$python" "$program" "${@:3}"
    ;;
test)
    if [ "${2-}" = --mindspore ]; then
        mindspore=${3:?"--mindspore needs a version, such as 2.8.0"}
        venv=$here/.venv-$mindspore
        set -- test "${@:4}"
    fi
    use test pytest xdist sklearn tensorboardX matplotlib mindcv sphinx myst_parser furo sphinx_copybutton
    cd "$here"
    case ${2-} in
    '') tier=(-m "not thorough") ;;
    all) tier=() ;;
    rest) tier=(-m thorough) ;;
    parallel)
        use_gpu
        exec "$python" -m pytest tests/semi_auto "${@:3}"
        ;;
    device)
        use_gpu
        exec "$python" tests/device/report.py "${@:3}"
        ;;
    *) exec "$python" -m pytest "${@:2}" ;;
    esac
    use_gpu
    exec "$python" -m pytest --numprocesses "$(processes)" --dist loadgroup --no-loadscope-reorder --durations 25 \
        ${tier[@]+"${tier[@]}"} "${@:3}"
    ;;
lint)
    use dev ruff mypy importlinter
    cd "$here"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
    if type -p zizmor >/dev/null; then
        zizmor --offline --quiet .github
    else
        echo "the workflows were not checked: zizmor is in the extra 'dev'"
    fi
    exec lint-imports
    ;;
docs)
    use docs sphinx myst_parser matplotlib furo sphinx_copybutton
    exec "$python" -m sphinx -W --keep-going -q -b html "$here/docs" "${2:-$here/build/site}"
    ;;
esac

# The launcher parses the words, so that run.sh and the launcher agree. MindSpore may not be installed yet.
words=(--default-script "$sample/train.py" ${SCRIPT:+--script "$SCRIPT"})
words+=(--processes "${PROCESSES:-8}" --launcher "${LAUNCHER:-msrun}")
words+=(--log-dir "${LOG_DIR:-log_output}" --timeout "${TIMEOUT:-0}" "$@")
some_python
script=$(become gaccum_ms.launch --print-script "${words[@]}")
if [ ! -f "$script" ]; then # the words were --help
    printf '%s\n' "$script"
    exit
fi
if [ "$script" -ef "$sample/train.py" ]; then
    use sample sklearn
    [ -n "${DATA_PATH-}" ] || "$python" "$sample/prepare_data.py"
elif [ "$(dirname "$script")/.." -ef "$here/sample_code" ]; then
    use_gallery
else
    use ''
fi >&2 # standard output is the launcher's alone: with --dry-run, a script
become gaccum_ms.launch "${words[@]}"
