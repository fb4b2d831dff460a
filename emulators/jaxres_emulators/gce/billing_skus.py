"""SKUs of Compute Engine as the Cloud Billing Catalog API writes them, with prices seen in 2026."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

AMERICAS = ("us-central1", "us-east1", "us-west1")
NETHERLANDS = ("europe-west4",)
UNITS = {
    "h": ("hour", "s", 3600),
    "GiBy.h": ("gibibyte hour", "By.s", 3600 * 2**30),
    "GiBy.mo": ("gibibyte month", "By.s", 30 * 86400 * 2**30),
}
"""By usage unit: its description, and base unit with the number of these."""
EFFECTIVE = "2026-11-26T08:00:00Z"


@dataclass
class BillingCatalog:
    """The catalog of the Cloud Billing API; use with the lock held."""

    skus: list[dict[str, Any]] = field(default_factory=list)
    is_enabled: bool = False
    """Whether the API is enabled in the caller's project; that of a new project is not."""
    page_size: int = 5000
    """Most SKUs of a page."""


def sku(
    sku_id: str,
    description: str,
    dollars: float,
    *,
    group: str = "CPU",
    usage: str = "OnDemand",
    unit: str = "h",
    regions: tuple[str, ...] = AMERICAS,
    tiers: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Returns a SKU; `tiers` are prices of further tiers."""
    name, base, factor = UNITS[unit]
    rates = [
        {"startUsageAmount": 100 * number, "unitPrice": money(each)}
        for number, each in enumerate((dollars, *tiers))
    ]
    return {
        "name": f"services/6F81-5844-456A/skus/{sku_id}",
        "skuId": sku_id,
        "description": description,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Storage" if group == "LocalSSD" else "Compute",
            "resourceGroup": group,
            "usageType": usage,
        },
        "serviceRegions": [*regions],
        "pricingInfo": [
            {
                "summary": "",
                "pricingExpression": {
                    "usageUnit": unit,
                    "displayQuantity": 1,
                    "tieredRates": rates,
                    "usageUnitDescription": name,
                    "baseUnit": base,
                    "baseUnitDescription": "second" if base == "s" else "byte second",
                    "baseUnitConversionFactor": factor,
                },
                "currencyConversionRate": 1,
                "effectiveTime": EFFECTIVE,
            }
        ],
        "serviceProviderName": "Google",
        "geoTaxonomy": {"type": "MULTI_REGIONAL", "regions": [*regions]},
    }


def money(dollars: float) -> dict[str, Any]:
    """Returns an amount: whole dollars as text, and billionths."""
    units, nanos = divmod(round(dollars * 1e9), 10**9)
    return {"currencyCode": "USD", "units": str(units), "nanos": nanos}


def _a2(place: str, regions: tuple[str, ...], mark: str) -> Iterator[dict[str, Any]]:
    core, ram, gpu = "A2 Instance Core", "A2 Instance Ram", "Nvidia Tesla A100 GPU"
    spot, flex = "Spot Preemptible", "DWS Defined Duration"
    at = f"running in {place}"
    yield sku(f"{mark}01", f"{core} {at}", 0.031611, regions=regions)
    yield sku(f"{mark}02", f"{ram} {at}", 0.004237, group="RAM", unit="GiBy.h", regions=regions)
    yield sku(f"{mark}03", f"{gpu} {at}", 2.933908, group="GPU", regions=regions)
    cheap = {"usage": "Preemptible", "regions": regions}
    yield sku(f"{mark}04", f"{spot} {core} {at}", 0.01659, **cheap)
    yield sku(f"{mark}05", f"{spot} {ram} {at}", 0.00222, group="RAM", unit="GiBy.h", **cheap)
    yield sku(f"{mark}06", f"{gpu} attached to {spot} VMs {at}", 1.5399, group="GPU", **cheap)
    yield sku(f"{mark}07", f"{flex} A2 Core {at}", 0.01739, regions=regions)
    yield sku(
        f"{mark}08", f"{flex} A2 Ram {at}", 0.00233, group="RAM", unit="GiBy.h", regions=regions
    )
    yield sku(
        f"{mark}09", f"{gpu} attached to {flex} VMs {at}", 1.61365, group="GPU", regions=regions
    )


A2 = [*_a2("Americas", AMERICAS, "A2AM-"), *_a2("Netherlands", NETHERLANDS, "A2NL-")]
A3 = [
    sku("A3AM-01", "A3 Instance Core running in Americas", 0.029323),
    sku("A3AM-02", "A3 Instance Ram running in Americas", 0.002553, group="RAM", unit="GiBy.h"),
    sku("A3AM-03", "Nvidia H100 80GB GPU running in Americas", 9.796551, group="GPU"),
    sku("A3AM-04", "DWS Defined Duration A3 Core running in Americas", 0.010934),
    sku(
        *("A3AM-05", "DWS Defined Duration A3 Ram running in Americas", 0.000952),
        group="RAM",
        unit="GiBy.h",
    ),
    sku(
        *("A3AM-06", "Nvidia H100 80GB GPU attached to DWS Defined Duration VMs"),
        *(4.200761,),
        group="GPU",
    ),
    sku(
        *("A3AM-07", "DWS Defined Duration SSD backed Local Storage running in Americas", 0.08),
        group="LocalSSD",
        unit="GiBy.mo",
    ),
    sku("A3AM-08", "SSD backed Local Storage", 0.08, group="LocalSSD", unit="GiBy.mo"),
    sku(
        *("A3AM-09", "SSD backed Local Storage attached to Spot Preemptible VMs", 0.04),
        group="LocalSSD",
        usage="Preemptible",
        unit="GiBy.mo",
    ),
    sku("A3AM-10", "A3Plus Instance Core running in Americas", 0.026924),
    sku("A3AM-11", "A3Plus Instance Ram running in Americas", 0.002344, group="RAM", unit="GiBy.h"),
    sku("A3AM-12", "Nvidia H100 80GB Plus GPU running in Americas", 10.344276, group="GPU"),
]
OTHERS = [
    sku(
        *("OTHR-01", "Nvidia H100 Mega 80GB GPU attached to DWS Defined Duration VMs in Americas"),
        *(4.423936,),
        group="GPU",
    ),
    sku(
        *("OTHR-02", "Reserved Nvidia H100 80GB Mega GPU in Americas in Calendar Mode", 4.841121),
        group="GPU",
    ),
    sku(
        *("OTHR-03", "Commitment v1: A2 Cpu in Americas for 1 Year", 0.019915),
        usage="Commit1Yr",
    ),
    sku("OTHR-04", "Nvidia Tesla A100 80GB GPU running in Americas", 3.92808, group="GPU"),
    sku("OTHR-05", "Reserved Nvidia Tesla A100 GPU in Americas", 0.0, group="GPU"),
    sku("OTHR-06", "N2 Instance Core running in Americas", 0.031611),
    sku("OTHR-07", "N2 Instance Ram running in Americas", 0.004237, group="RAM", unit="GiBy.h"),
    sku("OTHR-08", "N2 Custom Instance Core running in Americas", 0.033191),
    sku("OTHR-09", "Nvidia Tesla A100 GPU attached to Sole Tenancy VMs", 2.933908, group="GPU"),
    sku(
        "OTHR-10", "Spot Preemptible A4 Nvidia B200 (1 gpu slice) in Americas", 4.9542, group="GPU"
    ),
]
SKUS = [*A2, *A3, *OTHERS]
