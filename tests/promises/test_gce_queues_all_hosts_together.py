"""Flex-start VMs of a job are delivered all together or not at all, and leave nothing behind.

Real launchers against the emulated Compute Engine, whose VMs have no processes here: no attempt
ever starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.storage import gcs_objects
from tests.promises.cloud import OPTION, Cloud

INSERT = "instanceGroupManagerResizeRequests.insert"
QUEUE = {"kind": "flex_start", **OPTION, "wait_minutes": 60}
STANDARD = {"kind": "standard", **OPTION, "zones": ["us-east4-a"]}


@pytest.fixture
def cloud(simulated_cloud: Cloud) -> Cloud:
    return simulated_cloud


def config(cloud: Cloud, *options: dict[str, Any]) -> Path:
    return cloud.config(num_hosts=2, capacity_options=[*options], max_run_hours=24.0)


def await_request(cloud: Cloud, state: str) -> None:
    """Waits until the only resize request has a state."""
    cloud.wait(lambda: states(cloud) == [state], of=f"resize request {state}")


def states(cloud: Cloud) -> list[str]:
    return [state for requests in cloud.gce.groups().values() for state in requests.values()]


def assert_nothing_is_left_after_down(cloud: Cloud) -> None:
    """Takes the job down; no VM, group, resize request or template may be left."""
    assert cloud.run_here("down") == ExitCode.DONE, cloud.describe()
    left = (cloud.gce.vms(), cloud.gce.groups(), cloud.gce.templates())
    assert left == ({}, {}, []), f"something is left\n{cloud.describe()}"


def test_all_vms_of_a_queue_are_delivered_together_or_none_is(cloud: Cloud) -> None:
    cloud.gce.stockout(model="FLEX_START", places=1)
    launcher = cloud.up(config(cloud, QUEUE))
    await_request(cloud, "ACCEPTED")
    cloud.wait(lambda: cloud.gce.lookups() >= 2, of="look for capacity")
    assert cloud.gce.vms_so_far() == [], "a part of the VMs was created"
    cloud.gce.restock()
    cloud.wait(lambda: "created: " in launcher.printed(), of="creation")
    assert len(cloud.gce.vms()) == 2, cloud.describe()
    assert {vm.model for vm in cloud.gce.vms_so_far()} == {"FLEX_START"}
    assert cloud.gce.calls().calls[INSERT] == 1, "there was more than one resize request"
    assert cloud.gce.calls().calls["instances.insert"] == 0, "VMs were requested one by one"
    assert_nothing_is_left_after_down(cloud)


@pytest.mark.parametrize(
    "fault",
    [
        "cancelled",
        pytest.param("failed", marks=pytest.mark.slow),
        pytest.param("never", marks=pytest.mark.slow),
    ],
)
def test_a_queue_that_delivers_nothing_is_left_for_the_next_option(
    cloud: Cloud, fault: str
) -> None:
    cloud.gce.hold_resize_requests()
    if fault == "failed":
        cloud.gce.fail_resize_requests("ZONE_RESOURCE_POOL_EXHAUSTED")
    launcher = cloud.up(config(cloud, {**QUEUE, "wait_minutes": 1}, STANDARD))
    if fault == "cancelled":
        await_request(cloud, "ACCEPTED")
        cloud.gce.cancel_resize_requests()
    cause = {"cancelled": "was cancelled", "failed": "does not have enough", "never": "has not"}
    cloud.wait(lambda: "us-central1-a: stockout: " in launcher.printed(), of="refusal")
    assert cause[fault] in launcher.printed(), "it was refused for another reason"
    cloud.wait(lambda: "created: " in launcher.printed(), of="creation by the next option")
    assert {vm.model for vm in cloud.gce.vms_so_far()} == {"STANDARD"}, cloud.describe()
    cloud.wait(lambda: (cloud.gce.groups(), cloud.gce.templates()) == ({}, []), of="deletion")
    assert_nothing_is_left_after_down(cloud)


def test_the_queue_of_a_dead_launcher_is_found_by_its_successor(cloud: Cloud) -> None:
    cloud.gce.hold_resize_requests()
    path = config(cloud, QUEUE)
    first = cloud.up(path)
    await_request(cloud, "ACCEPTED")
    first.kill()
    first.wait_exit()
    second = cloud.up(path)
    cloud.wait(lambda: "resuming (placing" in second.printed(), of="takeover")
    cloud.gce.hold_resize_requests(False)
    cloud.wait(lambda: "created: " in second.printed(), of="creation")
    assert cloud.gce.calls().calls[INSERT] == 1, "it was requested again"
    assert len(cloud.gce.vms_so_far()) == 2, cloud.describe()
    assert_nothing_is_left_after_down(cloud)


@pytest.mark.slow
def test_a_queue_that_no_desired_state_has_is_ended_by_down(cloud: Cloud) -> None:
    cloud.gce.hold_resize_requests()
    path = config(cloud, QUEUE)
    launcher = cloud.up(path)
    await_request(cloud, "ACCEPTED")
    launcher.kill()
    launcher.wait_exit()
    gcs_objects.delete_tree(cloud.launch_paths.root)
    assert cloud.run_here("down", path) == ExitCode.DONE, cloud.describe()
    left = (cloud.gce.vms(), cloud.gce.groups(), cloud.gce.templates())
    assert left == ({}, {}, []), f"something is left\n{cloud.describe()}"
    cloud.gce.hold_resize_requests(False)
    assert cloud.gce.vms_so_far() == [], "its VMs were created after the end"


@pytest.mark.slow
def test_a_lost_vm_of_a_group_leaves_it_and_the_others_are_kept(cloud: Cloud) -> None:
    launcher = cloud.up(config(cloud, QUEUE))
    cloud.wait(lambda: "created: " in launcher.printed(), of="creation")
    lost, kept = cloud.gce.vms()
    cloud.gce.host_error(lost)
    cloud.wait(lambda: lost not in cloud.gce.vms(), of="deletion of the lost VM")
    cloud.wait(lambda: len(cloud.gce.vms()) == 2, of="replacement")
    assert kept in cloud.gce.vms(), "the other VM was not kept"
    assert cloud.gce.members() == [kept], "the group still has the lost VM"
    assert cloud.gce.calls().calls[INSERT] == 1, "the replacement waits for a group"
    assert_nothing_is_left_after_down(cloud)
