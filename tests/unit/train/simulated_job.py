"""Times of a simulated job of many hosts, with the reports that the performance guard makes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxres.config.schema.training import ThroughputSection
from jaxres.runlog.events import (
    Evaluated,
    Event,
    PhaseChanged,
    SaveCommitted,
    SaveStarted,
    TrainingStarted,
)
from jaxres.train.checks.host_times import TIMED_STEPS, Times
from jaxres.train.checks.performance_guard import DevicePlace, PerformanceGuard
from tests.manual_clock import ManualClock

DEVICES_A_HOST = 2
STEP, BUSY, PROBE = 0.5, 0.02, 0.001


@dataclasses.dataclass
class SimulatedJob:
    """Simulates the times of a job: noise, pauses, saves and evaluations, and one planted fault."""

    num_hosts: int
    seed: int
    noise: float = 0.05
    compute: Callable[[int, int], float] = lambda host, step: 1.0
    """Factor on the time of the devices of a host at a step."""
    work: Callable[[int, int], float] = lambda host, step: 0.0
    """Seconds that a host works longer by itself at a step."""
    wait: Callable[[int], float] = lambda step: 0.0
    """Seconds that a step takes longer without a host as the cause."""
    waits_for_data: bool = False
    around: Callable[[], Any] = contextlib.nullcontext
    """Makes a context for each call of the guard with the times of a step."""
    events: list[Event] = dataclasses.field(default_factory=list)

    def run(self, num_steps: int) -> list[Event]:
        """Simulates so many steps with the default settings; returns the reports."""
        self.clock, chance = ManualClock(), np.random.default_rng(self.seed)
        places = [
            DevicePlace(host, host * DEVICES_A_HOST + i, "H100")
            for host in range(self.num_hosts)
            for i in range(DEVICES_A_HOST)
        ]
        guard = PerformanceGuard(
            ThroughputSection(min_seconds=0.0),
            places=places,
            tokens_per_step=1000,
            reports=True,
            emit=self.events.append,
            clock=self.clock,
        )
        guard.on_event(TrainingStarted(0, None, "bitwise"))
        busy_of = np.zeros((TIMED_STEPS, self.num_hosts))
        extra_of, times, save_ends = busy_of.copy(), Times(), 0
        for step in range(1, num_steps + 1):
            extra = np.array([self.work(host, step) for host in range(self.num_hosts)])
            busy = BUSY * chance.lognormal(0, 0.2, self.num_hosts) + extra
            busy += chance.exponential(0.2, self.num_hosts) * (chance.random(self.num_hosts) < 0.01)
            factors = [self.compute(host, step) for host in range(self.num_hosts)]
            computed = STEP * max(factors) * chance.lognormal(0, self.noise) + self.wait(step)
            seconds = max(computed * (1.15 if step < save_ends else 1.0), *busy)
            self.clock.now += seconds
            busy_of[step % TIMED_STEPS], extra_of[step % TIMED_STEPS] = busy, extra
            if step % TIMED_STEPS == 0:
                noise = chance.lognormal(0, self.noise, len(places))
                probes = PROBE * noise * np.repeat(factors, DEVICES_A_HOST)
                probes += (chance.random(len(places)) < 0.01) * 5 * PROBE
                data = extra_of.mean(0) if self.waits_for_data else 0 * extra
                times = Times(*map(tuple, (busy_of.mean(0), data, probes)))
            with self.around():
                guard.on_times(step, seconds, times)
            if step % 500 == 0:
                guard.on_event(PhaseChanged("evaluate"))
                self.clock.now += 20 * chance.lognormal(0, self.noise)
                guard.on_event(PhaseChanged("train"))
                guard.on_event(Evaluated(step, 1.0, 1.0, step))
            if step % 200 == 0:
                guard.on_event(SaveStarted(step, 0.1))
                save_ends = step + 30
            if step == save_ends:
                guard.on_event(SaveCommitted(step, "", 0, 15.0))
        return self.events
