"""The options of the launcher's command: their names, their values, and which go together."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from gaccum_ms.launch.cluster import MASTER_PORT
from gaccum_ms.launch.command_line import Parser, seconds
from gaccum_ms.launch.dry_run import FORMS, words_of

LOCAL = "127.0.0.1"


def parse(argv: list[str], prog: str = "python -m gaccum_ms.launch") -> argparse.Namespace:
    """Read a command line of `prog` . A mistake in it ends this program with one line of error."""
    parser = _parser(prog)
    options, rest = parser.split(argv)
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
    if not 0 <= options.master_port < 65536:
        parser.error(f"--master-port must be from 1 to 65535, but got {options.master_port}")
    if options.nodes > 1:
        if options.launcher == "mpirun":
            parser.error("--nodes needs --launcher msrun")
        if options.master_addr == LOCAL and options.dry_run != "slurm":
            parser.error("--nodes needs --master-addr, an address of host 0 that the other hosts can reach")
    if options.nodes > 1 or options.dry_run:
        options.master_port = options.master_port or MASTER_PORT
    _check_restarts(parser, options)
    options.restarts_here, options.attempt = options.attempt == 0, max(1, options.attempt)
    for name, value in (("--rank-table-file", options.rank_table_file), ("--bind-core", options.bind_core)):
        if value and options.launcher == "mpirun":
            parser.error(f"{name} needs --launcher msrun")
    if options.rank_table_file:
        if not Path(options.rank_table_file).is_file():
            parser.error(f"--rank-table-file: no such file: {options.rank_table_file}")
        options.rank_table_file = str(Path(options.rank_table_file).resolve())
    if options.bind_core and options.bind_core.lower() not in ("true", "false") and not _is_object(options.bind_core):
        parser.error(f"--bind-core must be True, False or a JSON object, but got {options.bind_core}")
    return options


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        usage="%(prog)s [options] script [its arguments]",
        description="Start a script on several processes, and end them together.",
    )
    ranks = parser.add_argument_group("the ranks")
    add = ranks.add_argument
    add("-n", "--processes", type=int, default=8, metavar="N", help="number of ranks on this host (default: 8)")
    add("--script", metavar="FILE", help="the program that each rank runs, if it does not come after the options")
    add("--launcher", choices=("msrun", "mpirun"), default="msrun", help="what starts the ranks (default: msrun)")
    add("--log-dir", type=Path, default=Path("log_output"), metavar="FOLDER", help="default: log_output")
    names = ("--bind-core", "--bind_core")
    add(*names, default="", metavar="CORES", help="msrun's option: True, or the cores of each rank as JSON")
    add("--rank-table-file", "--rank_table_file", default="", metavar="FILE", help="msrun's option, for Ascend")

    limits = parser.add_argument_group("time limits, in seconds")
    add = functools.partial(limits.add_argument, type=seconds, metavar="S")
    add("--timeout", default=0, help="end all ranks after this time (default: never)")
    add("--start-timeout", default=600, help="end all ranks if one has not come by then (default: 600)")
    add(
        "--end-timeout",
        default=15,
        help="once a rank has ended, end the others if they stand still for so long (default: 15; 0: never)",
    )

    restarts = parser.add_argument_group("restarts after a rank has failed, on one host")
    add = functools.partial(restarts.add_argument, type=int, default=0)
    add("--max-restarts", metavar="N", help="start all ranks again, at most N times (default: 0)")
    add("--min-processes", metavar="N", help="then go on with N ranks or more (default: all)")

    hosts = parser.add_argument_group("several hosts: start the same command on each")
    add = hosts.add_argument
    add("--nodes", type=int, default=1, metavar="N", help="number of hosts (default: 1)")
    add("--node-rank", type=int, default=0, metavar="R", help="number of this host, from 0")
    add("--master-addr", default=LOCAL, metavar="ADDRESS", help="an address of host 0; needed with several hosts")
    port = f"port of MindSpore's scheduler on host 0 (default: {MASTER_PORT}; on one host: any free port)"
    add("--master-port", type=int, default=0, metavar="PORT", help=port)

    print_only = parser.add_argument_group("print a script instead of starting anything")
    add = print_only.add_argument
    add("--dry-run", choices=FORMS, help="print a script of bash that starts all ranks by these means")
    add("--hosts", type=_names, default=[], metavar="HOST,HOST", help="with --dry-run: the names of the hosts")

    # For run.sh: the script if none is given, and printing the chosen script. For Slurm, which restarts the launcher:
    # the number of this attempt.
    parser.add_argument("--attempt", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--default-script", help=argparse.SUPPRESS)
    parser.add_argument("--print-script", action="store_true", help=argparse.SUPPRESS)
    return parser


def _check_restarts(parser: Parser, options: argparse.Namespace) -> None:
    """Check the options for restarts."""
    if options.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, but got {options.max_restarts}")
    by_engine = options.attempt or options.dry_run == "slurm"
    if options.nodes > 1 and (options.min_processes or (options.max_restarts and not by_engine)):
        parser.error("--max-restarts and --min-processes need one host, or an engine: --dry-run slurm")
    if not options.min_processes:
        return
    size = options.processes
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
