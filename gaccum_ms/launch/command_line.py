"""Reads a command line by argparse: the launcher's options, the script, and the script's own arguments.

    [options] [--] SCRIPT [its arguments]        or        [options] --script SCRIPT [--] [its arguments]

The options end at the first word that is none of them. A word that resembles one is an error, because it is probably a
typing mistake. If a script's own option resembles one, put it after ``--`` or after the script.
"""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from gaccum_ms.launch.output import show

ALIKE = 0.8  # difflib's ratio from which two words resemble each other


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n".replace("\n", " ").rstrip() + "\n")

    def refuse(self, wrong: object, why: str) -> None:
        """End this program with an error, if something is wrong."""
        if wrong:
            self.error(why)

    def print_help(self, file: Any = None) -> None:
        show(self.format_help())

    def split(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the options, and return them and the other words; the parser must have no positional argument."""
        self.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        options, unknown = self.parse_known_args(words)
        if not unknown:
            return options, options.rest[1:] if options.rest[:1] == ["--"] else options.rest
        name = unknown[0].partition("=")[0]
        own = [option for each in self._actions if each.help != argparse.SUPPRESS for option in each.option_strings]
        near = [option for option in own if len(name) > len("--n") and option.startswith(name)]
        near += [option for option in own if option[:2] == "--" and name.endswith(option[1:])]  # --num-processes
        if near := near or difflib.get_close_matches(name, own, n=1, cutoff=ALIKE):
            self.error(f"there is no option {name}; is {near[0]} meant? A script's own options come after '--'")
        place = words.index(unknown[0])
        return self.parse_args(words[:place]), words[place:]
