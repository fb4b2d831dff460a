"""Promises of the calls: Google's client against the emulator, nothing is taken for another."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from jaxres.launch.desired_state import Creation, Vm
from jaxres.launch.gce import ENDPOINT, compute_of
from jaxres.launch.gce_api import Compute, ServiceSilent
from jaxres.launch.instance_spec import Machine
from jaxres.launch.observed_state import Refused
from tests.emulators.gce import GceEmulator
from tests.unit.launch.gce_config import config

ZONE = "us-central1-a"
NAMES = ("jx-0000", "jx-0001")
ASKED = Creation(NAMES, str(uuid.uuid5(uuid.NAMESPACE_URL, "jx")))
SHORT = ["VM_MIN_COUNT_NOT_REACHED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"]


class Service:
    """The service as a launcher has it, and one creation of two VMs."""

    def __init__(self, gce: GceEmulator, **fields: Any) -> None:
        section = config(project=gce.project, **fields).launch.gce
        assert section is not None
        self.compute = Compute(section, endpoint=gce.url)
        self.machine = Machine(section, section.ladder[0], ZONE, {"jaxres-run": "jx"}, {})
        self.emulator = gce

    def create(self, asked: Creation = ASKED) -> str | Refused:
        vms = [Vm(name, ZONE, 0, 1.0) for name in asked.names]
        return self.compute.create(asked, vms, self.machine)

    def outcome(self, operation: str | Refused) -> Refused | bool:
        """Waits for an operation's end; returns what has become of it."""
        assert isinstance(operation, str), operation
        self.emulator.wait_for(lambda: self.compute.became_of(operation, ZONE) is not False)
        return self.compute.became_of(operation, ZONE)


def test_vms_are_made_listed_and_deleted(gce: GceEmulator) -> None:
    service = Service(gce)
    assert service.outcome(service.create()) is True
    listed = service.compute.list("jx")
    assert set(listed) == set(NAMES)
    assert all(vm.zone == ZONE and vm.status == "RUNNING" and vm.ip for vm in listed.values())
    assert service.compute.list("jx-other") == {}
    for name in NAMES:
        assert service.compute.exists(name, ZONE)
        service.compute.delete(name, ZONE)
        service.compute.delete(name, ZONE)
    gce.wait_for(lambda: gce.vms() == {})
    assert not service.compute.exists(NAMES[0], ZONE)
    service.compute.delete(NAMES[0], ZONE)


@pytest.mark.parametrize("has_http", [True, False])
@pytest.mark.parametrize(
    ("codes", "trouble"),
    [(SHORT, "stockout"), (["QUOTA_EXCEEDED"], "quota"), (["INTERNAL_ERROR"], "passing")],
)
def test_a_failed_operation_is_never_taken_for_a_good_one(
    gce: GceEmulator, has_http: bool, codes: list[str], trouble: str
) -> None:
    """Without the fields of HTTP the client's own futures say that it has gone well."""
    service = Service(gce)
    gce.fail_operation("error", type="bulkInsert", codes=codes, has_http=has_http)
    found = service.outcome(service.create())
    assert isinstance(found, Refused), f"{found}: a failed operation counts as done"
    assert found.trouble == trouble


def test_the_same_request_is_heard_once_whoever_makes_it_again(gce: GceEmulator) -> None:
    service, successor = Service(gce), Service(gce)
    gce.fail("drop after", call="instances.bulkInsert")
    with pytest.raises(ServiceSilent):
        service.create()
    operation = successor.compute.operation_of(ASKED, ZONE)
    assert operation is not None
    assert service.create() == successor.create() == operation
    assert service.outcome(operation) is True
    assert sorted(name for _, name in gce.events("insert")) == list(NAMES)
    other = Creation(("jx-0002",), str(uuid.uuid4()))
    assert service.compute.operation_of(other, ZONE) is None


@pytest.mark.parametrize("kind", ["429", "500", "503", "rateLimitExceeded", "drop", "503 after"])
def test_what_may_pass_is_a_silence_and_no_answer(gce: GceEmulator, kind: str) -> None:
    service = Service(gce)
    assert service.outcome(service.create()) is True
    compute = service.compute
    for call in (
        lambda: compute.list("jx"),
        lambda: compute.exists(NAMES[0], ZONE),
        lambda: compute.became_of("operation-1", ZONE),
        lambda: compute.operation_of(ASKED, ZONE),
        lambda: compute.events(ZONE),
        lambda: compute.delete(NAMES[0], ZONE),
        lambda: service.create(),
    ):
        gce.fail(kind)
        with pytest.raises(ServiceSilent):
            call()
    assert set(compute.list("jx")) <= set(NAMES)


def test_a_refusal_is_an_answer(gce: GceEmulator) -> None:
    service = Service(gce)
    gce.fail("quotaExceeded", call="instances.bulkInsert")
    refused = service.create()
    assert isinstance(refused, Refused)
    assert refused.trouble == "quota"
    gce.remove_machine(ZONE, "a2-highgpu-1g")
    refused = service.create()
    assert isinstance(refused, Refused)
    assert refused.trouble == "wrong_zone"


def test_an_api_that_knows_no_notice_of_preemption_is_asked_without(gce: GceEmulator) -> None:
    gce.refuse_field("preemptionNoticeDuration")
    service, told = Service(gce), []
    service.compute.told_by(told.append)
    assert service.outcome(service.create()) is True
    assert len(told) == 1
    assert "going on without" in told[0]
    assert service.compute.operation_of(ASKED, ZONE) is not None, "a successor would not find it"


def test_a_queue_takes_vms_one_by_one_and_each_request_once(gce: GceEmulator) -> None:
    rung = {"kind": "flex_start", "zones": [ZONE], "machine_type": "a2-highgpu-1g"}
    service = Service(gce, ladder=[rung], max_run_hours=24.0)
    first = service.create()
    assert service.create() == first
    assert service.outcome(first) is True
    assert sorted(name for _, name in gce.events("insert")) == list(NAMES)
    found = service.compute.operation_of(ASKED, ZONE)
    assert found is not None
    assert isinstance(first, str)
    assert set(found.split(",")) == set(first.split(","))


@pytest.mark.parametrize("kind", ["spot", "flex_start"])
def test_a_disk_type_is_named_as_either_way_of_asking_wants_it(gce: GceEmulator, kind: str) -> None:
    rung = {"kind": kind, "zones": [ZONE], "machine_type": "a3-ultragpu-8g"}
    gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_H200_GPUS", 16)
    service = Service(gce, ladder=[rung], max_run_hours=24.0, disk_type="hyperdisk-balanced")
    assert service.outcome(service.create()) is True


def test_what_the_service_has_done_to_a_vm_is_known_while_it_still_lists_it(
    gce: GceEmulator,
) -> None:
    service = Service(gce)
    assert service.outcome(service.create()) is True
    assert service.compute.events(ZONE) == {}
    gce.host_error(NAMES[0], shows_running_seconds=36000, is_told=True)
    gce.preempt(NAMES[1], seconds=36000)
    listed = service.compute.list("jx")
    assert service.compute.events(ZONE) == {
        listed[NAMES[0]].id: "compute.instances.hostError",
        listed[NAMES[1]].id: "compute.instances.preempted",
    }
    assert {vm.status for vm in listed.values()} == {"RUNNING"}


def test_an_address_in_the_config_counts_before_one_in_the_environment(gce: GceEmulator) -> None:
    nobody = {ENDPOINT: "http://127.0.0.1:9"}
    assert compute_of(config(project=gce.project, endpoint=gce.url), nobody).list("jx") == {}
    assert compute_of(config(project=gce.project), {ENDPOINT: gce.url}).list("jx") == {}
    with pytest.raises(ServiceSilent):
        compute_of(config(project=gce.project), nobody).list("jx")


def test_sixty_four_vms_are_one_call(gce: GceEmulator) -> None:
    service = Service(gce, num_hosts=64)
    gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 64)
    names = tuple(f"jx-{n:04d}" for n in range(64))
    asked = Creation(names, str(uuid.uuid4()))
    assert service.outcome(service.create(asked)) is True
    assert set(service.compute.list("jx")) == set(names)
    assert gce.calls().calls["instances.bulkInsert"] == 1


def test_rights_that_are_taken_away_while_a_job_is_on_are_a_silence(gce: GceEmulator) -> None:
    service = Service(gce)
    operation = service.create()
    assert service.outcome(operation) is True
    compute = service.compute
    calls: list[tuple[str, Callable[[], object]]] = [
        ("compute.instances.list", lambda: compute.list("jx")),
        ("compute.instances.get", lambda: compute.exists(NAMES[0], ZONE)),
        ("compute.zoneOperations.get", lambda: compute.became_of(str(operation), ZONE)),
        ("compute.zoneOperations.list", lambda: compute.operation_of(ASKED, ZONE)),
        ("compute.zoneOperations.list", lambda: compute.events(ZONE)),
        ("compute.instances.delete", lambda: compute.delete(NAMES[0], ZONE)),
    ]
    for permission, call in calls:
        gce.deny(permission)
        with pytest.raises(ServiceSilent, match=f"Required '{permission}'"):
            call()
        gce.allow(permission)
        call()


def test_an_operation_that_the_service_has_forgotten_has_no_known_end(gce: GceEmulator) -> None:
    assert Service(gce).compute.became_of("operation-0", ZONE) is False
