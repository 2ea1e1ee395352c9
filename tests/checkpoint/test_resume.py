"""A training that is killed and resumed has the same results as without interruption. Ranks: test_window_ranks.py."""

from __future__ import annotations

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

from gaccum_ms import Accumulators, CountMask, FlushAccumulation, TrainOneStepWithGradAccumulationCell, resume
from gaccum_ms.record.run_record import OF_DATA_SET
from tests.checkpoint import resume_worker
from tests.checkpoint.resume_worker import BATCHES, EPOCHS, Seen, everything, make_data_set, make_model
from tests.support import paths
from tests.support.modes import eagerly
from tests.support.programs import Programs
from tests.support.reference import OPTIMIZERS, Regression, as_numpy, batches, relative_error
from tests.support.reference import make_step as step_of
from tests.support.state import assert_identical

LAST = EPOCHS * BATCHES
OPEN_WINDOW = "ignore:For 'GradAccumulationCell', training ended in the middle of a window:UserWarning"
pytestmark = pytest.mark.filterwarnings(OPEN_WINDOW)


def edited(source: Path, target: Path, edit) -> Path:
    """A checkpoint with other contents: `edit` changes the dict of arrays."""
    values = {name: value.asnumpy() for name, value in ms.load_checkpoint(str(source)).items()}
    edit(values)
    ms.save_checkpoint([{"name": name, "data": Tensor(value)} for name, value in values.items()], str(target))
    return target


def losing(prefix: str):
    """An edit that removes the entries with this prefix."""
    return lambda values: [values.pop(name) for name in list(values) if name.startswith(prefix)]


class Reference(NamedTuple):
    """A training without interruption, its compiled model, and a checkpoint from before the first batch."""

    model: ms.Model
    folder: Path
    start: Path
    seen: Seen
    end: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Trainings with and without FlushAccumulation, by one compiled model."""
    made = {}
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.manual_seed(5)
    model, start = make_model(), tmp_path_factory.mktemp("start") / "start.ckpt"
    ms.save_checkpoint(model.train_network, str(start))

    def reference(*callbacks: train.Callback) -> Reference:
        if len(callbacks) not in made:
            folder, seen = tmp_path_factory.mktemp("saved"), Seen()
            resume(model, start)
            config = train.CheckpointConfig(keep_checkpoint_max=100, format="safetensors" if callbacks else "ckpt")
            saving = train.ModelCheckpoint("net", str(folder), config)
            model.train(EPOCHS, make_data_set(), callbacks=[*callbacks, seen, saving])
            end = everything(model.train_network)
            made[len(callbacks)] = Reference(model, folder, start, seen, end)
        return made[len(callbacks)]

    return reference


@pytest.mark.parametrize(
    ("callbacks", "places"), [([], (1, 2, 4, 7)), ([FlushAccumulation()], (6, 8))], ids=["open", "flushed"]
)
def test_resumed_after_any_batch_is_bit_identical(references, callbacks, places):
    """After each position in a window, and an epoch's last batch; for "flushed", in the tail. The outputs, inputs and
    digest of all Parameters are equal for every later batch, without any compilation. The loss scale has gone down and
    up, and data are shuffled anew in each epoch."""
    model, folder, start, whole, end = references(*callbacks)
    assert [row[0] for row in whole.rows] == list(range(1, LAST + 1))
    scales = [float.fromhex(row[3]) for row in whole.rows]
    assert {after / before for before, after in itertools.pairwise(scales)} == {0.5, 1.0, 2.0}
    assert len(set(whole.inputs)) == LAST
    compiled = len(model.train_network.compile_cache)
    for batch in places:
        resume(model, start)
        data_set, seen = make_data_set(), Seen()
        (checkpoint,) = folder.glob(f"net-{(batch - 1) // BATCHES + 1}_{(batch - 1) % BATCHES + 1}.*")
        finished = resume(model, checkpoint, data_set)
        model.train(EPOCHS, data_set, callbacks=[*callbacks, seen], initial_epoch=finished)
        assert seen.rows == whole.rows[batch:], batch
        assert seen.inputs == whole.inputs[batch:], batch
        assert_identical(everything(model.train_network), end)
    assert len(model.train_network.compile_cache) == compiled


def test_killed_by_kill_9_is_bit_identical(references, tmp_path):
    """A process is killed in mid-window; the next is resumed and runs to the end."""
    reference, rows, checkpoint = references(), [], []
    with Programs(paths.python_path()) as programs:
        for number, kill_after in enumerate((6, 0)):
            folder = tmp_path / str(number)
            folder.mkdir()
            arguments = map(str, (folder, kill_after, *checkpoint))
            finished = programs.run(Path(resume_worker.__file__), *arguments, folder=folder)
            assert finished.returncode == (-signal.SIGKILL if kill_after else 0), finished.stderr[-3000:]
            assert (folder / "end.npz").exists() == (not kill_after)
            checkpoint = [max((folder / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)]
            rows += [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
            assert rows == reference.seen.rows[: kill_after or LAST]
    assert_identical(dict(np.load(folder / "end.npz")), reference.end)


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


@pytest.fixture(scope="module")
def by_rule(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints after three batches of a window of four, in which batches weigh by samples or by counts."""
    files = {rule: tmp_path_factory.mktemp(rule) / "three_of_four.ckpt" for rule in ("samples", "counts")}
    with eagerly():
        for rule, file in files.items():
            step = make_step(accumulation_steps=4, micro_size=2, count=CountMask() if rule == "counts" else None)
            run(step, range(3), rule == "counts")
            ms.save_checkpoint(step, str(file))
    return files


@pytest.fixture
def in_mid_window(by_rule) -> Path:
    return by_rule["samples"]


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


def test_a_window_goes_on_by_its_own_number_of_batches_in_a_cell_of_longer_windows(in_mid_window, pynative):
    """It was begun by micro_size=2, with batches of 6, 4 and 7 samples; here a batch of 5 ends it."""
    step = make_step(factor=0.0, micro_batch_size=2, accumulation_steps=8)
    resume(step, in_mid_window)
    assert int(step.window_position.asnumpy()) == 3
    run(step, [3])
    assert int(step.update_count.asnumpy()) == 1
    assert float(step.window_count.asnumpy()) == 22
    assert int(step.accumulation_steps.asnumpy()) == 8
    assert_updates(step, [[0, 1, 2, 3]], 1e-4)


def test_a_window_goes_on_by_its_true_counts_in_a_cell_of_single_batches(by_rule):
    """It was begun in PyNative mode, and ends in graph mode; the next window has one batch."""
    step = make_step(factor=0.0, micro_batch_size=2, count=CountMask())
    resume(step, by_rule["counts"])
    run(step, [3, 4], masked=True)
    assert int(step.update_count.asnumpy()) == 2
    assert_updates(step, [[0, 1, 2, 3], [4]], 1e-4, masked=True)


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
    ("edit", "message"),
    [
        (claiming(window_origin=[1, 2]), r"all 2 rank\(s\)' are needed .* on rank 0 of 1, but got '.*' of rank 1 of 2"),
        (losing("out"), r"must have all parameters .* but got '.*edited.ckpt' without out\."),
        (losing("accu_grads.hidden"), "window's sums, but got '.*' without accu_grads.hidden.*It is damaged"),
        (losing("gaccum_ms.random"), "sums, but got '.*' without gaccum_ms.random_state.*It is damaged"),
        (lambda values: values.update(out=values["out"].astype(int)), "kind .* out of Float32, and int64"),
        (lambda values: values.update(out=values["out"][:-1]), r"out of shape \(8,\), and \(7,\) in '.*edited.ckpt'"),
        (claiming(epoch_batches=7), r"got 6 an epoch .* 1 rank\(s\), where the checkpoint has 7 on each of 1"),
        (claiming(rate_factor=3), r"must be without a factor of AdaScale, .* with the rate times 3\."),
        (claiming(window_rule=4), "must have the whole sums, but got one .* with sharded accumulators"),
    ],
)
def test_resume_refuses_and_changes_nothing(in_mid_window, tmp_path, edit, message):
    file = edited(in_mid_window, tmp_path / "edited.ckpt", edit)
    step, data_set = make_step(), plain_data_set(6)
    of_data_set = (data_set,) if "epoch" in message else ()
    message = f"For '(resume|TrainOneStep.*)', .*{message}"
    assert_refused(step, lambda: resume(step, file, *of_data_set), ValueError, message)
    assert data_set.get_init_step() == 0


def test_what_mindspore_loaded_is_refused_at_the_first_call_and_every_other(in_mid_window):
    for options, message in (
        ({"micro_size": 2}, r"3 batch\(es\) after its beginning.* accumulation_steps=4 and .* accumulation_steps=1"),
        ({"accumulation_steps": 4, "count": CountMask()}, "micro-batches weigh by samples, where here they .* counts"),
    ):
        step = make_step(**options)
        ms.load_param_into_net(step, ms.load_checkpoint(str(in_mid_window)))
        for _ in range(2):
            assert_refused(step, lambda step=step: run(step, [3]), ValueError, f"For 'TrainOneStepWith.*{message}")


def test_what_mindspore_loads_into_a_step_that_has_run_is_refused_too(in_mid_window, tmp_path, pynative):
    file = edited(in_mid_window, tmp_path / "edited.ckpt", claiming(window_origin=[1, 2]))
    step = make_step()
    run(step, [3])
    ms.load_param_into_net(step, ms.load_checkpoint(str(file)))
    assert_refused(step, lambda: run(step, [3]), ValueError, "got the sums of rank 1 of 2 on rank 0 of 1")


def test_files_of_different_updates_are_refused(in_mid_window, tmp_path):
    """For instance, checkpoints of two ranks from different times."""
    edits = [claiming(window_origin=[rank, 2], update_count=rank) for rank in range(2)]
    files = [edited(in_mid_window, tmp_path / f"{rank}.ckpt", edit) for rank, edit in enumerate(edits)]
    step = make_step()
    assert_refused(step, lambda: resume(step, files), ValueError, r"must be of the same update, but got updates \[")


def test_resume_refuses_what_is_no_checkpoint_and_models_of_others(in_mid_window, tmp_path):
    step = make_step()
    assert_refused(step, lambda: resume(step, []), ValueError, "'checkpoint' must be at least one file, but got none")
    assert_refused(step, lambda: resume(step, tmp_path / "no.ckpt"), ValueError, r"no\.ckpt")
    file = in_mid_window
    message = "different ranks of one run.* rank 0 of 1.* rank 0 of 1"
    assert_refused(step, lambda: resume(step, [file, file]), ValueError, message)
    other, link = tmp_path / "weights.bin", tmp_path / "latest"
    other.write_bytes(file.read_bytes())
    link.symlink_to(tmp_path / "gone")
    for wrong in (other, link, [file, tmp_path / "folder"]):
        message = r"must be a folder, or a file whose name ends with .ckpt or .safetensors, but got .*"
        assert_refused(step, lambda wrong=wrong: resume(step, wrong), ValueError, message)
    network = Regression()
    plain = nn.TrainOneStepCell(network, OPTIMIZERS["sgd"](network.trainable_params()))
    message = r"must be a Model of a GradAccumulationCell.* but got '(TrainOneStepCell|Regression)'"
    for other in (plain, ms.Model(plain), ms.Model(network)):
        with pytest.raises(TypeError, match=message):
            resume(other, file)


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


def test_weights_alone_are_refused_unless_the_optimizer_is_to_begin_anew(tmp_path, pynative):
    """So is another optimizer's state, which would replace nothing of the present one's."""
    network = times(Regression(), 2.0)
    file = tmp_path / "weights.ckpt"
    ms.save_checkpoint(network, str(file))
    step = make_step("adam", micro_size=2)
    run(step, [3])
    message = r"state, but got '.*weights.ckpt' with weights alone.*load_param_into_net.*optimizer=False"
    assert_refused(step, lambda: resume(step, file), ValueError, message)
    ms.save_checkpoint(make_step("sgd", micro_size=2), str(tmp_path / "sgd.ckpt"))
    message = "must have all parameters of the network and the optimizer's state, but got .* without .*beta1_power"
    assert_refused(step, lambda: resume(step, tmp_path / "sgd.ckpt"), ValueError, message)
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
        missing, extra = ms.load_param_into_net(cell, ms.load_checkpoint(str(in_mid_window)))
        assert not missing
        assert {"gaccum_ms.window_sums", "gaccum_ms.window_unit", "accu_grads.out"} <= set(extra)
    run(plain, [3])
    assert_updates(plain, [[3]], 1e-4)
    batch = [Tensor(column) for column in batch_of(0)[:2]]
    assert float(bare(*batch)) == float(Regression()(*batch))


def test_nothing_of_the_window_that_was_open_before_is_left_after_a_resume(tmp_path, pynative):
    """The step is in mid-window, and the file has fewer Parameters than the step."""
    step = make_step(micro_size=2, accumulation_steps=2, accumulators=Accumulators(ms.float16, compensated=True))
    run(step, [7, 8, 9])
    compensations = [p for p in step.get_parameters() if p.name.startswith("accu_compensation.")]
    assert all(as_numpy(p).any() for p in compensations)
    network = Regression()
    plain = nn.TrainOneStepCell(network, OPTIMIZERS["sgd"](network.trainable_params()))
    ms.save_checkpoint(plain, str(tmp_path / "plain.ckpt"))
    resume(step, tmp_path / "plain.ckpt")
    assert int(step.window_position.asnumpy()) == int(step.batch_count.asnumpy()) == 0
    assert not any(as_numpy(p).any() for p in (*step.accu_grads, *compensations))
    run(step, [3, 4])
    assert_updates(step, [[3, 4]], 1e-4)


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
