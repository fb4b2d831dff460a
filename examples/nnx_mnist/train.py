"""A loop of Flax NNX on images that are made here; its lines with jaxres keep it alive.

python examples/nnx_mnist/train.py runs/digits 2000    # Kill it, run it again: the same weights.
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxres

SIZE, BATCH = 16, 64


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear((SIZE // 4) ** 2 * 16, 10, rngs=rngs)

    def __call__(self, image):
        image = nnx.relu(self.second(nnx.relu(self.first(image))))
        return self.dense(self.dropout(image.reshape(len(image), -1)))


def batch_at(position):
    """Returns images of ten patterns under noise, and their labels."""
    patterns = np.random.default_rng(0).random((10, SIZE, SIZE, 1), np.float32)
    random = np.random.default_rng([1, position])
    labels = random.integers(10, size=BATCH)
    return patterns[labels] + random.random((BATCH, SIZE, SIZE, 1), np.float32), labels


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return loss


folder, last, model = sys.argv[1], int(sys.argv[2]), Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
both = (model, optimizer)
with jaxres.attempt(folder, save_every_steps=100) as attempt:
    state, position, start = attempt.restore_or(lambda: nnx.state(both), position=0)
    nnx.update(both, state)
    for step in attempt.steps(start, last):
        loss = train_step(model, optimizer, *batch_at(position))
        position += 1
        attempt.finished(step, nnx.state(both), metrics={"loss": loss}, position=position)
model.eval()
images, labels = batch_at(0)
print(f"{jnp.mean(model(images).argmax(axis=1) == labels):.0%} are named right")
