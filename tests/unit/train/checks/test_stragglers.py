"""A slow host is named and a lower throughput reported, without false reports under noise."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from jaxres.config.schema.training import ThroughputSection
from jaxres.runlog.events import (
    Event,
    StragglerFound,
    StragglerRecovered,
    ThroughputDropped,
    ThroughputRecovered,
)
from jaxres.train.checks import stragglers
from jaxres.train.checks.host_times import Times
from jaxres.train.checks.performance_guard import DevicePlace, PerformanceGuard
from jaxres.train.checks.stragglers import Comparison, Series
from tests.manual_clock import ManualClock
from tests.tiers import slow_but
from tests.unit.train.simulated_job import STEP, SimulatedJob

ONSET = 1050


@pytest.mark.parametrize(
    ("noise", "num_hosts"),
    slow_but(itertools.product([0.02, 0.05], [1, 2, 3, 16]), (0.05, 1)),
)
def test_ten_thousand_clean_steps_cause_no_report(num_hosts, noise):
    assert SimulatedJob(num_hosts, seed=num_hosts, noise=noise).run(10_000) == []


@pytest.mark.parametrize("num_hosts", [2, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_host_whose_devices_are_slower_by_1_3_is_named_within_50_steps(num_hosts, seed):
    job = SimulatedJob(
        num_hosts, seed, compute=lambda host, step: 1 + 0.3 * (host == 1 and step > ONSET)
    )
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
    job = SimulatedJob(
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
    job = SimulatedJob(3, seed=0, work=lambda host, step: 1.3 * STEP * (host == 0))
    assert job.run(2000) == []


def test_work_of_a_host_that_its_devices_hide_is_not_reported():
    job = SimulatedJob(3, seed=0, work=lambda host, step: 0.5 * STEP * (host == 0))
    assert job.run(2000) == []


def test_a_recovery_is_reported():
    is_slow = lambda step: ONSET < step <= ONSET + 200  # noqa: E731
    job = SimulatedJob(3, 0, compute=lambda host, step: 1.3 if host == 1 and is_slow(step) else 1.0)
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
    job = SimulatedJob(3, seed=0, compute=lambda host, step: 1.3 if step > ONSET else 1.0)
    (hot,) = job.run(ONSET + 100)
    assert isinstance(hot, ThroughputDropped)
    assert (hot.cause, hot.host) == ("devices", None)
    job = SimulatedJob(3, seed=0, wait=lambda step: 0.3 * STEP * (step > ONSET))
    (unknown,) = job.run(ONSET + 100)
    assert isinstance(unknown, ThroughputDropped)
    assert unknown.cause == "unknown"


def test_nothing_is_reported_before_it_has_lasted_for_min_seconds():
    for min_seconds, expected in ((0.0, True), (1e6, False)):
        events: list[Event] = []
        guard = PerformanceGuard(
            ThroughputSection(min_seconds=min_seconds),
            places=[DevicePlace(0, 0, "cpu"), DevicePlace(1, 1, "cpu")],
            tokens_per_step=1,
            reports=True,
            emit=events.append,
            clock=ManualClock(),
        )
        for step in range(1, 401):
            slow = 0.4 if step > 200 else 0.1 + step * 1e-6
            times = Times((slow, 0.01), (0.0, 0.0), (0.0, 0.0))
            guard.on_times(step, slow, dataclasses.replace(times) if step % 5 else times)
        assert bool(events) == expected


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 0.0])
def test_a_time_that_no_clock_returns_changes_nothing(odd):
    """The flags go through a collective, which a faulty device may spoil."""
    compared, series = Comparison(), Series()
    for record in range(30):
        for times in ((1.0, 1.01), (1.0, odd), (odd, 1.0)):
            before = compared
            compared, found, recovered = stragglers.compare(
                compared, times, factor=1.15, min_seconds=0.0, now=float(record)
            )
            assert (found, recovered) == ((), ())
            assert odd not in times or compared == before
    assert math.isfinite(compared.noise)
    for seconds in [1.0, odd] * 100:
        series, is_changed = stragglers.measure(
            series, seconds, block_size=5, drop=0.1, min_seconds=0.0, now=0.0
        )
        assert not is_changed or odd <= 0
    assert math.isfinite(series.usual)
    assert math.isfinite(series.noise)


def test_host_0_and_a_single_hosts_devices_are_named_too():
    """Host 0 reports itself; a single host has no other one, and its devices are compared."""
    job = SimulatedJob(
        num_hosts=3, seed=1, work=lambda host, step: 0.9 * (host == 0 and step > 300)
    )
    first = next(event for event in job.run(400) if isinstance(event, StragglerFound))
    assert (first.host, first.cause) == (0, "host")
    events, clock = [], ManualClock()
    places = [DevicePlace(0, device, "H100") for device in range(4)]
    guard = PerformanceGuard(
        ThroughputSection(min_seconds=0.0),
        places=places,
        tokens_per_step=1,
        reports=True,
        emit=events.append,
        clock=clock,
    )
    for step in range(1, 400):
        clock.now += 0.5
        jitter = 1 + 1e-6 * step
        probes = tuple(0.001 * jitter * (1.4 if place == 2 else 1.0) for place in range(4))
        guard.on_times(step, 0.5, Times((0.4 * jitter,), (0.0,), probes))
    (found,) = events
    assert isinstance(found, StragglerFound)
    assert (found.host, found.devices, found.cause) == (0, (2,), "device")
