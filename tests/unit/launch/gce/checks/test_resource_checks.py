"""What breaks first runs is found before a VM is requested, with what to do about it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce.api.compute import Compute
from jaxres.launch.gce.checks import preflight
from jaxres.launch.gce.state.desired_state import PendingCreate, VmSpec
from jaxres.launch.gce.vm.instance_spec import Machine
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from tests.manual_clock import ManualClock
from tests.unit.launch.gce_config import IMAGE, OPTION, config

ZONE, REGION = "us-central1-a", "us-central1"
RUN = GcsPath("bucket", "run")
GPU = {**OPTION, "zones": [ZONE]}
STANDARD = {**GPU, "kind": "standard"}
RESERVED = {**GPU, "kind": "reservation", "reservation": "mine"}
A3 = {**GPU, "machine_type": "a3-highgpu-8g"}
FAMILY = "projects/emulated/global/images/family/own"


pytestmark = pytest.mark.usefixtures("no_bucket")


@pytest.fixture
def no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is not looked up."""
    monkeypatch.setattr(preflight, "_bucket", lambda *_, **__: [])


def check(gce: GceEmulator, **fields: Any) -> list[str]:
    section = config(project=gce.project, **{"capacity_options": [GPU], **fields}).launch.gce
    assert section is not None
    return preflight.check(section, Compute(section, endpoint=gce.url, clock=ManualClock()), RUN)


def close_network(gce: GceEmulator, *rules: dict[str, Any], **more: Any) -> None:
    gce.add_subnetwork(REGION, "closed", network="vpc")
    gce.set_firewall("vpc", [*rules], **more)


def allow(*ports: str, sources: str = "127.0.0.0/8", **more: Any) -> dict[str, Any]:
    tcp = {"IPProtocol": "tcp", **({"ports": [*ports]} if ports else {})}
    rule = {"name": "r", "direction": "INGRESS", "priority": 1000, "allowed": [tcp]}
    return rule | ({"sourceRanges": [sources]} if sources else {}) | more


Arrange = Callable[[GceEmulator], Any]
NAT = "gcloud compute networks subnets update default --region us-central1 "


def reserve_later(gce: GceEmulator, **fields: Any) -> None:
    times = {"begins": "2999-01-01T00:00:00-08:00", "ends": "2999-01-08T00:00:00-08:00"}
    known = {"machine": "a2-highgpu-1g", "count": 2, "reservation": "mine", **times}
    gce.reserve_later(ZONE, "later", **{**known, **fields})


FAILURES: dict[str, tuple[Arrange, dict[str, Any], tuple[str, ...]]] = {
    "no way to the bucket": (
        lambda gce: gce.end_private_access(REGION, "default"),
        {},
        (
            "launch.gce.subnetworks: the subnetwork default in us-central1 has no Private Google "
            f"Access, and the VMs no external address: they can't read their code from the bucket. "
            f"`{NAT}--enable-private-ip-google-access --project emulated`",
            "or launch.gce.external_ip: true",
        ),
    ),
    "no way to the bucket in the host project": (
        lambda gce: (
            gce.add_subnetwork(REGION, "shared", host_project="net-host"),
            gce.end_private_access(REGION, "shared", host_project="net-host"),
        ),
        {"subnetworks": ["projects/net-host/regions/{region}/subnetworks/shared"]},
        ("the subnetwork shared in us-central1 has no Private", "--project net-host"),
    ),
    "no default network": (
        lambda gce: gce.remove_subnetwork(REGION, "default"),
        {},
        ("there is no default network with a subnetwork in us-central1. Set launch.gce.subnet",),
    ),
    "no GPUs in all regions": (
        lambda gce: gce.quota_of_all_regions("GPUS_ALL_REGIONS", 0),
        {},
        (
            "launch.gce.capacity_options: no capacity option has quota (spot in us-central1-a: "
            "GPUS_ALL_REGIONS is 0 (all regions), needed: 2). Request more: ",
            "iam-admin/quotas?project=emulated",
        ),
    ),
    "no GPUs of the model on demand": (
        lambda gce: gce.quota(REGION, "NVIDIA_A100_GPUS", 1),
        {"capacity_options": [STANDARD]},
        ("standard in us-central1-a: NVIDIA_A100_GPUS is 1 (us-central1), needed: 2",),
    ),
    "the GPUs of g2 follow from its CPUs": (
        lambda gce: gce.quota(REGION, "PREEMPTIBLE_NVIDIA_L4_GPUS", 3),
        {"capacity_options": [{**GPU, "machine_type": "g2-standard-24"}]},
        ("PREEMPTIBLE_NVIDIA_L4_GPUS is 3 (us-central1), needed: 4",),
    ),
    "no CPUs": (
        lambda gce: gce.quota(REGION, "A2_CPUS", 23),
        {},
        ("A2_CPUS is 23 (us-central1), needed: 24",),
    ),
    "no CPUs in all regions": (
        lambda gce: gce.quota_of_all_regions("CPUS_ALL_REGIONS", 12),
        {},
        ("CPUS_ALL_REGIONS is 12 (all regions), needed: 24",),
    ),
    "no SSDs for the boot disks": (
        lambda gce: gce.quota(REGION, "SSD_TOTAL_GB", 399),
        {"disk_type": "pd-ssd"},
        ("SSD_TOTAL_GB is 399 (us-central1), needed: 400",),
    ),
    "no local SSDs": (
        lambda gce: gce.quota(REGION, "LOCAL_SSD_TOTAL_GB", 749),
        {"capacity_options": [{**STANDARD, "machine_type": "a2-ultragpu-1g"}]},
        ("LOCAL_SSD_TOTAL_GB is 749 (us-central1), needed: 750",),
    ),
    "no reservation": (
        lambda gce: gce.reserve("us-central1-b", "mine", machine="a2-highgpu-1g", count=2),
        {"capacity_options": [RESERVED]},
        (
            "capacity_options[0].reservation: there is no reservation mine in us-central1-a. "
            "`gcloud compute reservations list --project emulated`",
        ),
    ),
    "a reservation of another machine type": (
        lambda gce: gce.reserve(ZONE, "mine", machine="a2-highgpu-8g", count=2),
        {"capacity_options": [RESERVED]},
        ("mine in us-central1-a is for a2-highgpu-8g, the option for a2-highgpu-1g",),
    ),
    "a reservation that is too small": (
        lambda gce: gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=1),
        {"capacity_options": [RESERVED]},
        ("is for 1 VMs, launch.gce.num_hosts is 2. `gcloud compute reservations update mine",),
    ),
    "a reservation with a policy": (
        lambda gce: (
            gce.add_policy(REGION, "compact"),
            gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2, policies=["compact"]),
        ),
        {"capacity_options": [RESERVED]},
        (
            "launch.gce.resource_policies: the reservation mine in us-central1-a has the resource "
            "policy compact, its VMs must have the same one. Set launch.gce.resource_policies: "
            "[compact]",
        ),
    ),
    "a reservation that is being deleted": (
        lambda gce: gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2, status="DELETING"),
        {"capacity_options": [RESERVED]},
        ("has the status DELETING, not READY",),
    ),
    "a future reservation that was declined": (
        lambda gce: reserve_later(gce, status="DECLINED"),
        {"capacity_options": [RESERVED]},
        ("by the future reservation later (DECLINED): 2 x a2-highgpu-1g", "delivers nothing"),
    ),
    "a future reservation that is too small": (
        lambda gce: reserve_later(gce, count=1),
        {"capacity_options": [RESERVED]},
        ("1 x a2-highgpu-1g, 2999-01-01 08:00 UTC", "num_hosts is 2: reserve more VMs"),
    ),
    "a future reservation of another machine type": (
        lambda gce: reserve_later(gce, machine="a2-highgpu-8g"),
        {"capacity_options": [RESERVED]},
        ("The option is for a2-highgpu-1g",),
    ),
    "a closed firewall": (
        close_network,
        {"subnetworks": ["closed"]},
        (
            "no firewall rule of the network vpc allows TCP connections from 127.",
            "to the ports 8470-9469, 32768-60999, on which the VMs connect to each other. "
            "`gcloud compute firewall-rules create jaxres-internal --network vpc --allow tcp",
        ),
    ),
    "a firewall that is open for others": (
        lambda gce: close_network(
            gce, allow(targetTags=["web"]), allow(sources="10.0.0.0/8"), allow("22")
        ),
        {"subnetworks": ["closed"], "tags": ["train"]},
        ("to the ports 8470-9469, 32768-60999",),
    ),
    "an image that is obsolete": (
        lambda gce: gce.add_image(
            gce.project, "own-1", family="own", deprecated={"state": "OBSOLETE"}
        ),
        {"image": "projects/emulated/global/images/own-1"},
        ("launch.gce.image: own-1 is obsolete. Use another image",),
    ),
    "a family that is deprecated": (
        lambda gce: gce.add_image(
            gce.project, "own-1", family="own", deprecated={"state": "DEPRECATED"}
        ),
        {"image": FAMILY},
        ("or all images of this family are deprecated", "--show-deprecated"),
    ),
    "an image that is not ready": (
        lambda gce: gce.add_image(gce.project, "own-1", family="own", status="PENDING"),
        {"image": FAMILY},
        ("own-1 has the status PENDING, not READY",),
    ),
    "an image larger than the disk": (
        lambda gce: gce.add_image(gce.project, "own-1", family="own", diskSizeGb="300"),
        {"image": FAMILY},
        ("launch.gce.disk_gb: own-1 needs a disk of 300 GB, launch.gce.disk_gb is 200",),
    ),
    "an image of another architecture": (
        lambda gce: gce.add_image(gce.project, "own-1", family="own", architecture="ARM64"),
        {"image": FAMILY},
        ("own-1 is for ARM64, a2-highgpu-1g has X86_64",),
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_would_break_the_first_run_is_refused_with_what_to_do(
    gce: GceEmulator, case: str
) -> None:
    arrange, fields, texts = FAILURES[case]
    arrange(gce)
    with pytest.raises(ConfigError) as raised:
        check(gce, **fields)
    for text in texts:
        assert text in str(raised.value), raised.value
    assert gce.events("insert") == []


GOOD: dict[str, tuple[Arrange, dict[str, Any]]] = {
    "an external address": (
        lambda gce: gce.end_private_access(REGION, "default"),
        {"external_ip": True},
    ),
    "Cloud NAT": (
        lambda gce: (gce.end_private_access(REGION, "default"), gce.add_nat(REGION)),
        {},
    ),
    "a template with an external address": (
        lambda gce: (
            gce.end_private_access(REGION, "default"),
            gce.add_template(
                "t",
                {
                    "networkInterfaces": [
                        {"network": "global/networks/default", "accessConfigs": [{}]}
                    ]
                },
            ),
        ),
        {"template": "t"},
    ),
    "a reservation uses no quota of GPUs": (
        lambda gce: (
            gce.quota_of_all_regions("GPUS_ALL_REGIONS", 0),
            gce.quota(REGION, "NVIDIA_A100_GPUS", 0),
            gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2),
        ),
        {"capacity_options": [RESERVED]},
    ),
    "one host needs no firewall rule": (
        close_network,
        {"subnetworks": ["closed"], "num_hosts": 1},
    ),
    "a firewall rule by tags": (
        lambda gce: close_network(
            gce, allow(sources="", sourceTags=["train"], targetTags=["train"])
        ),
        {"subnetworks": ["closed"], "tags": ["train"]},
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_works_gives_no_warning(gce: GceEmulator, case: str) -> None:
    arrange, fields = GOOD[case]
    arrange(gce)
    assert check(gce, **fields) == []


WARNINGS: dict[str, tuple[Arrange, dict[str, Any], str]] = {
    "one option of two has no quota": (
        lambda gce: gce.quota(REGION, "PREEMPTIBLE_NVIDIA_A100_GPUS", 1),
        {"capacity_options": [GPU, STANDARD]},
        "no quota: spot in us-central1-a: PREEMPTIBLE_NVIDIA_A100_GPUS is 1 (us-central1)",
    ),
    "CPUs of a family with a quota of its own": (
        lambda gce: gce.quota(REGION, "CPUS", 24),
        {"capacity_options": [A3]},
        "maybe too little quota: spot in us-central1-a: CPUS is 24 (us-central1), needed: 416",
    ),
    "packages without a way to the internet": (
        lambda _: None,
        {"runtime": {"kind": "python", "packages": ["jax"]}},
        "runtime.packages are installed from the internet, and VMs in the subnetwork default in",
    ),
    "an image of another registry": (
        lambda _: None,
        {"runtime": {"kind": "container", "image": "ghcr.io/a/b"}},
        "the container image ghcr.io/a/b is not in a registry of Google, and VMs in",
    ),
    "docker from the internet": (
        lambda _: None,
        {"runtime": {"kind": "container", "image": "gcr.io/a/b", "install_docker": True}},
        "docker may be installed from the internet (launch.gce.runtime.install_docker), and VMs in",
    ),
    "a reservation that is being created": (
        lambda gce: gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2, status="CREATING"),
        {"capacity_options": [RESERVED]},
        "has the status CREATING, not READY",
    ),
    "a reservation that is delivered later": (
        lambda gce: reserve_later(gce),
        {"capacity_options": [RESERVED]},
        "delivered by the future reservation later (APPROVED): 2 x a2-highgpu-1g, 2999-01-01 08:00 "
        "UTC to 2999-01-08 08:00 UTC, when its VMs are deleted. The option is left out until then",
    ),
    "one that exists already": (
        lambda gce: (
            gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2, status="CREATING"),
            reserve_later(gce),
        ),
        {"capacity_options": [RESERVED]},
        "2999-01-01 08:00 UTC to 2999-01-08 08:00 UTC",
    ),
    "firewall policies are not read": (
        lambda gce: close_network(
            gce, policies=[{"name": "org", "rules": [{"action": "allow", "priority": 1}]}]
        ),
        {"subnetworks": ["closed"]},
        "(its firewall policies, such as org, may: they are not checked)",
    ),
    "an image that is deprecated": (
        lambda gce: gce.add_image(
            gce.project, "own-1", family="own", deprecated={"state": "DEPRECATED"}
        ),
        {"image": "projects/emulated/global/images/own-1"},
        "own-1 is deprecated",
    ),
}


def test_gpus_without_their_rdma_network_are_a_warning(gce: GceEmulator) -> None:
    ultra = {**GPU, "machine_type": "a3-ultragpu-8g"}
    fields = {"capacity_options": [ultra], "disk_type": "hyperdisk-balanced"}
    (warning,) = check(gce, **fields)
    assert "a3-ultragpu-8g is used without MRDMA interfaces" in warning
    assert check(gce, **fields, num_hosts=1) == []


@pytest.mark.parametrize("case", WARNINGS)
def test_what_may_break_the_first_run_is_a_warning(gce: GceEmulator, case: str) -> None:
    arrange, fields, text = WARNINGS[case]
    arrange(gce)
    (warning,) = check(gce, **fields)
    assert text in warning


def test_quota_and_places_that_are_in_use_now_are_a_warning(gce: GceEmulator) -> None:
    gce.quota(REGION, "NVIDIA_A100_GPUS", 2)
    gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2)
    for option in (STANDARD, RESERVED):
        section = config(project=gce.project, capacity_options=[option]).launch.gce
        assert section is not None
        _create(gce, section, option["kind"])
    standard, reserved = check(gce, capacity_options=[RESERVED, STANDARD])[::-1]
    assert "NVIDIA_A100_GPUS is 2 (us-central1), of which 1 are in use now, needed: 2" in standard
    assert "mine in us-central1-a has 1 of 2 VMs free now, needed: 2" in reserved


def _create(gce: GceEmulator, section: Any, kind: str) -> None:
    name = f"jx-{kind}"
    machine = Machine(section, section.capacity_options[0], ZONE, {"jaxres-run": "jx"}, {})
    request = PendingCreate((name,), str(uuid.uuid5(uuid.NAMESPACE_URL, name)))
    compute = Compute(section, endpoint=gce.url)
    assert isinstance(compute.create(request, [VmSpec(name, ZONE, 0, 1.0)], machine), str)
    gce.wait_for(lambda: gce.vms().get(name) == "RUNNING")


READS = {
    "compute.projects.get": {},
    "compute.machineTypes.get": {},
    "compute.regions.get": {},
    "compute.images.getFromFamily": {},
    "compute.subnetworks.get": {},
    "compute.networks.getEffectiveFirewalls": {},
    "compute.reservations.get": {"capacity_options": [RESERVED]},
    "compute.routers.list": {"runtime": {"kind": "python", "packages": ["jax"]}},
    "compute.instanceTemplates.get": {"template": "t"},
}


@pytest.mark.parametrize("permission", READS)
def test_a_read_that_is_not_allowed_is_a_warning_with_the_permission(
    gce: GceEmulator, permission: str
) -> None:
    gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2)
    gce.add_template("t", {})
    gce.deny(permission)
    warnings = check(gce, **READS[permission])
    assert warnings
    assert all(f"this account lacks {permission}" in warning for warning in warnings), warnings


def test_without_the_permission_to_read_routers_missing_access_is_a_warning(
    gce: GceEmulator,
) -> None:
    gce.end_private_access(REGION, "default")
    gce.deny("compute.routers.list")
    (warning,) = check(gce)
    assert "has no Private Google Access" in warning
    assert (
        "(whether Cloud NAT serves it is not known: this account lacks compute.routers" in warning
    )


def test_a_zone_that_does_not_answer_is_a_warning_and_the_others_are_checked(
    gce: GceEmulator,
) -> None:
    gce.lose_zone(ZONE)
    both = {**RESERVED, "zones": [ZONE, "us-central1-b"]}
    (warning,) = check(gce, capacity_options=[RESERVED, GPU, {**GPU, "zones": ["us-central1-b"]}])
    assert warning.startswith(f"zone {ZONE} does not answer, it was not checked (")
    with pytest.raises(ConfigError) as refused:
        check(gce, capacity_options=[both])
    assert "there is no reservation mine in us-central1-b" in str(refused.value)
    assert ZONE not in str(refused.value)
    with pytest.raises(StorageUnavailable, match="the Compute API does not answer"):
        check(gce)


def test_each_resource_is_read_once(gce: GceEmulator) -> None:
    check(gce, capacity_options=[OPTION, {**OPTION, "kind": "standard"}], image=IMAGE)
    calls = dict(gce.calls().calls)
    assert calls == {
        "projects.get": 1,
        "machineTypes.get": 2,
        "images.getFromFamily": 1,
        "subnetworks.get": 1,
        "networks.getEffectiveFirewalls": 1,
        "regions.get": 1,
    }
