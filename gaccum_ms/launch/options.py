"""The options of the launcher's command: what each is called, what it may be, and which go together."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from gaccum_ms.launch.cluster import MASTER_PORT, SECRET
from gaccum_ms.launch.command_line import Parser, seconds
from gaccum_ms.launch.dry_run import FORMS, words_of

LOCAL = "127.0.0.1"
SECRET_BYTES = 16  # at least


def parse(argv: list[str]) -> argparse.Namespace:
    """Read a command line. A mistake in it ends this program, with one line that says which."""
    parser = Parser(
        prog="python -m gaccum_ms.launch",
        usage="%(prog)s [options] script [its arguments]",
        description="Start a script on several processes, of one host or of several, and end them together.",
    )
    parser.add_argument("-n", "--processes", type=int, default=8, help="number of ranks on this host (default: 8)")
    parser.add_argument("--script", help="the program that each rank runs, where it does not come after the options")
    parser.add_argument("--launcher", choices=("msrun", "mpirun"), default="msrun", help="default: msrun")
    parser.add_argument("--log-dir", type=Path, default=Path("log_output"), help="default: log_output")
    parser.add_argument("--timeout", type=seconds, default=0, help="seconds after which all is ended (default: never)")
    parser.add_argument(
        "--start-timeout", type=seconds, default=600, help="seconds in which ranks and hosts must come (default: 600)"
    )
    parser.add_argument(
        "--end-timeout",
        type=seconds,
        default=15,
        help="seconds for which ranks may stand still once another has ended (default: 15; 0: for ever)",
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of hosts (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this one is, from 0")
    parser.add_argument("--master-addr", default=LOCAL, help="an address of host 0; needed with several hosts")
    parser.add_argument(
        "--master-port", type=int, default=0, help=f"a port there, and the next (default: {MASTER_PORT}; one host: any)"
    )
    parser.add_argument(
        "--secret-file", type=Path, help=f"what hosts know each other by, in a file (default: the variable {SECRET})"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often all ranks may begin anew after one or a host has failed (default: 0)",
    )
    parser.add_argument(
        "--min-processes", type=int, default=0, help="least number of ranks, on all hosts, for that (default: all)"
    )
    names = ("--tune-cpu", "--tune-cpu-threads")  # the second is its name of before
    parser.add_argument(*names, dest="tune_cpu_threads", action="store_true", help="call gaccum_ms.tune_cpu() first")
    parser.add_argument("--rank-table-file", "--rank_table_file", default="", help="msrun's option")
    parser.add_argument("--bind-core", "--bind_core", default="", help="msrun's option: True, or cores as JSON")
    parser.add_argument(
        "--dry-run",
        choices=FORMS,
        help="start nothing: print a script that does, with every rank's variables, by these means",
    )
    parser.add_argument("--hosts", type=_names, default=[], help="with --dry-run: the hosts' names, as host0,host1")
    # What run.sh needs: the script where none is given, and which one it is.
    parser.add_argument("--default-script", help=argparse.SUPPRESS)
    parser.add_argument("--print-script", action="store_true", help=argparse.SUPPRESS)
    own, rest = parser.split(argv)
    options = parser.parse_args(own)
    if options.script is None:
        if rest and not rest[0].startswith("-"):
            options.script = rest.pop(0)
        elif options.default_script is not None:
            options.script = options.default_script
        else:
            parser.error(f"there is no option {rest[0]}" if rest else "the script is missing")
    options.args = rest
    options.words = words_of(options, parser.get_default)
    if options.hosts and not options.dry_run:
        parser.error("--hosts needs --dry-run; started by hand, each host gets --nodes and --node-rank")
    if options.hosts:
        if options.nodes not in (1, len(options.hosts)):
            parser.error(f"--hosts must be --nodes = {options.nodes} names, but got {len(options.hosts)}")
        options.nodes = len(options.hosts)
        options.master_addr = options.hosts[0] if options.master_addr == LOCAL else options.master_addr
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, but got {options.processes}")
    if not Path(options.script).is_file():
        parser.error(f"no such script: {options.script}")
    if options.start_timeout == 0:
        parser.error("--start-timeout must be greater than 0, but got 0")
    if not 0 <= options.node_rank < options.nodes:
        parser.error(f"--node-rank must be from 0 to --nodes - 1 = {options.nodes - 1}, but got {options.node_rank}")
    if not 0 <= options.master_port < 65535:
        parser.error(f"--master-port must be from 1 to 65534, but got {options.master_port}")
    if options.nodes > 1:
        if options.launcher == "mpirun":
            parser.error("--nodes needs --launcher msrun")
        if options.master_addr == LOCAL and options.dry_run != "slurm":
            parser.error("--nodes needs --master-addr, an address of host 0 that the other hosts can reach")
    if options.nodes > 1 or options.dry_run:
        options.master_port = options.master_port or MASTER_PORT
    _check_restarts(parser, options)
    for name, value in (("--rank-table-file", options.rank_table_file), ("--bind-core", options.bind_core)):
        if value and options.launcher == "mpirun":
            parser.error(f"{name} needs --launcher msrun")
    if options.rank_table_file:
        if not Path(options.rank_table_file).is_file():
            parser.error(f"--rank-table-file: no such file: {options.rank_table_file}")
        options.rank_table_file = str(Path(options.rank_table_file).resolve())
    if options.bind_core and options.bind_core.lower() not in ("true", "false") and not _is_object(options.bind_core):
        parser.error(f"--bind-core must be True, False or a JSON object, but got {options.bind_core}")
    try:
        options.secret = _secret(options.secret_file)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check_restarts(parser: Parser, options: argparse.Namespace) -> None:
    """Check the options that say how often all begin anew, and on how many ranks."""
    if options.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, but got {options.max_restarts}")
    if not options.min_processes:
        return
    size = options.nodes * options.processes
    if not 1 <= options.min_processes <= size:
        parser.error(f"--min-processes must be from 1 to all {size} ranks, but got {options.min_processes}")
    if not options.max_restarts:
        parser.error("--min-processes needs --max-restarts")
    for name, value in (("--rank-table-file", options.rank_table_file), ("--bind-core", options.bind_core)):
        if value and options.min_processes < size:
            parser.error(f"{name} is for all {size} ranks, so it does not go with --min-processes")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _secret(file: Path | None) -> bytes:
    """What the hosts know each other by; nothing where there is none."""
    if file is None:
        name, secret = SECRET, os.environ.get(SECRET, "").strip().encode()
        if not secret:
            return b""
    else:
        name = "--secret-file"
        try:
            secret = file.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"--secret-file: cannot read '{file}': {error.strerror}") from None
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"{name} must hold at least {SECRET_BYTES} characters, but got {len(secret)}")
    return secret
