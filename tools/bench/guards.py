"""Benchmark of the guards inside the step: the step with all of them against one without.

    python tools/bench/guards.py [--blocks 40] [--steps 25]

The step without is a usual one (mean loss, gradient, clipping by optax, update), on
the same model, optimizer and rows; both are compiled in this process and take turns. Prints the
ratio with its interval, and XLA's memory analysis of both. Exits 1 above 1.03.

    python tools/bench/guards.py --copies 2

The comparison of the state's copies on so many devices (on CPU: virtual ones): blocks of steps with
one after each step against blocks without. The difference, over guards.corruption.every_steps, is
what a step costs more. Exits 1 above 1.005.

    python tools/bench/guards.py --all [--blocks 40] [--steps 100] [--devices 2]

All guards of a run at their default settings: two real training loops in this process, one with
the defaults and one with every guard off, take turns in blocks of steps. A block has comparisons of
copies and probes of the devices as often as a run has them. Evaluations and saves are left out. A
reading of the host by the health guard, which is in another process, is timed apart and added as if
its time were taken from the step. Prints the ratio with its interval. Exits 1 above 1.01.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", str(len(os.sched_getaffinity(0))))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import step as loops  # tools/bench/step.py

from jaxres import config as configs
from jaxres import models
from jaxres.clock import SystemClock
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.optimizer import AdamwOptimizer, CosineSchedule
from jaxres.config.schema.run_config import MeshSection
from jaxres.config.schema.training import CorruptionSection, GuardsSection
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, replica_fingerprint
from jaxres.engine import schedule as schedules
from jaxres.engine import state as states
from jaxres.engine import step as steps
from jaxres.supervisor.health import host_health
from jaxres.train.components import Trainer
from jaxres.train.loop import train

LIMIT, COPIES_LIMIT, ALL_LIMIT = 1.03, 1.005, 1.01
OFF = (
    *("guards.rollback=null", "guards.bad_records=null", "guards.corruption=null"),
    *("guards.throughput=null", "guards.spikes=null", "guards.diagnostics=none"),
    *("guards.max_skips_in_a_row=null", "guards.max_skips=null", "hardware.health=null"),
)
"""Settings without which nothing but the mask of a non-finite step is left."""
BLOCK_STEPS, ALL_BLOCK_STEPS = 25, 100
READINGS = 50
ROWS, LENGTH, VOCAB = 24, 96, 256
MODEL = GptModel(num_layers=1, d_model=64, num_heads=2, compute_dtype="float32")
"""A step of about 20 ms on two cores."""
CLIP_NORM = 1.0


def rows(num: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Returns one batch of random tokens."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (num, length + 1), dtype=np.int32)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "segment_ids_BT": np.ones((num, length), np.int32),
        "positions_BT": np.tile(np.arange(length, dtype=np.int32), (num, 1)),
        "weights_BT": np.ones((num, length), np.float32),
    }


def bare_step(model: Any, tx: Any, rate: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a usual train step."""
    clip = optax.clip_by_global_norm(CLIP_NORM)

    def step(state: states.TrainState, batch: Any) -> Any:
        next_key, key = jax.random.split(jax.random.wrap_key_data(state.key))

        def mean_loss(params: Any) -> Any:
            loss_B, weight_B = model.loss(params, batch, key)
            return jnp.sum(loss_B) / jnp.sum(weight_B)

        loss, grads = jax.value_and_grad(mean_loss)(state.params)
        norm = optax.tree.norm(grads)
        grads, _ = clip.update(grads, clip.init(state.params))
        direction, opt = tx.update(grads, state.opt, state.params)
        count = state.step + 1
        params = jax.tree.map(lambda p, d: p - rate(count) * d, state.params, direction)
        after = states.TrainState(
            params=params, opt=opt, key=jax.random.key_data(next_key), step=count, norms=state.norms
        )
        return after, jnp.stack([loss, norm])

    return step


def seconds(step: Any, state: Any, batch: Any, *, count: int) -> tuple[float, Any]:
    """Returns the seconds of a step, and the state after `count` of them."""
    started = time.perf_counter()
    for _ in range(count):
        state, metrics = step(state, batch)
        np.asarray(metrics)
    return (time.perf_counter() - started) / count, state


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Returns the median and the bootstrapped 95 % interval of it."""
    chosen = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    low, high = np.quantile(np.median(np.asarray(ratios)[chosen], axis=1), [0.025, 0.975])
    return statistics.median(ratios), float(low), float(high)


def compiled_step(
    mesh: Any,
    batch: dict[str, np.ndarray],
    *,
    model: GptModel = MODEL,
    microbatches: int = 1,
    spikes: Any = None,
    reduction: Any = None,
) -> tuple[Any, Any, Any]:
    """Returns a compiled step on a mesh, its first state, and the batch in its place."""
    keep = meshes.pin_batch_dim(mesh) if reduction is None else lambda x: x
    length = batch["tokens_BT"].shape[1]
    built = models.build(
        model, vocab_size=VOCAB, seq_len=length, platform=jax.default_backend(), keep_rows=keep
    )
    tx = optimizer.build(AdamwOptimizer(), axes=built.axes)
    rate = schedules.learning_rate(CosineSchedule(), peak=3e-4, total_steps=10_000)
    step = steps.make_train_step(
        built,
        tx,
        rate,
        steps.StepSettings(
            clip_norm=CLIP_NORM,
            microbatches=microbatches,
            spikes=spikes,
            reduction=reduction,
        ),
    )
    bare = jax.eval_shape(lambda: states.init(built, tx, seed=0))
    shardings = states.shardings(bare, built, mesh)
    state = jax.jit(lambda: states.init(built, tx, seed=0), out_shardings=shardings)()
    placed = meshes.place_batch(mesh, batch)
    results = (shardings, meshes.replicated(mesh))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=results)
    return jitted.lower(state, placed).compile(), state, placed


def copies(num_devices: int, *, blocks: int, steps_a_block: int) -> int:
    """Measures the comparison of the copies; returns 1 if the ratio is above the limit."""
    mesh = meshes.build(MeshSection(), devices=jax.devices()[:num_devices])
    compiled, state, batch = compiled_step(mesh, rows(), spikes=GuardsSection().spikes)
    fingerprints = jax.jit(replica_fingerprint.make(state, mesh)).lower(state).compile()

    def compared(state: Any, batch: Any) -> Any:
        state, metrics = compiled(state, batch)
        np.asarray(fingerprints(state))
        return state, metrics

    pairs = []
    for block in range(blocks + 2):
        found = [0.0, 0.0]
        for side in (0, 1) if block % 2 else (1, 0):
            function = (compared, compiled)[side]
            found[side], state = seconds(function, state, batch, count=steps_a_block)
        if block >= 2:
            pairs.append(found)
    every = CorruptionSection().every_steps
    alone = 1e3 * statistics.median(pair[1] for pair in pairs)
    ratio, low, high = interval([1 + (a / b - 1) / every for a, b in pairs])
    cost = 1e3 * statistics.median(a - b for a, b in pairs)
    print(
        f"{num_devices} copies of {sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6:.2f} MB: "
        f"a comparison {cost:.2f} ms, a step {alone:.2f} ms; one in {every} steps: ratio "
        f"{ratio:.5f} (95 % interval of the median {low:.5f} to {high:.5f})"
    )
    if ratio > COPIES_LIMIT:
        print(f"FAIL: the ratio is above {COPIES_LIMIT}")
        return 1
    return 0


@dataclass
class Turns:
    """Two loops of which one runs at a time, for a block of steps each."""

    steps_a_block: int
    turn: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Seconds of a step in each block, of each loop."""
    ended: set[int] = field(default_factory=set)

    def wrapped(self, side: int, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of a loop, which waits for the loop's turn before each block."""
        calls, began = 0, 0.0

        def call(state: Any, *inputs: Any) -> Any:
            nonlocal calls, began
            if calls % self.steps_a_block == 0:
                jax.block_until_ready(state)
                if calls:
                    self.seconds[side].append((time.perf_counter() - began) / self.steps_a_block)
                self.pass_on(side)
                self.wait(side)
                began = time.perf_counter()
            calls += 1
            return step(state, *inputs)

        return call

    def wait(self, side: int) -> None:
        """Waits for a loop's turn."""
        with self.changed:
            self.changed.wait_for(lambda: self.turn == side or 1 - side in self.ended)
        time.sleep(loops.SETTLE_SECONDS)

    def pass_on(self, side: int) -> None:
        """Gives the turn to the other loop."""
        with self.changed:
            self.turn = 1 - side
            self.changed.notify_all()

    def run(self, side: int, trainer: Trainer, *, num_steps: int) -> None:
        """Runs a loop to its end, never beside the other: their collectives may lack threads."""
        self.wait(side)
        try:
            train(loops.short(trainer, steps=num_steps, step=self.wrapped(side, trainer.step)))
        finally:
            self.ended.add(side)
            self.pass_on(side)


def reading_seconds() -> float:
    """Returns the median time of one reading of the host by the health guard."""
    clock, seconds = SystemClock(), []
    for _ in range(READINGS):
        began = time.perf_counter()
        host_health.read(Path(tempfile.gettempdir()), supervisor=os.getpid(), clock=clock)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def all_guards(*, blocks: int, steps_a_block: int) -> int:
    """Measures a loop with all guards; returns 1 if the ratio is above the limit."""
    settings = ([], OFF)
    turns, num_steps = Turns(steps_a_block), (blocks + loops.WARM_BLOCKS) * steps_a_block + 1
    with contextlib.ExitStack() as stack:
        trainers = []
        for off in settings:
            chosen = [*loops.SMALL, "run.dir=bench", *off]
            config = configs.load(loops.CONFIG, chosen).config
            trainers.append(stack.enter_context(loops.built(config, live=False)).run)
        threads = [
            threading.Thread(
                target=turns.run, args=(side, trainer), kwargs={"num_steps": num_steps}
            )
            for side, trainer in enumerate(trainers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    pairs = list(zip(*turns.seconds, strict=True))[loops.WARM_BLOCKS :]
    assert len(pairs) == blocks, "a loop has ended early"
    share = reading_seconds() / host_health.READ_SECONDS
    ratio, low, high = interval([a / b + share for a, b in pairs])
    on, off_ms = (1e3 * statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    print(
        f"{blocks} blocks of {steps_a_block} steps on {jax.device_count()} devices: all guards "
        f"{on:.2f} ms, none {off_ms:.2f} ms; readings of the host {1e6 * share:.1f} us a second: "
        f"ratio {ratio:.4f} (95 % interval of the median {low:.4f} to {high:.4f})"
    )
    if ratio > ALL_LIMIT:
        print(f"FAIL: the ratio is above {ALL_LIMIT}")
        return 1
    return 0


def main() -> int:
    """Measures and prints; returns 1 if the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, help="steps a block (25; with --all 100)")
    parser.add_argument("--copies", type=int, default=0, help="compare copies on so many devices")
    parser.add_argument("--all", action="store_true", help="all guards of a run, in real loops")
    parser.add_argument("--devices", type=int, default=2, help="of --all, virtual ones on a CPU")
    options = parser.parse_args()
    if options.all:
        jax.config.update("jax_num_cpu_devices", options.devices)
        return all_guards(blocks=options.blocks, steps_a_block=options.steps or ALL_BLOCK_STEPS)
    options.steps = options.steps or BLOCK_STEPS
    if options.copies:
        jax.config.update("jax_num_cpu_devices", options.copies)
        return copies(options.copies, blocks=options.blocks, steps_a_block=options.steps)
    model = models.build(MODEL, vocab_size=VOCAB, seq_len=LENGTH, platform=jax.default_backend())
    tx = optimizer.build(AdamwOptimizer(), axes=model.axes)
    rate = schedules.learning_rate(CosineSchedule(), peak=3e-4, total_steps=10_000)
    guarded = steps.make_train_step(
        model,
        tx,
        rate,
        steps.StepSettings(
            clip_norm=CLIP_NORM,
            microbatches=1,
            spikes=GuardsSection().spikes,
        ),
    )
    batch = {name: jnp.asarray(array) for name, array in rows().items()}
    start = jax.jit(lambda: states.init(model, tx, seed=0))
    compiled, at, pairs = [], [], []
    for function in (guarded, bare_step(model, tx, rate)):
        compiled.append(jax.jit(function, donate_argnums=0).trace(start(), batch).lower().compile())
        at.append(start())
    for block in range(options.blocks + 2):
        found = [0.0, 0.0]
        for side in (0, 1) if block % 2 else (1, 0):
            found[side], at[side] = seconds(compiled[side], at[side], batch, count=options.steps)
        if block >= 2:
            pairs.append(found)
    ratio, low, high = interval([a / b for a, b in pairs])
    ours, bare = (1e3 * statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    print(
        f"guards on {ours:.2f} ms, off {bare:.2f} ms: ratio {ratio:.3f} "
        f"(95 % interval of the median {low:.3f} to {high:.3f})"
    )
    for name, program in zip(("on", "off"), compiled, strict=True):
        memory = program.memory_analysis()
        print(
            f"guards {name}: temporaries {memory.temp_size_in_bytes / 1024:,.0f} KiB, donated "
            f"{memory.alias_size_in_bytes / 1024:,.0f} KiB"
        )
    if ratio > LIMIT:
        print(f"FAIL: the ratio is above {LIMIT}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
