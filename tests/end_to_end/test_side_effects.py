"""A training leaves the user's other objects, and MindSpore, as they were, once its step and its loop are gone."""

from __future__ import annotations

import gc
import os
import sys
import types
import weakref

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from gaccum_ms import (
    FlushAccumulation,
    GradAccumulationCell,
    GradAccumulator,
    TrainOneStepWithGradAccumulationCell,
    UpdateScheduler,
    WindowMonitor,
    resume,
)

X, Y = np.ones((12, 3), np.float32), np.zeros((12, 1), np.float32)
HERE = sys.modules[__name__]


def noisy(x):
    """A function of the user's that draws: MindSpore must compile it for each copy of the network."""
    return ops.dropout(x, 0.5)


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.dropout = nn.Dense(3, 4), nn.Dense(4, 1), nn.Dropout(p=0.1)

    def construct(self, x):
        return self.last(noisy(self.dropout(self.first(x))))


class Objects:
    """What a user has before there is a step."""

    def __init__(self):
        self.network, self.loss = Network(), nn.BCEWithLogitsLoss()
        self.optimizer = optim.Adam(self.network.trainable_params(), lr=0.1, amsgrad=True)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.data_set = ms.dataset.NumpySlicesDataset((X, Y), shuffle=False).batch(4)

    def named(self):
        """All of them, and their parts."""
        yield from {"noisy": noisy, "Network": Network}.items()
        yield from vars(self).items()
        yield from ((f"cell {name}", cell) for name, cell in self.network.cells_and_names())
        states = [value for value in vars(self.scheduler).values() if isinstance(value, ms.Parameter)]
        for number, value in enumerate([*self.network.get_parameters(), *states, *self.optimizer.get_parameters()]):
            yield f"parameter {number}", value

    def state(self):
        """The names of each object's attributes, and what a Parameter is called."""
        return {
            name: set(vars(value)) | ({value.name, value.requires_grad} if isinstance(value, ms.Parameter) else set())
            for name, value in self.named()
        }

    def step(self, micro_size=2):
        cell = GradAccumulationCell(nn.WithLossCell(self.network, self.loss), micro_size)
        return TrainOneStepWithGradAccumulationCell(cell, self.optimizer).set_train()


def functions_and_classes():
    """Of MindSpore's modules and of this one: the functions and classes, by where they are, and their attributes."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("mindspore.") or module is HERE]
    holders = {id(module): (module.__name__, module) for module in modules}
    for module in modules:
        for name, value in vars(module).items():
            if type(value) is type and "mindspore" in str(getattr(value, "__module__", "")):
                holders.setdefault(id(value), (f"{module.__name__}.{name}", value))
    found = {}
    for place, holder in holders.values():
        for name, value in list(vars(holder).items()):
            is_last_look_up = name == "__ms_tensor_func__"  # MindSpore's
            if isinstance(value, (types.FunctionType, type)) and not is_last_look_up:
                found[f"{place}.{name}"] = value
    attributes = {place: set(vars(value)) for place, value in found.items() if isinstance(value, types.FunctionType)}
    return found, attributes


def by_model(objects):
    cell = GradAccumulationCell(objects.network, 2, accumulation_steps=2)
    model = ms.Model(cell, objects.loss, objects.optimizer)
    callbacks = [FlushAccumulation(), WindowMonitor(), UpdateScheduler(objects.scheduler)]
    model.train(1, objects.data_set, callbacks=callbacks)
    del callbacks
    assert "gaccum_ms.scheduler.0.last_epoch" in model.train_network.parameters_dict()
    return weakref.ref(model.train_network)


def by_step(objects):
    step = objects.step(3)
    step(Tensor(X), Tensor(Y))
    assert "assign_value" in vars(objects.network.last.weight)
    return weakref.ref(step)


def by_loop(objects):
    accumulator = GradAccumulator(objects.optimizer, 2, scheduler=objects.scheduler)
    grad_fn = accumulator.value_and_grad(nn.WithLossCell(objects.network, objects.loss).set_train())
    for x, y in objects.data_set.create_tuple_iterator():
        _, gradients = grad_fn(x, y)
        accumulator(gradients)
    accumulator.flush()
    return weakref.ref(accumulator)


def test_a_training_leaves_everything_as_it_was(mode):
    """Apart from the notes that MindSpore's own step leaves on such objects."""
    others = Objects()
    state_of_others = others.state()
    own = nn.TrainOneStepCell(nn.WithLossCell(others.network, others.loss), others.optimizer)
    ms.Model(own.set_train()).train(1, others.data_set)
    notes: dict[bool, set] = {True: set(), False: set()}  # of Parameters, and of other objects
    for name, names in others.state().items():
        notes[name.startswith("parameter")] |= names - state_of_others[name]
    environment, (functions, attributes) = dict(os.environ), functions_and_classes()
    for train in (by_model, by_step, by_loop):
        objects = Objects()
        before = objects.state()
        reference = train(objects)
        gc.collect()
        # In graph mode MindSpore may keep a Cell that was trained, its own too. Then its graph lives, too.
        kept = {"assign_value"} if mode == "graph" and reference() is not None else set()
        after = objects.state()
        assert before.keys() == after.keys() or (kept and before.keys() < after.keys()), train
        for name in before:
            assert before[name] <= after[name], (train, name)
            is_parameter = name.startswith("parameter")
            allowed = notes[is_parameter] | (kept if is_parameter else set())
            assert after[name] - before[name] <= allowed, (train, name)
        functions_after, attributes_after = functions_and_classes()
        assert [place for place in functions if functions_after.get(place) is not functions[place]] == [], train
        assert [place for place in attributes if attributes_after[place] != attributes[place]] == [], train
        assert dict(os.environ) == environment


def test_what_two_steps_need_goes_with_the_last_one():
    objects = Objects()
    weight = objects.network.last.weight
    first, second = objects.step(), objects.step()
    rates = {name for name in objects.optimizer.parameters_dict() if name.startswith("learning_rate_group_")}
    assert rates and "assign_value" in vars(weight)
    del first
    gc.collect()
    assert "assign_value" in vars(weight) and rates <= objects.optimizer.parameters_dict().keys()
    del second
    gc.collect()
    assert "assign_value" not in vars(weight) and not rates & objects.optimizer.parameters_dict().keys()


def test_a_data_set_begins_where_it_did_once_a_resumed_step_is_gone(tmp_path, pynative):
    objects = Objects()
    step = objects.step()
    step(*next(iter(objects.data_set.create_tuple_iterator(num_epochs=1))))
    ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
    objects.data_set.get_dataset_size(), objects.data_set.get_batch_size()  # which MindSpore notes
    before = dict(vars(objects.data_set))
    resume(step, tmp_path / "step.ckpt", objects.data_set)
    other = objects.step()
    resume(other, tmp_path / "step.ckpt", objects.data_set)
    del step
    gc.collect()
    assert len(list(objects.data_set.create_tuple_iterator(num_epochs=1))) == 2  # the other step is still there
    del other
    gc.collect()
    assert vars(objects.data_set) == before
    assert len(list(objects.data_set.create_tuple_iterator(num_epochs=1))) == 3
