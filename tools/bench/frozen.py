"""Benchmark of saves of a state that is mostly frozen: linked, against written each time.

    python tools/bench/frozen.py [--megabytes 512] [--frozen 0.95] [--rounds 5] [--dir DIR]

The frozen part is as large in a LoRA run. Both ways save the same states, one after the
other, in one process; a step that donates the state lies between two saves. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from checkpoint import CLAIM

from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.checkpoint.write.frozen_arrays import sums_of
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import SingleHost
from jaxres.config.schema.checkpoint import CheckpointSection, KeepSection
from jaxres.engine.state import Progress
from jaxres.engine.trainable import Trainable
from jaxres.runlog.events import Event, SaveCommitted
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog

NUM_ARRAYS = 16
COLUMNS = 1024


def make_state(*, size_bytes: int, frozen: float) -> dict[str, Any]:
    """Returns a state of that size with a frozen part (base) and a trained one (lora, moments)."""
    rows = int(size_bytes * frozen / (4 * COLUMNS * NUM_ARRAYS))
    small = max(1, int(size_bytes * (1 - frozen) / (3 * 4 * COLUMNS)))

    @jax.jit
    def made() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), NUM_ARRAYS)
        base = {f"{i:02}": jax.random.normal(key, (rows, COLUMNS)) for i, key in enumerate(keys)}
        trained = jax.random.normal(jax.random.key(1), (small, COLUMNS))
        moments = {"mu": jnp.zeros_like(trained), "nu": jnp.zeros_like(trained)}
        return {"params": {"base": base, "lora": {"a": trained}}, "opt": moments}

    return made()


@partial(jax.jit, donate_argnums=0)
def step(state: dict[str, Any]) -> dict[str, Any]:
    """Stand-in for a training step: passes the frozen part through, and donates the state."""
    lora = jax.tree.map(lambda x: x + 1, state["params"]["lora"])
    moments = jax.tree.map(lambda x: x + 1, state["opt"])
    return {"params": {**state["params"], "lora": lora}, "opt": moments}


def rows_of(
    root: Path, state: dict[str, Any], *, trainable: Trainable, rounds: int
) -> list[tuple[float, float, float, int]]:
    """Returns seconds of the call, of the step after it, of the whole save; and written bytes."""
    run_dir = RunDir(root)
    events: list[Event] = []
    checkpoints = Checkpointer(
        CheckpointSection(keep=KeepSection(last=2), timeout_seconds=600),
        run_dir=run_dir,
        log=RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock()),
        claim=CLAIM,
        peers=SingleHost(),
        emit=events.append,
        before_commit=lambda: None,
        trainable=trainable,
    )
    rows = []
    with checkpoints:
        for number in range(1, rounds + 3):
            state = jax.block_until_ready(step(state))
            began = time.perf_counter()
            checkpoints.save(state, Progress(step=number))
            called = time.perf_counter()
            state = jax.block_until_ready(step(state))
            stepped = time.perf_counter()
            checkpoints.wait()
            ended = time.perf_counter()
            saved = [event for event in events if isinstance(event, SaveCommitted)][-1]
            assert saved.step == number, checkpoints.last_error
            written = saved.bytes - saved.linked_bytes
            rows.append((called - began, stepped - called, ended - began, written))
    return rows[2:]  # The first two compile, and write the frozen part in both ways.


def main() -> int:
    """Measures, and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--frozen", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="folder of the saves; default: that of temporary files")
    options = parser.parse_args()
    make = partial(make_state, size_bytes=options.megabytes * 2**20, frozen=options.frozen)
    base = make()["params"]["base"]
    jax.block_until_ready(sums_of(base))
    times = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        jax.block_until_ready(sums_of(base))
        times.append(time.perf_counter() - began)
    print(f"check that the frozen part is the same: {statistics.median(times):.3f} s")
    frozen = Trainable(frozenset(f"base/{name}" for name in base))
    for name, trainable in (("written", Trainable()), ("linked", frozen)):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
            rows = rows_of(Path(folder), make(), trainable=trainable, rounds=options.rounds)
        call, after, whole, written = (statistics.median(row[i] for row in rows) for i in range(4))
        print(
            f"{name:<8} call {call:.3f} s, step after it {after:.3f} s, whole save {whole:.2f} s, "
            f"{written / 2**20:.1f} MiB written"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
