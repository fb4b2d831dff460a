"""The price of a machine type, by the SKUs of Google's Cloud Billing Catalog API. Pure.

No SKU names a machine type: its price is the sum of its cores, memory, GPUs and local SSDs, which
are found by the descriptions of their SKUs. A part that does not match exactly one SKU makes the
price unknown; it is never left out.

The descriptions are those of public lists of the catalog, read in 2026. Not here, because the lists
do not show what their SKUs include: A4, A4X (GPU slices) and G4; N1, which may have GPUs besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxres.config.schema_gce import CapacityOption, ReservationOption

Usage = Literal["on_demand", "spot", "flex_start"]
Sku = Mapping[str, Any]
"""A SKU as the API writes it."""

LOCAL_SSD_GIB = 375
SHAPES = r"(?:standard|highmem|highcpu)-[0-9]+"
FAMILIES = {
    r"a2-(?:high|mega|ultra)gpu-[0-9]+g": "A2",
    r"a3-highgpu-[0-9]+g": "A3",
    r"a3-megagpu-[0-9]+g": "A3Plus",
    r"a3-ultragpu-[0-9]+g": "A3Ultra",
    r"g2-standard-[0-9]+": "G2",
    rf"e2-{SHAPES}": "E2",
    rf"n2-{SHAPES}": "N2",
    rf"c3-{SHAPES}": "C3",
}
"""Name of a machine family in descriptions of SKUs, by the machine type."""
GPUS = {
    "nvidia-tesla-a100": ("Nvidia Tesla A100 GPU",),
    "nvidia-a100-80gb": ("Nvidia Tesla A100 80GB GPU",),
    "nvidia-h100-80gb": ("Nvidia H100 80GB GPU",),
    "nvidia-h100-mega-80gb": (
        "Nvidia H100 80GB Plus GPU",
        "Nvidia H100 80GB Mega GPU",
        "Nvidia H100 Mega 80GB GPU",
    ),
    "nvidia-h200-141gb": ("H200 141GB GPU", "Nvidia H200 141GB GPU"),
    "nvidia-l4": ("Nvidia L4 GPU",),
}
"""Names of a GPU in descriptions of SKUs, by the accelerator type of the Compute API."""
SSD = "SSD backed Local Storage"
SPOT, FLEX = "Spot Preemptible", "DWS Defined Duration"
USAGE_TYPES: Mapping[Usage, tuple[str, ...]] = {
    "on_demand": ("OnDemand",),
    "spot": ("Preemptible", "OnDemand"),
    "flex_start": ("OnDemand",),
}
"""Usage types of the SKUs; some SKUs of Spot VMs have OnDemand, so the description decides."""
HOUR_IN_BASE_UNITS = {"s": 3600.0, "By.s": 3600.0 * 2**30}
"""An hour, or an hour of a GiB, in the base unit of a SKU."""


@dataclass(frozen=True)
class MachineParts:
    """What a VM of a machine type is billed for, by the Compute API."""

    num_cpus: int
    memory_gib: float
    gpu: str = ""
    """Accelerator type; empty: no GPUs."""
    num_gpus: int = 0
    num_local_ssds: int = 0


@dataclass(frozen=True)
class CatalogPrice:
    """Price of a machine type in a region."""

    machine_type: str
    region: str
    usage: Usage
    dollars_per_hour: float
    """Of one VM, without its disks."""
    skus: tuple[str, ...]
    """Ids of the SKUs of its parts."""
    effective: str
    """Date since which the newest of them has its price."""
    looked_up_at: float = 0.0
    """In seconds since the epoch."""


@dataclass(frozen=True)
class UnknownPrice:
    """A machine type has no price that is certain."""

    reason: str


class _Unknown(Exception):
    """Why a part has no price that is certain."""


def usage_of(option: CapacityOption) -> Usage | UnknownPrice:
    """Returns by which prices the VMs of a capacity option are billed."""
    if isinstance(option, ReservationOption):
        if option.provisioning_model == "standard":
            return "on_demand"
        return UnknownPrice("reservation_bound VMs are billed by the terms of their reservation")
    return "on_demand" if option.kind == "standard" else option.kind


def family_of(machine_type: str) -> str | UnknownPrice:
    """Returns the name of a machine type's family in descriptions of SKUs.

    >>> family_of("a3-megagpu-8g"), family_of("n1-standard-8")
    ('A3Plus', UnknownPrice(reason='jaxres knows no SKUs of n1-standard-8'))
    """
    for pattern, name in FAMILIES.items():
        if re.fullmatch(pattern, machine_type):
            return name
    return UnknownPrice(f"jaxres knows no SKUs of {machine_type}")


def price(
    skus: Iterable[Sku], parts: MachineParts, *, machine_type: str, region: str, usage: Usage
) -> CatalogPrice | UnknownPrice:
    """Returns the price of a machine type, or why it is unknown."""
    family = family_of(machine_type)
    if isinstance(family, UnknownPrice):
        return family
    if parts.num_gpus and parts.gpu not in GPUS:
        return UnknownPrice(f"jaxres knows no SKUs of {parts.gpu}")
    candidates = [
        (_without_place(str(sku["description"])), sku)
        for sku in skus
        if region in sku["serviceRegions"] and sku["category"]["usageType"] in USAGE_TYPES[usage]
    ]
    dollars, ids, dates = 0.0, list[str](), list[str]()
    try:
        for part, amount, base_unit, names in _parts(parts, family, usage):
            matching = [sku for name, sku in candidates if name in names]
            if len(matching) != 1:
                found = ", ".join(sku["skuId"] for sku in matching) or "none"
                raise _Unknown(f"{part} must match one SKU in {region}, found: {found}")
            dollars += amount * _dollars_per_hour(matching[0], base_unit)
            ids.append(matching[0]["skuId"])
            dates.append(matching[0]["pricingInfo"][-1]["effectiveTime"][:10])
    except _Unknown as unknown:
        return UnknownPrice(str(unknown))
    except (LookupError, ValueError, TypeError, ZeroDivisionError) as error:
        return UnknownPrice(f"a SKU has another form than expected ({error!r})")
    return CatalogPrice(machine_type, region, usage, dollars, tuple(ids), max(dates))


def _without_place(description: str) -> str:
    """Returns a description in lower case without the place at its end.

    >>> _without_place("A2 Instance Core running in Americas"), _without_place("X in A in B Mode")
    ('a2 instance core', 'x in a')
    """
    return re.sub(r" (?:running )?in (?:(?! in ).)+$", "", description).strip().lower()


def _parts(
    parts: MachineParts, family: str, usage: Usage
) -> Iterator[tuple[str, float, str, set[str]]]:
    """Yields each part of a VM: its name, amount, base unit, and descriptions of its SKU."""
    gpus = GPUS.get(parts.gpu, ())
    core, ram = f"{family} Instance Core", f"{family} Instance Ram"
    names: tuple[tuple[str, ...], ...]
    if usage == "on_demand":
        names = (core,), (ram,), gpus, (SSD,)
    elif usage == "spot":
        names = (
            (f"{SPOT} {core}",),
            (f"{SPOT} {ram}",),
            tuple(
                name for gpu in gpus for name in (f"{gpu} attached to {SPOT} VMs", f"{SPOT} {gpu}")
            ),
            (f"{SSD} attached to {SPOT} VMs",),
        )
    else:
        names = (
            (f"{FLEX} {family} Core", f"{FLEX} {core}"),
            (f"{FLEX} {family} Ram", f"{FLEX} {ram}"),
            tuple(
                name for gpu in gpus for name in (f"{gpu} attached to {FLEX} VMs", f"{FLEX} {gpu}")
            ),
            (f"{FLEX} {SSD}", f"{SSD} attached to {FLEX} VMs"),
        )
    cores, rams, gpu_names, ssds = ({name.lower() for name in each} for each in names)
    yield "a core", parts.num_cpus, "s", cores
    yield "a GiB of memory", parts.memory_gib, "By.s", rams
    if parts.num_gpus:
        yield "a GPU", parts.num_gpus, "s", gpu_names
    if parts.num_local_ssds:
        yield "a GiB of local SSD", LOCAL_SSD_GIB * parts.num_local_ssds, "By.s", ssds


def _dollars_per_hour(sku: Sku, base_unit: str) -> float:
    """Returns the dollars of an hour, or of an hour of a GiB."""
    expression = sku["pricingInfo"][-1]["pricingExpression"]
    if expression["baseUnit"] != base_unit:
        raise _Unknown(f"SKU {sku['skuId']} has the base unit {expression['baseUnit']}")
    rates = [rate["unitPrice"] for rate in expression["tieredRates"]]
    if any(rate.get("currencyCode", "USD") != "USD" for rate in rates):
        raise _Unknown(f"SKU {sku['skuId']} is not priced in dollars")
    priced = [p for rate in rates if (p := int(rate.get("units", 0)) + rate.get("nanos", 0) / 1e9)]
    if len(priced) != 1:
        raise _Unknown(f"SKU {sku['skuId']} has {len(priced)} priced tiers")
    return priced[0] * HOUR_IN_BASE_UNITS[base_unit] / expression["baseUnitConversionFactor"]
