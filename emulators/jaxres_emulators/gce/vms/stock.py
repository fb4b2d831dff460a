"""Durations, and zones without capacity."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from jaxres_emulators.gce.vms.vm import Vm


@dataclass
class Delays:
    """Durations in emulated time."""

    provision: float = 2.0
    stage: float = 3.0
    off: float = 2.0
    """From the end of the last process to the end of the operation."""
    spot_off: float = 30.0
    """How long a Spot VM is given after SIGTERM."""
    standard_off: float = 90.0
    warning: float = 60.0
    """Between the early warning of a maintenance and its beginning."""


@dataclass
class Shortage:
    """A zone or model without capacity."""

    zone: str = ".*"
    machine: str = ".*"
    model: str = ".*"
    places: int | None = None
    """How many VMs there may be; None: no new one, however many there are."""
    codes: tuple[str, ...] = ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",)
    has_http: bool = True
    times: int | None = None
    """For how many requests; None: until it is taken away."""
    until: float = float("inf")
    """Monotonic time."""
    asked_by: set[str] = field(default_factory=set)

    def matches(self, vm: Vm) -> bool:
        pairs = ((self.zone, vm.zone), (self.machine, vm.shape.name), (self.model, vm.model))
        return all(re.fullmatch(rule, word) for rule, word in pairs)

    def takes_all(self, zone: str, machine: str) -> bool:
        pairs = ((self.zone, zone), (self.machine, machine))
        return self.places is None and all(re.fullmatch(rule, word) for rule, word in pairs)

    def takes(self, vm: Vm, there: int, group: str) -> bool:
        if not self.matches(vm) or time.monotonic() > self.until:
            return False
        if self.places is not None and there < self.places:
            return False
        if self.times is not None and group not in self.asked_by:
            if len(self.asked_by) >= self.times:
                return False
            self.asked_by.add(group)
        return True
