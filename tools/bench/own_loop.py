"""Benchmark of `jaxres.attempt` around a loop: its steps against those of the bare loop.

    python tools/bench/own_loop.py [--blocks 40] [--steps 50] [--milliseconds 10]

Both loops run the same jitted step in this process and take turns in blocks of steps; the width of
the step is chosen so that it takes about that long here. Saves are left out. Prints the ratio of
the blocks with its interval, and the ratio of their processor time. Exits 1 above 1.03.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import guards  # tools/bench/guards.py
import jax
import jax.numpy as jnp

import jaxres

LIMIT = 1.03
FIRST_WIDTH, PRODUCTS = 256, 8


@jax.jit
def train_step(state: Any) -> tuple[Any, jax.Array]:
    """Multiplies a matrix by itself a few times."""
    x = state["x"]
    for _ in range(PRODUCTS):
        x = jnp.tanh(x @ state["x"] / x.shape[0])
    return {"x": 0.5 * (x + state["x"])}, jnp.mean(x**2)


def make_state(width: int) -> dict[str, jax.Array]:
    """Returns the first state."""
    return {"x": jax.random.normal(jax.random.key(0), (width, width))}


def width_of(milliseconds: float) -> int:
    """Returns the width of a step that takes about so long."""
    state, _ = jax.block_until_ready(train_step(make_state(FIRST_WIDTH)))
    before = time.perf_counter()
    for _ in range(10):
        state, _ = train_step(state)
    jax.block_until_ready(state)
    took = (time.perf_counter() - before) / 10
    return int(FIRST_WIDTH * (milliseconds / 1000 / took) ** (1 / 3)) // 8 * 8 + 8


def bare_blocks(width: int, steps: int) -> Iterator[None]:
    """Computes a block of steps for each item, without jaxres."""
    state = make_state(width)
    while True:
        for _ in range(steps):
            state, _ = train_step(state)
        jax.block_until_ready(state)
        yield


def wrapped_blocks(width: int, steps: int, folder: str, last: int) -> Iterator[None]:
    """Computes a block of steps for each item, within an attempt."""
    with jaxres.attempt(folder, save_every_steps=10**9) as attempt:
        state, _, start = attempt.restore_or(lambda: make_state(width))
        for step in attempt.steps(start, last):
            state, loss = train_step(state)
            attempt.finished(step, state, metrics={"loss": loss}, position=step)
            if step % steps == 0:
                jax.block_until_ready(state)
                yield


def seconds(block: Callable[[], object]) -> tuple[float, float]:
    """Returns the wall time and the processor time of a block."""
    wall, processor = time.perf_counter(), time.process_time()
    block()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> int:
    """Prints the ratios; returns 1 above the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--milliseconds", type=float, default=10.0)
    given = parser.parse_args()
    width = width_of(given.milliseconds)
    with tempfile.TemporaryDirectory() as folder:
        bare = bare_blocks(width, given.steps)
        wrapped = wrapped_blocks(width, given.steps, folder, given.steps * (given.blocks + 1))
        pairs = [(seconds(bare.__next__), seconds(wrapped.__next__)) for _ in range(given.blocks)]
        for _ in wrapped:
            pass
    pairs = pairs[1:]  # The first block compiles.
    medians = list[float]()
    for index, name in enumerate(("wall time", "processor time")):
        ratios = [with_it[index] / without[index] for without, with_it in pairs]
        median, low, high = guards.interval(ratios)
        print(f"{name}: {median:.3f} ({low:.3f} to {high:.3f}) of the bare loop")
        medians.append(median)
    step_ms = 1000 * statistics.median(one[0] for one, _ in pairs) / given.steps
    print(f"steps of {step_ms:.1f} ms, width {width}")
    return int(medians[0] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
