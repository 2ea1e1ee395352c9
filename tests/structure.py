"""The imports of the package, as ``python tests/structure.py`` prints them; test_structure.py allows no circle.

The longest chain of imports says how many files a reader may have to open to understand one. Imports that are only for
type checkers count; those in a package's `__init__` do not.
"""

from __future__ import annotations

import functools
from pathlib import Path

import grimp

PACKAGE = Path(__file__).resolve().parents[1] / "gaccum_ms"
Imports = dict[str, set[str]]


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


if __name__ == "__main__":
    for kind, imported in (("modules", imports()), ("packages", of_packages(imports()))):
        chain, circles = longest_chain(imported)
        print(f"longest chain of {len(chain)} {kind}: {' -> '.join(chain)}; circles: {', '.join(circles) or 'none'}")
