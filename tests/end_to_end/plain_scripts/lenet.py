"""LeNet on digits, in the form of MindSpore's quick start: python lenet.py MODE FOLDER [distributed]"""

import sys

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

mode, folder = int(sys.argv[1]), sys.argv[2]
ms.set_context(mode=mode)
ms.set_seed(1)
shard = {}
if "distributed" in sys.argv:
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    shard = {"num_shards": get_group_size(), "shard_id": get_rank()}


class LeNet5(nn.Cell):
    def __init__(self, num_class=10, num_channel=1):
        super().__init__()
        self.conv1 = nn.Conv2d(num_channel, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, num_class)
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()

    def construct(self, x):
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.fc3(x)


def create_dataset(usage, batch_size, **shard):
    dataset = ds.MnistDataset(folder, usage=usage, **shard)
    images = [
        ds.vision.Resize(32),
        ds.vision.Rescale(1.0 / 255.0, 0.0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW(),
    ]
    dataset = dataset.map(images, "image").map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size)


network = LeNet5()
net_loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
net_opt = nn.Momentum(network.trainable_params(), learning_rate=0.02, momentum=0.9)
model = ms.Model(network, net_loss, net_opt, metrics={"Accuracy": nn.Accuracy()})
model.train(2, create_dataset("train", 64, **shard), callbacks=[ms.LossMonitor(8)])

print("accuracy", model.eval(create_dataset("test", 261))["Accuracy"])
images = next(create_dataset("test", 4).create_tuple_iterator())[0]
name = f"lenet{shard.get('shard_id', '')}"
ms.export(network, images, file_name=name, file_format="MINDIR")
exported = nn.GraphCell(ms.load(f"{name}.mindir")) if mode == ms.GRAPH_MODE else model.predict
print("predicted", *(round(float(value), 5) for value in model.predict(images)[0]))
print("exported", *(round(float(value), 5) for value in exported(images)[0]))
