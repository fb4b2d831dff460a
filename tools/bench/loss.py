"""Benchmark of model.loss_blocks: the output layer and its loss, with and without blocks.

    python tools/bench/loss.py [--rows 8] [--positions 256] [--width 256] [--vocabulary 32768]
                               [--dtype float32] [--repeats 9]

Loss and gradients of both kinds are compiled in this process and take turns. Prints the median time
of each as a ratio to the plain loss, the 95 % interval, and the memory that XLA plans for values of
the computation (`temp_size_in_bytes`), beside the size of all logits.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import guards  # tools/bench/guards.py
import jax
import jax.numpy as jnp

from jaxres.models.blockwise_loss import blockwise_cross_entropy
from jaxres.models.gpt import logits_product
from jaxres.models.interface import cross_entropy

BLOCKS = (2, 4, 8, 16, 32)


def plain(x_BTD: Any, head_DV: Any, targets_BT: Any, weights_BT: Any) -> Any:
    """Returns the loss of all logits at once."""
    return cross_entropy(logits_product(x_BTD, head_DV), targets_BT, weights_BT)


def compiled(loss: Any, x_BTD: Any, head_DV: Any, targets_BT: Any) -> Any:
    """Returns the compiled loss and gradients."""
    weights_BT = jnp.ones(targets_BT.shape, jnp.float32)

    def total(x_BTD: Any, head_DV: Any) -> Any:
        return jnp.sum(loss(x_BTD, head_DV, targets_BT, weights_BT)[0])

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(x_BTD, head_DV).compile()


def main() -> int:
    """Prints a line for each number of blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"rows": 8, "positions": 256, "width": 256, "vocabulary": 32768}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    x_BTD = jax.random.normal(keys[0], (given.rows, given.positions, given.width), given.dtype)
    head_DV = 0.02 * jax.random.normal(keys[1], (given.width, given.vocabulary))
    targets_BT = jax.random.randint(keys[2], x_BTD.shape[:2], 0, given.vocabulary)
    losses = {1: plain} | {n: partial(blockwise_cross_entropy, blocks=n) for n in BLOCKS}
    sides = {n: compiled(loss, x_BTD, head_DV, targets_BT) for n, loss in losses.items()}
    seconds: dict[int, list[float]] = {n: [] for n in sides}
    for repeat in range(given.repeats + 1):
        for n, side in sides.items():
            began = time.perf_counter()
            jax.block_until_ready(side(x_BTD, head_DV))
            if repeat:
                seconds[n].append(time.perf_counter() - began)
    logits = 4 * targets_BT.size * given.vocabulary
    print(f"all logits: {logits / 2**20:.0f} MiB")
    for n, side in sides.items():
        ratios = [own / base for own, base in zip(seconds[n], seconds[1], strict=True)]
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*guards.interval(ratios))
        memory = side.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{n} blocks: {ratio} of the plain time, {memory:.0f} MiB of values")
    return 0


if __name__ == "__main__":
    sys.exit(main())
