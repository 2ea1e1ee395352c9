#!/usr/bin/env bash
# bash run.sh [options] [script] [its arguments]     train the sample, or run a script, on 8 processes
# bash run.sh sample NAME [its options]              train one of sample_code/ in this process
# bash run.sh check                                  say what this machine can train on
# bash run.sh test                                   all tests but the weekly ones, on all cores
# bash run.sh test parallel | device | mutations     graphs for 8 devices; tests on devices; faults they must find
# bash run.sh test matrix                            for each fault the tests that find it (hours; it can be stopped)
# bash run.sh test weekly                            the tests of tests/weekly.txt, which none of the above runs
# bash run.sh test [arguments of pytest]             some of all tests, in one process
# bash run.sh test --mindspore 2.8.0 [any of these]  with that MindSpore, in an environment of its own
# bash run.sh lint                                   ruff, mypy, import-linter, and zizmor for the workflows
# bash run.sh docs [folder]                          build the site, also in Chinese, by default in build/site
# What the active Python lacks goes into .venv, here, never there. The options of `gaccum-ms run` follow:
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sample=$here/sample_code/distributed_gradient_accumulation/train.py
venv=$here/.venv
version= EXTRAS=${EXTRAS-} # by --mindspore; more extras of setup.py, without which their tests are skipped
python=$(type -p python || type -p python3 || true)
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # this folder comes before installed packages

find_python() { # print one that can make .venv: each is run, because pyenv's may not run
    for candidate in python3.1{1,2,0} python{3,} "${PYENV_ROOT:-${HOME-}/.pyenv}"/versions/3.1[012].*/bin/python3; do
        "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo "$candidate" && return
    done
    echo "error: no Python 3.10, 3.11 or 3.12 with 'venv' was found (on Debian: python3-venv)." >&2
    return 2
}

lacks() { # lacks MODULE...: print those that $python does not have
    "$python" -c 'import sys, importlib.util as u
print(*(name for name in sys.argv[1:] if not u.find_spec(name)))' "$@" 2>/dev/null || echo "$*"
}

# use EXTRA MODULE...: let $python have MindSpore and these modules: the active one, or .venv's, on top of its packages.
use() {
    local base='' lacking modules=(mindspore psutil tqdm "${@:2}")
    lacking=$(lacks "${modules[@]}")
    [ -n "$lacking" ] || return 0
    [ -n "$(lacks mindspore)" ] || base=$python
    python=$venv/bin/python PATH=$venv/bin:$PATH
    {
        flock 9 # another run.sh may be making it
        if ! "$python" -c '' 2>/dev/null; then
            rm -rf "$venv"
            base=${base:-$(find_python)}
            "$base" -m venv "$venv"
            [[ " $lacking " == *" mindspore "* ]] || "$base" -c 'import sys
print(*(f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("-packages")), sep="\n")
' >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/on-top.pth"
        fi
        [ -n "$(lacks "${modules[@]}")" ] || return 0
        echo "installing gaccum_ms${1:+[$1]} into $venv, for want of ${lacking// /, }"
        [ -z "$(lacks pip)" ] || "$python" -m ensurepip >/dev/null # as `uv venv` makes it
        PYTHONPATH='' "$python" -m pip install --quiet --disable-pip-version-check --editable "$here${1:+[$1]}" \
            ${version:+"mindspore==$version"}
    } 9>>"$venv.lock"
}

become() { # become MODULE [WORDS...]: it needs no MindSpore, and imports nothing of the working folder (-P, from 3.11)
    [ -z "$(lacks mindspore)" ] || python=$venv/bin/python
    [ -x "$python" ] || python=$(find_python) || exit
    exec "$python" $("$python" -c 'import sys; print("-P" * hasattr(sys.flags, "safe_path"))') -m "$@"
}

case ${1-} in
-h | --help) sed -n '2,/^set/s/^# //p' "${BASH_SOURCE[0]}" ;;
check) become gaccum_ms check ;;
sample)
    use gallery sklearn matplotlib mindcv
    exec "$python" "$here/sample_code/${2-}/train.py" "${@:3}"
    ;;
test)
    if [ "${2-}" = --mindspore ]; then
        version=${3:?"--mindspore needs a version, such as 2.8.0"}
        venv=$here/.venv-$version python=''
        set -- test "${@:4}"
    fi
    use "test${EXTRAS:+,$EXTRAS}" pytest coverage grimp pytest_rerunfailures xdist sklearn tensorboardX matplotlib mindcv \
        myst_parser selenium sphinx_copybutton sphinx_reredirects ${EXTRAS//,/ }
    cd "$here"
    case ${2-} in
    '') tests=(-m pytest --numprocesses auto --dist loadgroup --no-loadscope-reorder --durations 25 -m "not weekly") ;;
    weekly) tests=(-m pytest -m weekly) ;; # in one process: some measure memory
    parallel) tests=(-m pytest tests/semi_auto) ;;
    device) tests=(tests/device/report.py) ;;
    mutations | matrix) tests=(tests/$2.py) ;;
    *) exec "$python" -m pytest "${@:2}" ;;
    esac
    PIP_RETRIES=1 use gpu nvidia.cudnn || echo "the tests that need NVIDIA's libraries are skipped"
    exec "$python" "${tests[@]}" "${@:3}"
    ;;
lint)
    use dev ruff mypy importlinter
    cd "$here"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
    ! type -p zizmor >/dev/null || zizmor --offline --quiet .github # the active Python may have none
    exec lint-imports
    ;;
docs)
    use docs sphinx myst_parser matplotlib furo sphinx_copybutton sphinx_reredirects
    "$python" -m sphinx -W --keep-going -q "$here/docs" "${2:-$here/build/site}"
    exec "$python" -m sphinx -W --keep-going -q -D language=zh_CN "$here/docs" "${2:-$here/build/site}/zh_CN"
    ;;
esac

# The launcher reads the words before anything is installed, and prints the script that they name, or its help.
script=$(become gaccum_ms.launch --print-script --default-script "$sample" "$@") || exit
[ -f "$script" ] || { printf '%s\n' "$script" && exit; }
if [ "$script" -ef "$sample" ]; then
    use sample sklearn
elif [ "$(dirname "$script")/.." -ef "$here/sample_code" ]; then
    use gallery sklearn matplotlib mindcv
else
    use ''
fi >&2 # standard output is the launcher's alone: with --dry-run, a script
become gaccum_ms.launch --default-script "$sample" "$@"
