"""The options of the launcher's command: their names, their values, and which go together."""

from __future__ import annotations

import argparse
import functools
import math
import os
from pathlib import Path

from gaccum_ms.launch.cluster import MASTER_PORT, Cluster
from gaccum_ms.launch.command_line import Parser
from gaccum_ms.launch.dry_run import FORMS

LOCAL = Cluster.master_addr
OF_MSRUN = ("rank_table_file", "bind_core")
OF_ALL_HOSTS = ("launcher", "timeout", "start_timeout", "end_timeout", "max_restarts", "min_processes", *OF_MSRUN)
FOR_RAY = ("ray_address", "ray_resources", "ray_working_dir", "checkpoints")
BY_HAND = ("node_rank", "master_addr", "master_port")


def parse(argv: list[str], prog: str = "python -m gaccum_ms.launch") -> argparse.Namespace:
    """Read a command line of `prog` . A mistake in it ends this program with one line of error."""
    parser = _parser(prog)
    options, rest = parser.split(argv)
    if options.script is None:
        options.script = rest.pop(0) if rest and not rest[0].startswith("-") else options.default_script
    parser.refuse(options.script is None, f"there is no option {rest[0]}" if rest else "the script is missing")
    options.args = rest
    values = {name: getattr(options, name) for name in OF_ALL_HOSTS}
    options.words = [f"{_option(name)}={values[name]}" for name in values if values[name] != parser.get_default(name)]
    if options.hosts:
        parser.refuse(not options.dry_run, "--hosts needs --dry-run; by hand, each host gets --nodes and --node-rank")
        wrong = f"--hosts must be --nodes = {options.nodes} names, but got {len(options.hosts)}"
        parser.refuse(options.nodes not in (1, len(options.hosts)), wrong)
        options.nodes = len(options.hosts)
        options.master_addr = options.hosts[0] if options.master_addr == LOCAL else options.master_addr
    lacks_hosts = options.dry_run == "openmpi" and not options.hosts
    parser.refuse(lacks_hosts, "--dry-run openmpi needs --hosts, the names of the hosts, from host 0 on")
    _check(parser, options)
    _check_restarts(parser, options)
    if options.dry_run or (options.nodes > 1 and not options.on):
        options.master_port = options.master_port or MASTER_PORT
    if options.ray_working_dir:
        options.script = os.path.relpath(options.script, options.ray_working_dir)
    if options.rank_table_file:
        options.rank_table_file = str(Path(options.rank_table_file).resolve())
    options.restarts_here, options.attempt = options.attempt == 0, max(1, options.attempt)
    return options


def _check(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse values that are wrong, or do not go together."""
    refuse, nodes, table = parser.refuse, options.nodes, options.rank_table_file
    refuse(options.processes < 1, f"--processes must be at least 1, but got {options.processes}")
    refuse(not Path(options.script).is_file(), f"no such script: {options.script}")
    for name in ("timeout", "start_timeout", "end_timeout"):
        value = getattr(options, name)
        wrong = f"{_option(name)} must be a finite number of seconds, at least 0, but got {value:g}"
        refuse(not 0 <= value < math.inf, wrong)
    refuse(options.start_timeout == 0, "--start-timeout must be greater than 0, but got 0")
    wrong = f"--node-rank must be from 0 to --nodes - 1 = {nodes - 1}, but got {options.node_rank}"
    refuse(not 0 <= options.node_rank < nodes, wrong)
    wrong = f"--master-port must be from 1 to 65535, but got {options.master_port}"
    refuse(not 0 <= options.master_port < 65536, wrong)
    refuse(nodes > 1 and options.launcher == "mpirun", "--nodes needs --launcher msrun")
    refuse(options.on and options.dry_run, "--on ray does not go with --dry-run")
    for name in BY_HAND if options.on else FOR_RAY:
        why = "is for hosts started by hand" if options.on else "needs --on ray"
        refuse(getattr(options, name) != parser.get_default(name), f"{_option(name)} {why}")
    no_address = nodes > 1 and options.master_addr == LOCAL and options.dry_run != "slurm" and not options.on
    refuse(no_address, "--nodes needs --master-addr, an address of host 0 that the other hosts can reach")
    for name in OF_MSRUN:
        refuse(getattr(options, name) and options.launcher == "mpirun", f"{_option(name)} needs --launcher msrun")
    refuse(table and not Path(table).is_file(), f"--rank-table-file: no such file: {table}")


def _check_restarts(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse restarts that nothing can make."""
    least, most, size = options.min_processes, options.max_restarts, options.nodes * options.processes
    parser.refuse(most < 0, f"--max-restarts must be at least 0, but got {most}")
    requeued = not least and (options.attempt or options.dry_run == "slurm")
    engines = "an engine: --on ray, or for --max-restarts --dry-run slurm"
    why = f"--max-restarts and --min-processes need one host, or {engines}"
    parser.refuse(options.nodes > 1 and (most or least) and not options.on and not requeued, why)
    wrong = f"--min-processes must be from 1 to all {size} ranks, but got {least}"
    parser.refuse(least and not 1 <= least <= size, wrong)
    parser.refuse(least and not most, "--min-processes needs --max-restarts")
    for name in OF_MSRUN:
        why = f"{_option(name)} is for all {size} ranks, so it does not go with --min-processes"
        parser.refuse(getattr(options, name) and 0 < least < size, why)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        usage="%(prog)s [options] script [its arguments]",
        description="Start a script on several processes, and end them together.",
    )
    add = parser.add_argument_group("the ranks").add_argument
    add("-n", "--processes", type=int, default=8, metavar="N", help="number of ranks on this host (default: 8)")
    add("--script", metavar="FILE", help="the program that each rank runs, if it does not come after the options")
    add("--launcher", choices=("msrun", "mpirun"), default="msrun", help="what starts the ranks (default: msrun)")
    add("--log-dir", type=Path, default=Path("log_output"), metavar="FOLDER", help="default: log_output")
    names = ("--bind-core", "--bind_core")
    add(*names, default="", metavar="CORES", help="msrun's option: True, or the cores of each rank as JSON")
    add("--rank-table-file", "--rank_table_file", default="", metavar="FILE", help="msrun's option, for Ascend")

    add = parser.add_argument_group("time limits, in seconds").add_argument
    add = functools.partial(add, type=float, metavar="S")
    add("--timeout", default=0, help="end all ranks after this time (default: never)")
    add("--start-timeout", default=600, help="end all ranks if one has not come by then (default: 600)")
    others = "end the others so long after a rank has ended (default: never)"
    add("--end-timeout", default=0, help=others)

    add = parser.add_argument_group("restarts after a rank has failed").add_argument
    add = functools.partial(add, type=int, default=0)
    add("--max-restarts", metavar="N", help="start all ranks again, at most N times (default: 0)")
    add("--min-processes", metavar="N", help="then go on with N ranks or more (default: all)")

    add = parser.add_argument_group("several hosts, by Ray").add_argument
    add("--on", choices=("ray",), help="start --nodes times --processes ranks on hosts of Ray's cluster, from here")
    add("--ray-address", default="", metavar="ADDRESS", help="the cluster (default: RAY_ADDRESS, or this host's)")
    needs = "what each rank needs, by Ray's names, such as CPU=2,NPU=1 (default: CPU=1)"
    add("--ray-resources", type=resources, default={"CPU": 1.0}, metavar="NAME=N", help=needs)
    add("--ray-working-dir", default="", metavar="FOLDER", help="send this folder to all hosts, and run there")
    shared = "the folder that all hosts must see, for --max-restarts (default: the folder where ranks run)"
    add("--checkpoints", default=".", metavar="FOLDER", help=shared)

    add = parser.add_argument_group("several hosts, by hand: start the same command on each").add_argument
    add("--nodes", type=int, default=1, metavar="N", help="number of hosts (default: 1)")
    add("--node-rank", type=int, default=0, metavar="R", help="number of this host, from 0")
    add("--master-addr", default=LOCAL, metavar="ADDRESS", help="an address of host 0; needed with several hosts")
    port = f"port of MindSpore's scheduler on host 0 (default: {MASTER_PORT}; on one host: any free port)"
    add("--master-port", type=int, default=0, metavar="PORT", help=port)

    add = parser.add_argument_group("print a script instead of starting anything").add_argument
    add("--dry-run", choices=FORMS, help="print a script of bash that starts the launcher on each host by these means")
    hosts = "with --dry-run: the names of the hosts"
    add("--hosts", type=lambda text: [*filter(None, text.split(","))], default=[], metavar="HOST,HOST", help=hosts)

    # For Slurm, which restarts the launcher: the number of this attempt. For run.sh: the script if none is given, and
    # printing the chosen script.
    parser.add_argument("--attempt", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--default-script", help=argparse.SUPPRESS)
    parser.add_argument("--print-script", action="store_true", help=argparse.SUPPRESS)
    return parser


def resources(text: str) -> dict[str, float]:
    """Ray's resources, for argparse, whose error has this function's name."""
    return {name: float(amount) for name, amount in (word.split("=") for word in text.split(","))}
