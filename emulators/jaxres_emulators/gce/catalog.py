"""Resources of a project: zones, machine types, images, subnetworks, templates, quotas.

Shapes after cloud.google.com/compute/docs/accelerator-optimized-machines.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

from jaxres_emulators.gce.errors import GceError, not_found

SPOT, STANDARD = "SPOT", "STANDARD"
FLEX_START, RESERVATION_BOUND = "FLEX_START", "RESERVATION_BOUND"
ANY = frozenset({SPOT, STANDARD, FLEX_START, RESERVATION_BOUND})
NO_ON_DEMAND = frozenset({SPOT, FLEX_START, RESERVATION_BOUND})
SPOT_OR_FLEX = frozenset({SPOT, FLEX_START})
RESERVED = frozenset({RESERVATION_BOUND})
ZONES = (
    *(f"us-central1-{letter}" for letter in "abcf"),
    *(f"us-east4-{letter}" for letter in "abc"),
    *(f"us-west1-{letter}" for letter in "abc"),
    *(f"europe-west4-{letter}" for letter in "abc"),
    *(f"asia-southeast1-{letter}" for letter in "abc"),
)
MUCH = 100_000.0
"""A quota that is never reached."""


@dataclass(frozen=True)
class Shape:
    """A machine type."""

    name: str
    cpus: int
    memory_gb: int
    gpu: str = ""
    gpus: int = 0
    metric: str = ""
    """Metric of its GPUs' quota; preemptible GPUs have a separate one."""
    models: frozenset[str] = ANY
    is_hyperdisk_only: bool = False
    is_simulated: bool = True
    """Whether simulateMaintenanceEvent supports it."""

    @property
    def cpu_metric(self) -> str:
        """Quota of its CPUs; empty: regions list no such quota."""
        family = self.name.partition("-")[0].upper()
        if family in ("E2", "N1"):
            return "CPUS"
        return f"{family}_CPUS" if family in ("A2", "N2", "C3") else ""

    @property
    def has_rdma(self) -> bool:
        """Whether it takes interfaces of the type MRDMA."""
        return self.name.startswith(("a3-ultragpu-", "a4-", "a4x-"))

    @property
    def local_ssds(self) -> int:
        """Local SSDs of 375 GB that come with it."""
        per_gpu = {"a2-ultragpu": 1, "a3-highgpu": 2, "a3-megagpu": 2}
        per_gpu |= {"a3-ultragpu": 4, "a4-highgpu": 4, "a4x-highgpu": 8}
        return per_gpu.get(self.name.rpartition("-")[0], 0) * self.gpus

    def resource(self, url: str, zone: str) -> dict[str, Any]:
        reported: dict[str, Any] = {
            "kind": "compute#machineType",
            "id": str(sum(self.name.encode()) * 1000),
            "name": self.name,
            "zone": zone,
            "guestCpus": self.cpus,
            "memoryMb": self.memory_gb * 1024,
            "architecture": "ARM64" if self.name.startswith("a4x-") else "X86_64",
            "selfLink": f"{url}/zones/{zone}/machineTypes/{self.name}",
        }
        if self.gpus:
            one = {"guestAcceleratorType": self.gpu, "guestAcceleratorCount": self.gpus}
            reported["accelerators"] = [one]
        if self.local_ssds:
            ssds = {"defaultInterface": "NVME", "partitionCount": self.local_ssds}
            reported["bundledLocalSsds"] = ssds
        return reported


def _shapes() -> dict[str, Shape]:
    a100, a100_80 = "nvidia-tesla-a100", "nvidia-a100-80gb"
    h100, mega = "nvidia-h100-80gb", "nvidia-h100-mega-80gb"
    h100s = "NVIDIA_H100_GPUS"
    found = [
        *(Shape(f"e2-{kind}", 2, 4) for kind in ("micro", "small", "medium")),
        *(
            Shape(f"{family}-standard-{n}", n, 4 * n)
            for family in ("e2", "n1", "n2", "c3")
            for n in (2, 4, 8, 16, 32)
        ),
        *(Shape(f"a2-highgpu-{n}g", 12 * n, 85 * n, a100, n, "NVIDIA_A100_GPUS") for n in _POWERS),
        Shape("a2-megagpu-16g", 96, 1360, a100, 16, "NVIDIA_A100_GPUS"),
        *(
            Shape(f"a2-ultragpu-{n}g", 12 * n, 170 * n, a100_80, n, "NVIDIA_A100_80GB_GPUS")
            for n in _POWERS
        ),
        *(
            Shape(f"a3-highgpu-{n}g", 26 * n, 234 * n, h100, n, h100s, SPOT_OR_FLEX)
            for n in (1, 2, 4)
        ),
        Shape("a3-highgpu-8g", 208, 1872, h100, 8, h100s),
        Shape("a3-megagpu-8g", 208, 1872, mega, 8, "NVIDIA_H100_MEGA_GPUS"),
        *(
            Shape(name, cpus, memory, gpu, n, metric, models, True, False)
            for name, cpus, memory, gpu, n, metric, models in (
                ("a3-ultragpu-8g", 224, 2952, "nvidia-h200-141gb", 8, "NVIDIA_H200_GPUS", _NO),
                ("a4-highgpu-8g", 224, 3968, "nvidia-b200", 8, "NVIDIA_B200_GPUS", _NO),
                ("a4x-highgpu-4g", 140, 884, "nvidia-gb200", 4, "NVIDIA_GB200_GPUS", RESERVED),
            )
        ),
        *(
            Shape(f"g2-standard-{cpus}", cpus, 4 * cpus, "nvidia-l4", n, "NVIDIA_L4_GPUS")
            for cpus, n in ((4, 1), (8, 1), (12, 1), (16, 1), (24, 2), (32, 1), (48, 4), (96, 8))
        ),
        *(
            Shape(f"g4-standard-{48 * n}", 48 * n, 180 * n, _RTX, n, "NVIDIA_RTX_PRO_6000_GPUS")
            for n in _POWERS
        ),
    ]
    return {shape.name: shape for shape in found}


_POWERS = (1, 2, 4, 8)
_NO = NO_ON_DEMAND
_RTX = "nvidia-rtx-pro-6000"
SHAPES = _shapes()
GPU_FAMILIES = re.compile(r"(a2|a3|a4|a4x|g2|g4)-")
"""Of which the GPUs come with the machine type."""
IMAGES = {
    "debian-cloud": {"debian-12": "debian-12-bookworm-v20260610"},
    "ubuntu-os-cloud": {"ubuntu-2404-lts-amd64": "ubuntu-2404-noble-amd64-v20260522"},
    "ubuntu-os-accelerator-images": {
        "ubuntu-accelerator-2404-amd64-with-nvidia-580": (
            "ubuntu-accelerator-2404-amd64-with-nvidia-580-v20260522"
        )
    },
    "deeplearning-platform-release": {
        "common-cu129-ubuntu-2204-nvidia-580": "common-cu129-ubuntu-2204-nvidia-580-v20260601"
    },
}


def region_of(zone: str) -> str:
    """Returns the region of a zone.

    >>> region_of("us-central1-a")
    'us-central1'
    """
    return zone.rpartition("-")[0]


def metric_of(shape: Shape, model: str) -> str:
    """Returns the quota of its GPUs; empty: none."""
    if not shape.metric or model == RESERVATION_BOUND:
        return ""
    return f"PREEMPTIBLE_{shape.metric}" if model in (SPOT, FLEX_START) else shape.metric


@dataclass(frozen=True)
class Reservation:
    """VMs of one machine type in one zone that are paid for, whether they exist or not."""

    machine: str
    count: int
    status: str = "READY"
    policies: tuple[str, ...] = ()
    """Resource policies, which its VMs must have too."""


@dataclass
class Catalog:
    """State that tests may change; use with the lock held."""

    zones: dict[str, set[str]] = field(
        default_factory=lambda: {zone: set(SHAPES) for zone in ZONES}
    )
    """Machine types by zone."""
    images: dict[str, dict[str, str]] = field(
        default_factory=lambda: {project: dict(found) for project, found in IMAGES.items()}
    )
    """By project: families, and their newest image."""
    image_fields: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Fields of images that differ from the usual ones, by project and name."""
    subnetworks: set[tuple[str, str]] = field(
        default_factory=lambda: {(region_of(zone), "default") for zone in ZONES}
    )
    """Region and name."""
    shared_subnetworks: set[tuple[str, str, str]] = field(default_factory=set)
    """Subnetworks of a Shared VPC: host project, region and name."""
    networks: dict[tuple[str, str, str], str] = field(default_factory=dict)
    """Networks of subnetworks, by host project (empty: own), region and name; others: default."""
    rdma: set[tuple[str, str, str]] = field(default_factory=set)
    """Subnetworks of networks with the RDMA profile; keys as above."""
    private: set[tuple[str, str, str]] = field(default_factory=set)
    """Subnetworks without Private Google Access; keys as above."""
    nats: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    """Routers by project (empty: own) and region."""
    firewalls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Firewall rules by network; the default one has its usual ones unless they are set here."""
    firewall_policies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Firewall policies by network."""
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    policies: set[tuple[str, str]] = field(default_factory=set)
    """Resource policies: region and name."""
    reservations: dict[tuple[str, str], Reservation] = field(default_factory=dict)
    """By zone and name."""
    futures: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Future reservations by zone and name, as JSON has them."""
    quotas: dict[tuple[str, str], float] = field(default_factory=dict)
    """Limits by region and metric; missing ones are large. Global quotas: region empty."""

    @property
    def regions(self) -> list[str]:
        return sorted({region_of(zone) for zone in self.zones})

    def limit(self, region: str, metric: str) -> float:
        return self.quotas.get((region, metric), MUCH)

    def has_image(self, link: str, project: str) -> bool:
        """Says whether there is an image, by the name that a disk gives it."""
        found = re.search(r"(?:projects/([^/]+)/)?global/images/(family/)?([^/]+)$", link)
        if found is None:
            return False
        owner, (family, name) = found[1] or project, (found[3], "") if found[2] else ("", found[3])
        with contextlib.suppress(GceError):
            reported = self.image(owner, name=name, family=family)
            state = reported.get("deprecated", {}).get("state", "ACTIVE")
            return state in ("ACTIVE", "DEPRECATED")
        return False

    def image_size(self, link: str, project: str) -> int:
        """Returns the size in GB of an image that there is."""
        found = re.search(r"(?:projects/([^/]+)/)?global/images/(family/)?([^/]+)$", link)
        assert found is not None, link
        family, name = (found[3], "") if found[2] else ("", found[3])
        return int(self.image(found[1] or project, name=name, family=family)["diskSizeGb"])

    def reaches_google(self, interface: dict[str, Any], zone: str, project: str) -> bool:
        """Says whether a VM reaches the bucket: by an address, its subnetwork's access, or NAT."""
        link = interface.get("subnetwork") or f"regions/{region_of(zone)}/subnetworks/default"
        found = re.search(r"(?:projects/([^/]+)/)?regions/([^/]+)/subnetworks/([^/]+)$", link)
        assert found is not None, link
        key = ("" if found[1] in (None, project) else found[1], found[2], found[3])
        network = self.networks.get(key, "default")
        return (
            bool(interface.get("accessConfigs"))
            or key not in self.private
            or any(one["network"].endswith(f"/{network}") for one in self.nats.get(key[:2], []))
        )

    def image(self, project: str, *, name: str = "", family: str = "") -> dict[str, Any]:
        for one, newest in self.images.get(project, {}).items():
            if one == family or newest == name:
                fields = self.image_fields.get((project, newest), {})
                if family and fields.get("deprecated"):
                    break  # Families lead to their newest image that is not deprecated.
                usual = {
                    "kind": "compute#image",
                    "id": str(sum(newest.encode())),
                    "name": newest,
                    "family": one,
                    "status": "READY",
                    "diskSizeGb": "50",
                    "archiveSizeBytes": "10000000000",
                    "architecture": "ARM64" if "arm64" in newest else "X86_64",
                    "selfLink": f"projects/{project}/global/images/{newest}",
                }
                return usual | fields
        what = f"family/{family}" if family else name
        raise not_found(f"projects/{project}/global/images/{what}")
