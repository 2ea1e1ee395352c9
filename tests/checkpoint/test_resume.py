"""A training that is killed and resumed has the same results as without interruption. Ranks: test_window_ranks.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, train
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import (
    Accumulators,
    CountMask,
    GradAccumulator,
    TrainOneStepWithGradAccumulationCell,
    resume,
)
from gaccum_ms.record.run_record import OF_DATA_SET
from tests.checkpoint import resume_worker
from tests.checkpoint.resume_worker import BATCHES, EPOCHS, KINDS, Seen, everything, make_data_set, make_model
from tests.support import paths
from tests.support.modes import eagerly
from tests.support.programs import Programs
from tests.support.reference import (
    OPTIMIZERS,
    Regression,
    as_numpy,
    batches,
    relative_error,
)
from tests.support.reference import make_step as step_of
from tests.support.state import assert_identical

LAST = EPOCHS * BATCHES
FORMATS = {"open": "ckpt", "flushed": "safetensors"}
OPEN_WINDOW = "ignore:For 'GradAccumulationCell', training ended in the middle of a window:UserWarning"
pytestmark = pytest.mark.filterwarnings(OPEN_WINDOW)


def edited(source: Path, target: Path, edit) -> Path:
    """A checkpoint with other contents: `edit` changes the dict of arrays."""
    values = {name: value.asnumpy() for name, value in ms.load_checkpoint(str(source)).items()}
    edit(values)
    ms.save_checkpoint([{"name": name, "data": Tensor(value)} for name, value in values.items()], str(target))
    return target


def losing(*prefixes: str):
    """An edit that removes entries with these prefixes."""

    def edit(values):
        for name in [name for name in values if name.startswith(prefixes)]:
            del values[name]

    return edit


# -- a whole training, by ms.Model -------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """A training without interruption, and its compiled model."""

    model: ms.Model
    folder: Path
    start: Path  # a checkpoint from before the first batch
    rows: list[list]
    inputs: list[bytes]
    end: dict[str, np.ndarray]

    def checkpoint(self, batch: int) -> Path:
        epoch, number = (batch - 1) // BATCHES + 1, (batch - 1) % BATCHES + 1
        return next(self.folder.glob(f"net-{epoch}_{number}.*"))


def go_on(model: ms.Model, kind: str, data_set=None, finished: int = 0, *callbacks: train.Callback) -> Seen:
    seen = Seen()
    callbacks = [*(make() for make in KINDS[kind]), seen, *callbacks]
    model.train(EPOCHS, data_set or make_data_set(), callbacks=callbacks, initial_epoch=finished)
    return seen


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Both kinds of trainings, by one compiled model."""
    made = {}
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.manual_seed(5)
    model, start = make_model(), tmp_path_factory.mktemp("start") / "start.ckpt"
    ms.save_checkpoint(model.train_network, str(start))

    def reference(kind: str) -> Reference:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            resume(model, start)
            config = train.CheckpointConfig(keep_checkpoint_max=100, format=FORMATS[kind])
            seen = go_on(model, kind, None, 0, train.ModelCheckpoint("net", str(folder), config))
            made[kind] = Reference(model, folder, start, seen.rows, seen.inputs, everything(model.train_network))
        return made[kind]

    return reference


def resumed(reference: Reference, kind: str, batch: int, fresh: bool) -> tuple[list[list], dict, list[bytes]]:
    """The results of a training resumed after this batch, in a new model or in the reference's own."""
    model = make_model() if fresh else reference.model
    if not fresh:
        resume(model, reference.start)
    data_set = make_data_set()
    seen = go_on(model, kind, data_set, resume(model, reference.checkpoint(batch), data_set))
    return seen.rows, everything(model.train_network), seen.inputs


# Each position in a window, and an epoch's last batch. For "flushed", in the tail.
PLACES = {"open": (1, 2, 4, 7), "flushed": (6, 8)}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_after_any_batch_is_bit_identical_in_a_step_that_has_run(references, kind):
    """The outputs, inputs and digest of all Parameters are equal for every later batch, without any compilation. The
    loss scale has gone down and up, and data are shuffled anew in each epoch."""
    reference = references(kind)
    assert [row[0] for row in reference.rows] == list(range(1, LAST + 1))
    scales = [float.fromhex(row[3]) for row in reference.rows]
    assert {after / before for before, after in itertools.pairwise(scales)} == {0.5, 1.0, 2.0}
    assert len(set(reference.inputs)) == LAST
    compiled = len(reference.model.train_network.compile_cache)
    for batch in PLACES[kind]:
        rows, end, inputs = resumed(reference, kind, batch, fresh=False)
        assert rows == reference.rows[batch:], batch
        assert inputs == reference.inputs[batch:], batch
        assert_identical(end, reference.end)
    assert len(reference.model.train_network.compile_cache) == compiled


def test_resumed_in_a_new_model_is_bit_identical(references):
    """After an epoch's last batch, in mid-window."""
    reference = references("open")
    rows, end, inputs = resumed(reference, "open", 7, fresh=True)
    assert rows == reference.rows[7:]
    assert inputs == reference.inputs[7:]
    assert_identical(end, reference.end)


def test_killed_by_kill_9_is_bit_identical(references, tmp_path):
    """A process is killed in mid-window; the next is resumed and runs to the end."""
    reference = references("open")
    rows, checkpoint = [], []
    with Programs(paths.python_path()) as programs:
        for number, kill_after in enumerate((6, 0)):
            folder = tmp_path / str(number)
            folder.mkdir()
            arguments = map(str, (folder, "open", "ckpt", kill_after, *checkpoint))
            finished = programs.run(Path(resume_worker.__file__), *arguments, folder=folder)
            assert finished.returncode == (-signal.SIGKILL if kill_after else 0), finished.stderr[-3000:]
            assert (folder / "end.npz").exists() == (not kill_after)
            checkpoint = [max((folder / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)]
            rows += [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
            assert rows == reference.rows[: kill_after or LAST]
    assert_identical(dict(np.load(folder / "end.npz")), reference.end)


# -- a step called by hand ---------------------------------------------------------------------------------------------


def make_step(optimizer="sgd", factor=1.0, **options) -> TrainOneStepWithGradAccumulationCell:
    """A step on the reference's weights times a factor, which is 0 for weights that a checkpoint will overwrite."""
    options = options or {"micro_size": 2, "accumulation_steps": 4}
    return step_of(times(Regression(), factor), OPTIMIZERS[optimizer], **options)


def times(network, factor):
    for parameter in network.get_parameters():
        parameter.set_data(parameter * factor)
    return network


SIZES = (6, 4, 7)  # samples of the batches in the saved window; all later batches have 5


def batch_of(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batch number `number` , with a mask that keeps 3 of 6, 2 of 4, 5 of 7, and then always 4 of 5 samples."""
    x, y = batches(SIZES[number] if number < len(SIZES) else 5, 1, seed=100 + number)[0]
    mask = (np.arange(len(x)) % (number + 2) != 0).astype(np.float32)
    return x, y, mask


def run(step, numbers, masked=False) -> list[float]:
    return [float(step(*map(Tensor, batch_of(number)[: 2 + masked])).asnumpy()) for number in numbers]


SAVED = {
    "samples": {"micro_size": 2},
    "counts": {"micro_size": 2, "count": CountMask()},
}


@pytest.fixture(scope="module")
def in_mid_window(tmp_path_factory):
    """Checkpoints after three batches of a window of four, by options of the saving step."""
    made = {}

    @eagerly()
    def file(name: str) -> Path:
        if name not in made:
            step = make_step(accumulation_steps=4, **SAVED[name])
            run(step, range(3), name == "counts")
            made[name] = tmp_path_factory.mktemp(name) / "three_of_four.ckpt"
            ms.save_checkpoint(step, str(made[name]))
        return made[name]

    return file


@eagerly()
def whole_updates(windows: list[list[int]], masked: bool) -> dict[str, np.ndarray]:
    """MindSpore's own step, with each window as one joined batch."""
    network = Regression()
    step = nn.TrainOneStepCell(network, OPTIMIZERS["sgd"](network.trainable_params())).set_train()
    for window in windows:
        columns = zip(*(batch_of(number)[: 2 + masked] for number in window), strict=True)
        step(*(Tensor(np.concatenate(column)) for column in columns))
    return {weight.name: as_numpy(weight) for weight in network.trainable_params()}


def assert_updates(step, windows: list[list[int]], tolerance: float, masked: bool = False) -> None:
    """Compare the changes of the weights, because the weights themselves would hide much of a wrong gradient."""
    begun, expected = whole_updates([], masked), whole_updates(windows, masked)
    for weight in step.weights:
        name = weight.name.removeprefix("network.")
        error = relative_error(as_numpy(weight) - begun[name], expected[name] - begun[name])
        assert error < tolerance, (name, error)


@pytest.mark.parametrize(
    ("saved", "options", "mode"),
    [
        ("samples", {"micro_batch_size": 2, "accumulation_steps": 8}, "pynative"),
        ("samples", {"micro_size": 2}, "pynative"),
        ("counts", {"micro_batch_size": 2, "count": CountMask()}, "graph"),
    ],
    ids=["longer windows", "no windows", "counts"],
    indirect=["mode"],
)
def test_a_window_is_finished_on_its_true_counts_whatever_the_options_are_now(in_mid_window, saved, options, mode):
    """Compared with MindSpore's step on the joined batches: the open window keeps its four batches, later ones have the
    cell's number.

    The window was begun in PyNative mode by micro_size=2, with batches of 6, 4 and 7; here a batch of 5 ends it.
    """
    masked = saved == "counts"
    step = make_step(factor=0.0, **options)
    resume(step, in_mid_window(saved))
    assert int(step.window_position.asnumpy()) == 3
    windows, number = [[0, 1, 2, 3]], options.get("accumulation_steps", 1)
    if number <= 4:
        windows.append(list(range(4, 4 + number)))
    last = 4 if number > 4 else 4 + number
    for batch in range(3, last):
        run(step, [batch], masked)
        assert int(step.update_count.asnumpy()) == (2 if batch == 3 + number else 1)
    joined = [np.concatenate([batch_of(one)[2] for one in window]) for window in windows]
    assert float(step.window_count.asnumpy()) == (joined[-1].sum() if masked else len(joined[-1]))
    assert int(step.accumulation_steps.asnumpy()) == number
    assert_updates(step, windows, 1e-4, masked)


def test_a_step_saved_by_hand_goes_on_bit_identically(tmp_path):
    """With `resume` and with MindSpore's own function (see gaccum_ms/backend/storage.py)."""
    step, file = make_step("momentum"), str(tmp_path / "by_hand.ckpt")
    run(step, [3, 4, 5])
    ms.save_checkpoint(step, file)
    losses = run(step, range(6, 12))
    end = everything(step)
    assert int(end["gaccum_ms.update_count"]) == 2
    for load in (resume, lambda step, file: ms.load_checkpoint(file, step)):
        load(step, file)
        assert run(step, range(6, 12)) == losses
        assert_identical(everything(step), end)
        assert len(step.compile_cache) == 1


# -- checkpoints that cannot be resumed are refused, and nothing changes -----------------------------------------------


def claiming(**numbers):
    """An edit that replaces some of the counts."""
    counts = {f"gaccum_ms.{name}": np.array(value, np.int32) for name, value in numbers.items()}
    return lambda values: values.update(counts)


def assert_refused(step, action, error, message) -> None:
    before, generator = everything(step), ms.get_rng_state().asnumpy()
    with pytest.raises(error, match=message):
        action()
    assert_identical(everything(step), before)
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), generator)


@pytest.mark.parametrize(
    ("edit", "options", "make_data_set", "message"),
    [
        (None, {"micro_size": 2, "count": CountMask()}, None, "weigh by samples, .* by counts"),
        (
            claiming(window_origin=[1, 2]),
            {},
            None,
            r"all 2 rank\(s\)' are needed to finish it on rank 0 of 1, but got '.*edited.ckpt' of rank 1 of 2",
        ),
        (losing("out"), {}, None, r"must have all parameters .* but got '.*edited.ckpt' without out\."),
        (losing("accu_grads.hidden"), {}, None, "window's sums, but got '.*' without accu_grads.hidden.*It is damaged"),
        (losing("gaccum_ms.random"), {}, None, "sums, but got '.*' without gaccum_ms.random_state.*It is damaged"),
        (claiming(window_rule=-1), {}, None, "'window_rule' must not be negative, but got -1"),
        (lambda values: values.update(out=values["out"].astype(int)), {}, None, "kind .* out of Float32, and int64"),
        (
            lambda values: values.update(out=values["out"][:-1]),
            {},
            None,
            r"out of shape \(8,\), and \(7,\) in '.*edited.ckpt'",
        ),
        (
            claiming(epoch_batches=7),
            {},
            lambda: plain_data_set(6),
            r"got 6 an epoch .* 1 rank\(s\), where the checkpoint has 7 on each of 1",
        ),
        (claiming(window_rule=4), {}, None, "must have the whole sums, but got one .* with sharded accumulators"),
        (claiming(rate_factor=3), {}, None, r"must be without a factor of AdaScale, .* with the rate times 3\."),
    ],
    ids=[
        *("counts", "another rank", "missing weight", "missing sum", "missing end", "other rule", "other kind"),
        *("other shape", "other dataset", "sharded", "rate factor"),
    ],
)
def test_resume_refuses_and_changes_nothing(in_mid_window, tmp_path, edit, options, make_data_set, message):
    file = in_mid_window("samples")
    if edit is not None:
        file = edited(file, tmp_path / "edited.ckpt", edit)
    step = make_step(**options)
    data_set = make_data_set and make_data_set()
    assert_refused(
        step, lambda: resume(step, file, data_set), ValueError, f"For '(resume|TrainOneStep.*)', .*{message}"
    )
    assert data_set is None or data_set.get_init_step() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_size": 2}, r"3 batch\(es\) after its beginning.* accumulation_steps=4 and .* accumulation_steps=1"),
        (
            {"micro_size": 2, "accumulation_steps": 4, "count": CountMask()},
            "a checkpoint whose micro-batches weigh by samples, where here they weigh by counts",
        ),
    ],
    ids=["no accumulation_steps", "another rule"],
)
def test_what_mindspore_loaded_is_refused_at_the_first_call_and_every_other(in_mid_window, options, message):
    step = make_step(**options)
    ms.load_param_into_net(step, ms.load_checkpoint(str(in_mid_window("samples"))))
    for _ in range(2):
        assert_refused(step, lambda: run(step, [3]), ValueError, f"For 'TrainOneStepWith.*{message}")


def test_what_mindspore_loads_into_a_step_that_has_run_is_refused_too(in_mid_window, tmp_path, pynative):
    file = edited(in_mid_window("samples"), tmp_path / "edited.ckpt", claiming(window_origin=[1, 2]))
    step = make_step()
    run(step, [3])
    ms.load_param_into_net(step, ms.load_checkpoint(str(file)))
    assert_refused(step, lambda: run(step, [3]), ValueError, "got the sums of rank 1 of 2 on rank 0 of 1")


def test_files_of_different_updates_are_refused(in_mid_window, tmp_path):
    """For instance, checkpoints of two ranks from different times."""
    files = [
        edited(
            in_mid_window("samples"), tmp_path / f"{rank}.ckpt", claiming(window_origin=[rank, 2], update_count=rank)
        )
        for rank in range(2)
    ]
    step = make_step()
    assert_refused(step, lambda: resume(step, files), ValueError, r"must be of the same update, but got updates \[")


def test_a_second_resume_after_a_change_of_ranks_goes_on_at_the_batch_after(tmp_path, pynative):
    """Two ranks saw two batches each. One goes on with the fifth of eight, and after two more with the seventh."""
    step = make_step(micro_size=2)
    run(step, [0, 1])
    both = tmp_path / "both.ckpt"
    ms.save_checkpoint(step, str(both))
    files = [
        edited(both, tmp_path / f"{rank}.ckpt", claiming(window_origin=[rank, 2], epoch_batches=4)) for rank in range(2)
    ]
    samples = batches(5 * 8, 1)[0][0]
    for seen in (4, 6):
        data_set = plain_data_set(8)
        step = make_step(micro_size=2)
        smaller = pytest.warns(UserWarning, match=r"an update has 1 batches, .* where it had 2 batches, ")
        with smaller if len(files) > 1 else contextlib.nullcontext():
            assert resume(step, files, data_set) == 0
        assert int(step.batch_count.asnumpy()) == seen
        iterator = data_set.create_tuple_iterator(num_epochs=1)
        for number in (seen, seen + 1):
            x, y = next(iterator)
            np.testing.assert_array_equal(x.asnumpy(), samples[5 * number : 5 * number + 5])
            step(x, y)
        files = [tmp_path / f"{seen}.ckpt"]
        ms.save_checkpoint(step, str(files[0]))


def test_joined_windows_of_two_ranks_keep_their_compensation(tmp_path, pynative):
    """Each rank's sums lose in the narrow dtype what its compensation has."""
    random = np.random.default_rng(5)
    added = random.normal(size=(2, 3, 50)).astype(np.float32)  # ranks, batches

    def make():
        weight = ms.Parameter(Tensor(np.zeros(50), ms.float32), name="weight")
        options = {"accumulators": Accumulators(ms.float16, compensated=True)}
        return GradAccumulator(nn.SGD([weight], 1.0), 8, **options), weight

    files = []
    for rank in range(2):
        accumulator, _ = make()
        for one in added[rank]:
            accumulator((Tensor(one),))
        accumulator.run_record.window_origin.set_data(Tensor([rank, 2], ms.int32))
        files.append(tmp_path / f"{rank}.ckpt")
        ms.save_checkpoint(accumulator, str(files[-1]))
    accumulator, weight = make()
    resume(accumulator, files)
    assert accumulator.accu_grads[0].dtype == ms.float16
    assert accumulator.flush()
    expected = -added.astype(np.float64).mean(axis=(0, 1))
    assert np.abs(weight.asnumpy() - expected).max() < 1e-6 * np.abs(expected).max()


def test_resume_refuses_what_is_no_checkpoint_and_models_of_others(in_mid_window, tmp_path):
    step = make_step()
    assert_refused(step, lambda: resume(step, []), ValueError, "'checkpoint' must be at least one file, but got none")
    assert_refused(step, lambda: resume(step, tmp_path / "no.ckpt"), ValueError, r"no\.ckpt")
    file = in_mid_window("samples")
    both = [file, file]
    assert_refused(
        step, lambda: resume(step, both), ValueError, "different ranks of one run.* rank 0 of 1.* rank 0 of 1"
    )
    other, link = tmp_path / "weights.bin", tmp_path / "latest"
    other.write_bytes(file.read_bytes())
    link.symlink_to(tmp_path / "gone")
    for wrong in (other, link, [file, tmp_path / "folder"]):
        message = r"must be a folder, or a file whose name ends with .ckpt or .safetensors, but got .*"
        assert_refused(step, lambda wrong=wrong: resume(step, wrong), ValueError, message)
    network = Regression()
    plain = nn.TrainOneStepCell(network, OPTIMIZERS["sgd"](network.trainable_params()))
    for other in (plain, ms.Model(plain), ms.Model(network)):
        with pytest.raises(
            TypeError, match=r"must be a Model of a GradAccumulationCell.* but got '(TrainOneStepCell|Regression)'"
        ):
            resume(other, file)


def test_a_step_that_has_run_single_batches_takes_what_is_between_two_windows_alone(in_mid_window, tmp_path, pynative):
    step = make_step(micro_size=2)
    run(step, [7])
    file = in_mid_window("samples")
    message = "before the first step, but got a step that has run, of a cell with accumulation_steps=1"
    assert_refused(step, lambda: resume(step, file), RuntimeError, message)
    run(step, [8])

    def end_window(values):
        for name in ("gaccum_ms.window_position", "gaccum_ms.window_sums", "gaccum_ms.window_unit"):
            values[name] = np.zeros_like(values[name])
        for name in [name for name in values if name.startswith("accu_grads.")]:
            values[name] = np.zeros_like(values[name])

    assert resume(step, edited(file, tmp_path / "between.ckpt", end_window)) == 0
    run(step, [3])
    assert_updates(step, [[3]], 1e-4)


def test_a_resumed_step_takes_a_batch_shorter_than_micro_size_as_the_one_that_was_saved_would(tmp_path, pynative):
    """It is an epoch's last batch; as the very first batch it would be an error."""
    x, y, _ = batch_of(3)
    steps = [make_step(micro_size=4) for _ in range(2)]
    run(steps[0], [3])
    ms.save_checkpoint(steps[0], str(tmp_path / "before.ckpt"))
    with pytest.raises(ValueError, match=r"micro_size=4 and a batch of 2 sample"):
        steps[1](Tensor(x[:2]), Tensor(y[:2]))
    resume(steps[1], tmp_path / "before.ckpt")
    losses = [float(step(Tensor(x[:2]), Tensor(y[:2])).asnumpy()) for step in steps]
    assert losses[0] == losses[1]
    assert_identical(everything(steps[0]), everything(steps[1]))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, pynative):
    """The present optimizer's state would not be replaced."""
    saved, other = make_step("sgd"), make_step("adam")
    for step in (saved, other):
        run(step, [3])
    ms.save_checkpoint(saved, str(tmp_path / "sgd.ckpt"))
    message = "must have all parameters of the network and the optimizer's state, but got .* without .*beta1_power"
    assert_refused(other, lambda: resume(other, tmp_path / "sgd.ckpt"), ValueError, message)


def test_weights_alone_are_refused_unless_the_optimizer_is_to_begin_anew(tmp_path, pynative):
    network = times(Regression(), 2.0)
    file = tmp_path / "weights.ckpt"
    ms.save_checkpoint(network, str(file))
    step = make_step("adam", micro_size=2)
    run(step, [3])
    message = (
        r"the optimizer's state, but got '.*weights.ckpt' with weights alone.*load_param_into_net.*optimizer=False"
    )
    assert_refused(step, lambda: resume(step, file), ValueError, message)
    state = everything(step.optimizer)
    assert resume(step, file, optimizer=False) == 0
    weights = {weight.name: as_numpy(weight) for weight in network.get_parameters()}
    assert_identical(everything(step.network), weights)
    assert_identical(everything(step.optimizer), state | weights)
    assert int(step.batch_count.asnumpy()) == 0


def test_without_the_optimizer_all_else_goes_on(tmp_path, pynative):
    """From another optimizer: the window, the counts and the data set. The rate is the optimizer's own."""
    saved = make_step("sgd", accumulation_steps=2)
    run(saved, range(3))
    file = tmp_path / "sgd.ckpt"
    ms.save_checkpoint(saved, str(file))
    step = make_step("adam", factor=0.0, accumulation_steps=2)
    step.optimizer.learning_rate.set_data(Tensor(0.25, ms.float32))
    data_set = plain_data_set(8)
    assert resume(step, file, data_set, optimizer=False) == 0
    assert data_set.get_init_step() == 3
    assert float(step.optimizer.learning_rate.asnumpy()) == 0.25
    kept = {parameter.name for parameter in step.optimizer.get_parameters()} - {w.name for w in step.weights}
    loaded, source = everything(step), everything(saved)
    of_data_set = OF_DATA_SET | {step.run_record.epoch_batches.name}  # the other step has seen none
    names = loaded.keys() & source.keys() - kept - of_data_set
    assert {"out", "accu_grads.out", "gaccum_ms.window_sums", "gaccum_ms.batch_count"} <= names
    assert_identical({name: loaded[name] for name in names}, {name: source[name] for name in names})
    with pytest.raises(TypeError, match="the argument 'optimizer' must be a bool, but got 1"):
        resume(step, file, optimizer=1)


def test_some_missing_state_of_a_training_without_accumulation_is_warned_of(tmp_path, pynative):
    network = Regression()
    plain = nn.TrainOneStepCell(network, OPTIMIZERS["momentum"](network.trainable_params())).set_train()
    run(plain, [3])
    ms.save_checkpoint(plain, str(tmp_path / "plain.ckpt"))
    file = edited(tmp_path / "plain.ckpt", tmp_path / "edited.ckpt", losing("moments.out"))
    step = make_step("momentum", factor=0.0, micro_size=2)
    with pytest.warns(UserWarning, match=r"edited.ckpt' has no moments.out of the optimizer's state, which stay as"):
        resume(step, file)
    assert_identical(everything(step.network), everything(network))


def test_an_accumulator_finishes_a_cells_window_by_samples_alone(in_mid_window, pynative):
    network = Regression()
    accumulator = GradAccumulator(OPTIMIZERS["sgd"](network.trainable_params()), 4)
    resume(accumulator, in_mid_window("samples"))
    batch = list(map(Tensor, batch_of(3)[:2]))
    _, gradients = ms.value_and_grad(network, None, accumulator.weights)(*batch)
    with pytest.raises(ValueError, match=r"weigh by batches after 3 batch\(es\) that weigh by samples"):
        accumulator(gradients)
    _, gradients = accumulator.value_and_grad(network)(*batch)
    assert accumulator(tuple(gradients)) is True
    assert_updates(accumulator, [[0, 1, 2, 3]], 1e-5)


# -- to and from trainings without accumulation ------------------------------------------------------------------------


def plain_data_set(number=4):
    return NumpySlicesDataset(batches(5 * number, 1)[0], ["x", "y"], shuffle=False).batch(5)


def test_a_checkpoint_of_a_training_without_accumulation_trains_on_in_our_step(tmp_path, pynative):
    """Compared with the same training without interruption: Momentum's state is loaded, and the dataset restarts."""
    network = Regression()
    plain = ms.Model(network, optimizer=OPTIMIZERS["momentum"](network.trainable_params()))
    config = train.CheckpointConfig(save_checkpoint_steps=4)
    plain.train(2, plain_data_set(), callbacks=[train.ModelCheckpoint("plain", str(tmp_path), config)])
    expected = {p.name: as_numpy(p) for p in plain.train_network.get_parameters()}
    ours = ms.Model(make_step("momentum", factor=0.0, micro_size=2))
    data_set = plain_data_set()
    assert resume(ours, tmp_path / "plain-1_4.ckpt", data_set) == 0
    ours.train(1, data_set)
    trained = {p.name: as_numpy(p) for p in ours.train_network.get_parameters()}
    assert max(relative_error(trained[name], value) for name, value in expected.items()) < 1e-5


def test_a_checkpoint_in_mid_window_loads_into_mindspores_own_step_and_into_the_bare_network(in_mid_window, pynative):
    network, bare = times(Regression(), 0), times(Regression(), 0)
    plain = nn.TrainOneStepCell(network, OPTIMIZERS["sgd"](network.trainable_params())).set_train()
    for cell in (plain, bare):
        missing, extra = ms.load_param_into_net(cell, ms.load_checkpoint(str(in_mid_window("samples"))))
        assert not missing
        assert {
            "gaccum_ms.window_sums",
            "gaccum_ms.window_unit",
            "gaccum_ms.batch_count",
            "accu_grads.out",
        } <= set(extra)
    run(plain, [3])
    assert_updates(plain, [[3]], 1e-4)
    batch = [Tensor(column) for column in batch_of(0)[:2]]
    assert float(bare(*batch)) == float(Regression()(*batch))


@pytest.mark.parametrize("saved", ["without accumulation", "not compensated"])
def test_nothing_of_the_window_that_was_open_before_is_left_after_a_resume(in_mid_window, tmp_path, saved, pynative):
    """The step is in mid-window, and the file has fewer Parameters than the step."""
    step = make_step(micro_size=2, accumulation_steps=2, accumulators=Accumulators(ms.float16, compensated=True))
    run(step, [7, 8, 9])
    compensations = [p for p in step.get_parameters() if p.name.startswith("accu_compensation.")]
    assert all(as_numpy(p).any() for p in compensations)
    file, windows = tmp_path / "fewer.ckpt", [[3, 4]]
    if saved == "without accumulation":
        network = Regression()
        plain = nn.TrainOneStepCell(network, OPTIMIZERS["sgd"](network.trainable_params()))
        ms.save_checkpoint(plain, str(file))
    else:
        file, windows = in_mid_window("samples"), [[0, 1, 2, 3]]
    resume(step, file)
    if windows == [[3, 4]]:
        assert int(step.window_position.asnumpy()) == int(step.batch_count.asnumpy()) == 0
        assert not any(as_numpy(p).any() for p in (*step.accu_grads, *compensations))
    else:
        sums = {name: value.asnumpy() for name, value in ms.load_checkpoint(str(file)).items()}
        for rounded, lost in zip(step.accu_grads, compensations, strict=True):
            assert np.abs(as_numpy(rounded) + as_numpy(lost) - sums[rounded.name]).max() < 1e-7
    run(step, [number for number in windows[0] if number >= 3])
    assert int(step.window_position.asnumpy()) == 0
    assert_updates(step, windows, 1e-4)


# -- random numbers ----------------------------------------------------------------------------------------------------


def test_the_default_generators_state_is_restored(tmp_path):
    """Only the state is checked: MindSpore 2.10 has no CPU kernel that uses it."""
    step = make_step()
    state = np.zeros(16, np.uint8)
    state[0], state[8] = 7, 4  # a seed, and the position in its stream
    ms.set_rng_state(Tensor(state))
    file = tmp_path / "random.ckpt"
    ms.save_checkpoint(step, str(file))
    ms.manual_seed(99)
    assert (ms.get_rng_state().asnumpy() != state).any()
    resume(make_step(factor=0.0), file)
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), state)
