"""Random histories: random options, batches, errors, writes and resumes, each call compared with an oracle in NumPy.

    python tests/histories.py --minutes 30              histories of all kinds, one after another
    python tests/histories.py --seed 17 --ranks 2       one history, as a difference prints it

A history is made from its seed alone, and each of its calls from the seed and its number. After each call everything
that the step shows (outputs, weights, the optimizer's state, records) is compared with what support/history_oracle.py
expects from the state before the call. So each comparison is of one step, and rounding errors do not add up. A history
that is played by itself and differs is shrunk: options and calls without which it still differs are left out. Histories
run in processes of their own (support/ranks.py), because a fault of MindSpore may end a process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import pickle
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import get_rank

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gaccum_ms import resume
from gaccum_ms.backend.parameters import overwrite
from tests.support import environment
from tests.support.history_oracle import (
    DISPENSABLE,
    OWN,
    Expected,
    Inputs,
    Oracle,
    Part,
    Setup,
    State,
    begun_average,
    cut,
    part_of,
    shapes_of,
)
from tests.support.history_setups import Bomb, make_trainer, random_batch, random_setup
from tests.support.modes import MODES
from tests.support.ranks import Ranks
from tests.support.reference import as_numpy

# Of the step's Parameters, those that hold the open window in the code's own units, or say where it comes from.
_IN_UNITS = ("window_unit", "window_sums", "window_squares", "batch_items", "noise_sums", "random_state", "window_rule")
# `batch_samples` is noted when a checkpoint is saved.
NOT_COMPARED = ("accu_grads", "accu_compensation", OWN + "batch_samples", *(OWN + name for name in _IN_UNITS))
# The records of the last window, of which nothing is known after an error.
_OF_WINDOWS = ("window_count", "dropped_micro_batches", "window_loss", "window_batches", "window_steps", "loss_terms")
_OF_GRADIENTS = ("grad_norm", "judged_norms", "judged_updates", "judged_norm", "skipped_updates")
RECORDS = {OWN + name for name in (*_OF_WINDOWS, *_OF_GRADIENTS)}
SCALE = {OWN + "scale_sense", "current_iterator_step", "last_overflow_iterator_step"}  # adjusted after an update
ERRORS = (ValueError, RuntimeError, KeyboardInterrupt, ArithmeticError)


class Difference(AssertionError):
    """What a call did is not what it must do."""


_compiled: dict[Any, tuple[Any, Any, dict[str, Tensor]]] = {}


def trainer_for(setup: Setup, seed: int, number: int) -> tuple[Any, Any]:
    """The step or accumulator, and its network. What is compiled may have run before."""
    if setup.mode == "pynative":
        return make_trainer(setup, seed)
    key = (setup, number, ms.get_auto_parallel_context("gradients_mean"))
    trainer, network, values = _compiled.get(key, (None, None, {}))
    if trainer is None or [one.name for one in trainer.get_parameters()] != list(values):  # other windows since then
        trainer, network = make_trainer(setup, seed)
        values = {one.name: Tensor(as_numpy(one), ms.float32).astype(one.dtype) for one in trainer.get_parameters()}
        _compiled[key] = trainer, network, values
    for parameter in trainer.get_parameters():
        overwrite(parameter, values[parameter.name])
    return trainer, network


class History:
    """One segment of a history, on one number of ranks."""

    def __init__(
        self,
        seed: int,
        mode: str,
        ranks: int = 1,
        rank: int = 0,
        folder: Path | None = None,
        segment: int = 0,
        setup: Setup | None = None,
        without: Sequence[str] = (),
    ):
        self.seed, self.ranks, self.rank, self.folder, self.segment = seed, ranks, rank, folder, segment
        self.random = np.random.default_rng([seed, segment])
        self.without, self.call_name = without, ""
        self.log: list[str] = []
        self.made = 0
        # In graph mode, what is compiled serves four histories.
        of_setup = np.random.default_rng(seed if mode == "pynative" else [seed // 4, 1])
        ms.set_context(mode=MODES["graph" if mode == "graph" else "pynative"])
        self.setup = setup or random_setup(of_setup, mode, ranks).without(without)
        if ranks > 1:
            ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=self.setup.gradients_mean)
        self.lengths = [2, 5] if self.setup.mode != "pynative" else list(range(1, 9))
        self.begin(self.setup)
        self.oracle = Oracle(self.setup, list(shapes_of(self.setup.body)), ranks, self.spans)

    @property
    def eager(self) -> bool:
        return self.setup.mode == "pynative"

    def begin(self, setup: Setup) -> None:
        self.setup = setup
        self.trainer, self.network = trainer_for(setup, self.seed + 1000 * self.made, self.made)
        self.made += 1
        self.spans = setup.accumulator or self.trainer.spans_batches

    def note(self, text: str) -> None:
        self.log.append(f"{self.call_name} {text}")

    # -- comparing -----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        return {one.name: as_numpy(one).astype(np.float64) for one in self.trainer.get_parameters()}

    def check(self, before: State, expected: Expected, outputs: Mapping[str, Any]) -> None:
        """Compare the outputs and the state with what is expected."""
        if self.setup.noise and "noise" in expected.outputs:
            outputs = {**outputs, "noise": self.noise()}
            expected.tolerance["noise"] = 1e-3 * np.max(expected.outputs["noise"], initial=0)
        for name, value in outputs.items():
            if name in expected.outputs:
                self.compare(name, expected.outputs[name], value, expected.tolerance.get(name, 1e-4))
        state = self.state()
        for name, value in expected.state.items():
            if name.startswith(NOT_COMPARED) or name in expected.unknown:
                continue
            tolerance = None
            if value is not before.get(name):
                change = np.abs(np.asarray(value) - before[name].reshape(np.shape(value))) if name in before else 0.0
                tolerance = expected.tolerance.get(name, 0.0) + 1e-4 * np.max(change, initial=0, where=change < 1e9)
            self.compare(name, value, state[name], tolerance)

    def noise(self) -> np.ndarray:
        """What GradNoiseScale reads of the last window."""
        noise = self.trainer.window.ledger.noise.read(float(self.trainer.grad_norm.asnumpy()))
        known = [noise.squares, noise.micro_batches, noise.added_items, noise.items]
        return np.array(known) if noise.is_known else np.zeros(0)

    def compare(self, name: str, expected: Any, actual: Any, tolerance: float | None) -> None:
        """Without a tolerance the values must be the same bits."""
        expected, actual = np.asarray(expected, float), np.asarray(actual, float)
        expected = expected.reshape(actual.shape) if expected.size == actual.size else expected
        size = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        allowed = 0.0 if tolerance is None else 5e-7 * size + tolerance
        same = (
            expected.shape == actual.shape
            and (
                (np.abs(expected - actual) <= allowed)
                | (expected == actual)
                | (~np.isfinite(expected) & ~np.isfinite(actual))
            ).all()
        )
        if not same:
            raise Difference(f"{name}: expected {expected.tolist()}, got {actual.tolist()} (allowed {allowed:.1e})")

    # -- actions -------------------------------------------------------------------------------------------------------

    def batches(self) -> list[Inputs]:
        """A batch for each rank."""
        setup = self.setup
        first = not int(self.trainer.batch_count.asnumpy())  # later ones may be short
        least = setup.micro_size or 1 if first else 1
        lengths = [one for one in self.lengths if one >= least] or [max(self.lengths)]
        lengths = self.random.choice(lengths, self.ranks).tolist()
        return [random_batch(self.random, setup, one) for one in lengths]

    def poison(self, batches: Sequence[Inputs]) -> str:
        """Put a number that is not finite into a batch."""
        checked = self.setup.scale is not None or self.setup.drops
        value = self.random.choice([np.inf, np.nan]) if checked else np.nan
        rank = int(self.random.integers(self.ranks))
        x = batches[rank][0]
        place = tuple(int(self.random.integers(size)) for size in x.shape)
        if self.setup.body == "tokens":
            return ""
        x[place] = value
        return f", {value} in sample {place[0]} of rank {rank}"

    def parts(self, before: State, batches: Sequence[Inputs | None]) -> list[list[Part] | None]:
        """The micro-batches of each rank's batch."""
        weights = self.oracle.weights(before)
        parts = [batch and [part_of(self.setup, weights, one) for one in cut(self.setup, batch)] for batch in batches]
        if self.setup.accumulator:  # it is given no losses
            for part in itertools.chain.from_iterable(filter(None, parts)):
                part.values = np.zeros(1)
        return parts

    def call(self, before: State, batch: Inputs) -> dict[str, Any]:
        """Train this rank's batch; returns the outputs by name."""
        setup = self.setup
        if setup.accumulator:
            divided = len(batch[0]) if setup.reduction == "mean" else 1
            (gradient,) = part_of(Setup(setup.body, "sum"), self.oracle.weights(before), batch).gradients
            scale = float(self.trainer.scale(Tensor(1.0, ms.float32)).asnumpy())
            gradients = tuple(Tensor(one / divided * scale, ms.float32) for one in gradient)
            count = (float(batch[-1].sum()),) if any(setup.counts) else ()
            return {"updated": self.trainer(gradients, *count)}
        outputs = self.trainer(*map(Tensor, batch))
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        for output in outputs:
            if not isinstance(output, Tensor) or isinstance(output, ms.Parameter):
                raise Difference(f"an output is a {type(output).__name__}")
        names = ["loss", *(["overflow", "scale"] if setup.scale else []), *(["rows", "scalar"] if setup.aux else [])]
        return dict(zip(names, (one.asnumpy() for one in outputs), strict=True))

    def train(self, spoilt: bool = False) -> None:
        """Train on a batch."""
        batches = self.batches()
        lengths = [len(batch[0]) for batch in batches]
        self.note(f"train {lengths}" + (self.poison(batches) if spoilt else ""))
        self.train_on(batches)

    def train_on(self, batches: Sequence[Inputs | None]) -> None:
        """Train on these batches, one of each rank, and compare."""
        before = self.state()
        expected = self.oracle.train(before, self.parts(before, batches), self.rank)
        batch, raises, outputs = batches[self.rank], expected.outputs.get("raises", False), {}
        try:
            outputs = {} if batch is None else self.call(before, batch)
        except ValueError as error:
            self.refused(error, expected)
        else:
            if raises:
                raise Difference("a bad count raised nothing")
        self.check(before, expected, outputs)

    def refused(self, error: BaseException, expected: Expected) -> None:
        """Raise the error, unless it is the one that must be raised for a bad count: then no records are known."""
        if not expected.outputs.get("raises") or ("count" not in str(error) and "denominator" not in str(error)):
            raise error
        expected.unknown |= RECORDS | {OWN + "batch_count"} if not self.setup.accumulator else set()

    def poisoned(self) -> None:
        """Train on a batch with a number that is not finite."""
        self.train(spoilt=True)

    def bad_count(self) -> None:
        """Train on a batch whose mask is negative or not a number, on one rank or all."""
        if self.setup.body == "tokens" or ("mask" not in self.setup.counts and self.setup.reduction != "ratio"):
            return self.train()
        batches = self.batches()
        value = self.random.choice([-50.0, np.nan])
        ranks = range(self.ranks) if self.random.random() < 0.5 or self.setup.accumulator else [0]
        for rank in ranks:
            batches[rank][-1][int(self.random.integers(len(batches[rank][0])))] = value
        self.note(f"train {[len(batch[0]) for batch in batches]}, a count of {value} on ranks {list(ranks)}")
        return self.train_on(batches)

    def train_but_on_one_rank(self) -> None:
        batches = self.batches()
        absent = int(self.random.integers(self.ranks))
        self.note(f"train {[len(batch[0]) for batch in batches]}, but not on rank {absent}")
        self.train_on([None if rank == absent else batch for rank, batch in enumerate(batches)])

    def flush(self) -> None:
        """End the open window. Before it, some ranks may get a batch that the others do not."""
        begun = 0 < len(self.oracle.windows[0]) < self.oracle.steps - 1
        if self.ranks > 1 and self.random.random() < 0.5 and begun:
            self.train_but_on_one_rank()
        self.note("flush")
        before = self.state()
        expected = Expected(dict(before), outputs={"updated": False})
        if self.spans and self.oracle.position:
            self.oracle.finish(expected, self.rank)
        elif self.ranks > 1:  # all take part, and the records become those of no window
            expected.unknown |= RECORDS
        self.check(before, expected, {"updated": self.trainer.flush()})

    def set_steps(self) -> None:
        steps = int(self.random.integers(1, 4))
        if not self.spans and steps > 1 and (self.trainer.run_record.begun or len(self.setup.counts) > 1):
            return
        self.note(f"set_accumulation_steps({steps})")
        before = self.state()
        self.trainer.set_accumulation_steps(steps)
        unknown = set() if self.spans == (self.spans or steps > 1) else RECORDS  # they are new
        self.spans = self.oracle.spans = self.spans or steps > 1
        self.oracle.own_losses |= steps > 1 and self.setup.split is None
        new = {OWN + "accumulation_steps": np.array(steps)} if self.spans else {}
        expected = Expected(before | new, unknown=unknown)
        self.check(before, expected, {})

    def set_scale(self) -> None:
        if self.setup.scale is None or (self.oracle.position and self.setup.accumulator):
            return
        scale = float(2 ** self.random.integers(0, 6))
        self.note(f"set_sense_scale({scale})")
        before = self.state()
        self.trainer.set_sense_scale(Tensor(np.full(self.trainer.scale_sense.shape, scale), ms.float32))
        self.check(before, Expected(before | {OWN + "scale_sense": np.array(scale)}), {})

    def write(self) -> None:
        """Write weights from outside."""
        way = str(self.random.choice(["set_data", "load_param_into_net", "assign"]))
        self.note(f"write the weights by {way}")
        before, new = self.state(), {}
        for weight in self.network.trainable_params():
            new[weight.name] = (self.random.normal(size=weight.shape) * 0.5).astype(np.float32)
            if way == "set_data":
                weight.set_data(Tensor(new[weight.name]))
            elif way == "assign":
                ops.assign(weight, Tensor(new[weight.name]))
        if way == "load_param_into_net":
            ms.load_param_into_net(self.network, {name: ms.Parameter(Tensor(one)) for name, one in new.items()})
        self.check(before, Expected(before | new), {})

    def is_over(self) -> bool:
        """Whether weights, averages or the optimizer's state are no numbers to go on with; alike on all ranks."""
        state = self.state()
        begun = (OWN + "average.",) if state.get(OWN + "averaged_updates", 0) > 0 else ()
        trained = [name for name in state if not name.startswith((OWN, *NOT_COMPARED)) or name.startswith(begun)]
        return not all((np.abs(state[name]) < 1e3).all() for name in trained)

    def beside(self) -> None:
        """Evaluate, and train another step on one rank: nothing changes here."""
        if not self.eager:
            return
        self.note("evaluate, and train another step")
        before = self.state()
        if not self.setup.accumulator:
            self.network.set_train(False)
            self.network(*map(Tensor, random_batch(self.random, self.setup, 4)))
            self.network.set_train(bool(self.random.integers(2)))
        other, _ = make_trainer(Setup(micro_size=2), self.seed)
        if self.ranks == 1:
            other(*map(Tensor, random_batch(self.random, Setup(), 4)))
        self.check(before, Expected(before), {})

    def averages(self) -> None:
        """Put the averages in the place of the weights; write one before."""
        if self.setup.link("average") is None:
            return
        before = self.state()
        if self.random.random() < 0.4:
            self.note("write an average")
            name = str(self.random.choice(self.oracle.names))
            value = self.random.normal(size=before[name].shape).astype(np.float32)
            averages = {one.name: one for one in self.trainer.get_parameters()}
            averages[OWN + "average." + name].set_data(Tensor(value))
            before[OWN + "average." + name] = value.astype(np.float64)
        self.note("averaged_weights()")
        with self.trainer.averaged_weights():
            self.check(before, Expected(before | {name: begun_average(before, name) for name in self.oracle.names}), {})
            try:
                self.trainer.flush()
            except RuntimeError:
                pass
            else:
                raise Difference("nothing refused to train within averaged_weights()")
        self.check(before, Expected(before), {})

    def clear(self) -> None:
        if not self.setup.accumulator:
            return
        self.note("clear")
        before = self.state()
        self.trainer.clear()
        self.oracle.clear()
        self.check(before, Expected(before | {OWN + "window_position": np.zeros(())}), {})

    def no_update(self) -> None:
        if not self.setup.accumulator:
            return
        self.note("no_update:")
        self.oracle.held = True
        with self.trainer.no_update():
            for _ in range(int(self.random.integers(1, 4))):
                self.train()
        self.oracle.held = False
        self.note("end of no_update")

    def error(self) -> None:
        """An error in the middle of a batch or a flush; then training goes on."""
        if not self.eager:
            return
        setup = self.setup
        places = [] if setup.accumulator else ["forward"] + ["token"] * (setup.body == "tokens")
        places += ["count"] * ("mask" in setup.counts and not setup.accumulator)
        places += ["split"] * (setup.split == "uneven") + ["transform", "after_update"] * (
            ("last",) in setup.transforms
        )
        if not places:
            return
        place = str(self.random.choice(places))
        error = ERRORS[int(self.random.integers(len(ERRORS)))]("once")
        flushes = place in ("transform", "after_update") and self.spans and self.random.random() < 0.5
        batches = self.batches()
        for batch in batches:  # the first micro-batch counts something, and runs, on each rank
            batch[-1].flat[0] = 1
        self.note(f"{type(error).__name__} in {place} of " + ("a flush" if flushes else "a batch"))
        before = self.state()
        windows = [list(window) for window in self.oracle.windows]
        position, rounding = self.oracle.position, self.oracle.rounding
        expected = Expected(dict(before), outputs={"updated": False})
        if not flushes:
            expected = self.oracle.train(before, self.parts(before, batches), self.rank)
        elif position:
            self.oracle.finish(expected, self.rank)
        elif self.ranks > 1:
            expected.unknown |= RECORDS
        if place == "token":  # the operator itself raises
            batches[self.rank][0][0, 0] = 99
            error = RuntimeError()
        Bomb.arm(place, error)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                outputs = {"updated": self.trainer.flush()} if flushes else self.call(before, batches[self.rank])
        except (type(error), ValueError) as raised:
            if raised is not error and (place != "token" or isinstance(raised, ValueError)):
                self.refused(raised, expected)  # an earlier batch of the window had a bad count
                Bomb.place = None
                self.check(before, expected, {})
                return
        else:
            Bomb.place = None
            self.check(before, expected, outputs)
            return
        now = self.state()
        went_on = now[OWN + "update_count"] > before[OWN + "update_count"]
        if went_on and place != "after_update":
            raise Difference("update_count advanced, though there was an error before the update")
        if not went_on:
            expected = Expected(dict(before))
        left = int(now[OWN + "window_position"])
        full = position and now[OWN + "window_steps"] <= position
        if self.spans and left == position and not went_on and not (full and not flushes):
            self.oracle.windows, self.oracle.rounding = windows, rounding
        elif left:
            raise Difference(f"window_position is {left}, and was {position} before the error")
        else:
            self.oracle.clear()
            warned = any("half-way" in str(one.message) for one in caught)
            if position and not warned and not flushes and not went_on:
                raise Difference(f"{position} batches were dropped without a word")
        expected.unknown |= RECORDS | {OWN + "window_position", OWN + "batch_count"} | (SCALE if went_on else set())
        self.check(before, expected, {})

    # -- saving and resuming -------------------------------------------------------------------------------------------

    def file(self, rank: int) -> Path:
        return self.folder / f"history{self.seed}.{self.segment}.{self.made}.{rank}.ckpt"

    def save_and_resume(self) -> None:
        """Go on in a new step, perhaps under other options."""
        before, setup = self.state(), self.setup
        ms.save_checkpoint(self.trainer, str(self.file(self.rank)))
        if self.eager:
            setup = self.varied()
        self.note(f"save, and resume with {setup}")
        file, saved = self.file(self.rank), before
        self.go_on(setup, file, saved)

    def varied(self) -> Setup:
        """The set-up with other sizes of micro-batches, windows and accumulators."""
        changed, setup = {}, self.setup
        if setup.micro_size is not None:
            changed["micro_size"] = int(self.random.integers(1, 4))
        if setup.steps > 1 and self.random.random() < 0.5:
            changed["steps"] = int(self.random.integers(2, 5))
        if self.random.random() < 0.3:
            changed["compensated"] = not setup.compensated
        return Setup(**vars(setup) | changed)

    def go_on(self, setup: Setup, files: Any, saved: State) -> None:
        spans, steps = self.spans, saved.get(OWN + "accumulation_steps")
        self.begin(setup)
        if spans and not self.spans and self.trainer.run_record.begun:  # an earlier history has run it
            _compiled.clear()
            self.begin(setup)
        if spans and not self.spans:  # windows became longer after the cell was made
            self.trainer.set_accumulation_steps(2)
            self.spans = True
        self.oracle.setup = setup
        resume(self.trainer, files)
        state = self.state()
        new = {name: value for name, value in saved.items() if name in state and name != OWN + "window_origin"}
        new[OWN + "configured_steps"] = np.array(setup.steps)
        if spans:
            same = int(saved[OWN + "configured_steps"]) == setup.steps
            new[OWN + "accumulation_steps"] = steps if same else np.array(setup.steps)
        self.check(saved, Expected({name: new[name] for name in state if name in new}), {})
        if self.setup.accumulator:
            return
        if self.spans and self.oracle.position:
            new_steps = int(state[OWN + "window_steps"])
            if new_steps != self.oracle.steps:
                raise Difference(f"the open window had {self.oracle.steps} batches, and now {new_steps}")

    def end(self) -> dict[str, Any]:
        """What the next segment, on another number of ranks, needs."""
        if self.oracle.position and self.setup.bare_sum:
            self.flush()
        ms.save_checkpoint(self.trainer, str(self.file(self.rank)))
        files = [str(self.file(rank)) for rank in range(self.ranks)]
        return {"setup": self.setup, "files": files, "oracle": self.oracle, "state": self.state(), "spans": self.spans}

    def continue_from(self, last: dict[str, Any]) -> None:
        ranks = last["oracle"].ranks
        self.oracle = last["oracle"]
        self.spans = last["spans"]
        saved = last["state"]
        seen = saved[OWN + "batch_count"] * ranks // self.ranks
        self.oracle.on(self.ranks)
        saved |= {OWN + "batch_count": seen, OWN + "window_position": np.array(self.oracle.position)}
        self.note(f"resume on {self.ranks} ranks, after {ranks}")
        self.go_on(last["setup"], last["files"], saved)

    # -- all of it -----------------------------------------------------------------------------------------------------

    ACTIONS: Mapping[str, float] = {
        "train": 10,
        "poisoned": 1.5,
        "bad_count": 1,
        "flush": 1.5,
        "set_steps": 1,
        "set_scale": 0.5,
        "write": 1,
        "beside": 0.5,
        "averages": 1,
        "clear": 0.7,
        "no_update": 0.7,
        "error": 2.5,
        "save_and_resume": 1,
    }

    def any_actions(self, calls: int) -> Iterator[str]:
        chances = np.array(list(self.ACTIONS.values()))
        for number in range(calls):  # each has random numbers of its own, so that one can be left out
            self.random = np.random.default_rng([self.seed, self.segment, number])
            self.call_name = f"{self.segment}.{number}"
            action = str(self.random.choice(list(self.ACTIONS), p=chances / chances.sum()))
            if self.call_name not in self.without:
                yield action
            if self.is_over():
                return

    def play(self, actions: Iterable[str]) -> None:
        for action in actions:
            try:
                getattr(self, action)()
            except Difference:
                self.agree(False)
                raise
            self.agree(True)

    def agree(self, is_well: bool) -> None:
        """On all ranks: stop if one of them found a difference, so that none waits for it."""
        if self.ranks > 1 and float(ops.AllReduce()(Tensor([float(is_well)])).asnumpy()[0]) < self.ranks and is_well:
            raise Difference("another rank found a difference")

    def report(self, error: BaseException) -> str:
        what = f"rank {self.rank}: {type(error).__name__}: {error}"
        return "\n".join([f"{self.setup}", *(f"    {line}" for line in self.log), what])


def play(
    seed: int,
    mode: str = "pynative",
    ranks: int = 1,
    rank: int = 0,
    folder: Path | None = None,
    segment: int = 0,
    calls: int = 14,
    without: Sequence[str] = (),
) -> str:
    """Play a segment of a history; returns "", or the difference that it found."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return play(seed, mode, ranks, rank, Path(name), segment, calls, without)
    Bomb.place = None
    kept = [folder / f"history{seed}.{number}" for number in range(3)]
    history = History(seed, mode, ranks, rank, folder, segment, without=without)
    try:
        with np.errstate(all="ignore"):
            if segment:
                last = pickle.loads(kept[0].read_bytes())
                if last["oracle"].ranks == ranks:
                    last = pickle.loads(kept[rank].read_bytes())
                history.continue_from(last)
            history.play(history.any_actions(calls))
            end = history.end()
        if ranks > 1:
            ops.AllReduce()(Tensor([1.0])).asnumpy()  # all ranks have saved, and read
        kept[rank].write_bytes(pickle.dumps(end))
    except BaseException as error:
        return history.report(error)
    return ""


class Cases(dict):
    """The cases of rank_that_stays.py: "SEED MODE RANKS SEGMENT WITHOUT..." plays a segment; the result is its
    report."""

    def __missing__(self, case: str) -> Callable[[Path], dict[str, np.ndarray]]:
        seed, mode, ranks, segment, *without = case.split()

        def function(folder: Path) -> dict[str, np.ndarray]:
            rank = get_rank() if int(ranks) > 1 else 0
            report = play(int(seed), mode, int(ranks), rank, folder, int(segment), without=without)
            return {"report": np.array(report)}

        return function


CASES = Cases()


def tell(seed: int, mode: str, most: int, pools: Mapping[int, Ranks], folder: Path, without: Sequence[str]) -> str:
    """Play a whole history without these options and calls; returns "", or the first difference."""
    before, further = [], np.random.default_rng([seed, 7]).integers(1, most + 1, 2).tolist()
    for segment, ranks in enumerate([most, *(further if most > 1 else [])]):
        try:
            case = " ".join([f"{seed} {mode} {ranks} {segment}", *without])
            results = pools[ranks].run("tests.histories", case, folder)
            reports = [str(one["report"]) for one in results]
        except AssertionError as error:  # a rank ended, or did not answer in time
            reports = [str(error)[-3000:]]
        if any(reports):
            if pools[ranks].launcher is not None and ranks > 1:  # they may wait for each other
                pools[ranks]._end()
            first, *others = filter(None, reports)
            said = "\n".join([first, *(other.rpartition("\n")[2] for other in others)])
            line = " ".join([f"python tests/histories.py --seed {seed} --mode {mode} --ranks {most}", *without])
            return "\n".join([f"DIFFERENCE, segment {segment} on {ranks} ranks; {line}", *before, said])
        before.append(f"(segment {segment} on {ranks} ranks: no difference)")
    return ""


def shrunk(report: str, without: Sequence[str], again: Callable[[Sequence[str]], str]) -> str:
    """The report of a shorter history that ends as this one does. `again` plays it without these options and calls."""

    def end(report: str) -> str:
        return "".join(re.findall(r"^rank \d: (\w+):", report, re.MULTILINE)[:1])

    options = [name for name in DISPENSABLE if f"{name}=" in report]
    links = re.findall(r"\('(\w+)'", report.partition("transforms=")[2])
    calls = re.findall(r"^    (\d+\.\d+) ", report, re.MULTILINE)
    for name in dict.fromkeys([*options, *links, *reversed(calls)]):
        shorter = again([*without, name])
        if end(shorter) == end(report) != "":
            without, report = [*without, name], shorter
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/histories.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to begin new histories")
    parser.add_argument("--first", type=int, default=None, help="the first seed; by default a random one")
    parser.add_argument("--seed", type=int, default=None, help="play this history alone, and shrink it if it differs")
    parser.add_argument("--mode", choices=list(MODES), default=None, help="by default every fifth history is of graphs")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 3), default=1, help="the largest number of ranks")
    parser.add_argument("without", nargs="*", help="options that are left out, and calls, such as noise 0.3")
    options = parser.parse_args()
    first = options.first if options.first is not None else int(time.time()) % 10**6
    seeds = itertools.count(first) if options.seed is None else [options.seed]
    end, played, different = time.monotonic() + 60 * options.minutes, 0, []
    with tempfile.TemporaryDirectory(prefix="histories") as name, contextlib.ExitStack() as stack:
        pools = {}
        for ranks in range(1, options.ranks + 1):
            folder = Path(name, f"ranks{ranks}")
            folder.mkdir()
            pools[ranks] = stack.enter_context(Ranks(folder, ranks, PYTHONWARNINGS="ignore"))
        for seed in seeds:
            if time.monotonic() > end:
                break
            mode = options.mode or ("graph" if seed // 4 % 5 == 4 else "pynative")
            again = functools.partial(tell, seed, mode, options.ranks, pools, Path(name))
            report = again(options.without)
            played += 1
            if report and options.seed is not None:
                report = shrunk(report, options.without, again)
            if report:
                different.append(seed)
                print(report + "\n", flush=True)
    print(f"{played} histories, seeds {first if options.seed is None else options.seed} and on: ", end="")
    print(f"differences in seeds {different}" if different else "no difference")
    return int(bool(different))


if __name__ == "__main__":
    environment.of_tests()
    sys.exit(main())
