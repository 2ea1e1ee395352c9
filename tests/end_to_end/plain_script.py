"""A text classifier with a metric per epoch and an export; test_plain_script.py starts it on two ranks."""

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops, train
from mindspore.communication import get_group_size, get_rank, init

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
init()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
shard = {"num_shards": get_group_size(), "shard_id": get_rank()}

GOOD, BAD = ["superb", "moving", "warm", "honest", "bright"], ["dull", "slow", "hollow", "cold", "stale"]
OTHERS = ["the", "film", "a", "plot", "and", "its", "actors", "scene", "music", "was", "is", "very", "rather", "often"]
WORDS = ["<pad>", *GOOD, *BAD, *OTHERS]
LENGTH = 16


def reviews(number, seed):
    """Sentences of 5 to 16 words, most of whose judging words tell the class."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        label = rng.integers(2)
        words = list(rng.choice(OTHERS, rng.integers(3, 14)))
        words += list(rng.choice(GOOD if label else BAD, 2)) + list(rng.choice(BAD if label else GOOD, 1))
        rng.shuffle(words)
        yield " ".join(words), np.int32(label)


def create_dataset(number, seed, **shard):
    vocab = ds.text.Vocab.from_list(WORDS)
    texts, labels = zip(*reviews(number, seed), strict=True)
    dataset = ds.NumpySlicesDataset((list(texts), list(labels)), ["text", "label"], **shard)
    ids = [
        ds.text.WhitespaceTokenizer(),
        ds.text.Lookup(vocab, data_type=ms.int32),
        ds.transforms.PadEnd([LENGTH], 0),
    ]
    return dataset.map(ids, "text").batch(32)


class Classifier(nn.Cell):
    """The mean of the words' vectors, and two layers."""

    def __init__(self, words, width, classes):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.hidden, self.relu, self.out = nn.Dense(width, width), nn.ReLU(), nn.Dense(width, classes)

    def construct(self, ids):
        mask = (ids > 0).astype(ms.float32).expand_dims(-1)
        mean = (self.embedding(ids) * mask).sum(axis=1) / ops.maximum(mask.sum(axis=1), 1.0)
        return self.out(self.relu(self.hidden(mean)))


net = Classifier(len(WORDS), 32, 2)
loss = nn.CrossEntropyLoss()
optimizer = nn.Adam(net.trainable_params(), learning_rate=0.01)
model = train.Model(net, loss, optimizer, metrics={"accuracy": train.Accuracy(), "loss": train.Loss()})
held_out = create_dataset(200, 2)
model.fit(3, create_dataset(320, 1, **shard), held_out, callbacks=[train.LossMonitor(2)])

ids = next(held_out.create_tuple_iterator())[0]
name = f"classifier{get_rank()}"
ms.export(model.predict_network, ids, file_name=name, file_format="MINDIR")
exported = nn.GraphCell(ms.load(f"{name}.mindir"))
print("predicted", *(round(float(value), 5) for value in model.predict(ids)[0]))
print("exported", *(round(float(value), 5) for value in exported(ids)[0]))
