"""The structure of the package, as ``python tests/structure.py`` prints it; test_structure.py allows no circle.

* the longest chain of imports, in modules: how many files a reader may have to open to understand one;
* the largest fan-out: how many modules of the package one module imports;
* circles: modules that import themselves through others;
* files of more than 300 lines, and the total number of lines.

Imports that are only for type checkers count; those in a package's `__init__` do not.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import grimp

PACKAGE = Path(__file__).resolve().parents[1] / "gaccum_ms"
LINES = 300
LONG_BY_ITS_DOCSTRING = {"cell.py"}
Imports = dict[str, set[str]]


class Structure(NamedTuple):
    """The numbers."""

    chain: list[str]
    packages: list[str]  # the longest chain of packages
    fan_out: tuple[int, str]
    circles: list[str]
    long_files: dict[str, int]
    lines: int


def imports() -> Imports:
    """The modules of the package that each module imports."""
    graph = grimp.build_graph("gaccum_ms")
    modules = {name for name in graph.modules if not graph.find_children(name)}
    return {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}


def of_packages(imported: Imports) -> Imports:
    """The packages of gaccum_ms, or modules beside them, that each imports."""
    packages: Imports = {}
    for name, others in imported.items():
        package = packages.setdefault(name.split(".")[1], set())
        package |= {other.split(".")[1] for other in others} - {name.split(".")[1]}
    return packages


def longest_chain(imported: Imports) -> tuple[list[str], list[str]]:
    """The longest chain of imports, and for each circle the module where it closes."""
    circles: list[str] = []

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        above.append(name)
        chains: list[tuple[str, ...]] = [()]
        for other in sorted(imported[name]):
            if other in above:
                circles.append(f"{name} -> {other}")
            else:
                chains.append(chain(other))
        above.pop()
        return (name, *max(chains, key=len))

    above: list[str] = []
    return list(max((chain(name) for name in sorted(imported)), key=len)), circles


def structure() -> Structure:
    imported = imports()
    chain, circles = longest_chain(imported)
    packages, circles_of_packages = longest_chain(of_packages(imported))
    lines = {str(file.relative_to(PACKAGE)): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    return Structure(
        chain=chain,
        packages=packages,
        fan_out=max((len(others), name) for name, others in imported.items()),
        circles=circles + circles_of_packages,
        long_files={name: n for name, n in lines.items() if n > LINES and name not in LONG_BY_ITS_DOCSTRING},
        lines=sum(lines.values()),
    )


if __name__ == "__main__":
    found = structure()
    print(f"longest chain of imports: {len(found.chain)} modules: {' -> '.join(found.chain)}")
    print(f"of packages: {' -> '.join(found.packages)}")
    print(f"largest fan-out: {found.fan_out[0]} ({found.fan_out[1]})")
    print(f"circles: {', '.join(found.circles) or 'none'}")
    print(f"files of more than {LINES} lines: {found.long_files or 'none'}; lines in all: {found.lines}")
