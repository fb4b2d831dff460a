"""Google's own client of the Compute API, and what it asks the emulator for."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1 as compute

PROJECT, ZONE = "emulated", "us-central1-a"
IMAGE = "projects/debian-cloud/global/images/family/debian-12"
TERMINATE = "TERMINATE"
DONE = compute.Operation.Status.DONE


class Served(Protocol):
    """An emulator, here or in another process."""

    url: str


class Clients:
    """What tests ask with; a context manager."""

    def __init__(self, gce: Served, *, credentials: Any = None) -> None:
        words: dict[str, Any] = {
            "credentials": credentials or AnonymousCredentials(),
            "client_options": ClientOptions(api_endpoint=gce.url),
        }
        self.instances = compute.InstancesClient(**words)
        self.operations = compute.ZoneOperationsClient(**words)
        self.of_regions = compute.RegionInstancesClient(**words)
        self.region_operations = compute.RegionOperationsClient(**words)
        self.machines = compute.MachineTypesClient(**words)
        self.images = compute.ImagesClient(**words)
        self.subnetworks = compute.SubnetworksClient(**words)
        self.regions = compute.RegionsClient(**words)
        self.projects = compute.ProjectsClient(**words)
        self.reservations = compute.ReservationsClient(**words)
        self.templates = compute.InstanceTemplatesClient(**words)

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in vars(self).values():
            client.transport.close()

    def insert(self, name: str, *, zone: str = ZONE, request: str = "", **more: Any) -> Any:
        words = {"project": PROJECT, "zone": zone, "instance_resource": instance(name, **more)}
        words |= {"request_id": request} if request else {}
        return self.instances.insert_unary(compute.InsertInstanceRequest(**words))

    def bulk(
        self, *names: str, least: int | None = None, zone: str = ZONE, **more: Any
    ) -> compute.Operation:
        return self.instances.bulk_insert_unary(
            project=PROJECT,
            zone=zone,
            bulk_insert_instance_resource_resource=bulk(*names, least=least, **more),
        )

    def wait(self, operation: compute.Operation, *, zone: str = ZONE) -> compute.Operation:
        """Waits until an operation is done: one request for it waits for a limited time."""
        while (reported := self.wait_once(operation, zone=zone)).status != DONE:
            pass
        return reported

    def wait_once(self, operation: compute.Operation, *, zone: str = ZONE) -> compute.Operation:
        return self.operations.wait(project=PROJECT, zone=zone, operation=operation.name)

    def delete(self, name: str, *, zone: str = ZONE) -> compute.Operation:
        return self.instances.delete_unary(project=PROJECT, zone=zone, instance=name)

    def get(self, name: str, *, zone: str = ZONE) -> compute.Instance:
        return self.instances.get(project=PROJECT, zone=zone, instance=name)

    def names(self, wanted: str = "", *, zone: str = ZONE, most: int = 500) -> list[str]:
        asked = compute.ListInstancesRequest(
            project=PROJECT, zone=zone, filter=wanted, max_results=most
        )
        return [one.name for one in self.instances.list(asked)]


def spot(**more: Any) -> compute.Scheduling:
    words = {
        "provisioning_model": "SPOT",
        "preemptible": True,
        "automatic_restart": False,
        "on_host_maintenance": TERMINATE,
        "instance_termination_action": "DELETE",
    }
    return compute.Scheduling(**(words | more))


def properties(
    *,
    machine: str = "a2-highgpu-1g",
    script: str | None = None,
    items: dict[str, str] | None = None,
    disk: str = "",
    image: str = IMAGE,
    scheduling: compute.Scheduling | None = None,
    region: str = "us-central1",
    nic_type: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Returns the properties of a VM to be created, without its name."""
    found = dict(items or {}) | ({} if script is None else {"startup-script": script})
    init = compute.AttachedDiskInitializeParams(source_image=image, disk_type=disk or None)
    subnetwork = f"regions/{region}/subnetworks/default"
    words = {
        "machine_type": machine,
        "scheduling": spot() if scheduling is None else scheduling,
        "disks": [compute.AttachedDisk(boot=True, auto_delete=True, initialize_params=init)],
        "network_interfaces": [compute.NetworkInterface(subnetwork=subnetwork, nic_type=nic_type)],
        "labels": {"jaxres-run": "r"},
        "metadata": compute.Metadata(
            items=[compute.Items(key=key, value=value) for key, value in found.items()]
        ),
    }
    return words | more


def instance(name: str, *, zone: str = ZONE, **more: Any) -> compute.Instance:
    words = properties(**more)
    machine = words["machine_type"]
    if "/" not in machine:
        words["machine_type"] = f"zones/{zone}/machineTypes/{machine}"
    for disk in words["disks"]:
        kind = disk.initialize_params.disk_type
        if kind and "/" not in kind:
            disk.initialize_params.disk_type = f"zones/{zone}/diskTypes/{kind}"
    return compute.Instance(name=name, **words)


def bulk(*names: str, least: int | None = None, **more: Any) -> compute.BulkInsertInstanceResource:
    one = compute.BulkInsertInstanceResourcePerInstanceProperties
    return compute.BulkInsertInstanceResource(
        count=len(names),
        min_count=len(names) if least is None else least,
        per_instance_properties={name: one() for name in names},
        instance_properties=compute.InstanceProperties(**properties(**more)),
    )
