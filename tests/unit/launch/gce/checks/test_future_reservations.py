"""A capacity option whose reservation begins later is left out until then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxres.launch.gce.api.compute import Compute
from jaxres.launch.gce.api.resource_reader import ResourceReader
from jaxres.launch.gce.checks import future_reservations
from jaxres.launch.gce.state.capacity_options import NEVER, Backoff
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres_emulators.gce import GceEmulator
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import NOW, START, ZONE, next_state, observed
from tests.unit.launch.gce_config import OPTION, config

RESERVED = {**OPTION, "kind": "reservation", "reservation": "mine", "zones": [ZONE]}
STANDARD = {**OPTION, "kind": "standard", "zones": ["us-east4-b"]}
BEGINS = 32472172800.0  # 2999-01-01, 08:00 UTC.


@pytest.fixture
def gce() -> Iterator[GceEmulator]:
    with GceEmulator(is_simulated=True) as gce:
        words = {"begins": "2999-01-01T00:00:00-08:00", "ends": "2999-01-08T00:00:00-08:00"}
        more = {"machine": "a2-highgpu-1g", "count": 2}
        gce.reserve_later(ZONE, "later", reservation="mine", **words, **more)
        yield gce
    assert gce.bugs == []


def left_out(gce: GceEmulator, *, now: float, reservation: str = "mine") -> tuple[Backoff, ...]:
    options = [{**RESERVED, "reservation": reservation}, STANDARD]
    section = config(project=gce.project, capacity_options=options).launch.gce
    assert section is not None
    reader = ResourceReader(Compute(section, endpoint=gce.url))
    return future_reservations.not_begun(section, reader, now=now)


def test_an_option_is_left_out_until_its_reservation_begins(gce: GceEmulator) -> None:
    found = left_out(gce, now=BEGINS - 60)
    assert found == (Backoff(0, ZONE, BEGINS, 0, "not_begun"),)
    assert left_out(gce, now=BEGINS) == (), "it has begun"
    settings = config(capacity_options=[RESERVED, STANDARD])
    job = changed(START, backoffs=found)
    before = next_state(job, observed(vms={}, now=BEGINS - 60), settings)
    assert {vm.option for vm in before.vms} == {1}, "the next option is not taken until then"
    after = next_state(job, observed(vms={}, now=BEGINS), settings)
    assert {vm.option for vm in after.vms} == {0}
    alone = config(capacity_options=[RESERVED])
    waiting = next_state(job, observed(vms={}, now=BEGINS - 60), alone)
    assert (waiting.vms, waiting.end) == ((), None), "the job does not wait"


def test_a_reservation_that_is_late_is_waited_for() -> None:
    """Google may take a day from its begin until it exists."""
    settings = config(capacity_options=[RESERVED])
    job = changed(START, backoffs=(Backoff(0, ZONE, NOW - 1, 0, "not_begun"),))
    absent = CreateFailed("refused", "INVALID: Specified reservation mine does not exist.")
    for times in (1, 2):
        asked = next_state(job, observed(vms={}), settings)
        assert asked.creation is not None, "it is not requested"
        job = next_state(asked, observed(vms={}, creation=absent), settings)
        (backoff,) = job.capacity.backoffs
        assert (backoff.error, backoff.failures) == ("not_begun", times)
        assert backoff.until == NOW + 300.0
        job = changed(job, backoffs=(replace(backoff, until=NOW - 1),), deleting=())
    other = CreateFailed("refused", "INVALID: Labels are refused.")
    asked = next_state(job, observed(vms={}), settings)
    (backoff,) = next_state(asked, observed(vms={}, creation=other), settings).capacity.backoffs
    assert backoff.until >= NEVER


def test_a_reservation_that_is_ready_or_of_another_name_waits_for_nothing(gce: GceEmulator) -> None:
    assert left_out(gce, now=BEGINS - 60, reservation="other") == ()
    gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2)
    assert left_out(gce, now=BEGINS - 60) == ()


def test_without_the_permission_nothing_is_left_out(gce: GceEmulator) -> None:
    gce.deny("compute.futureReservations.list")
    assert left_out(gce, now=BEGINS - 60) == ()
