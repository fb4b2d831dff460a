"""Promises of the calls for groups of Flex-start VMs, with Google's client against the emulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxres.launch.gce.api.compute import ApiUnavailable
from jaxres.launch.gce.state.desired_state import InstanceGroup, PendingCreate
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres_emulators.gce import GceEmulator
from tests.unit.launch.gce.api.test_gce_api import CREATION, NAMES, ZONE, ComputeFixture

OPTION = {"kind": "flex_start", "zones": [ZONE], "machine_type": "a2-highgpu-1g"}
GROUP = InstanceGroup(NAMES[0], ZONE, NAMES)
INSERTS = (
    "instanceTemplates.insert",
    "instanceGroupManagers.insert",
    "instanceGroupManagerResizeRequests.insert",
)


@pytest.fixture
def gce() -> Iterator[GceEmulator]:
    with GceEmulator(speed=60, is_simulated=True) as gce:
        yield gce
    assert gce.bugs == []


def service(gce: GceEmulator, **fields: Any) -> ComputeFixture:
    return ComputeFixture(gce, **{"capacity_options": [OPTION], "max_run_hours": 24.0, **fields})


def until(gce: GceEmulator, step: Callable[[], Any]) -> Any:
    """Repeats a step until it returns something, as a launcher does, also after no answer."""
    found: list[Any] = []

    def once() -> bool:
        try:
            found.append(step())
        except ApiUnavailable:
            found.append(None)
        return bool(found[-1])

    gce.wait_for(once)
    return found[-1]


def request(one: ComputeFixture) -> Any:
    return until(one.emulator, one.create)


def delete(one: ComputeFixture, group: InstanceGroup = GROUP) -> None:
    calls = one.compute.resize_requests

    def step() -> bool:
        calls.delete(group)
        return group.name in calls.gone

    until(one.emulator, step)


def test_the_template_has_what_the_config_and_its_template_say(gce: GceEmulator) -> None:
    properties = {"tags": {"items": ["a"]}, "metadata": {"items": [{"key": "k", "value": "v"}]}}
    networks = {"networkInterfaces": [{"network": "global/networks/default"}]}
    gce.add_template("t", properties | networks)
    one = service(gce, template="t", labels={"team": "x"})
    assert one.outcome(request(one)) is True
    for vm in gce.vms_so_far():
        assert vm.wanted["tags"] == {"items": ["a"]}
        assert vm.items["k"] == "v"
        assert vm.labels == {"team": "x", "jaxres-run": "jx"}
        assert vm.model == "FLEX_START"
        assert vm.wanted["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}
        assert vm.scheduling["maxRunDuration"]["seconds"] == "86400"


@pytest.mark.parametrize("kind", ["503 after", "drop after", "503"])
@pytest.mark.parametrize("call", INSERTS)
def test_a_request_whose_answer_is_lost_creates_one_of_each(
    gce: GceEmulator, kind: str, call: str
) -> None:
    gce.fail(kind, call=call)
    first, second = service(gce), service(gce)

    def create_until_unanswered() -> None:
        while first.create() is None:
            time.sleep(0.01)

    with pytest.raises(ApiUnavailable):
        create_until_unanswered()
    operation = request(second)
    assert operation == request(first) == second.compute.find_operation(CREATION, ZONE)
    assert second.outcome(operation) is True
    assert gce.groups() == {NAMES[0]: {NAMES[0]: "SUCCEEDED"}}
    assert len(gce.vms_so_far()) == 2


@pytest.mark.parametrize("kind", ["template", "group", "request"])
def test_a_part_whose_operation_fails_is_no_success(gce: GceEmulator, kind: str) -> None:
    types = {
        "template": "insert",
        "group": "compute.instanceGroupManagers.insert",
        "request": "compute.instanceGroupManagers.resizeRequests.insert",
    }
    gce.fail_operation("error", type=types[kind], codes=["QUOTA_EXCEEDED"], has_http=False)
    one = service(gce)
    found = request(one)
    assert isinstance(found, CreateFailed), f"{found}: a failed operation counts as accepted"
    assert found.kind == "quota"
    delete(one)
    assert (gce.groups(), gce.templates()) == ({}, [])


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (("ZONE_RESOURCE_POOL_EXHAUSTED",), "stockout"),
        (("QUOTA_EXCEEDED",), "quota"),
        (("INTERNAL_ERROR",), "passing"),
    ],
)
def test_a_failed_resize_request_has_its_cause(
    gce: GceEmulator, codes: tuple[str, ...], kind: str
) -> None:
    gce.fail_resize_requests(*codes)
    one = service(gce)
    found = one.outcome(request(one))
    assert isinstance(found, CreateFailed)
    assert found.kind == kind


def test_a_cancelled_or_deleted_resize_request_is_a_failure(gce: GceEmulator) -> None:
    gce.hold_resize_requests()
    one = service(gce)
    operation = request(one)
    assert one.compute.create_result(operation, ZONE) is False
    gce.cancel_resize_requests()
    found = one.compute.create_result(operation, ZONE)
    assert isinstance(found, CreateFailed)
    assert (found.kind, "was cancelled" in found.message) == ("stockout", True)
    delete(one)
    found = one.compute.create_result(operation, ZONE)
    assert isinstance(found, CreateFailed)
    assert found.kind == "passing"


@pytest.mark.parametrize("waits", [True, False])
def test_a_group_is_deleted_with_its_vms_and_its_template(gce: GceEmulator, waits: bool) -> None:
    gce.add_template("other", {})
    gce.hold_resize_requests(waits)
    one = service(gce)
    operation = request(one)
    assert waits or one.outcome(operation) is True
    delete(service(gce))
    assert (gce.vms(), gce.groups(), gce.templates()) == ({}, {}, ["other"])
    gce.hold_resize_requests(False)
    assert len(gce.vms_so_far()) == (0 if waits else 2)


@pytest.mark.parametrize("error", ["forbidden", "409", "412"])
def test_a_request_that_may_not_be_cancelled_is_deleted_with_its_group(
    gce: GceEmulator, error: str
) -> None:
    gce.hold_resize_requests()
    request(service(gce))
    rule = gce.fail(error, call="instanceGroupManagerResizeRequests.cancel", times=None)
    delete(service(gce))
    assert rule.hits > 0, "no cancellation was tried"
    assert (gce.vms(), gce.groups(), gce.templates()) == ({}, {}, [])


def test_groups_of_a_run_are_found_by_their_description(gce: GceEmulator) -> None:
    gce.hold_resize_requests()
    one = service(gce)
    request(one)
    calls = one.compute.resize_requests
    assert calls.leftovers("jx") == ([InstanceGroup(NAMES[0], ZONE, ())], {})
    assert calls.leftovers("j") == calls.leftovers("jx-other") == ([], {})
    delete(one, calls.leftovers("jx")[0][0])
    assert calls.leftovers("jx") == ([], {})


def test_a_name_that_is_used_by_another_vm_is_refused(gce: GceEmulator) -> None:
    alone = service(gce, num_hosts=1)
    single = PendingCreate((NAMES[1],), CREATION.request_id)
    assert alone.outcome(alone.create(single)) is True
    found = request(service(gce))
    assert isinstance(found, CreateFailed)
    assert found.kind == "exists"
