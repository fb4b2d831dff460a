"""The probe measures each device of a host, as rarely as its share of the time requires."""

from __future__ import annotations

import jax

from jaxres.clock import SystemClock
from jaxres.train.checks.device_probe import FIRST_STEP, DeviceProbe


def probe_of(*, max_share: float) -> DeviceProbe:
    return DeviceProbe(jax.devices(), max_share=max_share, clock=SystemClock())


def test_every_device_is_measured():
    probe = probe_of(max_share=0.5)
    probe.measure()
    assert set(probe.seconds) == set(jax.devices())
    assert all(0 < seconds < 5 for seconds in probe.seconds.values())


def test_durations_are_in_the_order_of_the_mesh_whichever_device_is_first():
    """Of a single host the order alone says which device is slow."""
    probe = DeviceProbe(["a", "b", "c"], max_share=0.5, clock=SystemClock())
    answers = {"a": [False, False, True], "b": [True], "c": [False, True]}

    class Part:
        def __init__(self, device):
            self.device, self.data = device, self
            self._answers = iter(answers[device])

        def is_ready(self):
            return next(self._answers)

    class Result:
        addressable_shards = tuple(map(Part, "abc"))

    probe._run = Result
    probe.measure()
    times = tuple(probe.seconds.values())
    assert sorted(times) == [times[1], times[2], times[0]], "a device has another one's time"


def test_no_probe_is_due_before_the_first_steps_are_over():
    probe = probe_of(max_share=0.5)
    for step in range(1, FIRST_STEP):
        probe.on_step(0.1)
        assert not probe.is_due(step + 1)
    probe.on_step(0.1)
    assert probe.is_due(2 * FIRST_STEP)
    assert not probe.is_due(2 * FIRST_STEP + 1)


def test_the_interval_is_the_smallest_power_of_two_that_keeps_the_share():
    for step_seconds, busy_seconds in ((0.01, 0.001), (0.3, 0.01), (10.0, 0.0)):
        probe = probe_of(max_share=0.005)
        for _ in range(FIRST_STEP):
            probe.on_step(step_seconds)
            probe.on_dispatch(busy_seconds)
        probe.measure()
        interval = probe.interval()
        cost = probe.cost_seconds
        assert cost >= busy_seconds
        assert cost <= 0.005 * interval * step_seconds
        assert interval == 5 or cost > 0.005 * interval / 2 * step_seconds
        assert interval % 5 == 0
        assert (interval // 5).bit_count() == 1
