"""Splits a command line into the launcher's options, the script, and the script's own arguments.

    [options] [--] SCRIPT [its arguments]        or        [options] --script SCRIPT [--] [its arguments]

The launcher's options end at the first word that is none of them: all following words belong to the script. A word
that resembles an option of the launcher is an error, because it is probably a typing mistake. If a script's own option
resembles one, put it after ``--`` or after the script.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from gaccum_ms.launch.output import show

ABBREVIATION_LETTERS = 4
ALIKE = 0.8  # difflib's ratio from which two words resemble each other


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and which separates its options from the script's words."""

    def __init__(self, **options: Any) -> None:
        self._options: dict[str, argparse.Action] = {}
        super().__init__(allow_abbrev=False, **options)

    def add_argument(self, *names: Any, group: Any = None, **options: Any) -> argparse.Action:
        """Add an option, if `group` is given to this group of the help."""
        action = super().add_argument(*names, **options) if group is None else group.add_argument(*names, **options)
        self._options |= dict.fromkeys(action.option_strings, action)
        return action

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n".replace("\n", " ").rstrip() + "\n")

    def print_help(self, file: Any = None) -> None:
        show(self.format_help().encode())

    def split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Split words into the launcher's options, for `parse_args` , and the rest."""
        own: list[str] = []
        rest = list(words)
        while rest and rest[0].startswith("-") and rest[0] != "-":
            word = rest.pop(0)
            if word == "--":
                break
            name, equals, _ = word.partition("=")
            if name not in self._options and name[:2] in self._options:  # -n8
                name, equals = name[:2], "="
            if name not in self._options:
                if near := self._near(name):
                    self.error(f"there is no option {name}; is {near} meant? A script's own options come after '--'")
                return own, [word, *rest]
            if self._options[name].nargs != 0 and not equals:
                if not rest or rest[0].partition("=")[0] in self._options:
                    self.error(f"{name} needs a value")
                own += [word, rest.pop(0)] if not name.startswith("--") else [f"{word}={rest.pop(0)}"]
            else:
                own.append(word)
        return own, rest

    def _near(self, name: str) -> str | None:
        """The option that a word resembles; None if there is none."""
        if not name.startswith("--"):
            return None
        shown = [option for option, action in self._options.items() if action.help != argparse.SUPPRESS]
        plain = {_plain(option): option for option in shown if option.startswith("--")}
        if len(_plain(name)) >= ABBREVIATION_LETTERS:
            starts: Iterable[str] = (option for option in plain if option.startswith(_plain(name)))
        else:
            starts = ()
        ends = (option for option in plain if _plain(name).endswith(f"-{option}"))  # --num-processes
        found = [*starts, *ends, *difflib.get_close_matches(_plain(name), plain, n=1, cutoff=ALIKE)]
        return plain[found[0]] if found else None


def _plain(option: str) -> str:
    return option.lstrip("-").replace("_", "-").lower()


def seconds(text: str) -> float:
    """A number of seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of seconds, at least 0, but got {text}")
    return value
