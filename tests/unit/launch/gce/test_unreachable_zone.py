"""Promises of a zone whose Compute API does not answer: its VMs are unknown, all others are not.

The controller is the real one, in a simulated cloud.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable
from jaxres.launch.gce import orphaned_vms
from jaxres.launch.gce.api.compute import ApiUnavailable
from jaxres.launch.gce.decide.lost_vms import UNLISTED_SECONDS, find_suspects
from jaxres.launch.gce.state.capacity_options import NEVER, Backoff, ZoneChoice, choose
from jaxres.launch.gce.state.desired_state import DesiredState, JobEnd, PendingCreate, VmSpec
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from tests.unit.launch.gce.api.test_gce_api import NAMES as TWO
from tests.unit.launch.gce.api.test_gce_api import ZONE as HOME
from tests.unit.launch.gce.api.test_gce_api import ComputeFixture
from tests.unit.launch.gce.decide.test_lost_vms import CONFIRM, GCE, silence
from tests.unit.launch.gce.decide.test_reconcile import (
    CONFIG,
    NAMES,
    NOW,
    READY,
    RUNNING,
    ZONE,
    next_state,
    observed,
)
from tests.unit.launch.gce.test_controller_cycles import NO_FAULTS, STEPS, job
from tests.unit.launch.gce.test_simulated_cloud import leader_of
from tests.unit.launch.gce_config import OPTION
from tests.unit.launch.simulated_cloud import PREEMPTED, SimulatedCloud, SimulatedCompute

FAR = "europe-west4-b"
HERE, THERE = OPTION["zones"]
LONGEST_SECONDS = 3600.0


class Cloud(SimulatedCloud):
    """Runs jobs of two hosts, and notes what the launcher prints."""

    printed: list[str]

    def launch(self, settings: RunConfig, until: Callable[[DesiredState], bool]) -> None:
        """Leads a job until a condition holds; fails if it does not within an hour."""

        def reached(desired: DesiredState) -> bool:
            assert self.now < LONGEST_SECONDS, f"{desired}\n{self.printed[-20:]}"
            return until(desired)

        leader = leader_of(self, settings, self.printed.append)
        assert leader is not None
        leader.run(until=reached)

    def lose(self, name: str) -> None:
        """Stops a VM and deletes it, as the service does with Spot VMs, without a notice."""
        self.vms[name].is_alive = False
        self.events[self.vms[name].id] = PREEMPTED
        self._remove_vm(name)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud(0, STEPS, LaunchPaths(GcsPath("bkt", "run")), NO_FAULTS)
    made.printed = []
    made.patch(monkeypatch)
    return made


def runs(desired: DesiredState, *, attempt: int) -> bool:
    return (desired.phase, desired.attempt.number) == ("running", attempt)


def lines_about(cloud: Cloud, zone: str) -> list[str]:
    return [line for line in cloud.printed if zone in line and "does not answer" in line]


@pytest.mark.slow
def test_an_unrelated_zone_that_is_unreachable_delays_no_recovery_and_no_end(
    cloud: Cloud,
) -> None:
    cloud.lost_zones = {FAR}
    cloud.launch(job(hosts=2), lambda desired: runs(desired, attempt=1))
    lost_at = cloud.now
    cloud.lose(sorted(cloud.vms)[0])
    cloud.launch(job(hosts=2), lambda desired: desired.next_name == 3)
    assert cloud.now - lost_at < 2 * CONFIRM, "the loss is found as late as without the API"
    cloud.launch(job(hosts=2), lambda desired: False)
    desired = cloud.desired()
    assert desired is not None
    assert desired.end is not None
    assert (desired.end.exit, cloud.vms) == (ExitCode.DONE, {})
    assert "no VM there counts as lost" in lines_about(cloud, FAR)[0]


@pytest.mark.slow
def test_a_vm_in_an_unreachable_zone_is_neither_lost_nor_replaced_until_the_zone_answers(
    cloud: Cloud,
) -> None:
    """The list lacks all its VMs, and one of them has stopped."""
    cloud.launch(job(hosts=2), lambda desired: runs(desired, attempt=1))
    cloud.lose(sorted(cloud.vms)[0])
    cloud.lost_zones, restored = {HERE}, cloud.now + 300.0

    def replaced(desired: DesiredState) -> bool:
        if cloud.now < restored:
            kept = (desired.next_name, desired.deleting)
            assert kept == (2, ()), f"a VM was replaced or deleted\n{cloud.printed}"
        else:
            cloud.lost_zones.clear()
        return runs(desired, attempt=2)

    cloud.launch(job(hosts=2), replaced)
    assert cloud.now > restored
    assert "no VM there counts as lost" in lines_about(cloud, HERE)[0]
    assert any(HERE in line and "answers again" in line for line in cloud.printed)
    desired = cloud.desired()
    assert desired is not None
    assert desired.next_name == 3, "other VMs than the lost one were replaced"


def test_a_job_begins_in_a_zone_that_answers(cloud: Cloud) -> None:
    cloud.lost_zones = {HERE}
    cloud.launch(job(hosts=2), lambda desired: runs(desired, attempt=1))
    assert {vm.zone for vm in cloud.vms.values()} == {THERE}


@pytest.mark.slow
def test_a_deletion_in_an_unreachable_zone_holds_up_no_other_and_follows(cloud: Cloud) -> None:
    cloud.launch(job(hosts=2), lambda desired: runs(desired, attempt=1))
    desired = cloud.desired()
    assert desired is not None
    cloud._boot_vm(f"{desired.name_prefix}-9998", HERE)
    cloud._boot_vm(f"{desired.name_prefix}-9999", THERE)
    cloud.damages.append("VMs of a launcher without the lease")
    cloud.put(cloud.paths.down.key, b"")
    cloud.lost_zones, until = {HERE}, cloud.now + 200.0
    cloud.launch(job(hosts=2), lambda desired: cloud.now > until)
    assert {vm.zone for vm in cloud.vms.values()} == {HERE}, "the reachable zone has a VM"
    desired = cloud.desired()
    assert desired is not None
    assert desired.phase == "ending", "the job has ended, and its VMs are unknown"
    cloud.lost_zones = set()
    cloud.launch(job(hosts=2), lambda desired: False)
    assert cloud.vms == {}


@pytest.mark.parametrize("looked_up", [None, "RUNNING", "TERMINATED"])
def test_an_older_look_up_confirms_no_loss_in_a_zone_that_is_unreachable_now(
    looked_up: str | None,
) -> None:
    asked = {"looked_up": {NAMES[1]: looked_up}, "vms": {}}
    fields = silence(10 * CONFIRM, **asked, unreachable=frozenset({ZONE}))
    found = next_state(RUNNING, observed(**fields))
    assert (found.phase, found.vms, found.deleting) == ("running", RUNNING.vms, ())
    fields = silence(10 * CONFIRM, **asked, unreachable=frozenset({FAR}))
    assert next_state(RUNNING, observed(**fields)).phase == "placing", "of an unrelated zone"


def test_a_vm_whose_zone_is_missing_in_the_list_is_not_suspected_sooner() -> None:
    silent = dict.fromkeys(NAMES, UNLISTED_SECONDS)
    arguments: tuple[Any, ...] = (RUNNING.vms, silent, {}, {NAMES[0]}, GCE)
    assert find_suspects(*arguments, unreachable={ZONE}) == []
    assert find_suspects(*arguments) == list(RUNNING.vms)


def test_no_attempt_starts_on_vms_that_are_unknown() -> None:
    found = next_state(READY, observed(vms={}, unreachable=frozenset({ZONE})))
    assert (found.phase, found.vms) == ("placing", READY.vms)


@pytest.mark.parametrize(("zone", "phase"), [(ZONE, "ending"), (FAR, "ended")])
def test_a_job_ends_once_each_zone_of_its_config_has_listed_no_vm(zone: str, phase: str) -> None:
    end = JobEnd(ExitCode.STOPPED, "stopped", NOW)
    ending = replace(READY, vms=(), phase="ending", end=end)
    assert next_state(ending, observed(vms={}, unreachable=frozenset({zone}))).phase == phase


CREATING = replace(
    READY,
    vms=tuple(VmSpec(name, ZONE, 0, NOW) for name in NAMES),
    creation=PendingCreate(NAMES, "id"),
)
WAIT = 60 * GCE.repair_minutes


@pytest.mark.parametrize(
    ("seconds", "creation", "moves"),
    [(0.5 * WAIT, None, False), (1.1 * WAIT, None, True), (1.1 * WAIT, True, False)],
    ids=["its time is not over", "no answer", "answered"],
)
def test_a_request_in_an_unreachable_zone_is_waited_for_as_long_as_a_repair(
    seconds: float, creation: CreateFailed | bool | None, moves: bool
) -> None:
    state = observed(
        now=NOW + seconds,
        vms={},
        reports={},
        creation=creation,
        since_create_seconds=seconds,
        unreachable=frozenset({ZONE}),
    )
    assert bool(next_state(CREATING, state).deleting) is moves


def test_an_unreachable_zone_is_skipped_and_never_for_good() -> None:
    assert CONFIG.launch.gce is not None
    options = CONFIG.launch.gce.capacity_options
    first, *others = options[0].zones
    found = choose(options, (), now=5.0, unreachable={first})
    assert isinstance(found, ZoneChoice)
    assert found.zone != first
    every = {zone for option in options for zone in option.zones}
    assert choose(options, (), now=5.0, unreachable=every) == 5.0
    never = [Backoff(0, zone, NEVER, 1, "refused") for zone in others]
    assert choose(options[:1], never, now=5.0, unreachable={first}) == 5.0


def test_the_end_without_a_desired_state_waits_for_a_zone_and_deletes_the_other_vms(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphaned_vms, "MAX_SECONDS", 120.0)
    cloud._boot_vm("jx-0-0000", HERE)
    cloud._boot_vm("jx-0-0001", THERE)
    cloud.damages.append("there is no desired state")
    cloud.lost_zones = {HERE}
    service: Any = SimulatedCompute(cloud)
    service.resize_requests.leftovers = lambda label: ([], {})
    with pytest.raises(StorageUnavailable, match=f"the VMs in {HERE} .* are unknown"):
        orphaned_vms.delete_all(service, "jx", clock=cloud, console=cloud.printed.append)
    assert list(cloud.vms) == ["jx-0-0000"]
    assert len(lines_about(cloud, HERE)) == 1, cloud.printed
    cloud.after(30.0, cloud.lost_zones.clear)
    orphaned_vms.delete_all(service, "jx", clock=cloud, console=cloud.printed.append)
    assert cloud.vms == {}


def test_a_list_of_all_zones_has_what_the_reachable_zones_have(gce: GceEmulator) -> None:
    """Google's client is the real one; the emulator fails a list that accepts no partial result."""
    service = ComputeFixture(gce)
    assert service.outcome(service.create()) is True
    gce.lose_zone(FAR)
    listed = service.compute.list("jx")
    assert set(listed.vms) == set(TWO)
    assert list(listed.unreachable) == [FAR]
    gce.lose_zone(HOME)
    listed = service.compute.list("jx")
    assert (listed.vms, set(listed.unreachable)) == ({}, {FAR, HOME})
    assert re.search("unreachable", listed.unreachable[HOME])
    with pytest.raises(ApiUnavailable):
        service.compute.status(TWO[0], HOME)
    gce.lose_zone(HOME, is_lost=False)
    gce.lose_zone(FAR, is_lost=False)
    assert set(service.compute.list("jx").vms) == set(TWO)
