"""Promises of the time that a controller takes from the loss of a VM to its replacement.

The controller is the real one; its environment is simulated, so its waits are counted, not timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import pytest

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.api.aggregated_lists import ListedVms
from jaxres.launch.gce.api.compute import ApiUnavailable
from jaxres.launch.gce.state.desired_state import DesiredState, PendingCreate, VmSpec
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm.instance_spec import PROGRAMS_SECRET, Machine
from jaxres.storage.path import GcsPath
from tests.tiers import slow_but
from tests.unit.launch.gce.test_simulated_cloud import lead
from tests.unit.launch.gce_config import OPTION, config
from tests.unit.launch.simulated_cloud import PREEMPTED, SimulatedCloud
from tests.unit.launch.simulated_vms import FaultRates

NO_FAULTS = FaultRates(0.0, no_answer=0.0, refusal=0.0, loss=0.0, crash=0.0, outages=0)
STEPS = 40


def job(*, hosts: int) -> RunConfig:
    made = config(num_hosts=hosts, capacity_options=[OPTION], lease_seconds=10.0)
    return made.model_copy(update={"train": made.train.model_copy(update={"steps": STEPS})})


@dataclass
class WatchedCloud(SimulatedCloud):
    """Notes in which order the controller and the hosts act once a VM is lost."""

    notes: list[str] = field(default_factory=list)
    is_lost: bool = False
    lost_at: float = inf
    refuses_seconds: float = 0.0
    """For how long no creation is answered after the loss."""
    waits_for_events: bool = False
    """Whether the VM is lost right after the service was asked for events, and the attempt ends."""
    is_due: bool = False
    secrets: list[str] = field(default_factory=list)
    """Secret for compiled steps in each creation."""

    def note(self, what: str) -> None:
        if self.is_lost:
            self.notes.append(what)

    def between(self, first: str, last: str) -> list[str]:
        """Returns the notes between the first note `first` and the next note `last`."""
        begin = self.notes.index(first)
        return self.notes[begin + 1 : self.notes.index(last, begin)]

    def sleep(self, seconds: float) -> None:
        self.note("the controller waits")
        super().sleep(seconds)

    def create(
        self, creation: PendingCreate, vms: Sequence[VmSpec], machine: Machine
    ) -> str | CreateFailed:
        self.note("request")
        self.secrets.append(machine.metadata[PROGRAMS_SECRET])
        if 0.0 <= self.now - self.lost_at < self.refuses_seconds:
            raise ApiUnavailable("503 Backend Error")
        return super().create(creation, vms, machine)

    def put(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> int:
        if metadata is not None and metadata.get("state") == "ended":
            self.note("a host reports its exit")
        return super().put(key, data, metadata)

    def preempt(self, name: str) -> None:
        """Stops a VM and deletes it, as the service does with Spot VMs, without a notice."""
        self.is_lost, self.lost_at = True, self.now
        self.vms[name].is_alive = False
        self.events[self.vms[name].id] = PREEMPTED
        self._remove_vm(name)

    def events_of(self, zone: str) -> dict[int, str]:
        self.note("events are asked for")
        found = dict(super().events_of(zone))
        if self.is_due and not self.is_lost:
            desired = self.desired()
            assert desired is not None
            host, lost = self.vms[desired.vms[0].name], desired.vms[-1].name
            self.preempt(lost)
            self._finish(host, ExitCode.PEER_LOST)
            assert host.agent is not None
            self.put(self.paths.report(host.name).key, b"", host.agent.metadata())
        return found

    def lose(self, name: str) -> None:
        self.is_due = True
        if not self.waits_for_events:
            self.preempt(name)

    def follow(self, before: DesiredState | None, after: DesiredState) -> None:
        """Preempts a VM in the first attempt, and notes the ends and starts of attempts."""
        change = None if before is None else (before.phase, after.phase)
        if change == ("placing", "running"):
            self.note("start")
            if after.attempt.number == 1:
                self.after(32.0, lambda: self.lose(after.vms[-1].name))
        elif change == ("running", "placing"):
            self.note("end")


def run_with_a_loss(
    monkeypatch: pytest.MonkeyPatch, *, seed: int, hosts: int = 2, waits_for_events: bool = False
) -> WatchedCloud:
    """Runs a job in which one VM is lost in the first attempt."""
    cloud = WatchedCloud(seed, STEPS, LaunchPaths(GcsPath("bkt", f"run-{seed}")), NO_FAULTS)
    cloud.check, cloud.waits_for_events = cloud.follow, waits_for_events
    cloud.patch(monkeypatch)
    lead(cloud, job(hosts=hosts), lambda line: None)
    desired = cloud.desired()
    assert desired is not None
    assert (desired.phase, desired.attempt.number, cloud.step) == ("ended", 2, STEPS), desired
    assert desired.history[0].code == ExitCode.PREEMPTED, desired.history
    assert cloud.notes.count("request") == 1, cloud.notes
    return cloud


@pytest.mark.parametrize("earlier", ["", 64 * "e"])
def test_a_replacement_has_the_secret_for_compiled_steps_of_the_vms_that_are_there(
    monkeypatch: pytest.MonkeyPatch, earlier: str
) -> None:
    """They may be of an earlier launcher: a replacement with another one compiles."""

    def listed(cloud: SimulatedCloud, run: str) -> ListedVms:
        found = SimulatedCloud.list(cloud, run)
        return replace(found, programs_secret=earlier if found.vms else "")

    monkeypatch.setattr(WatchedCloud, "list", listed)
    cloud = run_with_a_loss(monkeypatch, seed=0)
    first, *others = cloud.secrets
    assert others == [earlier or first], "the replacement has another secret"
    assert len(first) == 64
    assert first != earlier, "each launcher draws its own"


@pytest.mark.parametrize("hosts", slow_but([1, 2], 2))
def test_the_replacement_is_requested_as_soon_as_the_loss_has_ended_the_attempt(
    monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    cloud = run_with_a_loss(monkeypatch, seed=0, hosts=hosts)
    before = cloud.between("end", "request")  # The other host may report its exit meanwhile.
    assert "the controller waits" not in before, "the request waits for the next cycle"


@pytest.mark.slow
def test_a_service_that_accepts_no_creation_for_long_costs_no_healthy_vm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud = WatchedCloud(0, STEPS, LaunchPaths(GcsPath("bkt", "run-0")), NO_FAULTS)
    cloud.refuses_seconds = 20 * 60.0
    cloud.check = cloud.follow
    cloud.patch(monkeypatch)
    lead(cloud, job(hosts=2), lambda line: None)
    desired = cloud.desired()
    assert desired is not None
    assert (desired.phase, desired.attempt.number, cloud.step) == ("ended", 2, STEPS), desired
    assert desired.next_name == 3, "healthy VMs were replaced, too"


@pytest.mark.slow
def test_the_loss_that_has_ended_an_attempt_is_found_in_the_cycle_after_the_exit_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service is asked for events in each cycle then, although it was just asked."""
    cloud = run_with_a_loss(monkeypatch, seed=0, waits_for_events=True)
    until = cloud.between("a host reports its exit", "end")
    assert "events are asked for" in until, "the loss was found in another way, or by luck"
    assert until.count("the controller waits") <= 1, until
