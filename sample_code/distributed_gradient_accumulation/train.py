"""Gradient accumulation on any number of processes: MindSpore's tutorial program.

    python train.py                    one process
    bash run.sh                        eight processes

Several processes train in semi-auto parallel mode on GPU and Ascend, and in data parallel mode on CPU, where MindSpore
has no semi-auto mode. DATA_PATH names a folder with MNIST's files; without it, scikit-learn's digits are used.
"""

import argparse
import os
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from prepare_data import prepare

from gaccum_ms import FlushAccumulation, GradAccumulationCell, tune_cpu


class Network(nn.Cell):
    """The tutorial's network."""

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
        x = self.relu1(self.layer1(x))
        x = self.relu2(self.layer2(x))
        return self.layer3(x)


def create_dataset(folder, usage, batch_size, drop_remainder=False, **shard):
    """Return batches of normalized images and int32 labels; `shard` selects this rank's samples."""
    dataset = ds.MnistDataset(str(folder), usage=usage, **shard)
    image_transforms = [
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW(),
    ]
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size, drop_remainder=drop_remainder)


def parse_arguments():
    """Read the arguments. The defaults for MNIST are the tutorial's; scikit-learn has 40 times fewer digits."""
    mnist = "DATA_PATH" in os.environ
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10 if mnist else 15, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32 if mnist else 16, help="samples per batch on each rank")
    parser.add_argument("--micro-size", type=int, default=4, help="number of micro-batches per batch")
    parser.add_argument("--accumulation-steps", type=int, default=1, help="batches that share an update")
    parser.add_argument("--learning-rate", type=float, default=1e-2 if mnist else 0.1, help="of SGD")
    parser.add_argument("--device", default=ms.get_context("device_target"), help="CPU, GPU or Ascend")
    parser.add_argument("--parallel-mode", default="semi_auto_parallel", help="or data_parallel; for several processes")
    parser.add_argument("--print-every", type=int, default=100 if mnist else 12, help="steps between two losses")
    return parser.parse_args()


def set_parallel_mode(wanted, device):
    """Set the parallel mode, and return it: data parallel if MindSpore lacks the wanted one."""
    mode = wanted
    if wanted == "semi_auto_parallel" and device == "CPU":
        mode = "data_parallel"
        print("notice: MindSpore has no semi-auto parallel mode on CPU; training in data parallel mode", flush=True)
    # In semi-auto parallel mode the loss is the mean over all devices, and its gradient needs no further mean.
    ms.set_auto_parallel_context(parallel_mode=mode, gradients_mean=mode == "data_parallel")
    return mode


def meet():
    """Wait for all ranks: a rank that leaves early breaks the last AllReduce of the others.

    An AllReduce ends on no rank before all ranks have started it. MindSpore's own barrier does nothing on CPU.
    """
    ops.AllReduce()(ms.Tensor([1.0])).asnumpy()


def main():
    args = parse_arguments()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device(args.device)
    ms.set_seed(1)  # every rank starts from the same weights
    net = Network()
    if args.device == "CPU":
        tune_cpu(network=net)
    distributed = "MS_ROLE" in os.environ  # set by msrun
    rank, ranks, shard, ragged = 0, 1, {}, True
    if distributed:
        init()
        rank, ranks = get_rank(), get_group_size()
        # Semi-auto parallel mode cuts batches into equal parts; data parallel mode takes batches of any size.
        ragged = set_parallel_mode(args.parallel_mode, args.device) == "data_parallel"
        shard = {"num_shards": ranks, "shard_id": rank}
    folder = Path(os.environ["DATA_PATH"]) if "DATA_PATH" in os.environ else prepare()
    print(
        f"rank {rank} of {ranks} on {args.device}: {args.epochs} epochs, batches of {args.batch_size} in "
        f"{args.micro_size} micro-batches, batches per update: {args.accumulation_steps}, "
        f"learning rate {args.learning_rate}, data: {folder}",
        flush=True,
    )

    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(net.trainable_params(), args.learning_rate)
    data_set = create_dataset(folder, "train", args.batch_size, drop_remainder=not ragged, **shard)

    accumulated = GradAccumulationCell(
        nn.WithLossCell(net, loss_fn), args.micro_size, accumulation_steps=args.accumulation_steps
    )
    model = ms.Model(accumulated, optimizer=optimizer)
    callbacks = [ms.LossMonitor(args.print_every), FlushAccumulation()]
    model.train(args.epochs, data_set, callbacks=callbacks, dataset_sink_mode=False)

    if distributed and not ragged:
        ms.reset_auto_parallel_context()  # each device has all weights, so one of them can evaluate alone
    if rank == 0:
        held_out = create_dataset(folder, "test", batch_size=1000)
        result = ms.Model(net, loss_fn, metrics={"accuracy"}).eval(held_out, dataset_sink_mode=False)
        print(f"accuracy on held-out images: {result['accuracy']:.2%}", flush=True)
    if distributed:
        meet()


if __name__ == "__main__":
    main()
