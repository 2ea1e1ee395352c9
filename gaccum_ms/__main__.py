"""The command ``gaccum-ms`` , or ``python -m gaccum_ms`` : it starts ranks, checks the machine, and draws reports.

No part of it imports MindSpore, which may not be installed yet.
"""

from __future__ import annotations

import sys

from gaccum_ms import __version__
from gaccum_ms.launch import __main__ as launch
from gaccum_ms.launch import doctor
from gaccum_ms.launch.output import say, show
from gaccum_ms.report import command as report

PROG = "gaccum-ms"
COMMANDS = {"run": launch.main, "check": doctor.main, "report": report.main}
HELP = f"""\
usage: {PROG} run [options] script [its arguments]
       {PROG} check
       {PROG} report [options] record [record ...]

Gradient accumulation for MindSpore: the tools around a training.

commands:
  run         start a script on several processes, on one host or more
  check       say what this machine can train on, and if not, why
  report      draw a WindowMonitor's record as one HTML page

options:
  -h, --help  show this help; after a command, the command's
  --version   show the version
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command that the words name, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["-h"], ["--help"]):
        show(HELP)
        return 0
    if words[:1] == ["--version"]:
        show(f"{PROG} {__version__}\n")
        return 0
    if not words or words[0] not in COMMANDS:
        mistake = f"there is no command {words[0]}" if words else "the command is missing"
        say(f"error: {mistake}; the commands are {', '.join(COMMANDS)}; see --help\n")
        return 2
    return COMMANDS[words[0]](words[1:], f"{PROG} {words[0]}")


if __name__ == "__main__":
    sys.exit(main())
