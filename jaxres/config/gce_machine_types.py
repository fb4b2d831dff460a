"""GPU machine types of Google Compute Engine: provisioning models, GPUs and quotas by family.

Source: cloud.google.com/compute/docs/accelerator-optimized-machines, read in 2026. Machine types
that are not listed here are not checked; the Compute API checks them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ANY = ("spot", "flex_start", "reservation", "standard")


@dataclass(frozen=True)
class Published:
    """Bus bandwidth of nccl-tests over VMs of a machine type, by messages of 1 GiB.

    A sum over two VMs may be faster than an all-gather: NCCL adds up within the VMs by NVLink.
    """

    gb_per_second: float
    """In 1e9 bytes/s."""
    source: str
    """Collective and NCCL plug-in, where the figure is published, and when it was read."""


@dataclass(frozen=True)
class MachineFamily:
    """A family of machine types that have GPUs."""

    pattern: re.Pattern[str]
    """Regular expression of the machine types."""
    kinds: tuple[str, ...]
    """Kinds of capacity options that offer these machine types."""
    gpu: str
    metric: str
    """Quota of its GPUs; spot and flex_start have a separate one (see quota_of)."""
    needs_hyperdisk: bool = False
    has_rdma: bool = False
    """Whether its GPUs reach GPUs of other VMs by interfaces of the type MRDMA."""
    num_gpus_by_cpus: Mapping[int, int] = field(default_factory=dict)
    """Number of GPUs by the number of CPUs, where only the latter is part of the name."""
    two_vms: Published | None = None
    """Bandwidth between two VMs that others have published; None: none was found."""

    def num_gpus(self, machine_type: str) -> int | None:
        """Returns the number of GPUs, or None if it does not follow from the machine type's name.

        >>> shape_of("g2-standard-24").num_gpus("g2-standard-24")
        2
        """
        match = re.search(r"-([0-9]+)(g?)$", machine_type)
        if match is None:
            return None
        return int(match[1]) if match[2] else self.num_gpus_by_cpus.get(int(match[1]))


SHAPES = (
    MachineFamily(
        re.compile(r"a2-(high|mega)gpu-(1|2|4|8|16)g"), ANY, "A100 40 GB", "NVIDIA_A100_GPUS"
    ),
    MachineFamily(
        re.compile(r"a2-ultragpu-(1|2|4|8)g"), ANY, "A100 80 GB", "NVIDIA_A100_80GB_GPUS"
    ),
    MachineFamily(
        re.compile(r"a3-highgpu-(1|2|4)g"), ("spot", "flex_start"), "H100 80 GB", "NVIDIA_H100_GPUS"
    ),
    MachineFamily(
        re.compile(r"a3-highgpu-8g"),
        ANY,
        "H100 80 GB",
        "NVIDIA_H100_GPUS",
        two_vms=Published(
            49.3,
            "all_gather with GPUDirect-TCPX, dstack examples/clusters/a3high/README.md, "
            "read 2026-11",
        ),
    ),
    MachineFamily(
        re.compile(r"a3-megagpu-8g"),
        ANY,
        "H100 80 GB",
        "NVIDIA_H100_MEGA_GPUS",
        two_vms=Published(
            181.9,
            "all_gather with GPUDirect-TCPXO, dstack examples/misc/a3mega-clusters/README.md, "
            "read 2026-11",
        ),
    ),
    MachineFamily(
        re.compile(r"a3-ultragpu-8g"),
        ("spot", "flex_start", "reservation"),
        "H200 141 GB",
        "NVIDIA_H200_GPUS",
        needs_hyperdisk=True,
        has_rdma=True,
    ),
    MachineFamily(
        re.compile(r"a4-highgpu-8g"),
        ("spot", "flex_start", "reservation"),
        "B200",
        "NVIDIA_B200_GPUS",
        needs_hyperdisk=True,
        has_rdma=True,
        two_vms=Published(
            324.1,
            "all_gather with gIB over 2 or 4 VMs, GoogleCloudPlatform/cluster-toolkit "
            "examples/gke-a4-highgpu/README.md, read 2026-11",
        ),
    ),
    MachineFamily(
        re.compile(r"a4x-.*"),
        ("reservation",),
        "GB200",
        "NVIDIA_GB200_GPUS",
        needs_hyperdisk=True,
        has_rdma=True,
    ),
    MachineFamily(
        re.compile(r"g2-standard-[0-9]+"),
        ANY,
        "L4",
        "NVIDIA_L4_GPUS",
        num_gpus_by_cpus={4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8},
    ),
    MachineFamily(
        re.compile(r"g4-standard-[0-9]+"),
        ANY,
        "RTX PRO 6000",
        "NVIDIA_RTX_PRO_6000_GPUS",
        num_gpus_by_cpus={48: 1, 96: 2, 192: 4, 384: 8},
    ),
)


def num_gpus(machine_type: str) -> int | None:
    """Returns the number of GPUs of a machine type; None: it has none, or is unknown.

    >>> num_gpus("a3-highgpu-8g"), num_gpus("n2-standard-8")
    (8, None)
    """
    shape = shape_of(machine_type)
    return None if shape is None else shape.num_gpus(machine_type)


def quota_of(machine_type: str, kind: str) -> tuple[str, int] | None:
    """Returns the GPU quota that a VM uses and how much of it; None: no GPUs, or unknown.

    >>> quota_of("a2-highgpu-4g", "spot")
    ('PREEMPTIBLE_NVIDIA_A100_GPUS', 4)
    """
    shape = shape_of(machine_type)
    number = None if shape is None else shape.num_gpus(machine_type)
    if shape is None or number is None or kind == "reservation":
        return None
    return ("PREEMPTIBLE_" if kind in ("spot", "flex_start") else "") + shape.metric, number


def shape_of(machine_type: str) -> MachineFamily | None:
    """Returns the family of a machine type; None: it has no GPUs, or is unknown.

    >>> shape_of("a3-ultragpu-8g").kinds
    ('spot', 'flex_start', 'reservation')
    """
    return next((shape for shape in SHAPES if shape.pattern.fullmatch(machine_type)), None)


def region_of(zone: str) -> str:
    """Returns the region that a zone is in.

    >>> region_of("us-central1-a")
    'us-central1'
    """
    return zone.rpartition("-")[0]
