"""The command ``gaccum-ms report`` ."""

from __future__ import annotations

import sys
from pathlib import Path

from gaccum_ms.launch.command_line import Parser
from gaccum_ms.launch.output import show
from gaccum_ms.report.records import RecordError, read

DOCTYPE = b"<!DOCTYPE html>"  # a file that begins so may be overwritten
DESCRIPTION = (
    "Draw the JSON lines that WindowMonitor('windows.jsonl') has written: loss, gradient norm, noise scale, window "
    "size, samples per second, learning rate and skipped updates. The page is one HTML file and needs no network. "
    "Several records are drawn beside each other."
)


def main(argv: list[str] | None = None, prog: str = "gaccum-ms report") -> int:
    """Read the records, write the page, and return the exit code."""
    parser = Parser(prog=prog, usage="%(prog)s [options] record [record ...]", description=DESCRIPTION)
    parser.add_argument("record", nargs="+", type=Path, help="a file of JSON lines, of rank 0")
    output = "the page to write, - for standard output (default: the first record's name, with .html)"
    parser.add_argument("-o", "--output", metavar="FILE", help=output)
    options = parser.parse_args(argv)
    try:
        records = [read(path) for path in options.record]
    except RecordError as error:
        parser.error(str(error))
    try:
        from gaccum_ms.report.page import page
    except ImportError as error:
        remedy = "pip install 'gaccum_ms[report]'"
        parser.error(f"matplotlib and Jinja2 must be installed, but {error} ({remedy})")
    text = page(records)
    for note in (note for record in records for note in record.notes):
        print(f"note: {note}", file=sys.stderr)
    if options.output == "-":
        return 0 if show(text) else 1
    output_path = Path(options.output) if options.output else options.record[0].with_suffix(".html")
    try:
        # Such as the first record, after a --output without its value.
        if output_path.is_file() and output_path.read_bytes()[: len(DOCTYPE)] not in (b"", DOCTYPE):
            parser.error(f"cannot write '{output_path}': it exists and is no HTML page")
        output_path.write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write '{output_path}': {error.strerror}")
    windows = sum(len(record.windows) for record in records)
    show(f"{windows:,} windows: {output_path}\n")
    return 0
