"""Promises of the Compute API calls, with Google's client against the emulator."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce.api.aggregated_lists import ListedVms
from jaxres.launch.gce.api.compute import ApiRefused, ApiUnavailable, Compute
from jaxres.launch.gce.checks import preflight
from jaxres.launch.gce.job_start import ENDPOINT, compute_for
from jaxres.launch.gce.state.desired_state import PendingCreate, VmSpec
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres.launch.gce.vm.instance_spec import Machine
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from tests.unit.launch.gce_config import config

ZONE = "us-central1-a"
NAMES = ("jx-0000", "jx-0001")
CREATION = PendingCreate(NAMES, str(uuid.uuid5(uuid.NAMESPACE_URL, "jx")))
SINGLE = PendingCreate(NAMES[:1], CREATION.request_id)
SHORT = ["VM_MIN_COUNT_NOT_REACHED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"]


class ComputeFixture:
    """The Compute API of a launcher, and one creation of two VMs."""

    def __init__(self, gce: GceEmulator, **fields: Any) -> None:
        section = config(project=gce.project, **fields).launch.gce
        assert section is not None
        self.section = section
        self.compute = Compute(section, endpoint=gce.url)
        self.machine = Machine(section, section.capacity_options[0], ZONE, {"jaxres-run": "jx"}, {})
        self.emulator = gce

    def create(self, creation: PendingCreate = CREATION) -> str | CreateFailed | None:
        vms = [VmSpec(name, ZONE, 0, 1.0) for name in creation.names]
        return self.compute.create(creation, vms, self.machine)

    def outcome(self, operation: str | CreateFailed | None) -> CreateFailed | bool:
        """Waits for an operation's end and returns its result."""
        assert isinstance(operation, str), operation
        self.emulator.wait_for(lambda: self.compute.create_result(operation, ZONE) is not False)
        return self.compute.create_result(operation, ZONE)


def test_vms_are_created_listed_and_deleted(gce: GceEmulator) -> None:
    service = ComputeFixture(gce)
    assert service.outcome(service.create()) is True
    listed = service.compute.list("jx").vms
    assert set(listed) == set(NAMES)
    assert all(vm.zone == ZONE and vm.status == "RUNNING" and vm.ip for vm in listed.values())
    assert service.compute.list("jx").programs_secret == ""
    assert service.compute.list("jx-other") == ListedVms()
    for name in NAMES:
        assert service.compute.exists(name, ZONE)
        assert service.compute.status(name, ZONE) == "RUNNING"
        service.compute.delete(name, ZONE)
        service.compute.delete(name, ZONE)
    gce.wait_for(lambda: gce.vms() == {})
    assert not service.compute.exists(NAMES[0], ZONE)
    assert service.compute.status(NAMES[0], ZONE) is None
    service.compute.delete(NAMES[0], ZONE)


@pytest.mark.parametrize("has_http", [True, False])
@pytest.mark.parametrize(
    ("codes", "kind"),
    [(SHORT, "stockout"), (["QUOTA_EXCEEDED"], "quota"), (["INTERNAL_ERROR"], "passing")],
)
def test_a_failed_operation_is_never_a_success(
    gce: GceEmulator, has_http: bool, codes: list[str], kind: str
) -> None:
    """Without the HTTP fields the client's own futures report success."""
    service = ComputeFixture(gce)
    gce.fail_operation("error", type="bulkInsert", codes=codes, has_http=has_http)
    found = service.outcome(service.create())
    assert isinstance(found, CreateFailed), f"{found}: a failed operation counts as done"
    assert found.kind == kind


def test_a_repeated_request_creates_vms_once(gce: GceEmulator) -> None:
    service, successor = ComputeFixture(gce), ComputeFixture(gce)
    gce.fail("drop after", call="instances.bulkInsert")
    with pytest.raises(ApiUnavailable):
        service.create()
    operation = successor.compute.find_operation(CREATION, ZONE)
    assert operation is not None
    assert service.create() == successor.create() == operation
    assert service.outcome(operation) is True
    assert sorted(name for _, name in gce.events("insert")) == list(NAMES)
    other = PendingCreate(("jx-0002",), str(uuid.uuid4()))
    assert service.compute.find_operation(other, ZONE) is None


@pytest.mark.parametrize("kind", ["429", "500", "503", "rateLimitExceeded", "drop", "503 after"])
def test_a_temporary_error_is_unavailability_and_no_response(gce: GceEmulator, kind: str) -> None:
    service = ComputeFixture(gce)
    assert service.outcome(service.create()) is True
    compute = service.compute
    for call in (
        lambda: compute.list("jx"),
        lambda: compute.exists(NAMES[0], ZONE),
        lambda: compute.create_result("operation-1", ZONE),
        lambda: compute.find_operation(CREATION, ZONE),
        lambda: compute.events(ZONE),
        lambda: compute.delete(NAMES[0], ZONE),
        lambda: service.create(),
    ):
        gce.fail(kind)
        with pytest.raises(ApiUnavailable):
            call()
    assert set(compute.list("jx").vms) <= set(NAMES)


def test_credentials_that_can_not_be_renewed_are_an_outage_of_a_running_launcher(
    gce: GceEmulator,
) -> None:
    credentials = Credentials(
        None, refresh_token="r", client_id="c", client_secret="s", token_uri=f"{gce.url}/no-token"
    )
    service = ComputeFixture(gce)
    service.compute._clients.clear()
    service.compute._options["credentials"] = credentials
    for call in (lambda: service.compute.list("jx"), service.create):
        with pytest.raises(ApiUnavailable, match="no credentials for Google Cloud"):
            call()
    with pytest.raises(ConfigError, match="gcloud auth"):
        preflight.check(service.section, service.compute, GcsPath("bucket", "run"))


def test_a_refusal_is_a_failed_creation(gce: GceEmulator) -> None:
    service = ComputeFixture(gce)
    gce.fail("quotaExceeded", call="instances.bulkInsert")
    refused = service.create()
    assert isinstance(refused, CreateFailed)
    assert refused.kind == "quota"
    gce.remove_machine(ZONE, "a2-highgpu-1g")
    refused = service.create()
    assert isinstance(refused, CreateFailed)
    assert refused.kind == "wrong_zone"


def test_an_api_without_preemption_notices_gets_the_request_without_one(gce: GceEmulator) -> None:
    gce.refuse_field("preemptionNoticeDuration")
    service, messages = ComputeFixture(gce), []
    service.compute.set_console(messages.append)
    assert service.outcome(service.create()) is True
    assert len(messages) == 1
    assert "continuing without it" in messages[0]
    assert service.compute.find_operation(CREATION, ZONE) is not None, (
        "a successor would not find it"
    )


PREVIEW = "Project p is not allowed to use a preview feature."


def test_a_notice_refused_in_other_words_is_omitted(gce: GceEmulator) -> None:
    gce.refuse_field("preemptionNoticeDuration", message=PREVIEW)
    service, messages = ComputeFixture(gce), []
    service.compute.set_console(messages.append)
    assert service.outcome(service.create()) is True
    assert len(messages) == 1
    assert "continuing without it" in messages[0]
    assert {vm.notice_seconds for vm in gce.vms_so_far()} == {0.0}


def test_a_notice_that_the_operation_refuses_is_omitted_by_the_next_request(
    gce: GceEmulator,
) -> None:
    service, messages = ComputeFixture(gce), []
    service.compute.set_console(messages.append)
    gce.fail_operation(type="bulkInsert", codes=["INVALID_USAGE"])
    failed = service.outcome(service.create())
    assert isinstance(failed, CreateFailed)
    assert failed.kind == "notice_refused", failed
    again = PendingCreate(("jx-0002", "jx-0003"), str(uuid.uuid4()))
    assert service.outcome(service.create(again)) is True
    assert {gce.vm(name).notice_seconds for name in again.names} == {0.0}
    assert len(messages) == 1


def test_a_refusal_without_a_notice_too_is_final_and_the_notice_is_kept(gce: GceEmulator) -> None:
    service = ComputeFixture(gce)
    gce.fail("400", call="instances.bulkInsert", times=2)
    failed = service.create()
    assert isinstance(failed, CreateFailed)
    assert failed.kind == "refused"
    gce.fail_operation(type="bulkInsert", codes=["INVALID_USAGE"], times=2)
    kinds = []
    for number in (0, 2):
        names = (f"jx-000{number}", f"jx-000{number + 1}")
        failed = service.outcome(service.create(PendingCreate(names, str(uuid.uuid4()))))
        assert isinstance(failed, CreateFailed)
        kinds.append(failed.kind)
    assert kinds == ["notice_refused", "refused"]
    names = ("jx-0004", "jx-0005")
    assert service.outcome(service.create(PendingCreate(names, str(uuid.uuid4())))) is True
    assert {gce.vm(name).notice_seconds for name in names} == {120.0}


class SteppingClock(SystemClock):
    """A clock that only sleeps move."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def check(gce: GceEmulator, clock: SystemClock, **fields: Any) -> list[str]:
    """Runs the checks before a creation; returns what is printed meanwhile."""
    section = config(project=gce.project, **fields).launch.gce
    assert section is not None
    printed: list[str] = []
    compute = Compute(section, endpoint=gce.url, clock=clock)
    compute.set_console(printed.append)
    preflight.check(section, compute, GcsPath("bucket", "run"))
    return printed


@pytest.fixture
def no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is not looked up."""
    monkeypatch.setattr(preflight, "_bucket", lambda *_, **__: [])


@pytest.mark.usefixtures("no_bucket")
def test_the_checks_wait_for_an_api_that_does_not_answer(gce: GceEmulator) -> None:
    clock = SteppingClock()
    gce.fail("503", times=7)
    printed = check(gce, clock)
    assert 30 <= clock.monotonic() <= 60, clock.slept
    assert len(printed) == 1
    assert "does not answer; trying again" in printed[0]
    gce.fail("503", times=None)
    with pytest.raises(StorageUnavailable, match="nothing was created, rerun the same command"):
        check(gce, clock := SteppingClock())
    assert 30 <= clock.monotonic() <= 60, clock.slept


@pytest.mark.usefixtures("no_bucket")
def test_a_subnetwork_of_a_shared_vpc_is_looked_up_in_its_host_project(gce: GceEmulator) -> None:
    shared = "projects/net-host/regions/{region}/subnetworks/shared"
    gce.add_subnetwork("us-central1", "shared", host_project="net-host")
    assert check(gce, SystemClock(), subnetworks=[shared]) == []
    service = ComputeFixture(gce, subnetworks=[shared])
    assert service.outcome(service.create()) is True
    for name, expected in (
        (shared.replace("/shared", "/other"), "no subnetwork other in us-central1 of the project"),
        ("projects/net-host/regions/us-east4/subnetworks/shared", "is in us-east4, VMs may be in"),
    ):
        with pytest.raises(ConfigError, match=expected):
            check(gce, SystemClock(), subnetworks=[name])


def test_one_queued_vm_is_requested_once_without_a_group(gce: GceEmulator) -> None:
    option = {"kind": "flex_start", "zones": [ZONE], "machine_type": "a2-highgpu-1g"}
    service = ComputeFixture(gce, capacity_options=[option], max_run_hours=24.0)
    first = service.create(SINGLE)
    assert service.create(SINGLE) == first
    assert service.outcome(first) is True
    assert [name for _, name in gce.events("insert")] == [NAMES[0]]
    assert service.compute.find_operation(SINGLE, ZONE) == first


@pytest.mark.parametrize("kind", ["spot", "flex_start"])
def test_a_disk_type_is_named_as_each_kind_of_request_requires(gce: GceEmulator, kind: str) -> None:
    option = {"kind": kind, "zones": [ZONE], "machine_type": "a3-ultragpu-8g"}
    gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_H200_GPUS", 16)
    service = ComputeFixture(
        gce, capacity_options=[option], max_run_hours=24.0, disk_type="hyperdisk-balanced"
    )
    creation = CREATION if kind == "spot" else SINGLE
    assert service.outcome(service.create(creation)) is True


def test_operations_of_the_service_are_known_while_a_vm_is_still_listed(
    gce: GceEmulator,
) -> None:
    service = ComputeFixture(gce)
    assert service.outcome(service.create()) is True
    assert service.compute.events(ZONE) == {}
    gce.host_error(NAMES[0], shows_running_seconds=36000, is_told=True)
    gce.preempt(NAMES[1], seconds=36000)
    listed = service.compute.list("jx").vms
    assert service.compute.events(ZONE) == {
        listed[NAMES[0]].id: "compute.instances.hostError",
        listed[NAMES[1]].id: "compute.instances.preempted",
    }
    assert {vm.status for vm in listed.values()} == {"RUNNING"}


def test_messages_for_the_operator_have_no_urls_of_requests(gce: GceEmulator) -> None:
    service = ComputeFixture(gce)
    gce.fail("503", call="instances.aggregatedList")
    with pytest.raises(ApiUnavailable) as caught:
        service.compute.list("jx")
    assert str(caught.value) == "ServiceUnavailable: 503 requested by the test"
    gce.refuse_field("labels", message="Labels are refused.")
    assert service.create() == CreateFailed("refused", "INVALID: Labels are refused.")


def test_an_endpoint_in_the_config_overrides_one_in_the_environment(gce: GceEmulator) -> None:
    unreachable = {ENDPOINT: "http://127.0.0.1:9"}
    assert (
        compute_for(config(project=gce.project, endpoint=gce.url), unreachable).list("jx")
        == ListedVms()
    )
    assert compute_for(config(project=gce.project), {ENDPOINT: gce.url}).list("jx") == ListedVms()
    with pytest.raises(ApiUnavailable):
        compute_for(config(project=gce.project), unreachable).list("jx")


def test_sixty_four_vms_are_one_call(gce: GceEmulator) -> None:
    service = ComputeFixture(gce, num_hosts=64)
    gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 64)
    names = tuple(f"jx-{n:04d}" for n in range(64))
    creation = PendingCreate(names, str(uuid.uuid4()))
    assert service.outcome(service.create(creation)) is True
    assert set(service.compute.list("jx").vms) == set(names)
    assert gce.calls().calls["instances.bulkInsert"] == 1


def test_permissions_removed_during_a_job_are_unavailability(gce: GceEmulator) -> None:
    service = ComputeFixture(gce)
    operation = service.create()
    assert service.outcome(operation) is True
    compute = service.compute
    calls: list[tuple[str, Callable[[], object]]] = [
        ("compute.instances.list", lambda: compute.list("jx")),
        ("compute.instances.get", lambda: compute.exists(NAMES[0], ZONE)),
        ("compute.zoneOperations.get", lambda: compute.create_result(str(operation), ZONE)),
        ("compute.zoneOperations.list", lambda: compute.find_operation(CREATION, ZONE)),
        ("compute.zoneOperations.list", lambda: compute.events(ZONE)),
        ("compute.instances.delete", lambda: compute.delete(NAMES[0], ZONE)),
    ]
    for permission, call in calls:
        gce.deny(permission)
        with pytest.raises(ApiRefused, match=f"Required '{permission}'"):
            call()
        gce.allow(permission)
        call()


def test_an_operation_that_the_service_has_deleted_has_no_known_end(gce: GceEmulator) -> None:
    assert ComputeFixture(gce).compute.create_result("operation-0", ZONE) is False
