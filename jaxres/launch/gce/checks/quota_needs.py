"""Which quotas of a project the VMs of a job use, and which are too small. Pure.

Source: cloud.google.com/compute/resource-usage, read in 2026. Quotas that the API does not list are
not judged: those by family of machine types, for newer GPUs, CPUs and local SSDs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxres.config.gce_machine_types import num_gpus, quota_of, shape_of
from jaxres.config.schema.gce import CapacityOption, SpotOption

GPUS_ALL_REGIONS, CPUS_ALL_REGIONS = "GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS"
LOCAL_SSD_GB = 375
"""Size of one local SSD."""
DISK_METRICS = {
    "pd-standard": "DISKS_TOTAL_GB",
    "pd-balanced": "SSD_TOTAL_GB",
    "pd-ssd": "SSD_TOTAL_GB",
    "hyperdisk-balanced": "HDB_TOTAL_GB",
}


@dataclass(frozen=True)
class MachineSize:
    """Resources of one VM, by the Compute API."""

    num_cpus: int
    num_gpus: int | None
    """None: the API names none."""
    num_local_ssds: int = 0


@dataclass(frozen=True)
class Quota:
    """A quota of a project or of a region."""

    limit: float
    usage: float = 0.0


@dataclass(frozen=True)
class Need:
    """Usage of a quota by the VMs of a job."""

    metrics: tuple[str, ...]
    """Names of the quota; the first one that the API lists counts."""
    amount: int
    spot_metric: str | None = None
    """A quota of Spot VMs, which are counted there or by `metrics`."""
    is_certain: bool = True
    """Whether it is known that this quota counts such VMs."""
    is_global: bool = False


@dataclass(frozen=True)
class Shortage:
    """A quota that is too small."""

    text: str
    is_certain: bool
    """Whether no creation can succeed with this quota; False: it may be free later, or not count.
    """


def needs(
    option: CapacityOption,
    size: MachineSize | None,
    *,
    num_hosts: int,
    disk_type: str | None,
    disk_gb: int | None,
) -> Iterator[Need]:
    """Yields the quota usage of the VMs of a capacity option.

    Args:
      size: what one VM uses; None: unknown.
      disk_type: type of the boot disk; None: unknown.
      disk_gb: size of the boot disk; None: that of a template.
    """
    kind, machine_type = option.kind, option.machine_type
    gpus = num_gpus(machine_type) or (None if size is None else size.num_gpus)
    if (quota := quota_of(machine_type, kind)) is not None:
        yield Need((quota[0],), quota[1] * num_hosts)
    if gpus is not None and not option.uses_reservation:
        yield Need((GPUS_ALL_REGIONS,), gpus * num_hosts, is_global=True)
    if disk_gb is not None and disk_type in DISK_METRICS:
        yield Need((DISK_METRICS[disk_type],), disk_gb * num_hosts)
    if size is None or option.uses_reservation:
        return
    is_spot = isinstance(option, SpotOption)
    is_certain = shape_of(machine_type) is None or machine_type.startswith("a2-")
    cpus, spot = size.num_cpus * num_hosts, "PREEMPTIBLE_CPUS" if is_spot else None
    yield Need(_cpu_metrics(machine_type), cpus, spot, is_certain=is_certain)
    yield Need((CPUS_ALL_REGIONS,), cpus, is_certain=is_certain, is_global=True)
    if size.num_local_ssds:
        amount = LOCAL_SSD_GB * size.num_local_ssds * num_hosts
        spot = "PREEMPTIBLE_LOCAL_SSD_GB" if is_spot else None
        yield Need(("LOCAL_SSD_TOTAL_GB",), amount, spot, is_certain=is_certain)


def _cpu_metrics(machine_type: str) -> tuple[str, ...]:
    """Returns the CPU quotas of a region that may count a machine type, the exact one first.

    >>> _cpu_metrics("a2-highgpu-1g"), _cpu_metrics("e2-small")
    (('A2_CPUS', 'CPUS'), ('CPUS',))
    """
    family = re.sub("-.*", "", machine_type).upper()
    return ("CPUS",) if family in ("E2", "N1") else (f"{family}_CPUS", "CPUS")


def shortages(
    needed: Sequence[Need],
    region: Mapping[str, Quota],
    project: Mapping[str, Quota],
    *,
    region_name: str,
) -> Iterator[Shortage]:
    """Yields the quotas that are too small, by their limits or by their unused rest.

    >>> need = Need(("GPUS_ALL_REGIONS",), 8, is_global=True)
    >>> [s.text for s in shortages([need], {}, {"GPUS_ALL_REGIONS": Quota(0)}, region_name="r")]
    ['GPUS_ALL_REGIONS is 0 (all regions), needed: 8']
    """
    for need in needed:
        quotas = project if need.is_global else region
        listed = [metric for metric in need.metrics if metric in quotas][:1]
        if need.spot_metric is not None and need.spot_metric in quotas:
            listed.append(need.spot_metric)
        if not listed:
            continue
        where = "all regions" if need.is_global else region_name
        best = max(listed, key=lambda metric: quotas[metric].limit)
        quota = quotas[best]
        if quota.limit < need.amount:
            text = f"{best} is {quota.limit:g} ({where}), needed: {need.amount}"
            yield Shortage(text, need.is_certain)
        elif max(quotas[m].limit - quotas[m].usage for m in listed) < need.amount:
            text = (
                f"{best} is {quota.limit:g} ({where}), of which {quota.usage:g} are in use now, "
                f"needed: {need.amount}"
            )
            yield Shortage(text, False)
