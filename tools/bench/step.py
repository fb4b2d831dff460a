"""Benchmark of the training loop against a bare one, and of the input pipeline alone.

    python tools/bench/step.py [--blocks 30] [--live] [--tensorboard] [--save-every N] [--parts]

Both loops run in this process on the same compiled step, model and batch size, in blocks that take
turns. Exits 1 and prints FAIL if the median ratio is above 1.05; a run with --save-every only
reports, since the cost of a save depends on the disk. --parts: only the host time of parts of the
loop, with steps that sleep.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", str(len(os.sched_getaffinity(0))))

import jax
import numpy as np
from rich.console import Console as Terminal

from jaxres import config as configs
from jaxres import data
from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import SingleHost
from jaxres.config import RunConfig
from jaxres.data import Prefetch
from jaxres.engine import mesh as meshes
from jaxres.engine.state import Progress
from jaxres.engine.step import METRICS, MetricsLayout
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.metrics import MetricsLog
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, RunLog
from jaxres.telemetry.console import Console
from jaxres.telemetry.observers import Observers
from jaxres.train import loop
from jaxres.train.build import BuiltTrainer, build
from jaxres.train.checks.performance_guard import PerformanceGuard
from jaxres.train.components import StepSchedule, Trainer
from jaxres.train.consensus import SingleHostConsensus
from jaxres.train.context import AttemptContext
from jaxres.train.loop import LAG, train
from jaxres.train.stop_requests import StopRequests

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
SMALL = ("data.seq_len=96", "model.num_layers=1", "model.d_model=64", "model.num_heads=2")
"""A model whose step takes about 20 ms on two cores."""
LIMIT = 1.05
NUM_PLACED = 8
WARM_BLOCKS = 2
SETTLE_SECONDS = 0.05
"""Pause before the other loop's turn, for the background threads to finish."""
FAKE_STEPS = 1000
FAKE_SECONDS = 0.005
PIPELINE_BATCHES = 1000
QUICKSTART_STEPS = 10
NEVER = 2**31 - 1
PARTS: tuple[tuple[Any, str], ...] = (
    (loop, "process_completed"),
    (loop, "complete_step"),
    (MetricsLayout, "read"),
    (MetricsLog, "append"),
    (Observers, "on_step"),
    (loop, "sample_digest"),
    (PerformanceGuard, "on_times"),
    (loop, "judge_step"),
    (SingleHostConsensus, "verdict"),
    (Checkpointer, "check"),
    (StepSchedule, "at"),
    (loop, "next_batch"),
    (Prefetch, "get"),
    (SingleHostConsensus, "local_flags"),
    (Progress, "after"),
    (loop, "to_plain"),
)
"""Parts of the loop; one has the time of the parts that it calls."""


@contextlib.contextmanager
def built(config: RunConfig, *, live: bool) -> Iterator[BuiltTrainer]:
    """Yields a run as a worker would build it, in its own run directory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        clock, run_dir = SystemClock(), RunDir(Path(folder, "run"))
        claim = Claim(
            attempt=1,
            host="bench",
            pid=os.getpid(),
            boot_id="",
            nonce="0",
            coordinator=None,
            num_hosts=1,
            threads=int(os.environ["NPROC"]),
            versions={},
            fingerprint={},
            trajectory=configs.digest(config),
        )
        log = RunLog.claim(run_dir.log, claim, after=[], clock=clock)
        screen = stack.enter_context(Path(folder, "screen").open("w"))
        console = stack.enter_context(
            Console(
                attempt=1,
                log_every_seconds=config.telemetry.log_every_seconds,
                clock=clock,
                terminal=Terminal(file=screen, force_terminal=live, width=160),
            )
        )
        observers = Observers([console])
        events = stack.enter_context(
            EventLog(run_dir.events(1, 0), clock=clock, listeners=[observers.on_event])
        )
        requests = StopRequests()
        context = AttemptContext(
            run_dir, log, claim, events.emit, clock, observers, requests, SingleHost()
        )
        yield build(config, context, stack)


@dataclass(frozen=True)
class Cost:
    """Wall seconds, and CPU seconds of all cores."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> Cost:
        """Returns the clocks' current values."""
        return Cost(time.perf_counter(), time.process_time())

    def until_now(self, steps: int) -> Cost:
        """Returns the cost per step since then."""
        now = Cost.now()
        return Cost((now.wall - self.wall) / steps, (now.cpu - self.cpu) / steps)


@dataclass
class Bare:
    """A bare loop: placed batches, a compiled step, metrics fetched late."""

    run: Trainer
    state: Any = None
    batches: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.run.init(self.run.log.history())[0]
        cursor, at = 0, self.run.data_loader.open(self.run.log.history())
        for _ in range(NUM_PLACED):
            fed = at(cursor)
            assert isinstance(fed, tuple)
            batch, arrays = fed
            self.batches.append(arrays)
            cursor = batch.next_cursor

    def cost(self, steps: int) -> Cost:
        """Runs steps and returns the cost of one."""
        step, state, flight = self.run.step, self.state, deque[jax.Array]()
        rate = self.run.peak_rate(1.0)
        started = Cost.now()
        for i in range(steps):
            if len(flight) == LAG:
                np.asarray(flight.popleft())
            state, metrics = step(state, self.batches[i % NUM_PLACED], None, rate)
            flight.append(metrics)
        jax.block_until_ready(state)
        self.state = state
        return started.until_now(steps)


@dataclass
class Turns:
    """Replaces the run's step, and runs blocks of the bare loop in between."""

    step: Callable[..., Any]
    bare: Bare
    steps_per_block: int
    calls: int = 0
    started: Cost = field(default_factory=Cost.now)
    pairs: list[tuple[Cost, Cost]] = field(default_factory=list)
    """Costs per step: jaxres, bare."""

    def __call__(self, state: Any, arrays: Any, *flags: Any) -> Any:
        """Runs one step of the run."""
        if self.calls % self.steps_per_block == 0:
            jax.block_until_ready(state)
            ours = self.started.until_now(self.steps_per_block)
            time.sleep(SETTLE_SECONDS)
            self.pairs.append((ours, self.bare.cost(self.steps_per_block)))
            self.started = Cost.now()
        self.calls += 1
        return self.step(state, arrays, *flags)


def take_turns(
    run: Trainer, *, blocks: int, steps: int, save_every: int
) -> list[tuple[Cost, Cost]]:
    """Returns the cost of a step of jaxres and of the bare loop, a pair for every block."""
    turns = Turns(run.step, Bare(run), steps)
    total = (blocks + WARM_BLOCKS) * steps + 1
    train(short(run, steps=total, save_every=save_every, step=turns))
    return turns.pairs[WARM_BLOCKS:][-blocks:]


def short(run: Trainer, *, steps: int, save_every: int = NEVER, **parts: Any) -> Trainer:
    """Returns the trainer with `steps` steps, without evaluations, with saves on request."""
    schedule = StepSchedule(steps=steps, save_every_steps=save_every, evaluate_every_steps=0)
    return dataclasses.replace(run, steps=steps, schedule=schedule, **parts)


def host_seconds(run: Trainer) -> tuple[float, float]:
    """Returns CPU seconds a step of the loop's thread, and of all threads, without any computing.

    The step is replaced by one that only sleeps, as a host does while its device computes.
    """
    form = run.metrics_layout
    metrics: Any = np.ones(len(METRICS) + len(form.params) + form.num_rows, np.float32)
    slept = 0.0
    marks: list[tuple[float, float]] = []

    def step(state: Any, arrays: Any, *_: Any) -> Any:
        nonlocal slept
        entered = time.thread_time()
        marks.append((entered - slept, time.process_time() - slept))
        time.sleep(FAKE_SECONDS)
        slept += time.thread_time() - entered  # The sleep's own cost is not jaxres'.
        return state, metrics

    train(short(run, steps=FAKE_STEPS, step=step))
    first, last = marks[FAKE_STEPS // 10], marks[-1]
    count = len(marks) - 1 - FAKE_STEPS // 10
    return (last[0] - first[0]) / count, (last[1] - first[1]) / count


def print_parts(run: Trainer) -> None:
    """Prints the host time of the loop and of PARTS; the clock adds about 1 us to each part."""
    totals = dict.fromkeys((name for _, name in PARTS), 0.0)

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **settings: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **settings)
            finally:
                totals[name] += time.thread_time() - began

        return call

    for owner, name in PARTS:
        setattr(owner, name, timed(getattr(owner, name), name))
    own, all_threads = host_seconds(run)
    print(f"{1e6 * own:6.0f} us  the loop's thread\n{1e6 * all_threads:6.0f} us  all threads")
    for name, seconds in totals.items():
        print(f"{1e6 * seconds / FAKE_STEPS:6.1f} us  {name}")


def pipeline_tokens_per_second(config: RunConfig) -> float:
    """Returns the throughput of rows, shuffling, prefetching and placement."""
    dataset = data.open_dataset(config.data)
    rows = config.train.global_batch_size
    mesh = meshes.build(config.mesh, devices=jax.devices())
    with data.Prefetch(
        data.batch_at(
            dataset.train,
            dataset.order(seed=config.run.seed, rows_per_step=rows),
            global_batch_size=rows,
        ),
        depth=config.data.prefetch_batches,
        timeout_seconds=config.data.timeout_seconds,
        place=lambda batch: (batch, meshes.place_batch(mesh, meshes.pack(batch.arrays))),
    ) as prefetch:
        started, cursor = 0.0, 0
        for index in range(PIPELINE_BATCHES + 1):
            if index == 1:
                started = time.perf_counter()
            fed = prefetch.get(cursor)
            assert isinstance(fed, tuple)
            cursor = fed[0].next_cursor
        seconds = time.perf_counter() - started
    return PIPELINE_BATCHES * rows * dataset.tokens_per_row / seconds


def interval(values: list[float], *, draws: int = 2000) -> tuple[float, float, float]:
    """Returns the median and the bootstrapped 95 % interval of it."""
    chosen = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    low, high = np.quantile(np.median(np.asarray(values)[chosen], axis=1), [0.025, 0.975])
    return statistics.median(values), float(low), float(high)


def table(name: str, pairs: list[tuple[float, float]]) -> float:
    """Prints both loops' medians and the ratio with its interval; returns the ratio."""
    ours, bare = (1e3 * statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio, low, high = interval([a / b for a, b in pairs])
    print(
        f"  {name:<22} jaxres {ours:7.2f} ms   bare loop {bare:7.2f} ms   "
        f"ratio {ratio:.3f} (95 % interval of the median {low:.3f} to {high:.3f})"
    )
    return ratio


def main() -> int:
    """Measures and prints; returns 1 if jaxres is slower than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=25, help="steps a block")
    parser.add_argument("--live", action="store_true", help="the progress bar of a terminal")
    parser.add_argument("--tensorboard", action="store_true", help="event files too")
    parser.add_argument("--save-every", type=int, default=NEVER, help="steps between saves")
    parser.add_argument("--parts", action="store_true", help="only the host time, by part")
    parser.add_argument(
        "overrides", nargs="*", help="section.field=value, on top of the small model"
    )
    options = parser.parse_args()
    board = f"telemetry.tensorboard={str(options.tensorboard).lower()}"
    small = configs.load(CONFIG, [*SMALL, board, "run.dir=bench", *options.overrides]).config
    if options.parts:
        with built(small, live=options.live) as parts:
            print_parts(parts.run)
        return 0
    with built(small, live=options.live) as parts:
        pairs = take_turns(
            parts.run, blocks=options.blocks, steps=options.steps, save_every=options.save_every
        )
    print(f"{options.blocks} blocks of {options.steps} steps, in turns")
    ratio = table("wall time", [(a.wall, b.wall) for a, b in pairs])
    table("CPU time, all threads", [(a.cpu, b.cpu) for a, b in pairs])
    with built(small, live=options.live) as parts:
        own, all_threads = host_seconds(parts.run)
        print(
            f"jaxres' own host time: {1e6 * own:.0f} us a step in the loop's thread, "
            f"{1e6 * all_threads:.0f} us with its background threads (CPU time)"
        )
    quickstart = configs.load(CONFIG, ["run.dir=bench"]).config
    with built(quickstart, live=False) as parts:
        bare = Bare(parts.run)
        bare.cost(QUICKSTART_STEPS)
        used = parts.run.data_loader.tokens_per_step / bare.cost(QUICKSTART_STEPS).wall
    delivered = pipeline_tokens_per_second(quickstart)
    print(
        f"input pipeline: {delivered:,.0f} tokens/s, {delivered / used:.0f} times what the "
        f"quickstart's model takes ({used:,.0f} tokens/s)"
    )
    if options.save_every == NEVER and ratio > LIMIT:
        print(f"FAIL: the ratio is above {LIMIT}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
