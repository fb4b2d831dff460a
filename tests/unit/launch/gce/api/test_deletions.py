"""A VM that may not be deleted is named, and costs money alone: all others are deleted.

The controller is the real one, in a simulated cloud.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxres.config import RunConfig
from jaxres.faults import StorageUnavailable
from jaxres.launch.gce import orphaned_vms
from jaxres.launch.gce.api.compute import ApiRefused, ApiUnavailable
from jaxres.launch.gce.state.desired_state import DesiredState, InstanceGroup
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.storage.path import GcsPath
from tests.unit.launch.gce.test_controller_cycles import NO_FAULTS
from tests.unit.launch.gce.test_simulated_cloud import leader_of
from tests.unit.launch.gce_config import OPTION, config
from tests.unit.launch.simulated_cloud import SimulatedCloud, SimulatedCompute

REFUSAL = "BadRequest: 400 Resource cannot be deleted if it's protected against deletion"
PATIENCE_SECONDS = 600.0


@dataclass
class ProtectedCloud(SimulatedCloud):
    """The first VMs of a run, and their group, can't be deleted until `error` is None."""

    num_protected: int = 1

    error: ApiUnavailable | None = field(default_factory=lambda: ApiRefused(REFUSAL))
    printed: list[str] = field(default_factory=list)

    def _refuse(self, name: str) -> None:
        if self.error is not None and int(name[-4:]) < self.num_protected:
            raise self.error

    def delete_vm(self, name: str, zone: str, group: InstanceGroup | None = None) -> None:
        self._refuse(name)
        super().delete_vm(name, zone, group)

    def delete_group(self, group: InstanceGroup) -> bool:
        self._refuse(group.name)
        return super().delete_group(group)

    @property
    def names(self) -> list[str]:
        """The ends of the names of all VMs."""
        return sorted(name.rpartition("-")[2] for name in self.vms)

    def refusals_printed(self) -> list[str]:
        return [line for line in self.printed if "refused" in line]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> ProtectedCloud:
    made = ProtectedCloud(0, 5, LaunchPaths(GcsPath("bkt", "run")), NO_FAULTS)
    made.patch(monkeypatch)
    return made


def job(hosts: int, option: dict[str, Any], *, steps: int) -> RunConfig:
    made = config(num_hosts=hosts, capacity_options=[option], lease_seconds=10.0)
    return made.model_copy(update={"train": made.train.model_copy(update={"steps": steps})})


def is_over(cloud: ProtectedCloud, desired: DesiredState, *, left: list[str]) -> bool:
    """Returns whether the job ends and has only these VMs; False for so many seconds at most."""
    assert cloud.now < PATIENCE_SECONDS, f"VMs are left for good: {cloud.names}\n{cloud.printed}"
    return desired.phase == "ending" and cloud.names == left


@pytest.mark.parametrize("error", [ApiRefused(REFUSAL), ApiUnavailable("503")])
def test_a_vm_that_can_not_be_deleted_keeps_no_other_from_it(
    cloud: ProtectedCloud, error: ApiUnavailable
) -> None:
    cloud.error = error
    leader = leader_of(cloud, job(3, OPTION, steps=cloud.steps), cloud.printed.append)
    assert leader is not None
    assert leader.run(until=lambda desired: is_over(cloud, desired, left=["0000"])) is None
    (vm,) = cloud.vms
    named = [f"{vm}: its deletion is refused; trying again ({REFUSAL})"]
    assert cloud.refusals_printed() == (named if isinstance(error, ApiRefused) else [])
    cloud.error = None
    assert leader.run() is not None
    assert cloud.names == []


def test_a_group_that_can_not_be_deleted_keeps_no_vm_from_it(cloud: ProtectedCloud) -> None:
    def create_another(before: DesiredState | None, after: DesiredState) -> None:
        if after.phase == "ending" and before is not None and before.phase != "ending":
            cloud._boot_vm(f"{after.name_prefix}-9999", "us-central1-a")

    cloud.check = create_another
    queue = {**OPTION, "kind": "flex_start", "wait_minutes": 10}
    leader = leader_of(cloud, job(2, queue, steps=cloud.steps), cloud.printed.append)
    assert leader is not None
    is_seen = [False]

    def has_deleted_it(desired: DesiredState) -> bool:
        is_seen[0] |= "9999" in cloud.names
        return is_seen[0] and is_over(cloud, desired, left=["0000", "0001"])

    assert leader.run(until=has_deleted_it) is None
    (line,) = cloud.refusals_printed()
    assert line.startswith(f"the instance group {min(cloud.vms)}: its deletion is refused"), line


def orphans(cloud: ProtectedCloud, count: int) -> Any:
    """Returns the Compute API with so many VMs that no job has."""
    for number in range(count):
        cloud._boot_vm(f"jx-0-{number:04d}", "us-central1-a")
    cloud.damages.append("there is no desired state")
    compute = SimulatedCompute(cloud)
    compute.resize_requests.leftovers = lambda label: ([], {})  # pyright: ignore
    return compute


def test_the_end_without_a_desired_state_deletes_all_vms_but_those_that_it_names(
    cloud: ProtectedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphaned_vms, "MAX_SECONDS", 120.0)
    cloud.num_protected = 40
    compute = orphans(cloud, 50)
    with pytest.raises(StorageUnavailable) as raised:
        orphaned_vms.delete_all(compute, "jx", clock=cloud, console=cloud.printed.append)
    assert cloud.names == [f"{number:04d}" for number in range(40)], "others are left as well"
    assert ", jx-0-0039: not known to be deleted after 120 s (jx-0-" in str(raised.value)
    assert f"jx-0-0039: {REFUSAL}" in str(raised.value)
    assert len(cloud.refusals_printed()) == 40, cloud.refusals_printed()
