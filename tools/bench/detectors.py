"""Benchmark of the detectors: recall of planted faults, false flags, latency, and cost.

    python tools/bench/detectors.py [--series 40]

Seeded series with the default settings, through the functions that a run uses. Recall: planted
faults that were flagged. False: flags per 1,000 steps (or reads) without a fault. Latency: from
the first bad step to its flag. Cost: processor time of the host for a step (read, reading or
start), the median of all calls; the guards inside the step are part of the device's program, and
`tools/bench/guards.py` measures them. docs/guards.md has the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxres.config.schema.hardware import HealthSection  # noqa: E402
from jaxres.config.schema.optimizer import SgdOptimizer  # noqa: E402
from jaxres.config.schema.supervision import DeadlinesSection  # noqa: E402
from jaxres.config.schema.training import RollbackSection, SpikesSection  # noqa: E402
from jaxres.data import find_bad_rows, find_hung_row  # noqa: E402
from jaxres.engine import grad_norm_stats, optimizer  # noqa: E402
from jaxres.engine import state as states  # noqa: E402
from jaxres.engine import step as steps  # noqa: E402
from jaxres.engine.divergence import losses  # noqa: E402
from jaxres.engine.guards import StepObservation  # noqa: E402
from jaxres.faults import Continue  # noqa: E402
from jaxres.models import Model  # noqa: E402
from jaxres.runlog.events import StragglerFound  # noqa: E402
from jaxres.supervisor.health import host_health  # noqa: E402
from jaxres.supervisor.health.host_health import HostReading  # noqa: E402
from jaxres.supervisor.process.watchdog import ProgressTracker, limit_seconds  # noqa: E402
from jaxres.telemetry.heartbeat import PhaseEntered, StepFinished  # noqa: E402
from tests.unit.train.simulated_job import SimulatedJob  # noqa: E402

STEPS, ROWS = 1000, 8
ONSET = 1050
"""Step from which on a simulated host is slow."""


@dataclass
class Tally:
    """Counts of detected and missed faults, and of false flags."""

    planted: int = 0
    found: int = 0
    clean: int = 0
    false: int = 0
    latencies: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    """Processor time of each call of the detector, in seconds."""

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Measures a call of the detector."""
        began = time.thread_time()
        yield
        self.costs.append(time.thread_time() - began)

    def line(self, name: str, fault: str, *, unit: str = "steps") -> str:
        """Returns a row of the table."""
        late = f"{statistics.median(self.latencies):g}" if self.latencies else "-"
        worst = f" (at most {max(self.latencies):g})" if len(set(self.latencies)) > 1 else ""
        found = f"{self.found} of {self.planted}"
        cost = f"{1e6 * statistics.median(self.costs):.3g} us" if self.costs else "in the step"
        return (
            f"| {name} | {fault} | {found} | {1000 * self.false / max(1, self.clean):.2f} "
            f"| {late}{worst} {unit if self.latencies else ''} | {cost} |"
        )


def planted_steps(chance: random.Random, *, count: int, first: int = 300) -> list[int]:
    """Draws steps that are far enough apart to be separate faults."""
    slots = range(first, STEPS - 60, 120)
    return sorted(slot + chance.randrange(50) for slot in chance.sample(list(slots), count))


def nonfinite(series: int) -> Tally:
    """Rows whose loss, or only whose gradient, is NaN or infinite, in the real step."""

    @jax.custom_vjp
    def spoil(x_B: Any, bad_B: Any) -> Any:
        return x_B

    spoil.defvjp(lambda x, bad: (x, bad), lambda bad, ct: (ct * bad, None))

    def loss(params: Any, batch: Any, key: Any) -> Any:
        x_B = (batch["x_B"] * params["w"] - 1.0) ** 2
        return spoil(x_B, batch["gradient_B"]) + batch["loss_B"], jnp.ones_like(x_B)

    model = Model(
        init=lambda key: {"w": jnp.ones(())},
        axes={"w": ()},
        loss=loss,
        logits=None,
        flops_per_token=0.0,
    )
    tx = optimizer.build(SgdOptimizer(), axes={"w": (None,)})
    function = jax.jit(
        steps.make_train_step(
            model,
            tx,
            lambda step: jnp.float32(1e-4),
            steps.StepSettings(
                clip_norm=1.0,
                microbatches=1,
                spikes=SpikesSection(),
            ),
        )
    )
    tally = Tally()
    for seed in range(series):
        chance, draw = random.Random(seed), np.random.default_rng(seed)
        state = states.init(model, tx, seed=0)
        form = steps.MetricsLayout.of(state, num_rows=ROWS)
        bad = set(chance.sample(range(100), 5))
        for step in range(100):
            spoilt, fine = np.zeros(ROWS, np.float32), np.ones(ROWS, np.float32)
            if step in bad:
                value = chance.choice([math.nan, math.inf, -math.inf])
                chance.choice([spoilt, fine])[chance.randrange(ROWS)] = value
            x_B = 1 + 0.1 * draw.standard_normal(ROWS).astype(np.float32)
            state, values = function(state, {"x_B": x_B, "loss_B": spoilt, "gradient_B": fine})
            count(tally, step in bad, not form.read(np.asarray(values))[0].applied)
    return tally


def count(tally: Tally, is_planted: bool, is_flagged: bool, latency: float = 0.0) -> None:
    """Adds one step."""
    tally.planted += is_planted
    tally.clean += not is_planted
    tally.found += is_planted and is_flagged
    tally.false += is_flagged and not is_planted
    if is_planted and is_flagged:
        tally.latencies.append(latency)


def spikes(series: int, *, factor: float, deviations: float) -> Tally:
    """Gradient norms that spread by 15 % and drift, of which some are a multiple of the usual."""
    section = SpikesSection()

    @jax.jit
    def scores(values: Any) -> Any:
        def one(usual: Any, norm: Any) -> Any:
            return grad_norm_stats.update(usual, norm, section), grad_norm_stats.score(
                usual, norm, section
            )

        return jax.lax.scan(one, grad_norm_stats.init(), values)[1]

    tally = Tally()
    for seed in range(series):
        bad = planted_steps(random.Random(seed), count=4)
        draw = np.random.default_rng(seed)
        values = np.exp(0.15 * draw.standard_normal(STEPS) - 0.5 * np.arange(STEPS) / STEPS)
        values[bad] = values[bad] * factor
        flagged = np.asarray(scores(values.astype(np.float32))) >= deviations
        for step in range(STEPS):
            count(tally, step in bad, bool(flagged[step]))
    return tally


def no_fault(series: int, make: Callable[[random.Random, int], float]) -> Tally:
    """Losses without a fault."""
    tally = Tally()
    for seed in range(series):
        chance, guard = random.Random(seed), losses(RollbackSection())
        memory = guard.init()
        for step in range(4 * STEPS):
            seen = seen_at(step, make(chance, step))
            with tally.call():
                memory, verdict = guard.judge(memory, seen)
            count(tally, False, not isinstance(verdict, Continue))
    return tally


def seen_at(step: int, loss: float) -> StepObservation:
    """Returns a step in which only the loss matters."""
    return StepObservation(
        step=step,
        rows=(step, step + 1),
        loss=loss,
        grad_norm=1.0,
        spike_score=0.0,
        applied=True,
        state_is_finite=True,
    )


NO_FAULTS: dict[str, Callable[[random.Random, int], float]] = {
    "nothing; small losses that spread by 50 %": lambda chance, step: (
        0.05 * math.exp(0.5 * chance.gauss(0, 1))
    ),
    "nothing; noise of 15 %, and 5 % outliers of twice the loss": lambda chance, step: (
        3 + chance.gauss(0, 0.45) + 3 * (chance.random() < 0.05)
    ),
    "nothing; 40 % higher for every other 500 steps": lambda chance, step: (
        3 * (1.4 if step // 500 % 2 else 1) + chance.gauss(0, 0.1)
    ),
}


def high_losses(series: int, *, factor: float, length: int) -> Tally:
    """Falling, noisy losses with single outliers; some stay high for a while."""
    tally = Tally()
    for seed in range(series):
        chance, guard = random.Random(seed), losses(RollbackSection())
        memory, onset, bad = guard.init(), 0, planted_steps(chance, count=3)
        found: set[int] = set()
        for step in range(STEPS):
            usual = 2.5 + 4 * math.exp(-step / 150)
            loss = usual + chance.gauss(0, 0.08) + 4 * (chance.random() < 0.01)
            onset = max((b for b in bad if b <= step), default=-length)
            is_high = step - onset < length and onset not in found
            seen = seen_at(step, loss + (factor - 1) * usual * is_high)
            with tally.call():
                memory, verdict = guard.judge(memory, seen)
            if isinstance(verdict, Continue):
                tally.clean += not is_high
            elif is_high:
                found.add(onset)
                tally.latencies.append(step - onset)
            else:
                tally.false += 1
        tally.planted, tally.found = tally.planted + len(bad), tally.found + len(found)
    return tally


def hangs(series: int, *, usual: float, slow: float) -> Tally:
    """Steps of which one in 50 is slower by a factor, and a last one that never ends."""
    limits, tally = DeadlinesSection(), Tally()
    for seed in range(series):
        chance = random.Random(seed)
        watch = ProgressTracker(last_progress=0.0).on_status(PhaseEntered("train"), now=0.0)
        now = 0.0
        for step in range(1, STEPS):
            seconds = usual * math.exp(chance.gauss(0, 0.2))
            seconds *= slow if chance.random() < 0.02 else 1
            tally.clean += 1
            now += seconds
            with tally.call():
                limit = limit_seconds(watch, limits)
                watch = watch.on_status(StepFinished(step, seconds), now=now)
            tally.false += seconds > limit
        tally.planted += 1
        tally.found += 1  # A limit is finite: what never ends is always found.
        tally.latencies.append(round(limit_seconds(watch, limits), 1))
    return tally


class FaultyRows:
    """Rows of which some raise or hang."""

    def __init__(self, errors: dict[int, Exception], hang: set[int] | None = None) -> None:
        self.errors, self.hang, self.free = errors, hang or set(), threading.Event()

    def __len__(self) -> int:
        return 10**6

    def rows(self, ids: Any) -> dict[str, Any]:
        """Reads."""
        for row in ids.tolist():
            if row in self.hang:
                self.free.wait()
            if row in self.errors:
                raise self.errors[row]
        return {"x": ids}


def bad_records(series: int) -> Tally:
    """Records that can't be decoded; and storage that does not answer: not a record's fault."""
    tally = Tally()
    undecodable = UnicodeDecodeError("utf-8", b"?", 0, 1, "no text")
    own = [ValueError("broken"), KeyError("x"), OSError("no image"), undecodable]
    away = [OSError(errno.EIO, "io"), ConnectionResetError(), TimeoutError(), MemoryError()]
    for seed in range(100 * series):
        chance, ids = random.Random(seed), np.arange(24)
        bad = set(chance.sample(range(24), chance.choice([0, 1, 2])))
        is_storage = bool(bad) and chance.random() < 0.5
        rows = FaultyRows({row: chance.choice(away if is_storage else own) for row in bad})
        try:
            with tally.call():
                found = set(find_bad_rows(rows, ids))
        except (OSError, MemoryError):
            found = set()
        for row in range(24):
            count(tally, row in bad and not is_storage, row in found)
    return tally


def hung_records(series: int) -> Tally:
    """One row that hangs among others; or all storage hangs: not a record's fault."""
    tally = Tally()
    for seed in range(series):
        chance, ids = random.Random(seed), np.arange(24)
        is_storage = chance.random() < 0.5
        bad = set(chance.sample(range(24), chance.randrange(2, 24) if is_storage else 1))
        rows = FaultyRows({}, bad)
        with tally.call():
            found = find_hung_row(rows, ids, seconds=0.05)
        rows.free.set()
        count(tally, not is_storage, found in bad)
    return tally


def leaks(series: int, *, minutes_left: float) -> Tally:
    """Memory of a run, each minute: noise of 50 MB, 300 MB more in every third minute (a save).

    In half of the series it also grows from the 30th minute on, at the rate that uses up the rest
    in so many minutes.
    """
    tally, section = Tally(), HealthSection()
    for seed in range(2 * series):
        chance, onset, total = random.Random(seed), 30 if seed % 2 else 10**9, 40e9
        rate, readings, found = (total - 10e9) / minutes_left, [], None
        for minute in range(120):
            used = 10e9 + rate * max(0, minute - onset) + chance.gauss(0, 50e6)
            used += 300e6 * (minute % 3 == 0) + 5e9 * min(1.0, minute / 5)
            reading = HostReading(60.0 * minute, round(used), round(total - used), None)
            readings = [*readings, reading][-host_health.NUM_READINGS :]
            with tally.call():
                is_found = bool(host_health.judge(readings, section))
            if minute < onset:
                count(tally, False, is_found)
            elif is_found and found is None:
                found = minute - onset
        if seed % 2:
            count(tally, True, found is not None, found or 0)
    return tally


def slow_hosts(series: int, *, factor: float, noise: float) -> Tally:
    """Jobs of three hosts with two devices each; the devices of one take longer from a step on."""
    tally = Tally()
    for seed in range(series):
        job = SimulatedJob(
            num_hosts=3,
            seed=seed,
            noise=noise,
            compute=lambda host, step: factor if host == 1 and step > ONSET else 1.0,
            around=tally.call,
        )
        events = job.run(ONSET + 200)
        named = [event for event in events if isinstance(event, StragglerFound)]
        right = [event.step - ONSET for event in named if event.step > ONSET and event.host == 1]
        count(tally, True, bool(right), right[0] if right else 0)
        tally.clean += ONSET
        tally.false += sum(event.step <= ONSET or event.host != 1 for event in named)
    return tally


def table(series: int) -> Iterator[str]:
    """Yields the table, row by row."""
    yield "| detector | planted | found | false per 1,000 | latency | cost |"
    yield "|---|---|---|---|---|---|"
    yield nonfinite(series // 4).line("non-finite step", "NaN, inf in a row's loss or gradient")
    section = SpikesSection()
    bands: list[tuple[str, float | None]] = [
        ("clip band", section.clip_deviations),
        ("skip band", section.skip_deviations),
    ]
    for name, deviations in bands:
        for factor in (2, 3, 5, 10, 100):
            tally = spikes(series, factor=factor, deviations=deviations or math.inf)
            yield tally.line(name, f"a norm {factor} times the usual")
    cases: list[tuple[float, int]] = [(1.3, 20), (1.6, 20), (2, 20), (4, 20), (2, 5), (2, 4)]
    for factor, length in cases:
        tally = high_losses(series, factor=factor, length=length)
        yield tally.line("high loss", f"{factor:g} times the usual for {length} steps")
    for name, make in NO_FAULTS.items():
        yield no_fault(series, make).line("high loss", name)
    for usual, slow in ((0.02, 100), (5.0, 5), (5.0, 12)):
        tally = hangs(series, usual=usual, slow=slow)
        name = f"steps of {usual:g} s, one in 50 {slow} times slower, then one that never ends"
        yield tally.line("step deadline", name, unit="s")
    yield bad_records(series).line("bad record", "decoding errors; storage errors beside")
    yield hung_records(series).line("hung record", "one row; or the storage (several rows)")
    for factor, noise in ((1.3, 0.02), (1.3, 0.05), (1.3, 0.1), (1.15, 0.05)):
        name = f"devices of a host {factor:g} times slower; steps spread by {noise:.0%}"
        yield slow_hosts(series, factor=factor, noise=noise).line("slow host", name)
    for minutes in (30, 60, 240):
        name = f"growth that uses up the memory in {minutes} minutes; saves beside"
        yield leaks(series, minutes_left=minutes).line("leak", name, unit="minutes")


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=40)
    for row in table(parser.parse_args().series):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
