"""A small decoder in plain JAX that learns the text of this file, from an iterator with a state.

python examples/decoder/train.py runs/decoder 500    # Kill it, run it again: the same weights.

The iterators of grain have the same two methods, `get_state` and `set_state`: `position=iterator`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxres

LENGTH, BATCH, WIDTH, HEADS, LAYERS, VOCAB = 64, 8, 64, 4, 2, 256
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
adam = optax.adam(1e-3)


class Windows:
    """Windows of the text in a new order each epoch, as batches."""

    def __init__(self):
        self.epoch, self.batch = 0, 0

    def __next__(self):
        order = np.random.default_rng(self.epoch).permutation(len(TEXT) - LENGTH)
        starts = order[self.batch * BATCH : (self.batch + 1) * BATCH]
        self.batch += 1
        if (self.batch + 1) * BATCH > len(order):
            self.epoch, self.batch = self.epoch + 1, 0
        return TEXT[starts[:, None] + np.arange(LENGTH + 1)]

    def get_state(self):
        return {"epoch": self.epoch, "batch": self.batch}

    def set_state(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]


def make_state():
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)}
    shapes |= {"down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(0), 2 + LAYERS * len(shapes)))
    params = {name: 0.02 * jax.random.normal(next(keys), (VOCAB, WIDTH)) for name in ("in", "head")}
    for n in range(LAYERS):
        params[f"layer{n}"] = {k: 0.1 * jax.random.normal(next(keys), s) for k, s in shapes.items()}
    return {"params": params, "adam": adam.init(params)}


def loss_of(params, tokens):
    x = params["in"][tokens[:, :-1]] + 0.02 * jnp.sin(jnp.arange(LENGTH)[:, None] / 8)
    for n in range(LAYERS):
        layer = params[f"layer{n}"]
        qkv = (jax.nn.standardize(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        seen = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + seen.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]
    logits = x @ params["head"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def train_step(state, tokens):
    loss, gradient = jax.value_and_grad(loss_of)(state["params"], tokens)
    updates, opt = adam.update(gradient, state["adam"])
    return {"params": optax.apply_updates(state["params"], updates), "adam": opt}, loss


with jaxres.attempt(sys.argv[1], save_every_steps=50) as attempt:
    state, windows, start = attempt.restore_or(make_state, position=Windows())
    for step in attempt.steps(start, int(sys.argv[2])):
        state, loss = train_step(state, next(windows))
        attempt.finished(step, state, metrics={"loss": loss}, position=windows)
