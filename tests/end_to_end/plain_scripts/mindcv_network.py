"""A network of mindcv on digits, as its own scripts train it: python mindcv_network.py MODE FOLDER [distributed]"""

import sys

import mindspore as ms
import mindspore.dataset as ds
from mindcv.data import create_loader
from mindcv.loss import create_loss
from mindcv.models.convnext import ConvNeXt
from mindcv.optim import create_optimizer
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


def loader(usage, batch_size, samples, **shard):
    dataset = ds.MnistDataset(folder, usage=usage, num_samples=samples, **shard)
    transforms = [ds.vision.Resize(32), ds.vision.Rescale(1.0 / 255.0, 0.0), ds.vision.HWC2CHW()]
    labels = [ds.transforms.TypeCast(ms.int32)]
    return create_loader(dataset, batch_size, is_training=False, transform=transforms, target_transform=labels)


network = ConvNeXt(in_channels=1, num_classes=10, depths=[1, 1, 1, 1], dims=[16, 24, 32, 48])
loss = create_loss(name="CE", label_smoothing=0.1)
optimizer = create_optimizer(network.trainable_params(), opt="adamw", lr=0.003, weight_decay=0.01)
model = ms.Model(network, loss_fn=loss, optimizer=optimizer, metrics={"accuracy", "loss"})
model.train(1, loader("train", 16, 128 // shard.get("num_shards", 1), **shard), callbacks=[ms.LossMonitor(2)])

held_out = loader("test", 64, 128)
print(*(f"{name} {value}" for name, value in sorted(model.eval(held_out).items())))
images = next(held_out.create_tuple_iterator())[0]
name = f"convnext{shard.get('shard_id', '')}"
ms.export(model.predict_network, images, file_name=name, file_format="MINDIR")
exported = nn.GraphCell(ms.load(f"{name}.mindir")) if mode == ms.GRAPH_MODE else model.predict
print("predicted", *(round(float(value), 5) for value in model.predict(images)[0]))
print("exported", *(round(float(value), 5) for value in exported(images)[0]))
