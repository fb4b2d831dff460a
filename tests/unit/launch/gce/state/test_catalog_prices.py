"""The price of a machine type is the sum of all its parts, or unknown: never a wrong figure."""

from __future__ import annotations

from typing import Any

import pytest

from jaxres.launch.gce.state import catalog_prices
from jaxres.launch.gce.state.catalog_prices import CatalogPrice, MachineParts, UnknownPrice, Usage
from jaxres_emulators.gce.billing_skus import NETHERLANDS, SKUS, sku

A100, H100, MEGA = "nvidia-tesla-a100", "nvidia-h100-80gb", "nvidia-h100-mega-80gb"
PARTS = {
    "a2-highgpu-1g": MachineParts(12, 85, A100, 1),
    "a2-ultragpu-1g": MachineParts(12, 170, "nvidia-a100-80gb", 1, 1),
    "a3-highgpu-8g": MachineParts(208, 1872, H100, 8, 16),
    "a3-megagpu-8g": MachineParts(208, 1872, MEGA, 8, 16),
    "n2-standard-8": MachineParts(8, 32),
    "e2-small": MachineParts(2, 2),
    "a4-highgpu-8g": MachineParts(224, 3968, "nvidia-b200", 8, 32),
    "n1-standard-8": MachineParts(8, 30),
}
SSD_HOURS = 0.08 / 720


def price(
    machine_type: str,
    usage: Usage = "on_demand",
    *,
    region: str = "us-central1",
    skus: list[dict[str, Any]] = SKUS,
) -> CatalogPrice | UnknownPrice:
    return catalog_prices.price(
        skus, PARTS[machine_type], machine_type=machine_type, region=region, usage=usage
    )


def without(*ids: str) -> list[dict[str, Any]]:
    return [one for one in SKUS if one["skuId"] not in ids]


A2_ON_DEMAND = 12 * 0.031611 + 85 * 0.004237 + 2.933908
A2_SPOT = 12 * 0.01659 + 85 * 0.00222 + 1.5399


@pytest.mark.parametrize(
    ("machine_type", "usage", "dollars", "ids"),
    [
        ("a2-highgpu-1g", "on_demand", A2_ON_DEMAND, ("A2AM-01", "A2AM-02", "A2AM-03")),
        ("a2-highgpu-1g", "spot", A2_SPOT, ("A2AM-04", "A2AM-05", "A2AM-06")),
        (
            *("a2-highgpu-1g", "flex_start", 12 * 0.01739 + 85 * 0.00233 + 1.61365),
            ("A2AM-07", "A2AM-08", "A2AM-09"),
        ),
        (
            *("a2-ultragpu-1g", "on_demand"),
            12 * 0.031611 + 170 * 0.004237 + 3.92808 + 375 * SSD_HOURS,
            ("A2AM-01", "A2AM-02", "OTHR-04", "A3AM-08"),
        ),
        (
            *("a3-highgpu-8g", "on_demand"),
            208 * 0.029323 + 1872 * 0.002553 + 8 * 9.796551 + 6000 * SSD_HOURS,
            ("A3AM-01", "A3AM-02", "A3AM-03", "A3AM-08"),
        ),
        (
            *("a3-highgpu-8g", "flex_start"),
            208 * 0.010934 + 1872 * 0.000952 + 8 * 4.200761 + 6000 * SSD_HOURS,
            ("A3AM-04", "A3AM-05", "A3AM-06", "A3AM-07"),
        ),
        (
            *("a3-megagpu-8g", "on_demand"),
            208 * 0.026924 + 1872 * 0.002344 + 8 * 10.344276 + 6000 * SSD_HOURS,
            ("A3AM-10", "A3AM-11", "A3AM-12", "A3AM-08"),
        ),
        ("n2-standard-8", "on_demand", 8 * 0.031611 + 32 * 0.004237, ("OTHR-06", "OTHR-07")),
    ],
)
def test_the_price_is_the_sum_of_cores_memory_gpus_and_local_ssds(
    machine_type: str, usage: Usage, dollars: float, ids: tuple[str, ...]
) -> None:
    found = price(machine_type, usage)
    assert isinstance(found, CatalogPrice), found
    assert found.dollars_per_hour == pytest.approx(dollars), "another price than the SKUs' sum"
    assert (found.skus, found.effective) == (ids, "2026-11-26")


def test_on_demand_vms_never_have_the_price_of_spot_vms() -> None:
    without_on_demand = without("A2AM-01", "A2AM-02", "A2AM-03")
    found = price("a2-highgpu-1g", skus=without_on_demand)
    assert isinstance(found, UnknownPrice), "a Spot price was taken for on-demand"
    spot = price("a2-highgpu-1g", "spot", skus=without("A2AM-04", "A2AM-05", "A2AM-06"))
    assert isinstance(spot, UnknownPrice), "an on-demand price was taken for Spot"
    # Google marks some SKUs of Spot VMs as OnDemand; the description has the last word.
    marked = [one | {"category": one["category"] | {"usageType": "OnDemand"}} for one in SKUS[3:6]]
    found = price("a2-highgpu-1g", skus=[*without("A2AM-04", "A2AM-05", "A2AM-06"), *marked])
    assert isinstance(found, CatalogPrice), found
    assert found.dollars_per_hour == pytest.approx(A2_ON_DEMAND)


@pytest.mark.parametrize(
    ("absent", "part"),
    [
        ("A3AM-01", "a core"),
        ("A3AM-02", "a GiB of memory"),
        ("A3AM-03", "a GPU"),
        ("A3AM-08", "a GiB of local SSD"),
    ],
)
def test_a_part_without_a_sku_makes_the_price_unknown_and_is_not_free(
    absent: str, part: str
) -> None:
    found = price("a3-highgpu-8g", skus=without(absent))
    assert isinstance(found, UnknownPrice), f"{part} was counted as 0 dollars"
    assert found.reason == f"{part} must match one SKU in us-central1, found: none"


def test_two_skus_of_one_part_make_the_price_unknown() -> None:
    twin = sku("TWIN-01", "A2 Instance Core running in Iowa", 0.02, regions=("us-central1",))
    found = price("a2-highgpu-1g", skus=[*SKUS, twin])
    assert isinstance(found, UnknownPrice), "one of two prices was guessed"
    assert found.reason.endswith("found: A2AM-01, TWIN-01")


def test_only_skus_of_the_region_count() -> None:
    dear = sku("A2NL-01", "A2 Instance Core running in Netherlands", 0.5, regions=NETHERLANDS)
    found = price("a2-highgpu-1g", region="europe-west4", skus=[*without("A2NL-01"), dear])
    assert isinstance(found, CatalogPrice), found
    assert found.dollars_per_hour == pytest.approx(A2_ON_DEMAND + 12 * (0.5 - 0.031611))
    assert isinstance(price("a2-highgpu-1g", region="asia-southeast1"), UnknownPrice)


def changed(**expression: Any) -> list[dict[str, Any]]:
    """Returns the SKUs; the pricing of the GPU is changed."""
    (gpu,) = (one for one in SKUS if one["skuId"] == "A2AM-03")
    info = gpu["pricingInfo"][0]
    new = info | {"pricingExpression": info["pricingExpression"] | expression}
    return [*without("A2AM-03"), gpu | {"pricingInfo": [new]}]


EUROS = [{"startUsageAmount": 0, "unitPrice": {"currencyCode": "EUR", "units": "2", "nanos": 0}}]
FREE = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": 0}}
PAID = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "2"}}


@pytest.mark.parametrize(
    ("skus", "reason"),
    [
        (changed(tieredRates=EUROS), "SKU A2AM-03 is not priced in dollars"),
        (changed(tieredRates=[FREE]), "SKU A2AM-03 has 0 priced tiers"),
        (changed(tieredRates=[PAID, PAID]), "SKU A2AM-03 has 2 priced tiers"),
        (changed(baseUnit="count"), "SKU A2AM-03 has the base unit count"),
        (changed(baseUnitConversionFactor=0), "a SKU has another form than expected"),
        (changed(tieredRates=[{}]), "a SKU has another form than expected"),
    ],
    ids=["euros", "free", "two-tiers", "unit", "no-factor", "no-price"],
)
def test_a_price_in_another_form_is_unknown(skus: list[dict[str, Any]], reason: str) -> None:
    found = price("a2-highgpu-1g", skus=skus)
    assert isinstance(found, UnknownPrice), "a price was guessed"
    assert found.reason.startswith(reason)


def test_the_tier_that_is_paid_counts_and_amounts_without_nanos_are_whole_dollars() -> None:
    found = price("a2-highgpu-1g", skus=changed(tieredRates=[FREE, PAID]))
    assert isinstance(found, CatalogPrice), found
    assert found.dollars_per_hour == pytest.approx(A2_ON_DEMAND - 2.933908 + 2)


@pytest.mark.parametrize("machine_type", ["e2-small", "a4-highgpu-8g", "n1-standard-8"])
def test_machine_types_whose_skus_are_not_known_have_no_price(machine_type: str) -> None:
    assert price(machine_type) == UnknownPrice(f"jaxres knows no SKUs of {machine_type}")
