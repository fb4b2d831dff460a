"""Times of each host and device that go between the hosts with the flags of a step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TIMED_STEPS = 5
"""Steps that times are averaged over: unchanged flags cost no transfer to the devices."""


@dataclass(frozen=True)
class LocalTimes:
    """Times of this host for one step."""

    busy_seconds: float
    """How long it worked for the step, without waits for devices and so for other hosts."""
    data_seconds: float = 0.0
    """The part of it in which it got the batch and placed it on the devices."""
    probe_seconds: Mapping[Any, float] = field(default_factory=dict)
    """Local device -> the newest duration of the probe (device_probe.py), in the order of the mesh;
    0: none yet."""


@dataclass(frozen=True)
class Times:
    """Times of all hosts and devices, as a completed step has returned them."""

    busy_seconds: tuple[float, ...] = ()
    """Mean of each host."""
    data_seconds: tuple[float, ...] = ()
    """Mean of each host."""
    probe_seconds: tuple[float, ...] = ()
    """Newest duration of the probe on each device, in the order of the mesh; 0: none yet."""


class MeanTimes:
    """Means of a host's times, which change only once in TIMED_STEPS steps."""

    def __init__(self) -> None:
        self._busy: list[float] = []
        self._data: list[float] = []
        self._newest = LocalTimes(0.0)

    def add(self, times: LocalTimes | None) -> LocalTimes:
        """Adds the times of a step, None for another one; returns the newest means."""
        if times is not None:
            self._busy.append(times.busy_seconds)
            self._data.append(times.data_seconds)
        if times is not None and len(self._busy) >= TIMED_STEPS:
            busy, data = statistics.fmean(self._busy), statistics.fmean(self._data)
            self._newest = LocalTimes(busy, data, times.probe_seconds)
            self._busy.clear()
            self._data.clear()
        return self._newest
