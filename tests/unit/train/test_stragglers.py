"""A slow host is named and a lower throughput reported, without false reports under noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from jaxres.config.schema_training import ThroughputSection
from jaxres.runlog.events import (
    Evaluated,
    Event,
    PhaseChanged,
    SaveCommitted,
    SaveStarted,
    StragglerFound,
    StragglerRecovered,
    ThroughputDropped,
    ThroughputRecovered,
    TrainingStarted,
)
from jaxres.train.host_times import TIMED_STEPS, Times
from jaxres.train.performance_guard import PerformanceGuard, Place

ONSET = 1050
DEVICES_A_HOST = 2
STEP, BUSY, PROBE = 0.5, 0.02, 0.001


@dataclasses.dataclass
class FakeClock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclasses.dataclass
class Job:
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
    events: list[Event] = dataclasses.field(default_factory=list)

    def run(self, num_steps: int) -> list[Event]:
        """Simulates so many steps with the default settings; returns the reports."""
        self.clock, chance = FakeClock(), np.random.default_rng(self.seed)
        places = [
            Place(host, host * DEVICES_A_HOST + i, "H100")
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


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 16])
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_ten_thousand_clean_steps_cause_no_report(num_hosts, noise):
    assert Job(num_hosts, seed=num_hosts, noise=noise).run(10_000) == []


@pytest.mark.parametrize("num_hosts", [2, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_host_whose_devices_are_slower_by_1_3_is_named_within_50_steps(num_hosts, seed):
    job = Job(num_hosts, seed, compute=lambda host, step: 1 + 0.3 * (host == 1 and step > ONSET))
    events = job.run(ONSET + 150)
    found = [event for event in events if isinstance(event, StragglerFound)]
    assert found[0].step <= ONSET + 50
    assert {event.host for event in found} == {1}
    assert {device for event in found for device in event.devices} == {2, 3}
    assert all("device" in event.reason and event.cause == "device" for event in found)
    assert all(event.step > ONSET for event in events)
    (dropped,) = [event for event in events if isinstance(event, ThroughputDropped)]
    assert (dropped.cause, dropped.host, dropped.kind) == ("device", 1, "steps")


@pytest.mark.parametrize("num_hosts", [2, 3, 16])
@pytest.mark.parametrize("cause", ["data", "host"])
def test_a_host_that_works_longer_than_its_devices_is_named_within_50_steps(num_hosts, cause):
    job = Job(
        num_hosts,
        seed=0,
        work=lambda host, step: 1.3 * STEP * (host == 0 and step > ONSET),
        waits_for_data=cause == "data",
    )
    events = job.run(ONSET + 150)
    (found,) = [event for event in events if isinstance(event, StragglerFound)]
    assert (found.host, found.devices, found.cause) == (0, (), cause)
    assert found.step <= ONSET + 50
    (dropped,) = [event for event in events if isinstance(event, ThroughputDropped)]
    assert (dropped.host, dropped.cause) == (0, cause)


def test_a_host_that_the_others_wait_for_at_the_usual_speed_is_not_reported():
    job = Job(3, seed=0, work=lambda host, step: 1.3 * STEP * (host == 0))
    assert job.run(2000) == []


def test_work_of_a_host_that_its_devices_hide_is_not_reported():
    job = Job(3, seed=0, work=lambda host, step: 0.5 * STEP * (host == 0))
    assert job.run(2000) == []


def test_a_recovery_is_reported():
    is_slow = lambda step: ONSET < step <= ONSET + 200  # noqa: E731
    job = Job(3, 0, compute=lambda host, step: 1.3 if host == 1 and is_slow(step) else 1.0)
    events = job.run(ONSET + 600)
    slow: set[int] = set()
    for event in events:
        if isinstance(event, StragglerFound):
            slow |= set(event.devices)
        elif isinstance(event, StragglerRecovered):
            slow -= set(event.devices)
            assert event.num_left == len(slow)
    dropped = {event.number for event in events if isinstance(event, ThroughputDropped)}
    recovered = {event.number for event in events if isinstance(event, ThroughputRecovered)}
    assert dropped == recovered
    assert dropped
    assert not slow


def test_a_lower_throughput_is_attributed_to_all_devices_or_to_an_unknown_cause():
    job = Job(3, seed=0, compute=lambda host, step: 1.3 if step > ONSET else 1.0)
    (hot,) = job.run(ONSET + 100)
    assert isinstance(hot, ThroughputDropped)
    assert (hot.cause, hot.host) == ("devices", None)
    job = Job(3, seed=0, wait=lambda step: 0.3 * STEP * (step > ONSET))
    (unknown,) = job.run(ONSET + 100)
    assert isinstance(unknown, ThroughputDropped)
    assert unknown.cause == "unknown"


def test_nothing_is_reported_before_it_has_lasted_for_min_seconds():
    for min_seconds, expected in ((0.0, True), (1e6, False)):
        events: list[Event] = []
        guard = PerformanceGuard(
            ThroughputSection(min_seconds=min_seconds),
            places=[Place(0, 0, "cpu"), Place(1, 1, "cpu")],
            tokens_per_step=1,
            reports=True,
            emit=events.append,
            clock=FakeClock(),
        )
        for step in range(1, 401):
            slow = 0.4 if step > 200 else 0.1 + step * 1e-6
            times = Times((slow, 0.01), (0.0, 0.0), (0.0, 0.0))
            guard.on_times(step, slow, dataclasses.replace(times) if step % 5 else times)
        assert bool(events) == expected
