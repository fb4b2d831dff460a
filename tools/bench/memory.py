"""Benchmark of the tier in host memory: steps with it against steps without it, in turns.

    python tools/bench/memory.py [--blocks 30] [--every 10] [section.field=value ...]

One run trains in this process; in every other block no state is kept in memory. Exits 1 and prints
FAIL if the median ratio is above 1.03 with steps of 50 ms or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from step import CONFIG, SETTLE_SECONDS, built, interval, short

from jaxres import config as configs
from jaxres.checkpoint.memory.tier import MemoryTier, size_bytes
from jaxres.engine.state import to_plain
from jaxres.storage import memory_folder
from jaxres.telemetry.stdio import format_bytes
from jaxres.train.loop import train

LIMIT = 1.03
LIMIT_FROM_SECONDS = 0.05
"""Shortest step for which the limit holds: the cost of a copy does not depend on the step."""
MODEL = ("data.seq_len=96", "model.num_layers=2", "model.d_model=64", "model.num_heads=2")
"""A model whose step takes about 50 ms on two cores that are half busy."""
WARM_BLOCKS = 2


@dataclass
class Switch:
    """A tier that can be switched off for a block."""

    tier: MemoryTier
    is_on: bool = False
    saves: list[float] = field(default_factory=list)
    """Seconds for which each state held up the loop, without the drain before it."""

    def is_due(self, step: int) -> bool:
        """Returns whether a state is to be kept, in a block with the tier."""
        return self.is_on and self.tier.is_due(step)

    def save(self, state: Any, progress: Any) -> None:
        """Keeps a state, in a block with the tier."""
        if self.is_due(progress.step):
            began = time.perf_counter()
            self.tier.save(state, progress)
            self.saves.append(time.perf_counter() - began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)


@dataclass
class Blocks:
    """Replaces the run's step; times blocks, and switches the tier between them."""

    step: Callable[..., Any]
    switch: Switch
    steps: int
    offset: int
    """Steps from the start of a block to its first state: the last one is written within it."""
    calls: int = 0
    started: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Seconds a step of each block, without and with the tier in turns."""

    def __call__(self, state: Any, arrays: Any, *flags: Any) -> Any:
        """Runs one step of the run."""
        if self.calls % self.steps == self.offset:
            jax.block_until_ready(state)
            self.seconds.append((time.perf_counter() - self.started) / self.steps)
            self.switch.is_on = len(self.seconds) % 2 == 0
            time.sleep(SETTLE_SECONDS)
            self.started = time.perf_counter()
        self.calls += 1
        return self.step(state, arrays, *flags)


def main() -> int:
    """Measures and prints; returns 1 if the tier costs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--every", type=int, default=10, help="steps between two states")
    parser.add_argument("overrides", nargs="*", help="section.field=value, on top of the model")
    options = parser.parse_args()
    memory = f"checkpoint.memory={{every_steps: {options.every}}}"
    config = configs.load(CONFIG, [*MODEL, memory, "run.dir=bench", *options.overrides]).config
    steps = 3 * options.every
    with built(config, live=False) as parts:
        run = parts.run
        switch = Switch(run.memory)
        blocks = Blocks(run.step, switch, steps, offset=options.every // 2)
        total = (2 * options.blocks + 2 * WARM_BLOCKS + 1) * steps + options.every
        chosen: Any = switch
        train(short(run, steps=total, step=blocks, memory=chosen))
        size = size_bytes(to_plain(run.shapes)) // 2
        memory_folder.delete(run.log.folder.parent)
    timed = blocks.seconds[1 + 2 * WARM_BLOCKS :][: 2 * options.blocks]
    without, with_tier = timed[0::2], timed[1::2]
    ratio, low, high = interval([a / b for a, b in zip(with_tier, without, strict=True)])
    usual = statistics.median(without)
    count, held_up = len(switch.saves), statistics.median(switch.saves)
    print(
        f"{options.blocks} pairs of {steps} steps, {count} states of {format_bytes(size)}\n"
        f"{1e3 * usual:.2f} ms a step without, {1e3 * statistics.median(with_tier):.2f} ms with a "
        f"state every {options.every} steps\nratio {ratio:.3f} (95 % interval of the median "
        f"{low:.3f} to {high:.3f}); a state holds up the loop for {1e3 * held_up:.2f} ms"
    )
    if usual >= LIMIT_FROM_SECONDS and ratio > LIMIT:
        print(f"FAIL: the ratio is above {LIMIT}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
