"""What `launch.gce` says of labels, tags, metadata, policies and reservations reaches the VMs."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest

from jaxres.config import cross_checks
from jaxres.config.schema.gce import GceSection
from jaxres.launch.gce.api.resource_reader import ResourceReader
from jaxres.launch.gce.controller import machine_for, new_state
from jaxres.launch.gce.job_start import boot_image_change, resolve_boot_image
from jaxres.launch.gce.state.desired_state import PendingCreate, VmSpec
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm.instance_spec import NUM_GPUS, PROGRAMS_SECRET, Machine
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gce.vms.vm import Vm
from tests.unit.launch.gce.api.test_gce_api import CREATION, NAMES, SINGLE, ZONE, ComputeFixture
from tests.unit.launch.gce_config import OPTION, config

FLEX = {"kind": "flex_start", "zones": [ZONE], "machine_type": "a2-highgpu-1g"}
KINDS: dict[str, dict[str, Any]] = {
    "spot": {},
    "flex_start": {"capacity_options": [FLEX], "max_run_hours": 24.0},
    "flex_start_alone": {"capacity_options": [FLEX], "max_run_hours": 24.0, "num_hosts": 1},
}
"""The kinds of requests: bulkInsert, resize request, and insert of a single VM."""


def section(**gce: Any) -> GceSection:
    found = config(**gce).launch.gce
    assert found is not None
    return found


def created(gce: GceEmulator, **fields: Any) -> Vm:
    """Creates the VMs of a launcher; returns the first one as the emulator has it."""
    service = ComputeFixture(gce, **fields)
    creation = CREATION if service.section.most_hosts > 1 else SINGLE
    gce.wait_for(lambda: service.create(creation) is not None)
    assert service.outcome(service.create(creation)) is True
    return gce.vm(NAMES[0])


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_on_the_vm_and_on_its_disk(gce: GceEmulator, kind: str) -> None:
    vm = created(gce, labels={"team": "vision"}, **KINDS[kind])
    expected = {"team": "vision", "jaxres-run": "jx"}
    assert vm.labels == expected
    (disk,) = vm.wanted["disks"]
    assert disk["initializeParams"]["labels"] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tags_and_metadata_are_those_of_the_config(gce: GceEmulator, kind: str) -> None:
    vm = created(gce, tags=["train"], metadata={"enable-oslogin": "TRUE"}, **KINDS[kind])
    assert vm.wanted["tags"] == {"items": ["train"]}
    assert vm.items["enable-oslogin"] == "TRUE"


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_the_template_is_kept_unless_a_key_overrides_it(
    gce: GceEmulator, kind: str
) -> None:
    items = {"install-nvidia-driver": "True", "enable-oslogin": "FALSE"}
    listed = [{"key": key, "value": value} for key, value in items.items()]
    networks = [{"network": "global/networks/default"}]
    gce.add_template("t", {"metadata": {"items": listed}, "networkInterfaces": networks})
    fields = {"template": "t", "metadata": {"enable-oslogin": "TRUE"}, **KINDS[kind]}
    items = created(gce, **fields).items
    assert items.get("install-nvidia-driver") == "True", "the template's metadata is lost"
    assert items["enable-oslogin"] == "TRUE"


def test_a_missing_template_is_refused_by_the_service(gce: GceEmulator) -> None:
    found = ComputeFixture(gce, template="none").create()
    assert isinstance(found, CreateFailed)
    assert (found.kind, "instanceTemplates/none" in found.message) == ("refused", True)


ULTRA = {"kind": "spot", "zones": [ZONE], "machine_type": "a3-ultragpu-8g"}
RDMA: dict[str, Any] = {
    "subnetworks": ["gpu-0", "gpu-1", *(f"rdma-{n}" for n in range(8))],
    "nic_types": ["GVNIC", "GVNIC", *["MRDMA"] * 8],
    "disk_type": "hyperdisk-balanced",
    "capacity_options": [ULTRA],
}


def add_rdma_networks(gce: GceEmulator) -> None:
    for name in RDMA["subnetworks"]:
        gce.add_subnetwork("us-central1", name, is_rdma=name.startswith("rdma"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_interface_has_the_type_that_its_network_requires(gce: GceEmulator, kind: str) -> None:
    add_rdma_networks(gce)
    flex = {"capacity_options": [{**ULTRA, "kind": "flex_start"}]}
    vm = created(gce, **{**RDMA, **KINDS[kind], **(flex if kind != "spot" else {})})
    assert [one.get("nicType") for one in vm.wanted["networkInterfaces"]] == RDMA["nic_types"]


def test_an_rdma_network_takes_no_other_type(gce: GceEmulator) -> None:
    add_rdma_networks(gce)
    found = ComputeFixture(gce, **{**RDMA, "nic_types": []}).create()
    assert isinstance(found, CreateFailed)
    assert (found.kind, "MRDMA only" in found.message) == ("refused", True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({**RDMA, "nic_types": []}, "GVNIC twice, MRDMA 8 times"),
        ({**RDMA, "nic_types": ["GVNIC"]}, "has 1 types, the VMs have 10 interfaces"),
        ({"nic_types": ["MRDMA"]}, "a2-highgpu-1g has no MRDMA interfaces"),
        ({"nic_types": ["GVNIC"], "template": "t"}, "the network interfaces are the template's"),
        ({"runtime": {"kind": "python", "python_version": "3.12"}}, "a new Python needs jaxres'"),
    ],
)
def test_keys_that_do_not_fit_are_refused_before_a_request(
    fields: dict[str, Any], text: str
) -> None:
    problems = [str(p) for p in cross_checks.check(config(**fields))]
    assert len(problems) == 1, problems
    assert text in problems[0]


def test_a_replacement_boots_the_image_of_the_first_vms(gce: GceEmulator) -> None:
    family = "projects/debian-cloud/global/images/family/debian-12"
    job = config(project=gce.project, image=family)
    assert job.launch.gce is not None
    reader = ResourceReader(ComputeFixture(gce).compute)
    first = resolve_boot_image(job.launch.gce, reader, print)
    assert first == "projects/debian-cloud/global/images/debian-12-bookworm-v20260610"
    state = replace(new_state("jx", "0" * 64, "0" * 64, now=1.0, after=None), image=first)
    gce.add_image("debian-cloud", "debian-12-bookworm-v20260901", family="debian-12")
    gce.add_image("debian-cloud", first.rpartition("/")[2], family="debian-12-old")
    paths, vm = LaunchPaths(GcsPath("b", "r")), VmSpec("jx-0001", ZONE, 0, 1.0)
    machine = machine_for(paths, job, state, vm)
    (disk,) = machine.properties()["disks"]
    assert disk["initialize_params"]["source_image"] == first
    later = resolve_boot_image(job.launch.gce, ResourceReader(ComputeFixture(gce).compute), print)
    assert "is debian-12-bookworm-v20260901 from now on" in boot_image_change(first, later)
    assert boot_image_change(first, first) == boot_image_change("", later) == ""


def test_an_image_family_that_can_not_be_read_is_named(gce: GceEmulator) -> None:
    section = config(project=gce.project).launch.gce
    assert section is not None
    gce.deny("compute.images.getFromFamily")
    printed: list[str] = []
    found = resolve_boot_image(section, ResourceReader(ComputeFixture(gce).compute), printed.append)
    assert found == ""
    assert "may boot from different images" in printed[0], printed
    image = "projects/debian-cloud/global/images/debian-12-bookworm-v20260610"
    fixed = section.model_copy(update={"image": image})
    assert resolve_boot_image(fixed, ResourceReader(ComputeFixture(gce).compute), print) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_resource_policy_is_named_as_each_kind_of_request_requires(
    gce: GceEmulator, kind: str
) -> None:
    gce.add_policy("us-central1", "compact")
    vm = created(gce, resource_policies=["compact"], **KINDS[kind])
    assert [name.rpartition("/")[2] for name in vm.wanted["resourcePolicies"]] == ["compact"]
    another = PendingCreate(("jx-0002",), str(uuid.uuid4()))
    found = ComputeFixture(gce, resource_policies=["other"], **KINDS[kind]).create(another)
    assert isinstance(found, CreateFailed), "the policy is ignored"


def test_the_host_error_timeout_is_requested_only_if_it_is_set(gce: GceEmulator) -> None:
    vm = created(gce, host_error_timeout_seconds=90)
    assert vm.scheduling["hostErrorTimeoutSeconds"] == 90
    machine = Machine(section(), section().capacity_options[0], ZONE, {}, {})
    assert "host_error_timeout_seconds" not in machine.scheduling()
    for seconds in (60, 100, 360):
        with pytest.raises(ValueError, match="host_error_timeout_seconds"):
            section(host_error_timeout_seconds=seconds)


@pytest.mark.parametrize(
    ("model", "expected"), [("reservation_bound", "RESERVATION_BOUND"), ("standard", "STANDARD")]
)
def test_a_reservation_is_used_by_the_model_of_its_kind(
    gce: GceEmulator, model: str, expected: str
) -> None:
    gce.reserve(ZONE, "mine", machine="a2-highgpu-1g", count=2)
    gce.quota("us-central1", "NVIDIA_A100_GPUS", 0)  # The reservation itself has counted.
    option = {**OPTION, "kind": "reservation", "reservation": "mine", "provisioning_model": model}
    vm = created(gce, capacity_options=[option])
    assert (vm.model, vm.reservation) == (expected, "mine")


def test_a_queued_vm_uses_no_reservation(gce: GceEmulator) -> None:
    vm = created(gce, **KINDS["flex_start"])
    assert vm.wanted["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("labels", {"Team": "a"}),
        ("labels", {"team": "A b"}),
        ("tags", ["-a"]),
        ("metadata", {"a b": "c"}),
        ("resource_policies", ["regions/r/resourcePolicies/p"]),
    ],
)
def test_names_that_the_service_refuses_are_refused_at_once(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        section(**{key: value})


@pytest.mark.parametrize(
    ("key", "name"),
    [("labels", "jaxres-run"), ("metadata", "jaxres-run"), ("metadata", "startup-script")],
)
def test_names_that_jaxres_sets_itself_are_refused(key: str, name: str) -> None:
    assert cross_checks.check(config(**{key: {"mine": "a"}})) == []
    (problem,) = cross_checks.check(config(**{key: {name: "a"}}))
    assert problem.key == f"launch.gce.{key}"
    assert f"{name} is set by jaxres itself" in problem.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("subnetworks", [(), ("default", "inner")])
def test_an_external_address_is_requested_for_the_first_interface_only(
    gce: GceEmulator, kind: str, subnetworks: tuple[str, ...]
) -> None:
    gce.add_subnetwork("us-central1", "inner")
    vm = created(gce, external_ip=True, subnetworks=[*subnetworks], **KINDS[kind])
    first, *others = vm.wanted["networkInterfaces"]
    assert first["accessConfigs"] == [{"name": "External NAT", "type": "ONE_TO_ONE_NAT"}]
    assert len(others) == max(0, len(subnetworks) - 1)
    assert not any(other.get("accessConfigs") for other in others)


def test_no_external_address_is_requested_unless_the_config_says_so(gce: GceEmulator) -> None:
    (interface,) = created(gce).wanted["networkInterfaces"]
    assert "accessConfigs" not in interface


def test_an_external_address_for_the_interfaces_of_a_template_is_refused() -> None:
    fields = {"template": "t", "image": None, "external_ip": True}
    loaded = config(**fields)
    problems = [problem.line() for problem in cross_checks.check(loaded)]
    assert any("launch.gce.external_ip: the network interfaces are" in line for line in problems)


@pytest.mark.parametrize("kind", KINDS)
def test_vms_have_the_secret_for_compiled_steps_and_a_later_launcher_reads_it(
    gce: GceEmulator, kind: str
) -> None:
    service = ComputeFixture(gce, **KINDS[kind])
    metadata = {PROGRAMS_SECRET: "5ec2e7"}
    service.machine = replace(service.machine, metadata=metadata)
    creation = CREATION if service.section.most_hosts > 1 else SINGLE
    gce.wait_for(lambda: service.create(creation) is not None)
    assert service.outcome(service.create(creation)) is True
    listed = service.compute.list("jx")
    assert listed.programs_secret == "5ec2e7"
    assert "5ec2e7" not in repr(listed)


@pytest.mark.parametrize(
    ("machine_type", "gpus"),
    [("a2-highgpu-4g", "4"), ("g2-standard-24", "2"), ("g4-standard-384", "8"), ("e2-small", None)],
)
def test_a_vm_knows_the_number_of_its_gpus(machine_type: str, gpus: str | None) -> None:
    found = section(capacity_options=[{**OPTION, "machine_type": machine_type}])
    machine = Machine(found, found.capacity_options[0], ZONE, {}, {})
    items = {item["key"]: item["value"] for item in machine.properties()["metadata"]["items"]}
    assert items.get(NUM_GPUS) == gpus
