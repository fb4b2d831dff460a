"""What goes wrong in the emulated GCE where a test asks: each fault as Google's client sees it."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import datetime

import pytest
import requests
from google.api_core import exceptions
from google.cloud import compute_v1 as compute

from jaxres_emulators.gce import GceEmulator
from tests.unit.emulators.gce_requests import PROJECT, ZONE, Clients, spot
from tests.waiting import SURE_SECONDS

Status = compute.Operation.Status
STOCKOUT = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def codes(operation: compute.Operation) -> list[str]:
    return [one.code for one in operation.error.errors]


def test_a_bulk_insert_is_all_or_nothing_and_its_second_error_is_the_cause(
    gce: GceEmulator, clients: Clients
) -> None:
    gce.stockout(places=3)
    reported = clients.wait(clients.bulk("a", "b", "c", "d"))
    assert codes(reported) == ["VM_MIN_COUNT_NOT_REACHED", STOCKOUT]
    assert reported.http_error_status_code == 503
    found = reported.instances_bulk_insert_operation_metadata.per_location_status[f"zones/{ZONE}"]
    assert (found.created_vm_count, found.failed_to_create_vm_count) == (3, 1)
    assert found.deleted_vm_count == 3
    assert gce.vms() == {}
    reported = clients.wait(clients.bulk("a", "b", "c", "d", least=2))
    assert codes(reported) == []
    assert list(gce.vms().values()) == ["RUNNING"] * 3
    with pytest.raises(exceptions.BadRequest):
        clients.bulk("x", least=2)


def test_a_stockout_is_per_zone_machine_and_model_and_may_lack_its_http_error(
    gce: GceEmulator, clients: Clients
) -> None:
    gce.stockout(zone=ZONE, machine="a2-.*", model="SPOT", times=1, has_http=False)
    reported = clients.wait(clients.insert("a"))
    assert codes(reported) == [STOCKOUT]
    assert reported.http_error_status_code == 0  # What the library's futures take for a success.
    assert gce.vms() == {}
    on_demand = compute.Scheduling(provisioning_model="STANDARD", on_host_maintenance="TERMINATE")
    gce.stockout(model="SPOT", codes=["STOCKOUT", "RESOURCE_POOL_EXHAUSTED"])
    assert codes(clients.wait(clients.insert("a", scheduling=on_demand))) == []
    assert codes(clients.wait(clients.insert("b"))) == ["STOCKOUT", "RESOURCE_POOL_EXHAUSTED"]
    gce.restock()
    assert codes(clients.wait(clients.insert("b"))) == []


def test_a_vm_can_be_preempted_during_its_creation(gce: GceEmulator, clients: Clients) -> None:
    gce.lose_next_in_creation()
    reported = clients.wait(clients.bulk("a", "b"))
    assert codes(reported) == ["VM_MIN_COUNT_NOT_REACHED", "UNSUPPORTED_OPERATION"]
    assert gce.vms() == {}
    gce.lose_next_in_creation()
    stops = spot(instance_termination_action="STOP")
    assert codes(clients.wait(clients.insert("a", scheduling=stops))) == ["UNSUPPORTED_OPERATION"]
    assert gce.vms() == {"a": "TERMINATED"}  # It holds its name.
    assert {kind for kind, _ in gce.events()} == {"compute.instances.preempted"}


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        ("429", exceptions.TooManyRequests, "rateLimitExceeded"),
        ("500", exceptions.InternalServerError, "internalError"),
        ("503", exceptions.ServiceUnavailable, "backendError"),
        ("rateLimitExceeded", exceptions.Forbidden, "rateLimitExceeded"),
        ("quotaExceeded", exceptions.Forbidden, "quotaExceeded"),
        ("resourceNotReady", exceptions.BadRequest, "resourceNotReady"),
    ],
)
def test_a_burst_of_errors_affects_the_given_number_of_calls(
    gce: GceEmulator, clients: Clients, kind: str, error: type[Exception], reason: str
) -> None:
    gce.fail(kind, call="instances.insert", times=2)
    for _ in range(2):
        with pytest.raises(error) as caught:
            clients.insert("one")
        assert isinstance(caught.value, exceptions.GoogleAPICallError)
        assert caught.value.errors[0]["reason"] == reason
    assert gce.vms() == {}
    clients.insert("one")


def test_a_burst_ends_after_its_seconds_and_a_rate_limit_after_a_minute(
    gce: GceEmulator, clients: Clients
) -> None:
    begun = time.monotonic()
    fault = gce.fail("500", times=None, seconds=400e3)
    with pytest.raises(exceptions.InternalServerError):
        clients.names()
    assert fault.until is not None
    assert fault.until >= begun + 400e3 / gce.scheduler.speed
    fault.until = time.monotonic()
    assert clients.names() == []
    gce.limit_rate(2)
    with pytest.raises(exceptions.Forbidden) as caught:
        _ = [clients.names() for _ in range(5)]  # A minute may begin among them.
    assert caught.value.errors[0]["reason"] == "rateLimitExceeded"


def test_a_response_can_be_lost_before_or_after_the_operation(
    gce: GceEmulator, clients: Clients
) -> None:
    request = str(uuid.uuid4())
    gce.fail("drop after", call="instances.insert")
    with pytest.raises(requests.exceptions.ConnectionError):
        clients.insert("one", request=request)
    assert list(gce.vms()) == ["one"]
    assert not codes(clients.wait(clients.insert("one", request=request)))
    gce.fail("drop", call="instances.insert")
    with pytest.raises(requests.exceptions.ConnectionError):
        clients.insert("two")
    assert list(gce.vms()) == ["one"]
    gce.fail("503 after", call="instances.delete")
    with pytest.raises(exceptions.ServiceUnavailable):
        clients.delete("one")
    gce.wait_for(lambda: gce.vms() == {})


def test_a_stalled_call_times_out_in_the_client(gce: GceEmulator, clients: Clients) -> None:
    gce.fail("stall", call="instances.get", late_seconds=1e6)
    with pytest.raises(requests.exceptions.ReadTimeout):
        clients.instances.get(project=PROJECT, zone=ZONE, instance="one", timeout=0.2, retry=None)


def test_operations_can_fail_hang_or_be_slow(gce: GceEmulator, clients: Clients) -> None:
    gce.fail_operation(type="delete", codes=["INTERNAL_ERROR"])
    gce.fail_operation("hang", type="insert", target="hangs")
    gce.fail_operation("slow", type="insert", target="slow", seconds=200)  # 1 s
    clients.wait(clients.insert("one"))
    reported = clients.wait(clients.delete("one"))
    assert codes(reported) == ["INTERNAL_ERROR"]
    assert gce.vms() == {"one": "RUNNING"}
    hanging, slow = clients.insert("hangs"), clients.insert("slow")
    gce.wait_for(lambda: set(gce.vms().values()) == {"RUNNING"})
    slow = clients.wait(slow)
    late = _time(slow.end_time) - _time(clients.get("slow").last_start_timestamp)
    assert late.total_seconds() >= 1.0
    # Waiting has an end of its own: 120 s, here 0.6.
    assert clients.wait_once(hanging).status == Status.RUNNING


def test_a_failed_bulk_insert_leaves_no_vm(gce: GceEmulator, clients: Clients) -> None:
    gce.fail_operation(type="bulkInsert", codes=["INTERNAL_ERROR"])
    assert codes(clients.wait(clients.bulk("a", "b"))) == [
        "VM_MIN_COUNT_NOT_REACHED",
        "INTERNAL_ERROR",
    ]
    assert gce.vms() == {}


def test_a_duplicate_name_can_be_an_error_of_the_operation(
    gce: GceEmulator, clients: Clients
) -> None:
    gce.api.conflict_by_operation = True
    clients.wait(clients.insert("a"))
    first = gce.vm("a").id
    reported = clients.wait(clients.bulk("a", "b"))
    assert codes(reported) == ["VM_MIN_COUNT_NOT_REACHED", "RESOURCE_ALREADY_EXISTS"]
    assert gce.vms() == {"a": "RUNNING"}
    assert gce.vm("a").id == first
    assert [vm.name for vm in gce.vms_so_far()] == ["a", "b"]


def test_lists_can_lag_behind_creations_and_deletions(gce: GceEmulator, clients: Clients) -> None:
    gce.lag_lists(1e6, gone_seconds=1e6)
    clients.wait(clients.insert("one"))
    assert gce.vms() == {"one": "RUNNING"}
    assert clients.names() == []
    assert clients.get("one").status == "RUNNING"
    gce.lag_lists(40, gone_seconds=1e6)  # 0.2 s
    gce.wait_for(lambda: clients.names() == ["one"])
    assert time.monotonic() - gce.vm("one").born >= 0.2
    clients.wait(clients.delete("one"))
    assert gce.vms() == {}
    assert clients.names() == ["one"]
    gce.lag_lists(0, gone_seconds=40)
    gce.wait_for(lambda: clients.names() == [])


STANDS_STILL = 0.001
"""A speed at which only `skip` makes come what is scheduled."""


def test_a_vm_can_be_deleted_during_its_creation(gce: GceEmulator, clients: Clients) -> None:
    speed, gce.scheduler.speed = gce.scheduler.speed, STANDS_STILL
    creation = clients.insert("one")  # It lasts until the deletion is requested.
    deletion = clients.delete("one")
    gce.scheduler.speed = speed
    gce.scheduler.skip(60 * speed / STANDS_STILL)
    assert codes(clients.wait(creation)) == ["RESOURCE_NOT_FOUND"]
    assert codes(clients.wait(deletion)) == []
    assert gce.vms() == {}


def test_only_one_of_many_concurrent_inserts_of_a_name_succeeds(
    gce: GceEmulator, clients: Clients
) -> None:
    results: list[str] = []

    def insert() -> None:
        try:
            results.append(clients.insert("one").name)
        except exceptions.Conflict:
            results.append("conflict")

    threads = [threading.Thread(target=insert) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("conflict") == 7


def test_the_metadata_server_of_a_vm_can_fail_or_be_unreachable() -> None:
    url = "computeMetadata/v1/instance/preempted"
    with GceEmulator(speed=200) as gce, Clients(gce) as clients:
        clients.wait(clients.insert("one"))
        guest = gce.vm("one").guest
        assert guest is not None

        def ask() -> int:
            headers = {"Metadata-Flavor": "Google"}
            address = f"http://{guest.metadata.address}/{url}"
            try:
                return requests.get(address, headers=headers, timeout=SURE_SECONDS).status_code
            except requests.exceptions.ConnectionError:
                return 0

        assert ask() == 200
        gce.fail_metadata("one", "503", times=2)
        gce.fail_metadata("one", "drop", times=1)
        assert [ask() for _ in range(4)] == [503, 503, 0, 200]
        gce.fail_metadata("one", "503", seconds=1e6, flap_seconds=20)
        seen = set()
        gce.wait_for(lambda: seen.add(ask()) or seen == {200, 503})
        assert gce.bugs == []


@pytest.mark.slow
def test_one_call_creates_a_thousand_simulated_vms(gce: GceEmulator, clients: Clients) -> None:
    names = [f"vm-{number:04}" for number in range(1000)]
    reported = clients.wait(clients.bulk(*names))
    assert codes(reported) == []
    assert clients.names() == names
    assert gce.calls().calls == {
        "instances.bulkInsert": 1,
        "zoneOperations.wait": 1,
        "instances.list": 2,
    }
    assert gce.pids() == []
