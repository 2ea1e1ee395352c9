"""MindSpore's tutorial program on gradient accumulation; test_tutorial.py runs it, and never imports it.

The tutorial's lines for semi-auto parallel mode are left out, because MindSpore refuses them on CPU. LossMonitor's
interval is shorter, because there are fewer digits than in MNIST. The last lines print the values for the test.
"""

import hashlib
import os

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.nn.wrap.cell_wrapper import GradAccumulationCell

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)


class Network(nn.Cell):
    """Network"""

    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Dense(28 * 28, 512, weight_init="normal", bias_init="zeros")
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Dense(512, 512, weight_init="normal", bias_init="zeros")
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Dense(512, 10, weight_init="normal", bias_init="zeros")

    def construct(self, x):
        x = self.flatten(x)
        x = self.layer1(x)
        x = self.relu1(x)
        x = self.layer2(x)
        x = self.relu2(x)
        logits = self.layer3(x)
        return logits


def create_dataset(batch_size, usage="train"):
    """create dataset"""
    dataset_path = os.getenv("DATA_PATH")
    dataset = ds.MnistDataset(dataset_path, usage=usage)
    image_transforms = [
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW(),
    ]
    label_transform = ds.transforms.TypeCast(ms.int32)
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(label_transform, "label")
    dataset = dataset.batch(batch_size)
    return dataset


net = Network()
data_set = create_dataset(32)
optimizer = nn.SGD(net.trainable_params(), 1e-2)
loss_fn = nn.CrossEntropyLoss()


def look(when):
    """Print the weights' digest and the held-out accuracy."""
    digest = hashlib.sha256(b"".join(p.asnumpy().tobytes() for p in net.get_parameters())).hexdigest()
    accuracy = ms.Model(net, loss_fn, metrics={"accuracy"}).eval(create_dataset(1000, "test"))["accuracy"]
    print(f"{when}: weights {digest} accuracy {accuracy}", flush=True)


look("before")
loss_cb = ms.LossMonitor(24)
accumulated = GradAccumulationCell(nn.WithLossCell(net, loss_fn), 4)
model = ms.Model(accumulated, optimizer=optimizer)
model.train(10, data_set, callbacks=[loss_cb])
look("after")
