"""Runs a graph from Python: the training step's graph, or a separate graph of a part of training."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend import cell_graph_executor, no_grad, pynative_executor
from gaccum_ms.backend.eager_means import mean_of_elements
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.storage import keep_in_place
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.checks.arguments import first_of

_BY_PYTHON = "called_by_python"  # an attribute of a Cell, for its `construct` : whether `run` calls it

# Of a Cell: the number of its graphs, and the addresses at which they read its Parameters.
_storage: weakref.WeakKeyDictionary[nn.Cell, tuple[int, list[tuple[ms.Parameter, int]]]] = weakref.WeakKeyDictionary()


_eager_runs: list[nn.Cell] = []  # those that Python has called, and that have not ended


class _GraphRun:
    """A run of a graph, which may compile it first."""


_graph_runs: list[_GraphRun] = []  # those that have not ended


def graph_run(otherwise: Any) -> Any:
    """An object that lives until the present run of a graph ends; `otherwise` , if another graph contains the Cell."""
    return _graph_runs[-1] if _graph_runs else otherwise


def runs_eagerly_now() -> bool:
    """Whether this is called by a Cell that `run` runs eagerly, and not while a graph is compiled."""
    return bool(_eager_runs)


def runs_eagerly(jit: bool) -> bool:
    """Whether `run` compiles nothing."""
    return os.getenv("MS_JIT") == "0" or (not jit and ms.get_context("mode") == ms.PYNATIVE_MODE)


@contextmanager
def eagerly() -> Iterator[None]:
    """Within it, Cells and functions with `mindspore.jit` run eagerly, in graph mode too; no context is switched."""
    before = os.environ.get("MS_JIT")
    os.environ["MS_JIT"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MS_JIT"]
        else:
            os.environ["MS_JIT"] = before


@contextmanager
def recorded_calls(cell: nn.Cell, jit: bool) -> Iterator[list[nn.Cell]]:
    """Within it, each call of the cell is noted before it begins. How far a compiled one came is not known, so the cell
    is then noted at once."""
    if not runs_eagerly(jit):
        yield [cell]
        return
    calls: list[nn.Cell] = []
    hook = cell.register_forward_pre_hook(lambda called, inputs: calls.append(called))
    try:
        yield calls
    finally:
        hook.remove()


def check_compilable(owner: str, jit: Any, name: str, functions: Iterable[Any]) -> None:
    """Refuse what a graph cannot contain: MindSpore parses the lines of source in which it stands."""
    problem = None if runs_eagerly(bool(jit)) else uncompilable(functions)
    if problem is not None:
        raise TypeError(
            f"For '{owner}', a function as '{name}' is compiled from its lines of source, in which a lambda must stand "
            f"alone, but got {problem}. Define the function by 'def', in a file."
        )


def uncompilable(functions: Iterable[Any]) -> str | None:
    """The first function or Cell that MindSpore cannot compile from its lines of source, in words."""
    for function in functions:
        if within := _lambda_within(function):
            return within
        try:
            for code in _codes_of(function):
                inspect.getsourcelines(code)
        except OSError:
            name = getattr(function, "__name__", type(function).__name__)
            return f"'{name}', whose source is in no file, as of what is typed at a prompt"
    return None


def _codes_of(function: Any) -> list[Any]:
    """The functions that a graph contains of this one: of a Cell, those that its class itself defines."""
    if not isinstance(function, nn.Cell):
        return [function] if inspect.isfunction(function) else []
    return [entry for entry in vars(type(function)).values() if inspect.isfunction(entry)]


def _lambda_within(function: Any) -> str:
    """A lambda that does not stand alone in its lines of source, in words; of any other function, nothing."""
    if getattr(function, "__name__", "") != "<lambda>":
        return ""
    with suppress(OSError, SyntaxError):
        statement = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        if isinstance(statement, (ast.Assign, ast.Expr)) and isinstance(statement.value, ast.Lambda):
            return ""
    code = function.__code__
    return f"a lambda within other code, in line {code.co_firstlineno} of {code.co_filename}"


def run(cell: nn.Cell, jit: bool, *inputs: Any) -> Any:
    """Call a Cell; with `jit` it is compiled in PyNative mode too, unless MindSpore's ``MS_JIT=0`` forbids it. The
    graph runs as in graph mode, not by `mindspore.jit` , which runs a graph without a loop in another thread while
    Python's thread spins. A graph sees every value that was written into its Parameters since its last run."""
    vars(cell)[_BY_PYTHON] = True
    try:
        return _run_eagerly(cell, *inputs) if runs_eagerly(jit) else _run_graph(cell, *inputs)
    finally:
        vars(cell)[_BY_PYTHON] = False


def _run_eagerly(cell: nn.Cell, *inputs: Any) -> Any:
    close_tape()  # a gradient that is not ours may have left it open
    _eager_runs.append(cell)
    try:
        with mean_of_elements():
            return nn.Cell.__call__(cell, *inputs)
    finally:
        _eager_runs.pop()


def _run_graph(cell: nn.Cell, *inputs: Any) -> Any:
    _let_go_of_moved(cell)
    inputs = tuple(_of_its_own(value) for value in inputs)
    _graph_runs.append(_GraphRun())
    try:
        if ms.get_context("mode") == ms.PYNATIVE_MODE:
            outputs = _run_graph_in_pynative_mode(cell, *inputs)
        else:
            outputs = nn.Cell.__call__(cell, *inputs)
    finally:
        _graph_runs.pop()
    _note_storage(cell)
    return outputs


def _of_its_own(value: Any) -> Any:
    """The Tensor with its own storage. A graph with a loop or a branch reads some views, such as ``x[:4]`` , from a
    wrong address, and silently computes wrong numbers."""
    if not isinstance(value, ms.Tensor) or (
        value.is_contiguous()
        and not value.storage_offset()
        and hasattr(value, "untyped_storage")
        and value.untyped_storage().nbytes() == value.nbytes
    ):
        return value
    with no_grad():
        return value.copy()


def _run_graph_in_pynative_mode(cell: nn.Cell, *inputs: Any) -> Any:
    if not cell.compile_cache:  # before its first compilation, graph mode does this too
        cell.check_names_and_refresh_name()
        cell.__compile_cell_hook__ = True
    close_tape()  # a gradient that is not ours may have left it open
    with no_grad(), compiling_alone():
        return cell.compile_and_run(*inputs)


@contextmanager
def gradients_allowed() -> Iterator[None]:
    """Within `no_grad` : `ops.value_and_grad` may be called, as while a graph is compiled in PyNative mode."""
    allowed = pynative_executor.enable_grad()
    pynative_executor.set_enable_grad(True)
    try:
        yield
    finally:
        pynative_executor.set_enable_grad(allowed)


def _note_storage(cell: nn.Cell) -> None:
    """Note the graph's Parameters and their addresses after a compilation."""
    graphs, _ = _storage.get(cell, (0, []))
    if graphs == len(cell.compile_cache):
        return
    executor = cell_graph_executor._graph_executor
    parameters = {
        id(parameter): parameter for phase in cell.compile_cache for parameter in executor.get_params(phase).values()
    }
    keep_in_place(cell, parameters.values())
    _storage[cell] = len(cell.compile_cache), [(parameter, parameter.data_ptr()) for parameter in parameters.values()]


def _let_go_of_moved(cell: nn.Cell) -> None:
    """Before a run: discard the graph if a Parameter's address has changed, so that it is compiled anew."""
    _, places = _storage.get(cell, (0, []))
    moved = [parameter.name for parameter, place in places if parameter.data_ptr() != place]
    if not moved:
        return
    warn_user(
        f"For '{type(cell).__name__}', Parameters must be written by 'set_data', 'load_param_into_net' or "
        f"'ops.assign', which leave their storage where the compiled graph reads it, but got other storage for "
        f"{first_of(moved, 5)}. The graph is compiled anew, to see the values."
    )
    cell.compile_cache.clear()
    del _storage[cell]


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Compile on this rank alone. With ``parameter_broadcast`` , MindSpore would broadcast the weights at each
    compilation, and wait for the other ranks."""
    asked_for = ms.get_auto_parallel_context("parameter_broadcast")
    if asked_for:
        ms.set_auto_parallel_context(parameter_broadcast=False)
    try:
        yield
    finally:
        if asked_for:
            ms.set_auto_parallel_context(parameter_broadcast=True)


# -- compiled ----------------------------------------------------------------------------------------------------------

_copy = ops.MultitypeFuncGraph("gaccum_ms_copy")


@_copy.register("Tensor")
def _copy_one(value):
    return value.copy()


def with_own_storage(inputs):
    """As `_of_its_own` , for the inputs of a Cell that is compiled into another graph."""
    return ops.HyperMap()(_copy, inputs)
