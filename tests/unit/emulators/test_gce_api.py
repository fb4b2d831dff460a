"""The emulated Compute API refuses what Google's refuses, and lists and counts as it does."""

from __future__ import annotations

import contextlib
import json
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import compute_v1 as compute

from jaxres_emulators.gce import GceEmulator
from tests.unit.emulators.gce_requests import PROJECT, TERMINATE, ZONE, Clients, bulk, spot
from tests.waiting import SURE_SECONDS

DONE = compute.Operation.Status.DONE
STANDARD = compute.Scheduling(provisioning_model="STANDARD", on_host_maintenance=TERMINATE)


def scheduling(model: str, **more: Any) -> compute.Scheduling:
    if model == "SPOT":
        return spot(**more)
    words = {"provisioning_model": model, "on_host_maintenance": TERMINATE}
    if model == "FLEX_START":
        words |= {
            "instance_termination_action": "DELETE",
            "max_run_duration": compute.Duration(seconds=3600),
        }
    return compute.Scheduling(**(words | more))


RESERVED = compute.ReservationAffinity(
    consume_reservation_type="SPECIFIC_RESERVATION",
    key="compute.googleapis.com/reservation-name",
    values=["mine"],
)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"name": "Upper"}, "Must be a match of regex"),
        ({"name": "x" * 64}, "Must be a match of regex"),
        ({"name": "ends-"}, "Must be a match of regex"),
        ({"labels": {"Key": "v"}}, "Label key 'Key' violates format"),
        ({"labels": {"key": "A.b"}}, "Label value 'A.b' violates format"),
        ({"machine": "e9-none"}, "does not exist in zone 'us-central1-a'"),
        ({"machine": "zones/us-east4-a/machineTypes/e2-small"}, "must be in the same zone"),
        ({"scheduling": spot(automatic_restart=True)}, "automaticRestart"),
        ({"scheduling": spot(preemptible=False)}, "preemptible"),
        ({"scheduling": spot(on_host_maintenance="MIGRATE")}, "do not support live migration"),
        ({"scheduling": scheduling("STANDARD", preemptible=True)}, "preemptible"),
        (
            {"scheduling": spot(preemption_notice_duration=compute.Duration(seconds=60))},
            "Must be 0 or 120",
        ),
        (
            {
                "scheduling": scheduling(
                    "STANDARD", preemption_notice_duration=compute.Duration(seconds=120)
                )
            },
            "only for Spot",
        ),
        ({"guest_accelerators": [compute.AcceleratorConfig(accelerator_count=1)]}, "its own"),
        ({"scheduling": spot(max_run_duration=compute.Duration(seconds=5))}, "between 30 and"),
        ({"image": "projects/debian-cloud/global/images/family/none"}, "image resource cannot be"),
        ({"region": "us-east4"}, "same region"),
        ({"machine": "a4-highgpu-8g"}, r"\[pd-standard\] features"),
        ({"nic_type": "MRDMA"}, "does not support NIC type MRDMA"),
        (
            {"nic_type": "MRDMA", "machine": "a4-highgpu-8g", "disk": "hyperdisk-balanced"},
            "MRDMA needs an RDMA network",
        ),
        ({"items": {"big": "x" * (256 * 1024 + 1)}}, "too large"),
    ],
)
def test_an_impossible_instance_is_rejected_at_once_and_creates_nothing(
    gce: GceEmulator, clients: Clients, what: dict[str, Any], says: str
) -> None:
    words = {"name": "one"} | what
    with pytest.raises(exceptions.BadRequest, match=says):
        clients.insert(words.pop("name"), **words)
    assert gce.vms() == {}
    assert gce.operations.all == {}


@pytest.mark.parametrize(
    ("machine", "models"),
    [
        ("a2-highgpu-8g", "SPOT STANDARD FLEX_START RESERVATION_BOUND"),
        ("a3-highgpu-4g", "SPOT FLEX_START"),
        ("a3-highgpu-8g", "SPOT STANDARD FLEX_START RESERVATION_BOUND"),
        ("a3-ultragpu-8g", "SPOT FLEX_START RESERVATION_BOUND"),
        ("a4-highgpu-8g", "SPOT FLEX_START RESERVATION_BOUND"),
        ("a4x-highgpu-4g", "RESERVATION_BOUND"),
    ],
)
def test_a_machine_type_supports_some_provisioning_models_only(
    gce: GceEmulator, clients: Clients, machine: str, models: str
) -> None:
    gce.reserve(ZONE, "mine", machine=machine, count=1)
    had = []
    for model in ("SPOT", "STANDARD", "FLEX_START", "RESERVATION_BOUND"):
        words: dict[str, Any] = {"scheduling": scheduling(model), "disk": "hyperdisk-balanced"}
        if model == "RESERVATION_BOUND":
            words["reservation_affinity"] = RESERVED
        with contextlib.suppress(exceptions.BadRequest):
            clients.insert(model.lower().replace("_", "-"), machine=machine, **words)
            had.append(model)
    assert had == models.split()


def test_bulk_insert_takes_a_machine_type_name_and_insert_a_url(clients: Clients) -> None:
    with pytest.raises(exceptions.BadRequest, match="does not exist"):
        clients.bulk("one", machine=f"zones/{ZONE}/machineTypes/e2-small")
    asked = compute.Instance(name="one", machine_type="e2-small")
    with pytest.raises(exceptions.BadRequest, match="URL is malformed"):
        clients.instances.insert_unary(project=PROJECT, zone=ZONE, instance_resource=asked)


def test_a_repeated_request_id_returns_the_same_operation_and_another_conflicts(
    gce: GceEmulator, clients: Clients
) -> None:
    request = str(uuid.uuid4())
    first = clients.insert("one", request=request)
    assert clients.insert("one", request=request).name == first.name
    clients.wait(first)
    assert clients.insert("one", request=request).name == first.name
    with pytest.raises(exceptions.Conflict) as caught:
        clients.insert("one", request=str(uuid.uuid4()))
    assert caught.value.errors[0]["reason"] == "alreadyExists"
    with pytest.raises(exceptions.Conflict):
        clients.bulk("two", "one")
    for bad in ("not-one", str(uuid.UUID(int=0))):
        with pytest.raises(exceptions.BadRequest, match="valid UUID"):
            clients.insert("three", request=bad)
    assert gce.vms() == {"one": "RUNNING"}


def test_a_deleted_vm_is_not_found(gce: GceEmulator, clients: Clients) -> None:
    clients.wait(clients.insert("one"))
    deletion = clients.delete("one")
    assert clients.wait(deletion).status == DONE
    assert gce.vms() == {}
    with pytest.raises(exceptions.NotFound) as caught:
        clients.delete("one")
    assert caught.value.errors[0]["reason"] == "notFound"
    first = clients.insert("one")
    assert clients.wait(first).target_id != deletion.target_id


def test_lists_are_filtered_and_paged(gce: GceEmulator, clients: Clients) -> None:
    clients.wait(clients.bulk(*(f"a-{n}" for n in range(7)), labels={"jaxres-run": "one"}))
    elsewhere = "europe-west4-b"
    words = {"labels": {"jaxres-run": "two", "jaxres-slot": "3"}, "region": "europe-west4"}
    clients.wait(clients.bulk("b-0", zone=elsewhere, **words), zone=elsewhere)
    assert clients.names(most=3) == [f"a-{n}" for n in range(7)]
    assert gce.calls().calls["instances.list"] == 3
    assert clients.names("name=a-3") == ["a-3"]
    assert clients.names('(name = "a-3") OR (name = "a-4")') == ["a-3", "a-4"]
    assert clients.names("name eq a-[12]") == ["a-1", "a-2"]
    assert clients.names("labels.jaxres-slot:*") == []
    assert clients.names("labels.jaxres-run=one AND status!=RUNNING") == []
    with pytest.raises(exceptions.BadRequest, match="filter"):
        clients.names("name = (")
    asked = compute.AggregatedListInstancesRequest(
        project=PROJECT, filter="labels.jaxres-run:*", max_results=3
    )
    found = {
        (scope, one.name)
        for scope, scoped in clients.instances.aggregated_list(asked)
        for one in scoped.instances
    }
    there = {(f"zones/{ZONE}", f"a-{n}") for n in range(7)}
    assert found == there | {(f"zones/{elsewhere}", "b-0")}


def test_stale_labels_are_refused(clients: Clients) -> None:
    clients.wait(clients.insert("one"))
    stale = clients.get("one").label_fingerprint

    def label(value: str) -> Any:
        body = compute.InstancesSetLabelsRequest(label_fingerprint=stale, labels={"k": value})
        return clients.instances.set_labels_unary(
            project=PROJECT, zone=ZONE, instance="one", instances_set_labels_request_resource=body
        )

    assert clients.wait(label("a")).status == DONE
    with pytest.raises(exceptions.PreconditionFailed):
        label("b")
    assert dict(clients.get("one").labels) == {"k": "a"}


@pytest.mark.parametrize("as_http", [True, False])
def test_quotas_are_per_region_and_model(gce: GceEmulator, clients: Clients, as_http: bool) -> None:
    gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 16, as_http=as_http)
    many = ("a", "b", "c")
    machine = "a2-highgpu-8g"
    if as_http:
        with pytest.raises(exceptions.Forbidden) as caught:
            clients.bulk(*many, machine=machine)
        assert caught.value.errors[0]["reason"] == "quotaExceeded"
    else:
        reported = clients.wait(clients.bulk(*many, machine=machine))
        codes = [one.code for one in reported.error.errors]
        assert codes == ["VM_MIN_COUNT_NOT_REACHED", "QUOTA_EXCEEDED"]
    assert gce.vms() == {}
    assert not clients.wait(clients.bulk("a", "b", machine=machine)).error.errors
    clients.wait(clients.insert("on-demand", machine=machine, scheduling=STANDARD))
    clients.wait(clients.delete("a"))
    found = clients.regions.get(project=PROJECT, region="us-central1").quotas
    usage = {one.metric: (one.usage, one.limit) for one in found}
    assert usage["PREEMPTIBLE_NVIDIA_A100_GPUS"] == (8, 16)
    assert usage["NVIDIA_A100_GPUS"][0] == 8


@pytest.mark.parametrize("kind", ["quota", "reservation"])
def test_a_vm_holds_quota_and_its_reserved_place_until_its_deletion_is_done(
    gce: GceEmulator, clients: Clients, kind: str
) -> None:
    words: dict[str, Any] = {"machine": "a2-highgpu-1g"}
    if kind == "quota":
        gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 1)
        code, status = "QUOTA_EXCEEDED", 403
    else:
        gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=1)
        code, status = "CONDITION_NOT_MET", 412
        words |= {"scheduling": scheduling("RESERVATION_BOUND"), "reservation_affinity": RESERVED}
    assert not clients.wait(clients.bulk("a", **words)).error.errors
    clients.wait(clients.delete("a"))
    assert not clients.wait(clients.bulk("b", **words)).error.errors, "it is not freed"
    gce.hold_deletions()
    deletion = clients.delete("b")
    assert gce.vms() == {"b": "STOPPING"}
    reported = clients.wait(clients.bulk("c", **words))
    assert [one.code for one in reported.error.errors] == ["VM_MIN_COUNT_NOT_REACHED", code]
    assert reported.http_error_status_code == status
    gce.hold_deletions(False)
    clients.wait(deletion)
    assert not clients.wait(clients.bulk("c", **words)).error.errors


def test_a_reservation_must_exist_with_this_machine_type(
    gce: GceEmulator, clients: Clients
) -> None:
    words = {"scheduling": scheduling("RESERVATION_BOUND"), "reservation_affinity": RESERVED}
    with pytest.raises(exceptions.BadRequest, match="reservation mine does not exist"):
        clients.bulk("a", **words)
    gce.reserve(ZONE, "mine", machine="a2-highgpu-8g", count=1)
    with pytest.raises(exceptions.BadRequest, match="No available resources in specified"):
        clients.bulk("a", machine="a2-highgpu-1g", **words)


def test_a_reservation_must_be_ready_and_its_vms_have_its_policies(
    gce: GceEmulator, clients: Clients
) -> None:
    words = {"scheduling": scheduling("RESERVATION_BOUND"), "reservation_affinity": RESERVED}
    gce.add_policy("us-central1", "compact")
    gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=1, policies=["compact"])
    with pytest.raises(exceptions.BadRequest, match="must be those of the reservation"):
        clients.bulk("a", **words)
    gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=1, status="CREATING")
    with pytest.raises(exceptions.PreconditionFailed, match="in READY state"):
        clients.bulk("a", **words)
    gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2)
    clients.wait(clients.bulk("a", **words))
    found = clients.reservations.get(project=PROJECT, zone=ZONE, reservation="mine")
    assert (found.status, found.specific_reservation.count) == ("READY", 2)
    assert found.specific_reservation.in_use_count == 1


def test_quotas_of_all_regions_count_vms_everywhere(gce: GceEmulator, clients: Clients) -> None:
    gce.quota_of_all_regions("GPUS_ALL_REGIONS", 2)
    elsewhere = "europe-west4-b"
    clients.wait(clients.bulk("a", zone=elsewhere, region="europe-west4"), zone=elsewhere)
    clients.wait(clients.bulk("b"))
    refused = clients.wait(clients.bulk("c"))
    assert "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 2 globally." in [
        one.message for one in refused.error.errors
    ]
    quotas = {q.metric: q for q in clients.projects.get(project=PROJECT).quotas}
    assert quotas["GPUS_ALL_REGIONS"].usage == 2
    assert quotas["CPUS_ALL_REGIONS"].usage == 24


def test_a_boot_disk_is_at_least_as_large_as_its_image(gce: GceEmulator, clients: Clients) -> None:
    gce.add_image(PROJECT, "own-1", family="own", diskSizeGb="300")
    disk = compute.AttachedDiskInitializeParams(
        source_image=f"projects/{PROJECT}/global/images/family/own", disk_size_gb=200
    )
    with pytest.raises(exceptions.BadRequest, match=r"smaller than the image size \(300 GB\)"):
        clients.bulk("a", disks=[compute.AttachedDisk(boot=True, initialize_params=disk)])


def test_a_missing_permission_is_named(gce: GceEmulator, clients: Clients) -> None:
    gce.deny("compute.instances.create")
    with pytest.raises(exceptions.Forbidden, match=r"'compute\.instances\.create' perm") as no:
        clients.bulk("one")
    assert no.value.errors[0]["reason"] == "forbidden"
    gce.allow("compute.instances.create")
    clients.wait(clients.insert("one", items={"k": "v"}))
    clients.wait(clients.delete("one"))
    assert set(gce.calls().permissions) == {
        "compute.instances.create",
        "compute.instances.setMetadata",
        "compute.instances.setLabels",
        "compute.instances.delete",
        "compute.disks.create",
        "compute.subnetworks.use",
        "compute.zoneOperations.get",
    }
    assert gce.calls().peak_per_minute == 5


def _list_of(project: str) -> Callable[[Clients], object]:
    return lambda clients: list(clients.instances.list(project=project, zone=ZONE))


def test_an_unknown_project_or_a_disabled_api_is_an_error(
    gce: GceEmulator, clients: Clients
) -> None:
    with pytest.raises(exceptions.NotFound, match="The resource 'projects/other' was not found"):
        _list_of("other")(clients)
    gce.disable_api()
    with pytest.raises(exceptions.Forbidden, match="has not been used in project") as caught:
        _list_of(PROJECT)(clients)
    assert caught.value.errors[0]["reason"] == "accessNotConfigured"


def test_an_unknown_field_is_refused(gce: GceEmulator, clients: Clients) -> None:
    noticed = spot(preemption_notice_duration=compute.Duration(seconds=120))
    gce.refuse_field("preemptionNoticeDuration")
    with pytest.raises(exceptions.BadRequest, match='Unknown name "preemptionNoticeDuration"'):
        clients.bulk("one", scheduling=noticed)
    clients.wait(clients.bulk("one"))
    assert gce.vms() == {"one": "RUNNING"}


def test_machine_types_images_and_subnetworks_can_be_looked_up(
    gce: GceEmulator, clients: Clients
) -> None:
    shape = clients.machines.get(project=PROJECT, zone=ZONE, machine_type="a3-highgpu-8g")
    assert [one.guest_accelerator_count for one in shape.accelerators] == [8]
    gce.remove_machine(ZONE, "a3-highgpu-8g")
    with pytest.raises(exceptions.NotFound):
        clients.machines.get(project=PROJECT, zone=ZONE, machine_type="a3-highgpu-8g")
    with pytest.raises(exceptions.BadRequest, match="does not exist in zone"):
        clients.bulk("one", machine="a3-highgpu-8g")
    image = clients.images.get_from_family(project="debian-cloud", family="debian-12")
    assert image.name == clients.images.get(project="debian-cloud", image=image.name).name
    with pytest.raises(exceptions.NotFound):
        clients.images.get_from_family(project="debian-cloud", family="none")
    words = {"project": PROJECT, "region": "us-central1"}
    assert clients.subnetworks.get(**words, subnetwork="default").ip_cidr_range.endswith(".0.0/16")
    with pytest.raises(exceptions.NotFound):
        clients.subnetworks.get(**words, subnetwork="none")
    assert clients.projects.get(project=PROJECT).name == PROJECT


def test_an_instance_template_supplies_omitted_fields(gce: GceEmulator, clients: Clients) -> None:
    properties = compute.InstanceProperties.to_json(
        bulk("x").instance_properties, use_integers_for_enums=False
    )
    gce.add_template("mine", _camel(json.loads(properties)))
    asked = compute.BulkInsertInstanceResource(
        count=1,
        name_pattern="t-##",
        source_instance_template=f"projects/{PROJECT}/global/instanceTemplates/mine",
    )
    operation = clients.instances.bulk_insert_unary(
        project=PROJECT, zone=ZONE, bulk_insert_instance_resource_resource=asked
    )
    assert not clients.wait(operation).error.errors
    assert clients.get("t-01").machine_type.endswith("/a2-highgpu-1g")
    assert clients.templates.get(project=PROJECT, instance_template="mine").name == "mine"


def _camel(found: Any) -> Any:
    if isinstance(found, list):
        return [_camel(one) for one in found]
    if not isinstance(found, dict):
        return found
    return {
        key.split("_")[0] + "".join(word.title() for word in key.split("_")[1:]): (
            one if key == "labels" else _camel(one)
        )
        for key, one in found.items()
        if one not in ("", [], {}, None)
    }


def test_a_regional_bulk_insert_places_all_vms_in_one_zone(
    gce: GceEmulator, clients: Clients
) -> None:
    gce.stockout(zone="us-central1-a")
    policy = compute.LocationPolicy(
        locations={"zones/us-central1-b": compute.LocationPolicyLocation(preference="DENY")}
    )
    resource = bulk("one", "two")
    resource.location_policy = policy
    operation = clients.of_regions.bulk_insert_unary(
        project=PROJECT,
        region="us-central1",
        bulk_insert_instance_resource_resource=resource,
    )
    reported = clients.region_operations.wait(
        project=PROJECT, region="us-central1", operation=operation.name
    )
    assert reported.status == DONE
    assert clients.names(zone="us-central1-c") == ["one", "two"]


def test_the_emulator_is_controlled_over_http(gce: GceEmulator, clients: Clients) -> None:
    clients.wait(clients.insert("one"))
    body = json.dumps({"name": "one", "notice": False}).encode()
    asked = urllib.request.Request(f"{gce.url}/emulator/preempt", data=body)
    assert urllib.request.urlopen(asked, timeout=SURE_SECONDS).status == 200
    with urllib.request.urlopen(f"{gce.url}/emulator/state", timeout=SURE_SECONDS) as answer:
        state = json.load(answer)
    assert state["vms"] == {}
    assert state["calls"] == {"instances.insert": 1, "zoneOperations.wait": 1}
