"""Your own data set, NNX model, metric, optimizer and hook: python examples/own_model.py RUN_DIR

Interrupt it and run it again: it goes on from the last finished step, bit for bit.
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxres
from jaxres.models import from_nnx


class Points:
    fingerprint = "two classes of points, version 1"

    def __len__(self):
        return 4000

    def __getitem__(self, index):  # A pure function of the index.
        rng, label = np.random.default_rng(index), index % 2
        return {"x": np.float32(rng.normal(2 * label - 1, 0.7, 2)), "label": np.int32(label)}


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.layers = nnx.List([nnx.Linear(2, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.norm(self.layers[0](x))))


def loss(net, batch):
    logits, ones = net(batch["x"]), jnp.ones(len(batch["label"]))
    is_right = jnp.float32(logits.argmax(-1) == batch["label"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, ones, {"accuracy": (is_right, ones)}


def optimizer(learning_rate):
    return optax.chain(optax.scale_by_belief(), optax.scale_by_learning_rate(learning_rate))


CONFIG = {
    "data": {"source": {"kind": "custom", "target": "__main__:Points"}, "heldout_fraction": 0.1},
    "model": {"kind": "custom", "target": "__main__:model", "args": {"width": 32}},
    "optimizer": {"kind": "custom", "target": "__main__:optimizer", "learning_rate": 0.01},
    "train": {"steps": 300, "global_batch_size": 64},
    "hooks": [{"target": "__main__:look", "every_steps": 100}],
    "evaluation": {"every_steps": 100},
}
model = lambda width, vocab_size, seq_len: from_nnx(lambda rngs: Net(width, rngs), loss)  # noqa: E731
look = lambda run: print("step", run.step, "loss", run.metrics["loss"])  # noqa: E731
if __name__ == "__main__":
    print(jaxres.train(CONFIG, {"run.dir": sys.argv[1]}).status()["evaluation"]["metrics"])
