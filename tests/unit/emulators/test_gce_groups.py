"""The emulated managed instance groups and resize requests are as strict as the API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from jaxres_emulators.gce import GceEmulator
from tests.unit.emulators.gce_requests import IMAGE, PROJECT, ZONE
from tests.waiting import SURE_SECONDS

GROUPS = f"zones/{ZONE}/instanceGroupManagers"
SECONDS = {"seconds": "3600"}
PROPERTIES = {
    "machineType": "a2-highgpu-1g",
    "disks": [{"boot": True, "initializeParams": {"sourceImage": IMAGE}}],
    "networkInterfaces": [{"subnetwork": "regions/us-central1/subnetworks/default"}],
    "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"},
    "scheduling": {
        "provisioningModel": "FLEX_START",
        "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": SECONDS,
    },
}
TEMPLATE = {"name": "t", "properties": PROPERTIES}
GROUP = {
    "name": "g",
    "baseInstanceName": "vm",
    "instanceTemplate": "global/instanceTemplates/t",
    "targetSize": 0,
    "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
}
REQUEST = {
    "name": "r",
    "instances": [{"name": "vm-0"}, {"name": "vm-1"}],
    "requestedRunDuration": SECONDS,
}


@pytest.fixture
def gce() -> Iterator[GceEmulator]:
    with GceEmulator(speed=60, is_simulated=True) as gce:
        yield gce
    assert gce.bugs == []


def call(gce: GceEmulator, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Sends a call; returns the answer, or the error's code and message."""
    url = f"{gce.url}/compute/v1/projects/{PROJECT}/{path}"
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data=data, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=SURE_SECONDS) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())["error"]


def done(gce: GceEmulator, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Sends a call, and returns its operation once that is done."""
    operation = call(gce, method, path, body)
    at = operation["selfLink"].partition(f"projects/{PROJECT}/")[2]
    gce.wait_for(lambda: call(gce, "GET", at)["status"] == "DONE")
    return call(gce, "GET", at)


def state(gce: GceEmulator) -> str:
    return call(gce, "GET", f"{GROUPS}/g/resizeRequests/r")["state"]


def set_up(gce: GceEmulator, **policy: str) -> None:
    """Creates the template and the group."""
    done(gce, "POST", "global/instanceTemplates", TEMPLATE)
    body = GROUP | ({"instanceLifecyclePolicy": policy} if policy else {})
    done(gce, "POST", GROUPS, body)


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("global/instanceTemplates", TEMPLATE | {"zone": ZONE}, "zone"),
        (
            "global/instanceTemplates",
            {"name": "u", "properties": PROPERTIES | {"name": "x"}},
            "name",
        ),
        (
            "global/instanceTemplates",
            {"name": "u", "properties": PROPERTIES | {"machineType": "zones/z/machineTypes/m"}},
            "name of a machine type",
        ),
        (GROUPS, GROUP | {"name": "h", "labels": {}}, "labels"),
        (GROUPS, GROUP | {"name": "h", "instanceTemplate": "none"}, "was not found"),
        (GROUPS, {k: v for k, v in GROUP.items() if k != "targetSize"}, "Required"),
        (GROUPS, GROUP | {"name": "h", "baseInstanceName": "a" * 59}, "pattern"),
        (f"{GROUPS}/g/resizeRequests", REQUEST | {"count": 2}, "count"),
        (f"{GROUPS}/g/resizeRequests", REQUEST | {"resizeBy": 2}, "Exactly one"),
        (
            f"{GROUPS}/g/resizeRequests",
            REQUEST | {"requestedRunDuration": {"seconds": "599"}},
            "between 600 and 604800",
        ),
        (f"{GROUPS}/g/resizeRequests", REQUEST | {"instances": [{"name": "A"}]}, "regex"),
        (f"{GROUPS}/g/resizeRequests", REQUEST | {"instances": [{"zone": "A"}]}, "zone"),
    ],
)
def test_what_the_api_does_not_know_is_refused(
    gce: GceEmulator, path: str, body: dict[str, Any], why: str
) -> None:
    set_up(gce)
    refused = call(gce, "POST", path, body)
    assert refused["code"] == 400, refused
    assert why in refused["message"]


def test_a_group_that_repairs_its_vms_takes_no_resize_request(gce: GceEmulator) -> None:
    set_up(gce, onFailedHealthCheck="REPAIR")
    refused = call(gce, "POST", f"{GROUPS}/g/resizeRequests", REQUEST)
    assert "Repairs must be turned off" in refused["message"]


def test_there_are_all_vms_of_a_resize_request_or_none(gce: GceEmulator) -> None:
    gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 1)
    set_up(gce)
    done(gce, "POST", f"{GROUPS}/g/resizeRequests", REQUEST)
    gce.wait_for(lambda: gce.lookups() >= 2)
    assert (state(gce), gce.vms()) == ("ACCEPTED", {})
    found = call(gce, "GET", f"{GROUPS}/g/resizeRequests/r")
    (error,) = found["status"]["lastAttempt"]["error"]["errors"]
    assert error["code"] == "QUOTA_EXCEEDED"
    gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 2)
    gce.wait_for(lambda: state(gce) == "SUCCEEDED")
    assert set(gce.vms()) == {"vm-0", "vm-1"}
    assert call(gce, "GET", f"{GROUPS}/g")["targetSize"] == 2


def test_vms_of_a_request_that_fails_in_the_middle_are_rolled_back(gce: GceEmulator) -> None:
    gce.lose_next_in_creation()
    set_up(gce)
    done(gce, "POST", f"{GROUPS}/g/resizeRequests", REQUEST)
    gce.wait_for(lambda: state(gce) == "FAILED")
    gce.wait_for(lambda: gce.vms() == {})
    assert call(gce, "GET", f"{GROUPS}/g")["targetSize"] == 0


def test_a_request_is_cancelled_while_it_waits_only(gce: GceEmulator) -> None:
    gce.hold_resize_requests()
    set_up(gce)
    done(gce, "POST", f"{GROUPS}/g/resizeRequests", REQUEST)
    done(gce, "POST", f"{GROUPS}/g/resizeRequests/r/cancel")
    assert state(gce) == "CANCELLED"
    refused = call(gce, "POST", f"{GROUPS}/g/resizeRequests/r/cancel")
    assert "Only a resize request in the state ACCEPTED" in refused["message"]


def test_a_template_is_deleted_after_its_group(gce: GceEmulator) -> None:
    set_up(gce)
    refused = call(gce, "DELETE", "global/instanceTemplates/t")
    assert refused["errors"][0]["reason"] == "resourceInUseByAnotherResource"
    done(gce, "DELETE", f"{GROUPS}/g")
    done(gce, "DELETE", "global/instanceTemplates/t")
    assert (gce.groups(), gce.templates()) == ({}, [])


def test_only_vms_of_the_group_leave_it(gce: GceEmulator) -> None:
    set_up(gce)
    done(gce, "POST", f"{GROUPS}/g/resizeRequests", REQUEST)
    gce.wait_for(lambda: state(gce) == "SUCCEEDED")
    links = [f"zones/{ZONE}/instances/{name}" for name in ("vm-0", "vm-9")]
    failed = done(gce, "POST", f"{GROUPS}/g/deleteInstances", {"instances": links})
    assert failed["error"]["errors"][0]["code"] == "INVALID_USAGE"
    body = {"instances": links, "skipInstancesOnValidationError": True}
    assert "error" not in done(gce, "POST", f"{GROUPS}/g/deleteInstances", body)
    gce.wait_for(lambda: set(gce.vms()) == {"vm-1"})
    assert gce.members() == ["vm-1"]
