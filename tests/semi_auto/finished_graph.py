"""Reads a finished graph, which MindSpore's compiler passes to the back end, from ``*_validate_*.ir`` .

A line ``%7(name) = Op(%3, I64(0)) ... primitive_attrs: {...}`` is a node. ``subgraph @name(...) {`` begins a graph that
others call. The last graph of the file, or the one named in ``# IR entry``, is the entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NODE = re.compile(r"^\s+(%\d+)\(.*?\) = (.+)$")
_GRAPH = re.compile(r"^subgraph @([^\s(]+)\((.*)\)\s*(\[.*\])? ?\{")
_ENTRY = re.compile(r"^# IR entry: @([^\s(]+)")
_PARAMETER = re.compile(r"^%para\d+_\S+")
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AlltoAll", "Send", "Receive")


class Node(NamedTuple):
    """One operation."""

    name: str  # "%7", unique in its graph
    op: str  # "MatMul"; "call" where another graph is called
    callee: str | None  # the called graph's name, or the node that holds the graph
    arguments: tuple[str, ...]
    attributes: str
    scope: str  # its place in the network

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of a collective of rank 0."""
        ranks = re.search(r"(?:group_rank_ids|rank_list): \(([\d, ]*)\)", self.attributes)
        assert ranks, f"no group in {self}"
        return tuple(int(rank) for rank in ranks.group(1).replace(" ", "").split(",") if rank)

    def attribute(self, name: str) -> int | None:
        """An integer attribute, such as the micro-batch's number, ``micro``."""
        found = re.search(rf"\b{name}: I64\((-?\d+)\)", self.attributes)
        return int(found.group(1)) if found else None


class Graph(NamedTuple):
    """Nodes, each after the nodes that it needs."""

    parameters: tuple[str, ...]
    nodes: tuple[Node, ...]
    result: str


class Program(NamedTuple):
    """All graphs of a file."""

    entry: Graph
    graphs: dict[str, Graph]
    shapes: dict[str, tuple[int, ...]]  # of the entry's parameters, on rank 0


def split_top(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts, depth, begin = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append(text[begin:position].strip())
            begin = position + 1
    return [*parts, text[begin:].strip()] if text.strip() else []


def _balanced(text: str) -> int:
    """The end of the parenthesis that opens `text`."""
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return position
    raise ValueError(f"no end in {text!r}")


def _node(name: str, body: str) -> Node:
    begin = body.index("](") + 1 if body.startswith("%") else body.index("(")
    op, callee, rest = body[:begin].removeprefix("PrimFunc_"), None, body[begin:]
    if op.startswith("call @"):
        op, callee = "call", op.removeprefix("call @")
    elif op.startswith("%"):
        op, callee = "call value", op.split("[")[0]
    end = _balanced(rest)
    return Node(name, op, callee, tuple(split_top(rest[1:end])), rest[end + 1 :], "")


def _joined(text: str) -> Iterator[str]:
    """The lines of a file; the lines of one constant's value are joined."""
    held = ""
    for line in text.splitlines():
        held = f"{held} {line.strip()}" if held else line
        if not (_NODE.match(held) and held.count("(") > held.count(")")):
            yield held
            held = ""


def read(path: Path) -> Program:
    """Read one file."""
    graphs: dict[str, Graph] = {}
    entry, name, parameters, nodes, shapes = "", "", (), [], {}
    for line in _joined(path.read_text()):
        if found := _ENTRY.match(line):
            entry = found.group(1)
        elif line.startswith("%para"):
            token = _PARAMETER.match(line).group().rstrip(":")
            shape = re.search(r"\], \(([\d, ]*)\)", line)
            shapes[token] = tuple(int(axis) for axis in shape.group(1).split(",") if axis.strip()) if shape else ()
        elif found := _GRAPH.match(line):
            name, nodes = found.group(1), []
            parameters = tuple(split_top(found.group(2)))
        elif found := _NODE.match(line):
            nodes.append(_node(*found.groups()))
        elif (found := re.match(r"^\s+# Fullname with scope: \((.*)\)", line)) and nodes:
            nodes[-1] = nodes[-1]._replace(scope=found.group(1))
        elif found := re.match(r"^\s+Return\((.*)\)", line):
            result = line.strip().removeprefix("Return")
            graphs[name] = Graph(parameters, tuple(nodes), split_top(result[1 : _balanced(result)])[0])
    return Program(graphs[entry], graphs, shapes)
