"""Prices of capacity options that the config gives none: asked of the Billing Catalog API, kept.

A price in the config always counts. The others are part of the desired state, with their SKUs and
dates, and are asked for again by an `up` that starts or takes over a job, at most once a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.config.errors import raise_all
from jaxres.config.gce_machine_types import region_of
from jaxres.config.schema_gce import CapacityOption, GceSection
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce.api import billing_catalog
from jaxres.launch.gce.api.billing_catalog import CatalogUnavailable
from jaxres.launch.gce.api.compute import Compute
from jaxres.launch.gce.api.resource_reader import ReadDenied, ResourceReader
from jaxres.launch.gce.checks.check_result import CheckResult
from jaxres.launch.gce.decide import cheaper_option
from jaxres.launch.gce.state import catalog_prices, spending
from jaxres.launch.gce.state.catalog_prices import CatalogPrice, MachineParts, UnknownPrice, Usage
from jaxres.launch.gce.state.desired_state import DesiredState

DAY_SECONDS = 86_400.0
SOURCE = "by the Billing Catalog API"
REMEDY = "Give dollars_per_hour"
Key = tuple[str, str, Usage]
"""Machine type, region and usage."""


@dataclass(frozen=True)
class PriceLookup:
    """Prices by the catalog, and why others are unknown."""

    prices: tuple[CatalogPrice, ...] = ()
    reasons: Mapping[Key, str] = field(default_factory=dict[Key, str])


def look_up(
    gce: GceSection,
    compute: Callable[[], Compute],
    clock: Clock,
    *,
    known: Sequence[CatalogPrice] = (),
) -> PriceLookup:
    """Returns the prices of the options without one in the config; raises nothing.

    Args:
      gce: the section of the config.
      compute: returns the Compute API; called only if a price is not known since a day ago.
      clock: the clock.
      known: prices found earlier; an old one stays if it can't be asked for again.
    """
    now, found = clock.wall(), {_key(price): price for price in known}
    due = {
        key: zone
        for key, zone in _wanted(gce).items()
        if key not in found or not 0 <= now - found[key].looked_up_at < DAY_SECONDS
    }
    if not due:
        return PriceLookup(tuple(known))
    answers = _ask(due, compute)
    prices = [a for a in answers.values() if isinstance(a, CatalogPrice)]
    found |= {_key(price): replace(price, looked_up_at=now) for price in prices}
    reasons = {k: a.reason for k, a in answers.items() if isinstance(a, UnknownPrice)}
    return PriceLookup(tuple(found.values()), reasons)


def _key(price: CatalogPrice) -> Key:
    return price.machine_type, price.region, price.usage


def _keys(option: CapacityOption) -> dict[Key, str] | UnknownPrice:
    """Returns the prices that an option needs, each with one of its zones."""
    family = catalog_prices.family_of(option.machine_type)
    usage = catalog_prices.usage_of(option)
    for unknown in (family, usage):
        if isinstance(unknown, UnknownPrice):
            return unknown
    assert not isinstance(usage, UnknownPrice), option
    return {(option.machine_type, region_of(z), usage): z for z in reversed(option.zones)}


def _wanted(gce: GceSection) -> dict[Key, str]:
    wanted = dict[Key, str]()
    for option in gce.capacity_options:
        if option.dollars_per_hour is None and not isinstance(keys := _keys(option), UnknownPrice):
            wanted |= keys
    return wanted


def _ask(
    due: Mapping[Key, str], compute: Callable[[], Compute]
) -> Mapping[Key, CatalogPrice | UnknownPrice]:
    """Returns the price of each key, or why it is unknown."""
    try:
        service = compute()
        reader = ResourceReader(service)
        machines = {
            key: reader.get("MachineTypesClient", zone=zone, machine_type=key[0])
            for key, zone in due.items()
        }
        skus = billing_catalog.list_skus(service, regions={region for _, region, _ in due})
    except (CatalogUnavailable, ConfigError, StorageUnavailable, ReadDenied) as error:
        return dict.fromkeys(due, UnknownPrice(str(error).rstrip(".")))
    found = dict[Key, CatalogPrice | UnknownPrice]()
    for key, machine in machines.items():
        machine_type, region, usage = key
        if machine is None:
            found[key] = UnknownPrice(f"{due[key]} has no {machine_type}")
        else:
            found[key] = catalog_prices.price(
                skus, _parts(machine), machine_type=machine_type, region=region, usage=usage
            )
    return found


def _parts(machine: Any) -> MachineParts:
    kinds = {one.guest_accelerator_type for one in machine.accelerators}
    return MachineParts(
        machine.guest_cpus,
        machine.memory_mb / 1024,
        ", ".join(sorted(kinds)),
        sum(one.guest_accelerator_count for one in machine.accelerators),
        machine.bundled_local_ssds.partition_count,
    )


def price_of(option: CapacityOption, lookup: PriceLookup) -> CatalogPrice | UnknownPrice:
    """Returns the price of an option by the catalog; unknown if it differs between its regions."""
    keys = _keys(option)
    if isinstance(keys, UnknownPrice):
        return keys
    by_key = {_key(price): price for price in lookup.prices}
    for key in keys:
        if key not in by_key:
            return UnknownPrice(lookup.reasons.get(key, f"none is known for {key[1]}"))
    found = [by_key[key] for key in keys]
    if len({price.dollars_per_hour for price in found}) > 1:
        prices = ", ".join(f"${p.dollars_per_hour:.4f} in {p.region}" for p in found[::-1])
        text = f"it differs between its regions ({prices}): give each one an option of its own"
        return UnknownPrice(text)
    return found[-1]


def fill(config: RunConfig, prices: Iterable[CatalogPrice]) -> RunConfig:
    """Returns the config with the prices by the catalog where it gives none."""
    gce = config.launch.gce
    assert gce is not None, config
    lookup, options = PriceLookup(tuple(prices)), list[CapacityOption]()
    for option in gce.capacity_options:
        if option.dollars_per_hour is None and isinstance(
            price := price_of(option, lookup), CatalogPrice
        ):
            option = option.model_copy(update={"dollars_per_hour": price.dollars_per_hour})
        options.append(option)
    gce = gce.model_copy(update={"capacity_options": tuple(options)})
    launch = config.launch.model_copy(update={"gce": gce})
    return config.model_copy(update={"launch": launch})


def adopt(
    desired: DesiredState, config: RunConfig, prices: tuple[CatalogPrice, ...]
) -> DesiredState:
    """Returns the desired state with prices; VMs deleted before these were known are charged."""
    gce = fill(config, prices).launch.gce
    assert gce is not None, config
    charged = tuple(
        replace(part, dollars=spending.charge(part.option, part.vm_seconds, gce))
        if not part.dollars
        else part
        for part in desired.spending
    )
    before, after = (sum(p.dollars for p in parts) for parts in (desired.spending, charged))
    spent = desired.spent_dollars + after - before
    return replace(desired, prices=prices, spending=charged, spent_dollars=spent)


def results(config: RunConfig, lookup: PriceLookup) -> Iterator[CheckResult]:
    """Yields which prices are unknown: failed if a limit on costs needs them."""
    gce = config.launch.gce
    assert gce is not None, config
    limits = {
        "launch.max_dollars": config.launch.max_dollars,
        "alerts.spend_dollars": config.alerts.spend_dollars,
    }
    needed_by = [name for name, value in limits.items() if value is not None]
    for number, option in enumerate(gce.capacity_options):
        price = price_of(option, lookup)
        if option.dollars_per_hour is not None or isinstance(price, CatalogPrice):
            continue
        text = f"the price of {option.kind} {option.machine_type} is unknown: {price.reason}"
        if needed_by:
            text += f"; {' and '.join(needed_by)} can't be enforced without it"
        state = "failed" if needed_by else "warning"
        key = f"launch.gce.capacity_options[{number}].dollars_per_hour"
        yield CheckResult("prices", state, text, REMEDY, key)


def for_job(
    config: RunConfig,
    compute: Compute,
    clock: Clock,
    console: Callable[[str], None],
    *,
    known: Sequence[CatalogPrice],
    is_new: bool,
) -> tuple[CatalogPrice, ...]:
    """Returns the prices of a job, and prints which are unknown.

    Raises:
      ConfigError: the job is new, and a limit on costs needs a price that is unknown.
    """
    gce = config.launch.gce
    assert gce is not None, config
    lookup = look_up(gce, lambda: compute, clock, known=known)
    found = [*results(config, lookup)]
    if is_new:
        raise_all(result.problem() for result in found if result.state == "failed")
    for result in found:
        console(result.text())
    return lookup.prices


def cost_lines(desired: DesiredState, gce: GceSection, *, now: float) -> list[str]:
    """Returns the costs by capacity option and cause, and the prices by the catalog, as lines."""
    parts = spending.so_far(desired, gce, now=now)
    prices = [f"    price of {describe(price)}" for price in desired.prices]
    saved = cheaper_option.saved_dollars(desired, gce, now=now)
    moves = [f"    saved by moves to a cheaper option: ${saved:.2f}"] if saved else []
    return [*(spending.describe(part, gce) for part in parts), *moves, *prices]


def describe(price: CatalogPrice) -> str:
    """Returns the text of `status` about a price.

    >>> describe(CatalogPrice("g2-standard-4", "us-east4", "spot", 0.2534, ("A",), "2026-11-26"))
    'spot g2-standard-4 in us-east4: $0.2534 an hour, by the Billing Catalog API, 2026-11-26'
    """
    what = f"{price.usage} {price.machine_type} in {price.region}"
    return f"{what}: ${price.dollars_per_hour:.4f} an hour, {SOURCE}, {price.effective}"
